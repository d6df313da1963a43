"""`python -m medusa_viz distill`: the model writes the training data of its own heads."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict, fields
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from medusa_viz.models.presets import DEFAULT_PRESET
from medusa_viz.training.distil_settings import MOST_DROPPED, DistilSettings

if TYPE_CHECKING:
    from medusa_viz.models.backbone import Backbone
    from medusa_viz.models.text import TextCodec
    from medusa_viz.training.distil import Shelf, Source
    from medusa_viz.training.written import PartFile

EXIT_STOPPED = 130  # what a shell reports for a command that Ctrl-C ended


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add `distill` to the command line; its `run` is in the parsed arguments."""
    parser = commands.add_parser(
        "distill", help="let the model write training data for its heads",
        description="The model replies to prompts, and the replies are stored as token ids for `train` and "
                    "`calibrate`. A run that was stopped (Ctrl-C) goes on with --resume. One that repeats the prompts "
                    f"or writes its own gives up after {MOST_DROPPED} unfit texts in a row.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_PRESET.name, help="name, folder or hub id of the backbone")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines with prompt, kind and split, or a "
                         "text file with one prompt a line; None: the prompts that ship with the project")
    prompts.add_argument("--synthesise", action="store_true", help="let the model write the prompts too")
    parser.add_argument("--split", choices=("all", "train", "held_out"), default="all", help="which prompts to take")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="token file to write")
    parser.add_argument("--resume", action="store_true", help="go on with the unfinished run beside --out")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16; only fp32 writes what the fp32 model says")
    for field in fields(DistilSettings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default,
                            choices=field.metadata["choices"], help=field.metadata["help"])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; faults that a person can mend are ValueErrors of one sentence."""
    settings = DistilSettings(**{field.name: getattr(args, field.name) for field in fields(DistilSettings)})
    if args.out.suffix != ".npz":
        raise ValueError(f"--out is {args.out}; a token file ends in .npz.")
    if args.out.exists():
        raise ValueError(f"{args.out} exists already: delete it, or name another file.")
    from medusa_viz.training import prompts
    from medusa_viz.training.distil import FromPrompts, SelfWritten
    from medusa_viz.training.written import PartFile

    path = args.prompts or prompts.SHIPPED
    asked = [] if args.synthesise else prompts.read(path, prompts.splits(args.split))  # before a model is loaded
    backbone, codec = _load(args)
    source = (SelfWritten(prompts.turn_frame(codec), backbone, settings) if args.synthesise else
              FromPrompts(asked, codec.encode_prompt, backbone, settings, path.name))
    part = PartFile(args.out.with_name(args.out.name + ".texts.jsonl"), _identity(backbone, source, settings),
                    args.resume)
    try:
        shelf, speed = _write(backbone, source, settings, part)
    except KeyboardInterrupt:
        print(f"\nStopped; {len(part.texts):,} texts are kept in {part.path}. Go on with --resume.", file=sys.stderr)
        return EXIT_STOPPED
    finally:
        part.close()
    _finish(args, settings, backbone, source, shelf, speed)
    part.path.unlink()
    return 0


def _load(args: argparse.Namespace) -> tuple[Backbone, TextCodec]:
    from medusa_viz.models import backbone, device, sources

    placement = device.choose(args.device, args.dtype)
    source = sources.bare(args.model, _tell)
    sources.fetch_weights(source, _tell)
    return backbone.load(source.folder, placement, source.title), sources.codec(source)


def _tell(phase: str, fraction: float | None, detail: str) -> None:
    print(f"{phase}: {detail}", file=sys.stderr)


def _identity(backbone: Backbone, source: Source, settings: DistilSettings) -> dict:
    """What a resumed run must have in common with the one that it goes on with. `tokens` and `rows` touch no text:
    a run may be resumed with more or fewer of them."""
    from medusa_viz.training.hidden import model_fingerprint

    return {"model": model_fingerprint(backbone.model), "dtype": backbone.placement.dtype_name, "source": source.name,
            "prompts": source.digest, **{name: value for name, value in asdict(settings).items()
                                         if name not in ("tokens", "rows")}}


def _write(backbone: Backbone, source: Source, settings: DistilSettings, part: PartFile) -> tuple[Shelf, dict]:
    """Write all texts under a progress bar; the shelf of them, and how fast that went."""
    from tqdm import tqdm

    from medusa_viz.training.distil import Shelf, write

    shelf = Shelf(source, settings.tokens)
    for text in part.texts.values():
        shelf.add(text)
    resumed = shelf.tokens + shelf.waiting
    if resumed:
        print(f"Resumed: {resumed:,} reply tokens are there already.", file=sys.stderr)
    tokens, begun = resumed, perf_counter()
    with tqdm(total=settings.tokens or None, initial=resumed, desc="writing", unit="token", smoothing=0.02) as bar:
        for text, tokens in write(backbone, source, settings, shelf, dict(part.texts)):
            part.add(text)
            bar.update(tokens - bar.n)
    return shelf, {"tokens": tokens - resumed, "seconds": round(perf_counter() - begun, 1)}


def _finish(args: argparse.Namespace, settings: DistilSettings, backbone: Backbone, source: Source, shelf: Shelf,
            speed: dict) -> None:
    """Token file and data card."""
    from medusa_viz.training.written import card_path, save_card, save_replies

    if not shelf.entries:
        raise ValueError(f"No reply was fit to keep ({json.dumps(shelf.dropped)}); nothing was written.")
    save_replies(args.out, shelf.entries, source.kinds, backbone.vocab_size)
    save_card(args.out, shelf.entries, source.kinds, {
        "model": backbone.name, "dtype": backbone.placement.dtype_name, "prompts": source.name,
        "settings": asdict(settings), "left_out": dict(shelf.dropped),
        "last_run": speed | {"device": backbone.placement.device_name, "linears": backbone.linears},
        "command": command_line(args)})
    print(f"{shelf.tokens:,} reply tokens in {len(shelf.entries):,} replies are in {args.out}, their data card in "
          f"{card_path(args.out)}; {speed['tokens'] / max(speed['seconds'], 0.1):,.0f} tokens per second.")


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run; of paths only the last part, since cards are read elsewhere."""
    words = ["python", "-m", "medusa_viz", "distill", "--model", Path(args.model).name if Path(args.model).exists()
             else args.model]
    words += ["--synthesise"] if args.synthesise else ["--prompts", args.prompts.name] if args.prompts else []
    words += ["--split", args.split] if args.split != "all" else []
    for field in fields(DistilSettings):
        value = getattr(args, field.name)
        if value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--out", args.out.name])
