"""Command line: python -m medusa_viz COMMAND, one of those that `--help` lists.

Options are made from the settings' own fields where there are some; what several commands take is added and checked
here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn, TypeVar

from medusa_viz.decoding.settings import Acceptance, Limits
from medusa_viz.models import memory
from medusa_viz.models.presets import DEFAULT_PRESET

if TYPE_CHECKING:
    from medusa_viz.decoding.decoder import Tree
    from medusa_viz.decoding.engine import Engine
    from medusa_viz.tuning.formats import Imported
    from medusa_viz.tuning.jobs import Job, Progress

T = TypeVar("T")
WIDE_TREE = 1024  # nodes; above, a note says that each step will be slow


class UsageError(ValueError):
    """Options that cannot be read; the message is one sentence."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the options as every other fault is said, without listing them all first."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; a foreseen fault is one sentence on standard error and exit status 2."""
    parser = Parser(prog="python -m medusa_viz", description="Medusa decoding, measured.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_decode(commands)
    _add_bench(commands)
    _add_contributions(commands)
    _add_train(commands)
    _add_distill(commands)
    _add_calibrate(commands)
    _add_tune(commands)
    _add_shelf(commands)
    try:
        options = parser.parse_args(arguments)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        for target in (getattr(options, name, None) for name in ("out", "json")):
            if target is not None:
                check_writable(target)
        if getattr(options, "tree", ""):
            check_tree(options.tree)
        return options.run(options) or 0
    except BrokenPipeError:  # whoever read our output has gone
        sys.stdout = None
        return 0
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{parser.prog} {options.command}: {memory.spoken(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def check_writable(target: Path) -> None:
    """Refuse a result that could not be written, before any work is done for it. Raises OSError with one sentence."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise OSError(f"The result cannot be written to {target} ({error.strerror}); name another place.") from error


def check_prompt(prompt: str) -> None:
    """Raises ValueError where there is nothing to answer."""
    if not prompt.strip():
        raise ValueError("The prompt is empty: type a prompt.")


def check_tree(spec: str) -> None:
    """Refuse a tree that no heads could draft, before any are loaded. Raises TreeError."""
    from medusa_viz.tuning import specs

    if names_file(spec):
        read_tree(Path(spec))
    else:
        specs.parse(spec)


def positive(text: str) -> int:
    """The type of options that count something."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text:.20} is no whole number of 1 or more")
    return number


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --heads, --device, --dtype, --compile: what every command that loads a model takes."""
    add_heads_options(parser)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, fp32, bf16, fp16, 8bit, 4bit (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="on CUDA, replay each step as a graph of fused kernels; "
                        "compiling takes minutes at the first load")


def add_heads_options(parser: argparse.ArgumentParser) -> None:
    """--model, --heads: which heads are meant."""
    parser.add_argument("--model", default=DEFAULT_PRESET.name, help="preset, folder or hub id (default: %(default)s)")
    parser.add_argument("--heads", default="", help="folder, file or hub id (default: the model's own)")


def add_measuring_options(parser: argparse.ArgumentParser, max_new_tokens: int, rounds: int, of: str = "") -> None:
    """--prompts, --max-new-tokens, --rounds: what every command takes that decodes prompts to measure something. `of`
    names the option that asks for it, where it is not all that the command does."""
    from medusa_viz.tuning.bench_command import PROMPTS

    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE.jsonl", help=f"{of}prompts to decode as "
                        'JSON lines {"prompt": …, "kind": …} (default: the eight that ship with the project)')
    parser.add_argument("--max-new-tokens", type=positive, default=max_new_tokens, help=f"{of}most tokens of a reply "
                        "(default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=rounds, help=f"{of}times every prompt is decoded (default: "
                        "%(default)s)")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """--json, for `write_json`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")


def write_json(options: argparse.Namespace, result: dict) -> None:
    """Write the result to where --json says, if it was given."""
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")


def shown(job: Job[T], what: str = "") -> T:
    """Do all parts of a job under a progress bar, named by the parts unless `what` is given. A stretch of another
    length is counted and timed anew, so that the time left is that of the work at hand."""
    from tqdm import tqdm

    from medusa_viz.tuning.jobs import finish

    with tqdm(desc=what, file=sys.stderr) as bar:
        def show(progress: Progress) -> None:
            if bar.total != progress.total:
                bar.reset(progress.total)
            bar.set_description(what or progress.part, refresh=False)
            bar.update(progress.done - bar.n)

        return finish(job, show)


def add_settings(parser: argparse.ArgumentParser, kind: type, rename: dict[str, str] | None = None) -> None:
    """One option per field of a settings dataclass."""
    for f in fields(kind):
        option = "--" + (rename or {}).get(f.name, f.name).replace("_", "-")
        parser.add_argument(option, dest=f.name, default=f.default, type=type(f.default), choices=f.metadata["choices"],
                            help=f"{f.metadata['help']} (default: %(default)s)")


def settings_from(options: argparse.Namespace, kind: type) -> object:
    """The settings dataclass of what was asked for; out of bounds raises SettingsError."""
    return kind(**{f.name: getattr(options, f.name) for f in fields(kind)})


def load_engine(options: argparse.Namespace) -> Engine:
    """Load model and heads, saying on standard error what goes on."""
    from medusa_viz.decoding import engine

    engine.quiet_transformers()

    def show(phase: str, fraction: float | None, detail: str) -> None:
        share = "" if fraction is None else f" {fraction:.0%}"
        print(f"\r\033[K{phase}{share} {detail}", end="", file=sys.stderr, flush=True)

    chosen = engine.EngineOptions(options.model, options.heads, options.device, options.dtype, options.compile)
    loaded = engine.load(chosen, show if sys.stderr.isatty() else engine.silent)
    print(f"{loaded.title} on {loaded.place} ({loaded.backbone.placement.reason}); linears: {loaded.backbone.linears}; "
          f"step: {loaded.backbone.step}", file=sys.stderr)
    report = loaded.loaded.report
    print(f"heads of {loaded.loaded.source}: {report.tensors}; {loaded.drafter.drafts_from}", file=sys.stderr)
    for notice in report.notices:
        print(f"note: {notice}", file=sys.stderr)
    return loaded


def tree_from(spec: str, engine: Engine) -> Tree:
    """A tree from a spec of `tuning.specs` or a file in any format of `tuning.formats`, notes on standard error."""
    from medusa_viz.tuning import measure_latency
    from medusa_viz.tuning.calibration import facts_of, known_here
    from medusa_viz.tuning.specs import build, fitted

    if names_file(spec):
        found = read_tree(Path(spec))
        built = fitted(found.shape, engine.drafter.heads)
        notes = [*found.notes, *built.notes]
    else:
        times = measure_latency.stored(engine) if spec.startswith("sequoia") else None
        built = build(spec, facts_of(engine, known_here(engine), times))
        notes = built.notes
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return built.tree


def names_file(spec: str) -> bool:
    """A tree file is meant, not a spec: it ends like a file, or is one."""
    path = Path(spec)
    return path.suffix[1:2].isalpha() or (len(spec) < 200 and path.is_file())


def read_tree(path: Path) -> Imported:
    """A tree file in any format. Raises TreeError in one sentence."""
    from medusa_viz.decoding.tree import TreeError
    from medusa_viz.tuning.formats import read

    try:
        return read(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TreeError(f"The tree file {path} cannot be read ({error}).") from error


def _add_decode(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("decode", help="decode a prompt, stream the text, print the metrics")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument("--tree", default="", help="plain, chain:3, dense:3,2,1, sparse:16, "
                        "sparse:16@4,3,2,2 (within top-s walls), joint:16, dynamic:16, published:mc_sim_7b_63 or a "
                        "tree file (default: that of the model's makers, else sparse:16)")
    add_json_option(parser)
    add_model_options(parser)
    add_settings(parser, Acceptance, {"mode": "accept"})
    add_settings(parser, Limits)
    parser.set_defaults(run=_decode)


def _decode(options: argparse.Namespace) -> None:
    settings, limits = settings_from(options, Acceptance), settings_from(options, Limits)
    check_prompt(options.prompt)
    from medusa_viz.models.text import TextStream

    engine = load_engine(options)
    stream = TextStream(engine.codec)
    result = reply(engine, options.prompt, options.tree, settings, limits, options.raw,
                   lambda tokens: print(stream.push(tokens), end="", flush=True))
    print(stream.finish())
    _print_metrics(result, settings.rule)
    write_json(options, result)


def reply(engine: Engine, prompt: str, tree: str, settings: Acceptance, limits: Limits, raw: bool = False,
          hear: Callable[[list[int]], None] = lambda tokens: None) -> dict:
    """Text and metrics of one reply, drafted by the tree of a spec, or by the engine's own where that is empty. `hear`
    gets the tokens of each step as they come. Notes go to standard error. Raises ValueError with one sentence."""
    from medusa_viz.decoding.check import equals_greedy
    from medusa_viz.decoding.decoder import decode

    shape = tree_from(tree or engine.tree, engine)
    if shape.nodes > WIDE_TREE:
        print(f"note: {shape.nodes:,} nodes a step take long; trees of up to {WIDE_TREE} are usual", file=sys.stderr)
    ids = engine.codec.encode_prompt(prompt, raw=raw)
    if ids.notice:
        print(f"note: {ids.notice}", file=sys.stderr)
    steps, begun = [], perf_counter()
    for step in decode(engine.backbone, engine.drafter, ids, shape, settings, limits.max_new_tokens):
        steps.append(step)
        hear(step.tokens)
    seconds = perf_counter() - begun
    tokens = [token for step in steps for token in step.tokens]
    return _result(engine, shape, tokens, steps, seconds, equals_greedy(engine.backbone, ids, tokens))


def _result(engine: Engine, shape: Tree, tokens: list[int], steps: list, seconds: float, difference) -> dict:
    from dataclasses import asdict

    from medusa_viz.decoding.metrics import measure

    metrics = measure([len(step.tokens) for step in steps], engine.drafter.heads)
    return {
        "text": engine.codec.decode(tokens), "token_ids": tokens, "steps": metrics.steps, "tokens": metrics.tokens,
        "tokens_per_step": metrics.tokens_per_step, "accepted_per_depth": metrics.accepted_per_depth,
        "seconds": seconds, "tokens_per_second": metrics.tokens / seconds,
        "equals_greedy": True if difference is None else asdict(difference),
        "tree_nodes": shape.nodes, "finish_reason": steps[-1].finish if steps else "context",
        "device": engine.backbone.placement.device_name, "dtype": engine.backbone.placement.dtype_name,
    }


def _print_metrics(result: dict, rule: str) -> None:
    equal = result["equals_greedy"]
    if equal is not True and rule != "greedy":
        equal = f"not expected, {rule} acceptance changes the text"
    elif equal is not True:
        equal = (f"differs from token {equal['position']} on (top-2 logit gap there {equal['gap']:.2g}"
                 f"{', a rounding tie' if equal['tie'] else ''})")
    depths = " ".join(f"{share:.0%}" for share in result["accepted_per_depth"])
    print(f"\n{result['tokens']} tokens in {result['steps']} steps: {result['tokens_per_step']:.2f} tokens per step "
          f"(committed tokens / steps), {result['tokens_per_second']:.1f} tokens per second with prefill\n"
          f"tree {result['tree_nodes']} nodes, drafts accepted at depth 1, 2, …: {depths} of steps\n"
          f"finished by {result['finish_reason']}; equals plain greedy: {'yes' if equal is True else equal}",
          file=sys.stderr)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    from medusa_viz.tuning import bench_command

    bench_command.add_parser(commands)


def _add_contributions(commands: argparse._SubParsersAction) -> None:
    from medusa_viz import contributions

    contributions.add_parser(commands)


def _add_train(commands: argparse._SubParsersAction) -> None:
    from medusa_viz.training import commands as training

    training.add_parser(commands)


def _add_distill(commands: argparse._SubParsersAction) -> None:
    from medusa_viz.training import distil_command

    distil_command.add_parser(commands)


def _add_calibrate(commands: argparse._SubParsersAction) -> None:
    from medusa_viz import calibrate

    calibrate.add_parser(commands)


def _add_tune(commands: argparse._SubParsersAction) -> None:
    from medusa_viz import tune
    from medusa_viz.tuning import export_command

    tune.add_parser(commands)
    export_command.add_parser(commands)


def _add_shelf(commands: argparse._SubParsersAction) -> None:
    from medusa_viz import shelf

    shelf.add_parsers(commands)
