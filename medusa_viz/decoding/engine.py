"""The engine: backbone, heads and tokenizer, loaded together and checked against each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer

from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.models import backbone as backbones
from medusa_viz.models import checkpoints, device
from medusa_viz.models.adapter import is_adapter
from medusa_viz.models.backbone import Backbone, BackboneError
from medusa_viz.models.fetch import ensure_model
from medusa_viz.models.heads import Drafter, HeadsError
from medusa_viz.models.presets import DEFAULT_PRESET, PRESETS, heads_folder
from medusa_viz.models.text import TextCodec

Report = Callable[[str, float | None, str], None]
PLAIN_STEPS = 9  # measured plain steps; the first of them is warm-up


def silent(phase: str, fraction: float | None, detail: str) -> None:
    """A report that nobody reads."""


@dataclass(frozen=True)
class EngineOptions:
    """What to load. `model` is a preset's name, a folder or a hub id; `heads` a folder, file or empty."""

    model: str = DEFAULT_PRESET.name
    heads: str = ""
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True)
class Engine:
    """Everything a run needs. Shared by all sessions; use it from one thread at a time."""

    backbone: Backbone
    drafter: Drafter
    codec: TextCodec
    loaded: checkpoints.LoadedHeads
    title: str

    @property
    def accuracy(self) -> list[list[float]]:
        """K x ranks: a_k(i), as measured when the heads were trained; empty if the file does not say."""
        return self.loaded.config.accuracy

    @property
    def place(self) -> str:
        """Device and dtype in words."""
        placement = self.backbone.placement
        return f"{placement.device_name} · {placement.dtype_name}"

    def plain_ms(self) -> float:
        """Median milliseconds of a plain step, measured now on a short run."""
        ids = self.codec.encode_prompt("The cat sat on the mat.", raw=True)
        steps = list(decode(self.backbone, None, ids, PLAIN, Acceptance(), PLAIN_STEPS + 1, end_ids=()))
        return median(step.timings.total for step in steps[1:PLAIN_STEPS])


def load(options: EngineOptions, report: Report = silent) -> Engine:
    """Fetch what is missing, load it, check it. Raises ValueError or RuntimeError whose text is one sentence."""
    placement = device.choose(options.device, options.dtype)
    preset = PRESETS.get(options.model)
    if not preset and not options.heads:
        raise HeadsError(f"{options.model} needs Medusa heads: name them with --heads (a folder or file).")
    source = ensure_model(preset, report) if preset else options.model
    title = preset.title if preset else Path(options.model).name
    heads = options.heads or heads_folder(preset)
    adapter = heads if is_adapter(heads) else None
    title += " + adapter" if adapter else ""
    report("load", None, title)
    loaded_backbone = backbones.load(source, placement, title, adapter=adapter)
    try:
        codec = TextCodec(AutoTokenizer.from_pretrained(source))
    except (OSError, ValueError, KeyError) as error:
        raise BackboneError(f"The tokenizer of {options.model} could not be loaded: "
                            f"{str(error).splitlines()[0]:.160}") from error
    loaded = checkpoints.load(heads, loaded_backbone.hidden_size, loaded_backbone.vocab_size, placement.dtype)
    return Engine(loaded_backbone, Drafter(loaded.module, loaded_backbone.lm_head), codec, loaded, title)


def quiet_transformers() -> None:
    """Keep transformers' progress bars and advice off the terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
