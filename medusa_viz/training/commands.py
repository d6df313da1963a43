"""`python -m medusa_viz train`: Medusa-1 heads from token files."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from pathlib import Path

from tqdm import tqdm

from medusa_viz.models.presets import DEFAULT_PRESET, PRESETS
from medusa_viz.training.trainer import TrainSettings

RECIPES = ("medusa1",)
UNITS = {"hidden": "token", "teacher": "token", "train": "step"}
TITLES = {"hidden": "hidden states", "teacher": "soft targets", "train": "training"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `train` to the command line; its `run` is in the parsed arguments."""
    parser = subparsers.add_parser(
        "train", help="train Medusa heads on token files",
        description="Train Medusa-1 heads (frozen backbone, shared LM head) on replies that the model wrote itself.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="medusa1", help="medusa1: heads only, backbone frozen")
    parser.add_argument("--model", default=DEFAULT_PRESET.name, help="preset, folder or hub id of the backbone")
    parser.add_argument("--data", nargs="+", type=Path, required=True, metavar="FILE.npz", help="token files")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where heads, log and checkpoint go")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--whole-text", action="store_true", help="label the prompts too, not only the replies")
    parser.add_argument("--cache", type=Path, default=None, metavar="FOLDER",
                        help="where hidden states are kept (1.2 KB per token); None: beside the fetched models")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    for field in dataclasses.fields(TrainSettings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default,
                            help=field.metadata["help"])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the command; faults are ValueErrors and RuntimeErrors of one sentence."""
    _train(args, _settings(args))


def _train(args: argparse.Namespace, settings: TrainSettings) -> None:
    from transformers import AutoTokenizer

    from medusa_viz.models import backbone, device
    from medusa_viz.models.fetch import cache_root, ensure_model
    from medusa_viz.training import data, recipe

    replies = data.load(args.data)  # first, since a wrong file is found at once and a model is not
    placement = device.choose(args.device, "fp32")
    preset = PRESETS.get(args.model)
    source = ensure_model(preset, _tell) if preset else args.model
    title = preset.title if preset else str(args.model)
    tokenizer = AutoTokenizer.from_pretrained(source)
    bars = _Bars()
    plain = backbone.load(source, placement, title, packed=False)  # autocast and copies need ordinary linears
    job = recipe.Job(plain, title, replies, data.byte_token_ids(tokenizer), settings, args.out,
                     args.cache or cache_root() / "training", args.whole_text, command_line(args), tqdm.write, bars)
    try:
        folder = recipe.run(job, args.resume)
    finally:
        bars.close()
    print(f"Heads, config and model card are in {folder}.")


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run; of paths only the last part, since cards are read elsewhere."""
    words = ["python", "-m", "medusa_viz", "train", "--recipe", args.recipe, "--model", args.model, "--data",
             *(path.name for path in args.data), "--out", args.out.name]
    words += ["--whole-text"] * args.whole_text
    for name, value in _settings(args).decisive.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _settings(args: argparse.Namespace) -> TrainSettings:
    return TrainSettings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(TrainSettings)})


def _tell(phase: str, fraction: float | None, detail: str) -> None:
    print(f"{phase}: {detail}", file=sys.stderr)


class _Bars:
    """A progress bar per phase."""

    def __init__(self) -> None:
        self.phase, self.bar = "", None

    def __call__(self, phase: str, done: int, total: int, line: dict | None) -> None:
        if phase != self.phase or self.bar.total != total:
            self.close()
            self.phase, self.bar = phase, tqdm(total=total, desc=TITLES[phase], unit=UNITS[phase], smoothing=0.05)
        self.bar.update(done - self.bar.n)
        if line:
            self.bar.set_postfix_str(f"loss {line['total']:.3f} · top-1 " + " ".join(
                "–" if share is None else f"{share:.3f}" for share in line["top1"]), refresh=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
