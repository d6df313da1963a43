"""`python -m medusa_viz train`: Medusa heads, and with them the backbone, from token files."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tqdm import tqdm

from medusa_viz.models.presets import DEFAULT_PRESET, PRESETS
from medusa_viz.training.progress import ProgressFile
from medusa_viz.training.settings import RECIPES, JointSettings, TrainSettings, settings_for

if TYPE_CHECKING:
    from medusa_viz.models.checkpoints import LoadedHeads
    from medusa_viz.models.device import Placement
    from medusa_viz.models.sources import Source
    from medusa_viz.training.data import Replies

UNITS = {"hidden": "token", "teacher": "token", "train": "step"}
TITLES = {"hidden": "hidden states", "teacher": "soft targets", "train": "training"}
BROUGHT = ("heads", "layers", "draft_vocabulary")  # settings that given heads decide
EXIT_STOPPED = 130  # what a shell reports for a command that Ctrl-C ended


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `train` to the command line; its `run` is in the parsed arguments."""
    parser = subparsers.add_parser(
        "train", help="train Medusa heads on token files",
        description="Train Medusa heads that share the LM head, on replies that the model wrote itself. Options that "
                    "say (medusa2) belong to the recipes medusa2 and direct. Ctrl-C stops after the step at hand; "
                    "--resume goes on. `accelerate launch -m medusa_viz train …` shares the work among processes; on "
                    "CPUs with `--multi_gpu --num_processes 2` before -m, and --device cpu.")
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="medusa1",
                        help="; ".join(f"{name}: {recipe.help}" for name, recipe in RECIPES.items()))
    parser.add_argument("--model", default=DEFAULT_PRESET.name, help="name, folder or hub id of the backbone")
    parser.add_argument("--data", nargs="+", type=Path, required=True, metavar="FILE.npz", help="token files")
    parser.add_argument("--init", default="", metavar="HEADS", help="folder, file or hub id of heads to start from; "
                        "they bring their number, layers and draft vocabulary, and for a joint recipe their adapter")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where heads, log and checkpoint go")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--whole-text", action="store_true", help="label the prompts too, not only the replies")
    parser.add_argument("--cache", type=Path, default=None, metavar="FOLDER",
                        help="where hidden states are kept, 1.2 KB per token (default: beside the fetched models)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "8bit", "4bit"), default="fp32", help="of the frozen "
                        "backbone; 8bit and 4bit are for CUDA cards and the recipe medusa1 (default: %(default)s)")
    for field, owners in _fields().values():
        own = "" if len(owners) == len(RECIPES) else " (medusa2)"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=None,
                            choices=field.metadata["choices"],
                            help=f"{field.metadata['help']}{own} (default: {_defaults(field.name, owners)})")
    parser.set_defaults(run=run)


def _fields() -> dict[str, tuple[dataclasses.Field, list[str]]]:
    """Every setting of any recipe by name, and the recipes that have it."""
    found: dict[str, tuple[dataclasses.Field, list[str]]] = {}
    for name, recipe in RECIPES.items():
        for field in dataclasses.fields(recipe.defaults):
            found.setdefault(field.name, (field, []))[1].append(name)
    return found


def _defaults(field: str, owners: list[str]) -> str:
    """Its default in the first recipe that has it, then every other one with the recipes that it is of."""
    by_value: dict[object, list[str]] = {}
    for name in owners:
        by_value.setdefault(getattr(RECIPES[name].defaults, field), []).append(name)
    first, *others = by_value
    return "; ".join([str(first), *(f"{' and '.join(by_value[value])} {value}" for value in others)])


def run(args: argparse.Namespace) -> int:
    """Run the command; faults are ValueErrors and RuntimeErrors of one sentence."""
    settings = _settings(args)
    brought = [name for name in BROUGHT if getattr(args, name) is not None]
    if args.init and brought:
        raise ValueError("--init brings heads whose number, layers and draft vocabulary stand; leave "
                         f"--{brought[0].replace('_', '-')} out.")
    if args.dtype in ("8bit", "4bit") and args.recipe != "medusa1":
        raise ValueError(f"--recipe {args.recipe} trains an adapter of the backbone, which --dtype {args.dtype} cannot "
                         "take in; choose fp32 or bf16, or the recipe medusa1.")
    from medusa_viz.models import device
    from medusa_viz.training import data
    from medusa_viz.training.run_folder import alone_in, check_folder

    replies = data.load(args.data)  # all that is wrong on disk is found before a model is loaded
    check_folder(args.out, settings, args.resume)
    placement = device.choose(_own_card(args.device), args.dtype)
    with alone_in(args.out):
        return _train(args, settings, replies, placement)


def _train(args: argparse.Namespace, settings: TrainSettings, replies: Replies, placement: Placement) -> int:
    from medusa_viz.models import backbone, sources
    from medusa_viz.models.fetch import cache_root
    from medusa_viz.training import data, recipe
    from medusa_viz.training.trainer import Stopped

    source = sources.bare(args.model, _tell)
    init = _init(args, settings, source) if args.init else None
    sources.fetch_weights(source, _tell)
    title = source.title if args.model in PRESETS else source.repository or args.model
    # Autocast, gradients and copies need ordinary linears.
    plain = backbone.load(source.folder, placement, title, packed=False)
    single_bytes = data.byte_token_ids(sources.codec(source).tokenizer)
    with _watching(args.out) as watch:
        job = recipe.Job(args.recipe, plain, title, replies, single_bytes, settings, args.out,
                         args.cache or cache_root() / "training", init, args.whole_text, command_line(args),
                         tqdm.write, watch.report, watch.stopped)
        try:
            folder = recipe.run(job, args.resume)
        except Stopped as stopped:
            watch.bars.close()
            print(stopped, file=sys.stderr)
            return EXIT_STOPPED
    print(f"Heads, config and model card are in {folder}.")
    return 0


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run; of paths only the last part, since cards are read elsewhere."""
    words = ["python", "-m", "medusa_viz", "train", "--recipe", args.recipe, "--model", args.model, "--data",
             *(path.name for path in args.data), "--out", args.out.name]
    words += ["--init", Path(args.init).name] if args.init else []
    words += ["--whole-text"] * args.whole_text
    words += ["--dtype", args.dtype] if args.dtype != "fp32" else []
    for name, value in _settings(args).decisive.items():
        if not (args.init and name in BROUGHT):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _settings(args: argparse.Namespace) -> TrainSettings:
    return settings_for(args.recipe, {name: getattr(args, name) for name in _fields()
                                      if getattr(args, name) is not None})


def _init(args: argparse.Namespace, settings: TrainSettings, source: Source) -> LoadedHeads:
    """The heads to start from, and that they and their adapter fit a backbone of which only the config is read."""
    from medusa_viz.models import checkpoints, placing
    from medusa_viz.models.adapter import Adapter

    backbone = placing.outline(source.folder)
    heads = checkpoints.load(args.init, backbone.hidden_size, backbone.vocab_size)
    if heads.adapter and isinstance(settings, JointSettings):
        Adapter(backbone.model, settings.rank, settings.alpha, source.title).read(heads.adapter)
    return heads


def _own_card(device: str) -> str:
    """Under `accelerate launch` every process takes the card of its own number."""
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu")
    return str(state.device) if device == "auto" and state.num_processes > 1 else device


def _tell(phase: str, fraction: float | None, detail: str) -> None:
    print(f"{phase}: {detail}", file=sys.stderr)


@contextmanager
def _watching(folder: Path) -> Iterator[SimpleNamespace]:
    """Progress on the terminal and in a file, and Ctrl-C: the first one asks, the second ends at once."""
    bars, file, asked = _Bars(), ProgressFile(folder), []

    def interrupt(*_: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)

    def report(phase: str, done: int, total: int, line: dict | None) -> None:
        bars(phase, done, total, line)
        file(phase, done, total)
        if asked and phase != "train":  # nothing is lost: what was computed is on disk
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield SimpleNamespace(report=report, stopped=lambda: bool(asked), bars=bars)
    finally:
        signal.signal(signal.SIGINT, before)
        bars.close()


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
            backbone = "" if line["lm_loss"] is None else f" = {line['lm_kind']} {line['lm_loss']:.4f} + heads"
            self.bar.set_postfix_str(f"loss {line['total']:.3f}{backbone} · top-1 " + " ".join(
                "–" if share is None else f"{share:.3f}" for share in line["top1"]), refresh=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
