"""The engine: backbone, heads and tokenizer, loaded together and checked against each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.models import backbone as backbones
from medusa_viz.models import checkpoints, device, gguf_files, placing, sources
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.heads import Drafter, HeadsError
from medusa_viz.models.presets import DEFAULT_PRESET
from medusa_viz.models.text import TextCodec

Report = Callable[[str, float | None, str], None]
PLAIN_STEPS = 9  # measured plain steps; the first of them is warm-up


def silent(phase: str, fraction: float | None, detail: str) -> None:
    """A report that nobody reads."""


@dataclass(frozen=True)
class EngineOptions:
    """What to load. `model` is the name of a preset or of a published model, a folder or a hub id; `heads` a folder,
    file, hub id or empty, which means the model's own."""

    model: str = DEFAULT_PRESET.name
    heads: str = ""
    device: str = "auto"
    dtype: str = "auto"
    compile: bool = False
    """Replay steps on CUDA as graphs of fused kernels."""


@dataclass(frozen=True)
class Engine:
    """Everything a run needs. Shared by all sessions; use it from one thread at a time."""

    backbone: Backbone
    drafter: Drafter
    codec: TextCodec
    loaded: checkpoints.LoadedHeads
    title: str
    tree: str = ""
    """Spec of the tree to draft with where nobody names one."""

    @property
    def accuracy(self) -> list[list[float]]:
        """K x ranks: a_k(i), by which trees are built here; see `LoadedHeads.accuracy`."""
        return self.loaded.accuracy

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
    """Fetch what is missing, load it, check it: heads against the backbone's config before its weights are fetched or
    read. Raises ValueError or RuntimeError whose text is one sentence."""
    placement = device.choose(options.device, options.dtype)
    source, loaded = find(options, placement, report)
    sources.fetch_weights(source, report)
    title = loaded.titled(source.title)
    unpacked = gguf_files.file_of(source.folder)
    report("unpack" if unpacked else "load", None, loaded.report.notices[0] if unpacked else title)
    backbone = backbones.load(source.folder, placement, title, adapter=loaded.adapter, compiled=options.compile,
                              heads=sum(parameter.numel() for parameter in loaded.module.parameters()))
    if spilled := placing.spilled(backbone.model, placement):
        loaded.report.notices.append(spilled)
    return Engine(backbone, Drafter(loaded.module, backbone.lm_head), sources.codec(source), loaded, title, source.tree)


def find(options: EngineOptions, placement: device.Placement, report: Report
         ) -> tuple[sources.Source, checkpoints.LoadedHeads]:
    """The backbone without its weights, and the heads that were named, else its own, with a notice where another
    backbone trained them."""
    source = sources.find(options.model, report)
    sizes = placing.outline(source.folder)
    try:
        loaded = checkpoints.load(options.heads or source.heads, sizes.hidden_size, sizes.vocab_size, placement.dtype,
                                  report)
    except checkpoints.NoHeadsError as error:
        if options.heads:
            raise
        raise HeadsError(f"{options.model} holds no Medusa heads: name some with --heads (a folder, file or hub id)."
                         ) from error
    if file := gguf_files.file_of(source.folder):
        loaded.report.notices.insert(0, gguf_files.notice(file, sizes.footprint))
    known = {Path(name).name.lower() for name in (options.model, source.repository, source.title, loaded.source)}
    if loaded.base and Path(loaded.base).name.lower() not in known:
        loaded.report.notices.append(f"the heads were trained on {loaded.base}, and may draft worse on {source.title}")
    if options.heads and not loaded.base:
        loaded.report.notices.append("the heads do not say which model they were trained on: name that one if it is "
                                     f"another than {source.title}")
    return source, checkpoints.with_ranks(loaded, loaded.titled(source.title), placement.dtype_name)


def quiet_transformers() -> None:
    """Keep transformers' progress bars and advice off the terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
