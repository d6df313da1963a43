"""`python -m medusa_viz contributions`: what each part of Medusa adds on this machine."""

from __future__ import annotations

import argparse
import sys

from medusa_viz.models.presets import MEDUSA2

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
    parser.add_argument("--direct", default="none", metavar="HEADS", help="folder of heads and adapter trained by the "
                        "recipe direct (default: %(default)s)")
    parser.add_argument("--top-s", default="2,3", help="the dense tree; the optimised ones get as many nodes "
                        "(default: %(default)s, the paper's figure 2)")
    add_measuring_options(parser, max_new_tokens=96, rounds=1)
    add_json_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command; faults are ValueErrors of one sentence."""
    from tqdm import tqdm

    from medusa_viz import cli
    from medusa_viz.models.presets import PRESETS
    from medusa_viz.tuning import bench, contributions

    prompts = bench.read_prompts(options.prompts)
    try:
        top_s = [int(part) for part in options.top_s.split(",")]
    except ValueError:
        raise bench.BenchError(f"--top-s is {options.top_s!r}; it must read like 2,3.") from None

    def other(heads: str):
        if heads == "none":
            return None
        chosen = {"model": heads, "heads": ""} if heads in PRESETS else {"model": options.model, "heads": heads}
        return cli.load_engine(argparse.Namespace(**vars(options) | chosen))

    found = contributions.rows(cli.load_engine(options), other(options.medusa2), other(options.direct), top_s)
    with tqdm(total=options.rounds * len(prompts) * len(found), unit="run", file=sys.stderr) as bar:
        result = contributions.measure(found, prompts, options.max_new_tokens, options.rounds, bar.update)
    print(table(result))
    cli.write_json(options, result)


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
