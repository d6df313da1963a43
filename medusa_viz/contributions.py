"""`python -m medusa_viz contributions`: what each part of Medusa adds on this machine."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from filelock import FileLock

from medusa_viz.models.presets import MEDUSA2, PRESETS, backbone_of

DIRECT_TOKENS = 30_000  # enough to show what direct training makes of the text
CHECKPOINT_EVERY = 5  # optimiser steps of it, each of which may take a quarter of a minute
HEADER = ("", "nodes", "tokens/step", "overhead", "speedup", "tokens/s", "perplexity", "equals greedy")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `contributions` to the command line; its `run` is in the parsed arguments."""
    from medusa_viz.cli import add_json_option, add_measuring_options, add_model_options

    parser = commands.add_parser(
        "contributions", help="measure what heads, trees and joint training add",
        description="Plain decoding, a chain, a dense tree, an optimised tree of as many nodes, Medusa-2, and direct "
                    "joint training, all greedy, by turns on the same prompts.")
    parser.add_argument("--medusa2", default=MEDUSA2.name, metavar="HEADS", help="preset, or folder of heads with an "
                        "adapter for the model; 'none' leaves the line out (default: %(default)s)")
    parser.add_argument("--direct", default=str(DIRECT_TOKENS), metavar="TOKENS|HEADS", help="reply tokens to train "
                        "the recipe direct on, once: the result is kept in your cache; or folder of heads and adapter "
                        "that it trained; 'none' leaves the line out (default: %(default)s)")
    parser.add_argument("--top-s", default="2,3", help="the dense tree; the optimised ones get as many nodes "
                        "(default: %(default)s, the paper's figure 2)")
    add_measuring_options(parser, max_new_tokens=96, rounds=1)
    add_json_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; faults are ValueErrors of one sentence."""
    from tqdm import tqdm

    from medusa_viz import cli
    from medusa_viz.tuning import bench, contributions

    prompts = bench.read_prompts(options.prompts)
    try:
        top_s = [int(part) for part in options.top_s.split(",")]
    except ValueError:
        raise bench.BenchError(f"--top-s is {options.top_s!r}; it must read like 2,3.") from None
    if not options.medusa2:
        raise ValueError("--medusa2 is empty; it must be a preset, a folder of heads, or none.")
    direct = options.direct
    if tokens := _direct_tokens(options):  # before anything is loaded: both at once would take twice the memory
        direct, status = _train_direct(options, tokens)
        if status:
            return status

    def other(heads: str):
        if heads == "none":
            return None
        chosen = {"model": heads, "heads": ""} if heads in PRESETS else {"model": options.model, "heads": heads}
        return cli.load_engine(argparse.Namespace(**vars(options) | chosen))

    found = contributions.rows(cli.load_engine(options), other(options.medusa2), other(str(direct)), top_s)
    with tqdm(total=options.rounds * len(prompts) * len(found), unit="run", file=sys.stderr) as bar:
        result = contributions.measure(found, prompts, options.max_new_tokens, options.rounds, bar.update)
    print(table(result))
    cli.write_json(options, result)
    return 0


def _direct_tokens(options: argparse.Namespace) -> int:
    """How many reply tokens --direct asks to train on; 0 where it names heads or none. Raises ValueError."""
    from medusa_viz.models import hub
    from medusa_viz.training import shipped

    try:
        tokens = int(options.direct)
    except ValueError:
        names_heads = options.direct and (Path(options.direct).exists() or hub.is_id(options.direct))
        if options.direct == "none" or names_heads:
            return 0
        tokens = 0
    if tokens < 1:
        raise ValueError(f"--direct is {options.direct!r:.80}; it must be a number of reply tokens to train on, a "
                         "folder of heads, or none.")
    if shipped.training_file(options.model) is None:
        raise ValueError(f"No replies of {options.model} to train on ship with the project: name with --direct a "
                         "folder of heads that the recipe direct trained, or none.")
    return tokens


def _train_direct(options: argparse.Namespace, tokens: int) -> tuple[Path, int]:
    """Where the heads lie, among the runs of the Train page, and the exit status of `train`, which makes them where
    those of the same settings and data are not there yet."""
    from medusa_viz import cli
    from medusa_viz.models.fetch import cache_root
    from medusa_viz.training import shipped
    from medusa_viz.training.run_folder import LOG_NAME
    from medusa_viz.training.settings import settings_for

    data, settings = shipped.training_file(options.model), settings_for("direct", {"tokens": tokens})
    digest = hashlib.sha256(data.read_bytes() + json.dumps(settings.decisive).encode()).hexdigest()
    folder = cache_root() / "runs" / f"direct-{tokens}-{digest[:8]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"), redirect_stdout(sys.stderr):
        if _passes(folder / LOG_NAME) == settings.passes:
            print(f"note: the heads of direct training are those trained before, in {folder}")
            return folder, 0
        print(f"note: heads are first trained by the recipe direct on {tokens:,} reply tokens, and kept in {folder}; "
              "the bars tell how long that takes, and after Ctrl-C the same command goes on")
        return folder, cli.main(["train", "--recipe", "direct", "--model", backbone_of(options.model),
                                 "--data", str(shipped.with_held_out(data)), "--tokens", str(tokens),
                                 "--checkpoint-every", str(CHECKPOINT_EVERY), "--out", str(folder),
                                 "--device", options.device, *["--resume"] * (folder / LOG_NAME).is_file()])


def _passes(log: Path) -> int:
    """Passes that a run went through, if its log ends behind one: the heads were saved before that line."""
    try:
        return json.loads(log.read_text().splitlines()[-1]).get("pass", 0)
    except (OSError, ValueError, IndexError):
        return 0


def table(result: dict) -> str:
    """The result as a Markdown table, with what its columns mean."""
    lines = [f"{result['model']}, {result['dtype']} on {result['device']} ({result['cpu']}); {result['prompts']} "
             f"prompts, up to {result['max_new_tokens']} new tokens, greedy", "",
             f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
    for row in result["rows"]:
        found = row["perplexity"]
        perplexity = f"{found['after'] / found['before'] - 1:+.1%}" if found else "–"
        equal = "yes" if row["equals_greedy"] is True else ("tie" if row["equals_greedy"]["tie"] else "no")
        lines.append(f"| {row['name']} | {row['nodes']} | {row['tokens_per_step']:.2f} | {row['overhead']:.2f} | "
                     f"{row['speedup']:.2f} | {row['tokens_per_second']:.1f} | {perplexity} | {equal} |")
    lines += ["", "tokens/step: committed tokens / steps; overhead: ms of a step / ms of a plain step; speedup: "
              "tokens/s over plain decoding's; perplexity: change of the trained backbone's on held-out replies; "
              "equals greedy: the text of the line's own backbone, decoded plainly"]
    return "\n".join(lines)
