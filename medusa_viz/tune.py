"""`python -m medusa_viz tune`: which tree is fastest with these heads on this device."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_viz.tuning.bench_command import PROMPTS

if TYPE_CHECKING:
    from medusa_viz.decoding.engine import Engine
    from medusa_viz.tuning.accuracy import Calibration
    from medusa_viz.tuning.jobs import Job
    from medusa_viz.tuning.latency import Latency
    from medusa_viz.tuning.measure_trees import Measured
    from medusa_viz.tuning.recommend import Option, Recommendation

TABLE_NODES = (3, 7, 15, 31, 63)
MEASURED_NODES = (3, 7, 15)
PREFIXES = ("short", "long")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `tune` to the command line; its `run` is in the parsed arguments."""
    from medusa_viz.cli import add_model_options

    parser = commands.add_parser(
        "tune", help="find the tree that is fastest on this device",
        description="Ranks recorded replies under the heads (or reads a rank table), measures this device's step times "
                    "(or takes those measured before), replays trees of every builder and size, and recommends one, or "
                    "plain decoding where that is faster. For greedy acceptance.")
    add_model_options(parser)
    known = parser.add_mutually_exclusive_group()
    known.add_argument("--ranks", type=Path, metavar="FILE.npz", help="rank table of `calibrate` (default: the one "
                       "beside the heads, else one is made)")
    known.add_argument("--replies", type=Path, metavar="FILE.npz", help="make the table from this token file of "
                       "replies")
    parser.add_argument("--latency", type=Path, metavar="FILE.json", help="step times recorded on another device")
    parser.add_argument("--measure-latency", action="store_true", help="measure step times anew")
    parser.add_argument("--save-latency", type=Path, metavar="FILE.json", help="also write the step times to this file")
    parser.add_argument("--batch", type=int, default=1, help="texts decoded at once (default: %(default)s)")
    parser.add_argument("--prefix", choices=PREFIXES, default="short", help="which measured prefix counts (default: "
                        "%(default)s)")
    parser.add_argument("--measure", action="store_true", help="then decode held-out prompts with dense, sparse and "
                        "recommended trees")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE.jsonl", help="prompts for --measure "
                        "(default: the eight that ship with the project)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="for --measure (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="times that --measure decodes each prompt (default: "
                        "%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command; faults are ValueErrors of one sentence."""
    from medusa_viz.cli import load_engine
    from medusa_viz.tuning import bench, latency, tune_report
    from medusa_viz.tuning.calibration import facts_of
    from medusa_viz.tuning.recommend import Survey, recommend

    for name in ("batch", "rounds", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be 1 or more.")
    prompts = bench.read_prompts(options.prompts) if options.measure else []
    recorded = latency.load(options.latency) if options.latency else None
    engine = load_engine(options)
    known = calibration(options, engine)
    curve = recorded or _latency(options, engine)
    place = min(PREFIXES.index(options.prefix), len(curve.curves) - 1)
    if options.save_latency:
        options.save_latency.write_text(latency.to_json(curve), "utf-8")
    survey = Survey(facts_of(engine, known, curve), known, curve, options.batch, place)
    trees = _shown(survey.running(), "replaying")
    table = [option for option in trees if int(option.spec.partition(":")[2]) in TABLE_NODES]
    advice = recommend(trees, curve.step_ms(0, options.batch, place))
    print(tune_report.latency(curve, place))
    print(tune_report.builders(table, TABLE_NODES))
    print(tune_report.advice(advice, curve, options.batch))
    print(tune_report.batches(trees, curve, place))
    measured = _measure(options, engine, survey, advice, prompts) if options.measure else []
    if measured:
        print(tune_report.measured(measured, trees, recorded is not None))
    if options.json:
        options.json.write_text(json.dumps(_result(engine, known, curve, table, advice, measured), indent=1,
                                           ensure_ascii=False) + "\n", "utf-8")


def calibration(options: argparse.Namespace, engine: Engine) -> Calibration:
    """The rank table asked for: read, found beside the heads, or made from greedy replies."""
    import numpy as np

    from medusa_viz.calibrate import calibrate, shipped_replies
    from medusa_viz.training import data
    from medusa_viz.tuning.calibration import known_of, table_for

    if options.ranks:
        known, notes = table_for(options.ranks, engine.drafter.module)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return known
    known = None if options.replies else known_of(engine.loaded.source, engine.drafter.module)
    if known:
        return known
    replies = data.load([shipped_replies(options)])
    greedy = replies.select(np.flatnonzero(replies.temperature == 0))
    if not len(greedy):
        raise ValueError(f"{replies.name} holds no greedy reply, and only greedy text can be replayed.")
    return calibrate(engine, greedy, {"heads": Path(engine.loaded.source).name, "replies": replies.name})


def _latency(options: argparse.Namespace, engine: Engine) -> Latency:
    from medusa_viz.tuning.measure_latency import measuring, stored

    known = None if options.measure_latency else stored(engine)
    return known or _shown(measuring(engine), "step times")


def _shown(job: Job, what: str) -> object:
    """All parts of a job, with a progress bar."""
    from tqdm import tqdm

    from medusa_viz.tuning.jobs import finish

    with tqdm(desc=what, file=sys.stderr) as bar:
        def show(progress: object) -> None:
            bar.total, bar.n = progress.total, progress.done
            bar.refresh()

        return finish(job, show)


def _measure(options: argparse.Namespace, engine: Engine, survey: object, advice: Recommendation, prompts: list
             ) -> list[Measured]:
    """Dense, sparse and the recommended builder at a few sizes, and the recommendation itself."""
    from medusa_viz.tuning.measure_trees import measuring

    names = dict.fromkeys(["best-dense", "sparse", *([advice.best.spec.partition(":")[0]] if advice.best else [])])
    trees = {f"{name}:{nodes}": survey.of_budget(name, nodes).tree for name in names for nodes in MEASURED_NODES}
    if advice.best:
        trees[advice.best.spec] = advice.best.tree
    ids = [engine.codec.encode_prompt(prompt.text) for prompt in prompts]
    return _shown(measuring(engine, trees, ids, options.max_new_tokens, options.rounds), "measuring")


def _result(engine: Engine, known: Calibration, curve: Latency, table: list[Option], advice: Recommendation,
            measured: list[Measured]) -> dict:
    """Everything as JSON holds it."""
    from medusa_viz.tuning.latency import to_json

    return {
        "model": engine.title, "device": engine.place, "calibration": known.about,
        "latency": json.loads(to_json(curve)),
        "builders": [_option(option) for option in table],
        "recommended": _option(advice.best) if advice.best else None,
        "plain_tokens_per_second": advice.plain_tokens_per_second, "speedup": advice.gain,
        "measured": [asdict(entry) for entry in measured],
    }


def _option(option: Option) -> dict:
    from medusa_viz.decoding.tree import TreeShape

    shape = option.tree if isinstance(option.tree, TreeShape) else None
    return {"spec": option.spec, "nodes": option.nodes, "expected": option.expected,
            "replayed": asdict(option.replayed) if option.replayed else None, "step_ms": option.milliseconds,
            "tokens_per_second": option.tokens_per_second,
            "paths": [list(path) for path in shape.paths[1:]] if shape is not None else None}
