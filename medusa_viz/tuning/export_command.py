"""`python -m medusa_viz export`: a tree in the form that another engine reads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_viz.models.presets import PRESETS, heads_folder
from medusa_viz.tuning.formats import FORMATS, export
from medusa_viz.tuning.published_trees import published

if TYPE_CHECKING:
    from medusa_viz.decoding.tree import TreeShape
    from medusa_viz.tuning.specs import Facts


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `export` to the command line; its `run` is in the parsed arguments."""
    from medusa_viz.cli import add_heads_options

    parser = commands.add_parser(
        "export", help="write a tree for another engine, or read one back",
        description="Writes a tree on standard output (or to --out) and says on standard error what the engine cannot "
                    "express. --tree takes a file in any of these formats too.")
    parser.add_argument("--tree", required=True, metavar="SPEC|FILE", help="a spec such as sparse:16 or "
                        "published:mc_sim_7b_63, or a file in any of the formats")
    parser.add_argument("--format", choices=tuple(FORMATS), default="tree", help="; ".join(
        f"{entry.name}: {entry.title}" for entry in FORMATS.values()) + " (default: %(default)s)")
    parser.add_argument("--ranks", type=Path, metavar="FILE.npz", help="rank table of `calibrate`: its "
                        "accuracies build the tree")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write here instead of to standard output")
    add_heads_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command; faults are ValueErrors of one sentence."""
    if options.out and options.out.is_dir():
        raise ValueError(f"--out is {options.out}, a folder; name a file.")
    shape, notes = _tree(options)
    written = export(shape, options.format)
    title = FORMATS[options.format].title
    for note in [*notes, *written.notes]:
        print(f"note: {note}", file=sys.stderr)
    if not written.expressible:
        raise ValueError(f"{title}: this tree of {shape.nodes:,} nodes cannot be expressed.")
    print(f"{title}: {shape.nodes:,} nodes, by depth {'/'.join(map(str, shape.depth_counts)) or 0}, fingerprint "
          f"{shape.fingerprint}{'' if written.exact else '; approximate'}", file=sys.stderr)
    if options.out:
        options.out.write_text(written.text + "\n", "utf-8")
    else:
        print(written.text)


def _tree(options: argparse.Namespace) -> tuple[TreeShape, list[str]]:
    """The tree and notes on it. Only a spec that needs the heads reads them."""
    from medusa_viz.cli import names_file, read_tree
    from medusa_viz.tuning.specs import build

    name = options.tree.removeprefix("published:")
    if options.tree != name and name in published():  # whole, however many heads there are here
        return published()[name], []
    if names_file(options.tree):
        found = read_tree(Path(options.tree))
        return found.shape, found.notes
    built = build(options.tree, _facts(options))
    return built.shape, built.notes


def _facts(options: argparse.Namespace) -> Facts:
    """What the heads' files say, without a backbone, and for trees sized by them this device's step times."""
    from medusa_viz.models import checkpoints, sources
    from medusa_viz.tuning import accuracy, measure_latency
    from medusa_viz.tuning.calibration import known_of, notes_on
    from medusa_viz.tuning.specs import Facts

    preset = PRESETS.get(options.model)
    if not (options.heads or preset):
        raise ValueError(f"The tree {options.tree} needs Medusa heads: name them with --heads (a folder or file).")
    known = accuracy.load(options.ranks) if options.ranks else None
    loaded = checkpoints.with_ranks(checkpoints.load(options.heads or heads_folder(preset)))
    module = loaded.module
    for note in [*loaded.report.notices, *(notes_on(known, options.ranks, module) if known else [])]:
        print(f"note: {note}", file=sys.stderr)
    known = known or known_of(loaded.source, module)
    rows = module.draft_ids if module.draft_ids is not None else module.output[0] if module.output is not None else ()
    title = loaded.titled(sources.title_of(options.model))
    times = measure_latency.stored_of(title) if options.tree.startswith("sequoia") else None
    return Facts(module.heads, () if known else loaded.accuracy, known.table if known else None,
                 times and times.step_ms, known.temperatures if known else (),
                 **({"choices": len(rows)} if len(rows) else {}))
