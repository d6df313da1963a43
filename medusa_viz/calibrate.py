"""`python -m medusa_viz calibrate`: how well a model's heads draft, measured on replies of its own."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from medusa_viz.decoding.engine import Engine
    from medusa_viz.training.data import Replies
    from medusa_viz.training.distil_settings import DistilSettings
    from medusa_viz.training.prompts import Prompt
    from medusa_viz.tuning.accuracy import Accuracy, Calibration, Rate

REPLAYED_NODES = (1, 3, 7, 15, 31, 63)
SHOWN_TOP = (1, 2, 3, 5, 10)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `calibrate` to the command line; its `run` is in the parsed arguments."""
    from medusa_viz.cli import add_model_options, positive

    parser = commands.add_parser(
        "calibrate", help="measure the accuracy of every head on the model's own replies",
        description="One teacher-forced pass over greedy replies ranks the token that came under every head. The ranks "
                    "give each head's accuracy per rank, and tokens per step of any tree without running the model.")
    add_model_options(parser)
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines with prompt, kind and split, or a text "
                       "file with one prompt a line; the model replies to them first")
    texts.add_argument("--replies", type=Path, metavar="FILE.npz", help="token file of replies (default: the model's "
                       "greedy replies that ship with the project)")
    parser.add_argument("--split", choices=("all", "train", "held_out"), default="train", help="which replies to take: "
                        "trees are built from train, and judged on held_out (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="most tokens of a reply to --prompts "
                        "(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="rank table to write")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Run the command; faults are ValueErrors of one sentence."""
    from medusa_viz.cli import load_engine
    from medusa_viz.training import prompts
    from medusa_viz.training.distil_settings import DistilSettings

    if options.out.suffix != ".npz":
        raise ValueError(f"--out is {options.out}; a rank table ends in .npz.")
    splits = prompts.splits(options.split)  # all that is wrong on disk is found before a model is loaded
    if options.prompts:
        settings = DistilSettings(temperatures="0", loops="keep", max_new_tokens=options.max_new_tokens)
        asked = prompts.read(options.prompts, splits)
        engine = load_engine(options)
        replies = _write(engine, asked, settings, options.prompts.name)
    else:
        replies = _read(options, splits)
        engine = load_engine(options)
    own_text = bool(options.prompts or options.replies or not engine.loaded.adapter)
    if not own_text:
        print("note: the replies that ship are the original backbone's, which the adapter of these heads changes: "
              "--prompts ranks replies of its own", file=sys.stderr)
    _measure(options, engine, replies, {} if own_text else {"own_text": False})


def _read(options: argparse.Namespace, splits: list[int]) -> Replies:
    """Greedy replies of the wanted split: of those named, else of those that ship for the model's backbone."""
    from medusa_viz.training import data, own_text

    path = options.replies or own_text.shipped_file(options.model)
    if path is None:
        raise ValueError(f"No replies of {options.model} ship with the project; name with --replies a token file of "
                         "its own, which `distill` writes.")
    replies = data.load([path])
    chosen = replies.select(np.isin(replies.split, splits) & (replies.temperature == 0))
    if not len(chosen):
        of_split = "" if options.split == "all" else f" of the split {options.split}"
        raise ValueError(f"{path} holds no greedy reply{of_split}, and only greedy text can be replayed.")
    return chosen


def _write(engine: Engine, asked: list[Prompt], settings: DistilSettings, name: str) -> Replies:
    """Greedy replies to prompts, written now."""
    from tqdm import tqdm

    from medusa_viz.training import written
    from medusa_viz.training.distil import FromPrompts, Shelf, write

    source = FromPrompts(asked, engine.codec.encode_prompt, engine.backbone, settings, name)
    shelf = Shelf(source, 0)
    with tqdm(total=source.jobs, desc="writing", unit="reply") as bar:
        for _ in write(engine.backbone, source, settings, shelf, {}):
            bar.update()
    return written.replies_of(shelf.entries, source.kinds, source.name)


def _measure(options: argparse.Namespace, engine: Engine, replies: Replies, more: dict) -> None:
    """`more` are facts to keep with the table."""
    from medusa_viz.tuning import accuracy, ranking, thresholds

    about = {**more, "heads": Path(engine.loaded.source).name, "replies": replies.name,
             "fingerprint": replies.fingerprint, "split": options.split, "draft_rows": engine.drafter.choices,
             "kept_ranks": ranking.KEPT_RANKS, "intervals": accuracy.INTERVALS}
    known = calibrate(engine, replies, about)
    measured = accuracy.accuracy(known.table, known.prompts)
    rates = accuracy.cross_replay(known.table, known.fold, REPLAYED_NODES, known.prompts)
    known = replace(known, about=known.about | {"replayed": [asdict(r) for r in rates]})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    accuracy.save(options.out, known, measured, split=replies.split, kind=replies.kind, kinds=np.array(replies.kinds))
    print(report(measured, rates, len(replies), int(known.prompts.max()) + 1))
    texts = [replies.sequence(i)[start:].tolist() for i, start in enumerate(replies.reply_start)]
    distinct, repeated = thresholds.repetition(texts)
    print(f"of these replies' 3-grams {distinct:.1%} are distinct, of their 4-grams {repeated:.1%} repeated")
    if known.about["perplexity"]:
        print(f"perplexity of the backbone on these replies: {known.about['perplexity']:.4f}")
    heat = ", ".join(f"{temperature:g}" for temperature in known.temperatures)
    print(f"temperatures at which the heads' own probabilities fit best, per head: {heat}")
    print(f"ranks and accuracy are in {options.out}", file=sys.stderr)


def calibrate(engine: Engine, replies: Replies, about: dict) -> Calibration:
    """Rank the replies, with a progress bar. Raises ValueError for another model's."""
    from medusa_viz.cli import shown
    from medusa_viz.tuning.calibration import calibrating

    if int(replies.ids.max()) >= engine.backbone.vocab_size:
        raise ValueError(f"{replies.name} holds id {replies.ids.max()}, but {engine.title} has "
                         f"{engine.backbone.vocab_size:,} tokens: the replies are another model's.")
    return shown(calibrating(engine, replies, about))


def report(measured: Accuracy, rates: list[Rate], replies: int, prompts: int) -> str:
    """What was measured, as text."""
    from medusa_viz.tuning.accuracy import INTERVALS

    lines = [f"{replies:,} replies to {prompts:,} prompts; in brackets {INTERVALS}", "",
             "head  positions  " + "  ".join(f"{'top-' + str(n):>6}" for n in SHOWN_TOP) + "   top-1 interval"]
    tops = [measured.top(n) for n in SHOWN_TOP]
    for k, positions in enumerate(measured.positions):
        lines.append(f"{k + 1:>4}  {positions:>9,}  " + "  ".join(f"{top[k]:6.3f}" for top in tops)
                     + f"   [{measured.low[k, 0]:.3f}, {measured.high[k, 0]:.3f}]")
    lines += ["", "tokens per step (committed tokens / steps), replayed; sparse trees built from one half of the "
              "replies and replayed on the other", "nodes  tokens per step"]
    lines += [f"{rate.nodes:>5}  {rate.tokens_per_step:.3f}  [{rate.low:.3f}, {rate.high:.3f}]" for rate in rates]
    return "\n".join(lines)
