"""`python -m medusa_viz tune`: which tree is fastest with these heads on this device."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_viz.decoding.engine import Engine
    from medusa_viz.training.data import Replies
    from medusa_viz.tuning.accuracy import Calibration
    from medusa_viz.tuning.latency import Latency
    from medusa_viz.tuning.measure_trees import Measured
    from medusa_viz.tuning.recommend import Option, Recommendation, Survey
    from medusa_viz.tuning.thresholds import Studied

TABLE_NODES = (3, 7, 15, 31, 63)
MEASURED_NODES = (3, 7, 15)
PREFIXES = ("short", "long")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `tune` to the command line; its `run` is in the parsed arguments."""
    from medusa_viz.cli import add_json_option, add_measuring_options, add_model_options, positive
    from medusa_viz.tuning.extents import STUDY

    parser = commands.add_parser(
        "tune", help="find the tree that is fastest on this device",
        description="Ranks recorded replies under the heads (or reads a rank table), measures this device's step times "
                    "(or takes those measured before), replays trees of every builder and size, and recommends one, or "
                    "plain decoding where that is faster. For greedy acceptance. Of a token file only the greedy "
                    "replies of the training split are read: the held-out ones are for judging.")
    add_model_options(parser)
    known = parser.add_mutually_exclusive_group()
    known.add_argument("--ranks", type=Path, metavar="FILE.npz", help="rank table of `calibrate` (default: the one "
                       "beside the heads, else the one that the Tuner made here, else one is made from the replies "
                       "that ship with the project, or from some that the model writes now)")
    known.add_argument("--replies", type=Path, metavar="FILE.npz", help="make the table from this token file of "
                       "replies")
    parser.add_argument("--latency", type=Path, metavar="FILE.json", help="step times recorded on another device")
    parser.add_argument("--measure-latency", action="store_true", help="measure step times anew")
    parser.add_argument("--save-latency", type=Path, metavar="FILE.json", help="also write the step times to this file")
    parser.add_argument("--batch", type=positive, default=1, help="texts decoded at once (default: %(default)s)")
    parser.add_argument("--prefix", choices=PREFIXES, default="short", help="which measured prefix counts (default: "
                        "%(default)s)")
    parser.add_argument("--measure", action="store_true", help="then decode unseen prompts, one at a time, with dense, "
                        "sparse and recommended trees")
    parser.add_argument("--thresholds", choices=tuple(STUDY), help="then run the threshold study of typical acceptance "
                        "with the recommended tree, on prompts that ship, as the Tuner page does: tokens per step over "
                        "ε and T against a proxy of quality")
    add_measuring_options(parser, max_new_tokens=64, rounds=1, of="for --measure: ")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command; faults are ValueErrors of one sentence."""
    from medusa_viz.calibrate import calibrate
    from medusa_viz.cli import load_engine, shown, write_json
    from medusa_viz.training import data, own_text
    from medusa_viz.tuning import accuracy, bench, latency, measure_latency, tune_report
    from medusa_viz.tuning.calibration import facts_of, greedy_training
    from medusa_viz.tuning.recommend import Survey, recommend, repriced

    prompts = bench.read_prompts(options.prompts) if options.measure else []
    recorded = latency.load(options.latency) if options.latency else None
    known = accuracy.load(options.ranks) if options.ranks else None
    replies = greedy_training(data.load([options.replies])) if options.replies else None
    engine = load_engine(options)
    known, replies = _chosen_by(options, engine, known, replies)
    curve = recorded or (None if options.measure_latency else measure_latency.stored(engine))
    print(_plan(known, replies, curve, len(prompts), bool(options.thresholds)), file=sys.stderr)
    if known is None:
        replies = replies or shown(own_text.writing(engine), "writing replies")
        about = {"heads": Path(engine.loaded.source).name, "replies": replies.name}
        known = calibrate(engine, replies, about)
    if known.about.get("own_text") is False:
        print(f"note: {own_text.OTHERS_TEXT}", file=sys.stderr)
    curve = curve or shown(measure_latency.measuring(engine), "step times")
    place = min(PREFIXES.index(options.prefix), len(curve.curves) - 1)
    if options.save_latency:
        options.save_latency.write_text(latency.to_json(curve), "utf-8")
    survey = Survey(facts_of(engine, known, curve), known, curve, options.batch, place)
    trees = shown(survey.running(), "replaying")
    advice = recommend(trees, curve.step_ms(0, options.batch, place))
    print(tune_report.latency(curve, place))
    print(tune_report.builders(trees, TABLE_NODES, options.batch, survey.favoured))
    print(tune_report.advice(advice, curve, options.batch))
    print(tune_report.batches(trees, curve, place))
    measured = _measure(options, engine, survey, advice, prompts) if options.measure else []
    if measured:
        print(tune_report.measured(measured, repriced(trees, curve), recorded is not None))
    studied = _study(options, engine, survey, advice) if options.thresholds else None
    if studied:
        print(tune_report.thresholds(*studied))
    write_json(options, _result(engine, known, survey, trees, advice, measured, studied))


def _chosen_by(options: argparse.Namespace, engine: Engine, known: Calibration | None, replies: Replies | None
               ) -> tuple[Calibration | None, Replies | None]:
    """What trees are chosen by: a rank table, named or beside the heads, or replies to make one from; neither where the
    model has to write such replies first."""
    from medusa_viz.training import own_text
    from medusa_viz.tuning.calibration import known_here, notes_on

    for note in notes_on(known, options.ranks, engine.drafter.module) if known else []:
        print(f"note: {note}", file=sys.stderr)
    if not (known or replies):
        known, path = known_here(engine), own_text.shipped(engine, options.model)
        replies = own_text.training_part(path) if path and not known else None
    return known, replies


def _plan(known: Calibration | None, replies: Replies | None, curve: Latency | None, prompts: int,
          study: bool) -> str:
    """What is about to be done; a progress bar then tells of each part how long it takes."""
    ranking = f"ranking {len(replies):,} greedy replies under the heads" if replies else (
        "writing greedy replies, ranking them under the heads")
    parts = ["" if known else ranking,
             "" if curve else "measuring this device's step times", "replaying trees of every builder and size",
             f"decoding {prompts} prompts with some of them" if prompts else "",
             "the threshold study of typical acceptance" if study else ""]
    return f"to do: {', '.join(part for part in parts if part)}"


def _measure(options: argparse.Namespace, engine: Engine, survey: Survey, advice: Recommendation, prompts: list
             ) -> list[Measured]:
    """Dense, sparse and the recommended builder at a few sizes, and the recommendation itself."""
    from medusa_viz.cli import shown
    from medusa_viz.tuning.measure_trees import measuring

    names = dict.fromkeys(["best-dense", "sparse", *([advice.best.spec.partition(":")[0]] if advice.best else [])])
    trees = {f"{name}:{nodes}": survey.of_budget(name, nodes).tree for name in names for nodes in MEASURED_NODES}
    if advice.best:
        trees[advice.best.spec] = advice.best.tree
    ids = [engine.codec.encode_prompt(prompt.text) for prompt in prompts]
    return shown(measuring(engine, trees, ids, options.max_new_tokens, options.rounds), "measuring")


def _study(options: argparse.Namespace, engine: Engine, survey: Survey, advice: Recommendation) -> tuple[str, Studied]:
    """Typical acceptance with the recommended tree, or a usual one where plain decoding is faster; its spec, and what
    came of it."""
    from medusa_viz.cli import shown
    from medusa_viz.models.presets import DEFAULT_TREE
    from medusa_viz.tuning.bench_command import first_prompts
    from medusa_viz.tuning.extents import STUDY
    from medusa_viz.tuning.specs import build
    from medusa_viz.tuning.thresholds import studying

    extent, best = STUDY[options.thresholds], advice.best
    tree = best.tree if best else build(DEFAULT_TREE, survey.facts).tree
    job = studying(engine, tree, first_prompts(engine, extent.prompts), extent.epsilons, extent.temperatures,
                   extent.tokens)
    return best.spec if best else DEFAULT_TREE, shown(job, "threshold study")


def _result(engine: Engine, known: Calibration, survey: Survey, trees: list[Option], advice: Recommendation,
            measured: list[Measured], studied: tuple[str, Studied] | None) -> dict:
    """Everything as JSON holds it; predicted tokens per second are of all texts of the batch together."""
    from medusa_viz.tuning.latency import to_json

    batch, sizes = survey.batch, {*TABLE_NODES, survey.favoured}
    table = [option for option in trees if int(option.spec.partition(":")[2]) in sizes]
    return {
        "model": engine.title, "device": engine.place, "calibration": known.about,
        "latency": json.loads(to_json(survey.latency)), "batch": batch,
        "builders": [_option(option, batch) for option in table],
        "recommended": _option(advice.best, batch) if advice.best else None,
        "plain_tokens_per_second": batch * advice.plain_tokens_per_second, "speedup": advice.gain,
        "measured": [asdict(entry) for entry in measured],
        "thresholds": studied and {"tree": studied[0], "points": [asdict(point) for point in studied[1].points]},
    }


def _option(option: Option, batch: int) -> dict:
    from medusa_viz.decoding.tree import TreeShape

    shape = option.tree if isinstance(option.tree, TreeShape) else None
    return {"spec": option.spec, "nodes": option.nodes, "expected": option.expected,
            "replayed": asdict(option.replayed) if option.replayed else None, "step_ms": option.milliseconds,
            "tokens_per_second": option.tokens_per_second and batch * option.tokens_per_second,
            "paths": [list(path) for path in shape.paths[1:]] if shape is not None else None}
