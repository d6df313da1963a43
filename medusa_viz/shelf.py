"""`python -m medusa_viz models` and `convert`: what can be run here, and heads written in another layout."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from medusa_viz.models.presets import heads_folder, shipped

if TYPE_CHECKING:
    from medusa_viz.models.published import Fit

LAYOUTS = ("medusa", "medusa-pt", "medusa-2", "vllm", "vllm-no-bias", "tensorrt-llm")
"""Names of `models.layouts.LAYOUTS`, here so that --help needs no torch."""


def add_parsers(commands: argparse._SubParsersAction) -> None:
    """Add both commands to the command line; `run` is in the parsed arguments."""
    parser = commands.add_parser("models", help="list the models known by name, and which of them fit this machine")
    parser.add_argument("name", nargs="?", default="", help="tell more of this one: where model and heads come from, "
                        "chat template, tree, memory by dtype")
    parser.set_defaults(run=list_models)
    parser = commands.add_parser("convert", help="write heads in the layout of another engine")
    parser.add_argument("--heads", required=True, help="folder, file or hub id, in any layout")
    parser.add_argument("--layout", required=True, choices=LAYOUTS)
    parser.add_argument("--model", default="", help="backbone, for layouts that hold its LM head or all of it")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to write")
    parser.set_defaults(run=convert)


def list_models(options: argparse.Namespace) -> None:
    """Every model known by name, with one sentence on whether it fits; or all that is known of one."""
    from medusa_viz.models import checkpoints
    from medusa_viz.models.device import choose
    from medusa_viz.models.published import fits

    if options.name:
        return _tell(options.name, fits(choose().device.type))
    for preset in shipped():
        loaded = checkpoints.load(heads_folder(preset))
        recipe = loaded.config.trained.get("recipe")
        trained = f" trained by the recipe {recipe}" if recipe else ""
        print(f"{preset.name:24} {preset.title}{' + adapter' * bool(loaded.adapter)} with {loaded.module.heads} heads"
              f"{trained} runs anywhere. Licence: {preset.licence}.")
    for fit in fits(choose().device.type):
        print(f"{fit.preset.name:24} {fit.sentence} Licence: {fit.preset.licence}.")
    print("`python -m medusa_viz models NAME` tells more of one: repositories, chat template, tree, memory by dtype.")


def _tell(name: str, fitting: list[Fit]) -> None:
    """The facts that the page's model menu shows too, one a line."""
    from medusa_viz.figures.texts import Texts
    from medusa_viz.models.sources import title_of
    from medusa_viz.ui.model_menu import facts

    fit = next((fit for fit in fitting if fit.preset.name == name), None)
    rows = facts(name, Texts(), fit)
    if not rows:
        raise ValueError(f"{name:.60} is none of the models known by name, which `python -m medusa_viz models` lists.")
    print(fit.sentence if fit else f"{title_of(name)} runs anywhere.")
    for row in rows:
        print(f"  {row['label']:14} {row['value']}")


def convert(options: argparse.Namespace) -> None:
    """Read heads and write them; what the layout cannot hold is said first."""
    from medusa_viz.models import checkpoints, sources
    from medusa_viz.models.adapter import is_adapter
    from medusa_viz.models.fetch import silent
    from medusa_viz.models.layouts import losses

    if options.out.is_file() or (options.out.is_dir() and any(options.out.iterdir())):
        raise ValueError(f"{options.out} is not empty: name another folder.")
    head, source, sizes = None, None, ()
    if options.model:
        source = sources.ready(options.model, silent)
        head = sources.lm_head(source.folder)
        sizes = (head.shape[1], head.shape[0])
    loaded = checkpoints.load(options.heads, *sizes)
    notes = loaded.report.notices + losses(loaded.module, options.layout)
    is_adapted = is_adapter(loaded.folder)
    if is_adapted and options.layout != "medusa-2":
        notes.append("these heads belong to a backbone with an adapter, which this layout leaves out: the medusa-2 "
                     "layout holds both")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    with TemporaryDirectory(dir=options.out.parent) as work:
        base = source and source.folder
        if base and is_adapted and options.layout == "medusa-2":
            base = _merged(base, loaded.folder, Path(work))
        path = checkpoints.save(options.out, loaded.module, loaded.config, loaded.dtype, options.layout, head, base)
    print(f"read: {loaded.report.tensors}", file=sys.stderr)
    print(f"{loaded.module.heads} heads written to {path}")


def _merged(base: Path, adapter: Path, target: Path) -> Path:
    """A copy of the backbone in `target` with an adapter added into its weights."""
    from transformers import AutoModelForCausalLM

    from medusa_viz.decoding.engine import quiet_transformers
    from medusa_viz.models import adapter as adapters
    from medusa_viz.models import hub

    quiet_transformers()
    adapters.merge(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter).save_pretrained(target)
    for file in hub.small_in(base):
        if not (target / file.name).exists():
            shutil.copyfile(file, target / file.name)
    return target
