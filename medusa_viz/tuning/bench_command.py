"""`python -m medusa_viz bench`: plain decoding, Medusa and transformers' `generate` on this machine, side by side."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from medusa_viz.models.presets import REPOSITORY

if TYPE_CHECKING:
    from medusa_viz.decoding.engine import Engine

PROMPTS = REPOSITORY / "assets" / "prompts" / "bench.jsonl"
COLUMNS = (("tokens/s", "tokens_per_second", "{:.1f}"), ("ms/token", "ms_per_token", "{:.1f}"),
           ("ms/step", "ms_per_step", "{:.1f}"), ("tokens/step", "tokens_per_step", "{:.2f}"),
           ("prefill ms", "prefill_ms", "{:.0f}"))


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `bench` to the command line; its `run` is in the parsed arguments."""
    from medusa_viz.cli import add_json_option, add_measuring_options, add_model_options

    parser = commands.add_parser(
        "bench", help="measure tokens per second of plain decoding, Medusa and transformers",
        description="Greedy decoding of the same prompts by every method in turn, after a warm-up. Prefill and decode "
                    "are timed apart, and every text is compared with plain greedy's.")
    parser.add_argument("--methods", default="plain,medusa,transformers", help="comma-separated (default: %(default)s)")
    parser.add_argument("--tree", default="sparse:8", help="Medusa's tree: chain:3, dense:3,2,1, sparse:8, "
                        "dynamic:8 or a tree file (default: %(default)s)")
    add_measuring_options(parser, max_new_tokens=96, rounds=3)
    add_json_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command; faults are ValueErrors of one sentence."""
    from medusa_viz.cli import write_json
    from medusa_viz.tuning import bench

    prompts, names = bench.read_prompts(options.prompts), bench.parse_methods(options.methods)
    result = _measure(options, prompts, names)
    print(table(result))
    write_json(options, result)


def _measure(options: argparse.Namespace, prompts: list, names: list[str]) -> dict:
    from tqdm import tqdm

    from medusa_viz import cli
    from medusa_viz.models import backbone, sources
    from medusa_viz.models.fetch import silent
    from medusa_viz.tuning import bench

    engine = cli.load_engine(options)
    shape = cli.tree_from(options.tree, engine)
    reference = None
    if "transformers" in names:  # a second copy, as transformers loads it
        source = sources.ready(options.model, silent)
        reference = backbone.load(source.folder, engine.backbone.placement, engine.title, packed=False,
                                  adapter=engine.loaded.adapter).model
    with tqdm(total=options.rounds * len(prompts) * len(names), unit="run", file=sys.stderr) as bar:
        return bench.bench(engine, reference, prompts, names, shape, options.max_new_tokens, options.rounds, bar.update)


def first_prompts(engine: Engine, count: int) -> list[list[int]]:
    """The first of the prompts that ship for measuring, each of another kind; no token file holds replies to them."""
    from medusa_viz.tuning import bench

    return [engine.codec.encode_prompt(prompt.text) for prompt in bench.read_prompts(PROMPTS)[:count]]


def table(result: dict) -> str:
    """The result for people."""
    head = f"{'':<13}" + "".join(f"{title:>12}" for title, _, _ in COLUMNS) + "   slowest-fastest round   equals greedy"
    lines = [f"{result['model']} with heads {result['heads']}, {result['dtype']} on {result['device']} "
             f"({result['cpu']})",
             f"linears: {result['linears']}; tree of {result['tree_nodes']} nodes; {result['prompts']} prompts, up to "
             f"{result['max_new_tokens']} new tokens, rounds: {result['rounds']}", "", head]
    for name, figures in result["methods"].items():
        cells = "".join(f"{form.format(figures[key]):>12}" for _, key, form in COLUMNS)
        slow, fast = figures["spread"]
        spread = f"{slow:.1f} - {fast:.1f} tokens/s"
        lines.append(f"{name:<13}{cells}   {spread:>21}   {_equal(figures['equals_greedy'])}")
    lines.append("")
    lines += [f"{name:<22}{ratio:6.2f}x tokens per second" for name, ratio in result["ratios"].items()]
    lines.append(f"memory read at {result['bandwidth_gb_s']:.0f} GB/s at best" + _share(result))
    lines.append("tokens/s and ms/token: decode alone, behind the first new token; tokens/step: committed tokens / "
                 "steps; ms/step: decode time / forward passes")
    return "\n".join(lines)


def _equal(equality: bool | dict) -> str:
    if equality is True:
        return "yes"
    tie = ", a rounding tie" if equality["tie"] else ""
    return (f"differs on {equality['differing_prompts']} prompt(s), first at token {equality['position']} of prompt "
            f"{equality['prompt'] + 1} (top-2 gap {equality['gap']:.1g}{tie})")


def _share(result: dict) -> str:
    plain = result["methods"].get("plain")
    if not plain or not plain["ms_per_step"]:
        return ""
    reached = result["step_gb"] / plain["ms_per_step"] * 1e3
    return f"; a plain step reads {result['step_gb']:.2f} GB of weights, {reached:.0f} GB/s over the whole step"
