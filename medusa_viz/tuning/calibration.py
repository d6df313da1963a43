"""Calibrating heads on recorded replies: ranks, accuracies and temperatures in one go; and what is known already."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np

from medusa_viz.decoding.engine import Engine
from medusa_viz.models.beside import heads_fingerprint, own_place, own_table, rank_table
from medusa_viz.models.heads import MedusaHeads
from medusa_viz.tuning.accuracy import Calibration, accuracy, load, save
from medusa_viz.tuning.jobs import Job
from medusa_viz.tuning.latency import Latency
from medusa_viz.tuning.ranking import fitting_temperatures, ranking
from medusa_viz.tuning.specs import Facts


class Replies(Protocol):
    """What `ranking.Sequences` says, and of each reply its temperature (0 is greedy) and its split (0 training, 1 held
    out)."""

    name: str
    ids: np.ndarray
    offsets: np.ndarray
    reply_start: np.ndarray
    temperature: np.ndarray
    split: np.ndarray

    def select(self, chosen: np.ndarray) -> Self:
        """The replies for which `chosen` (bool [replies]) is True."""


R = TypeVar("R", bound=Replies)


def greedy_training(replies: R) -> R:
    """What a tree may be chosen by: the greedy replies of the training split, since the held-out ones are for judging
    alone; all greedy ones where there is no training split. Raises ValueError where none is greedy."""
    training = replies.split == 0
    chosen = (replies.temperature == 0) & (training | ~training.any())
    if not chosen.any():
        kind = "greedy reply of the training split" if training.any() else "greedy reply"
        raise ValueError(f"{replies.name} holds no {kind}, and only greedy text can be replayed.")
    return replies.select(chosen)


def calibrating(engine: Engine, replies: Replies, about: dict | None = None) -> Job[Calibration]:
    """Rank all replies under all heads. The temperatures are fitted on one half of the replies alone."""
    prompts = prompt_of(replies)
    two_splits = len(set(replies.split.tolist())) > 1
    fold = replies.split.astype(bool) if two_splits else prompts % 2 == 1
    fitted = np.flatnonzero(~fold if (~fold).any() else fold)
    temperatures = yield from fitting_temperatures(engine.backbone, engine.drafter, replies, fitted)
    ranked = yield from ranking(engine.backbone, engine.drafter, replies, temperatures)
    about = (about or {}) | {"model": engine.title, "dtype": engine.backbone.placement.dtype_name,
                             "heads_fingerprint": heads_fingerprint(engine.drafter.module),
                             "perplexity": ranked.perplexity}
    return Calibration(ranked.table, prompts, fold, temperatures, ranked.p, about)


def prompt_of(replies: Replies) -> np.ndarray:
    """int64 [replies]: number of the prompt that each answers; replies behind equal prompt tokens share one."""
    numbers: dict[bytes, int] = {}
    starts = replies.offsets[:-1]
    return np.array([numbers.setdefault(replies.ids[start : start + length].tobytes(), len(numbers))
                     for start, length in zip(starts.tolist(), replies.reply_start.tolist())], np.int64)


def known_of(source: str, module: MedusaHeads, model: str = "", dtype: str = "") -> Calibration | None:
    """The rank table that counts for heads, if there is one (on a backbone of this name and dtype, where that is
    known). One that cannot be read is none: loading the heads said so."""
    try:
        path = rank_table(source, module, model, dtype)
        return load(path) if path else None
    except ValueError:
        return None


def known_here(engine: Engine) -> Calibration | None:
    """The rank table that counts for the heads in use on this backbone."""
    return known_of(engine.loaded.source, engine.drafter.module, engine.title, engine.backbone.placement.dtype_name)


def own_of(engine: Engine) -> Calibration | None:
    """The user's own calibration of the heads in use on this backbone."""
    path = own_table(engine.drafter.module, engine.title, engine.backbone.placement.dtype_name)
    try:
        return load(path) if path else None
    except ValueError:
        return None


def keep(known: Calibration, engine: Engine) -> None:
    """Leave a calibration of the heads in use in the user's cache."""
    target = own_place(engine.drafter.module)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part.npz")
    save(part, known, accuracy(known.table, known.prompts))
    part.replace(target)


def notes_on(known: Calibration, path: Path, module: MedusaHeads) -> list[str]:
    """Notes where a rank table that a person named may be of other heads, or is of replies for judging. Raises
    ValueError in one sentence where it cannot be of these heads."""
    if known.table.ranks.shape[1] != module.heads:
        raise ValueError(f"{path} ranks {known.table.ranks.shape[1]} heads, but there are {module.heads}.")
    same = known.about.get("heads_fingerprint") in (None, heads_fingerprint(module))
    notes = [] if same else [f"{path.name} was made with other heads ({known.about.get('heads', 'unnamed')})"]
    if known.about.get("split") in ("all", "held_out"):
        notes.append(f"{path.name} ranks held-out replies too, so that those judge no tree built from it")
    return notes


def facts_of(engine: Engine, known: Calibration | None = None, latency: Latency | None = None) -> Facts:
    """What builders may draw on: a calibration's own accuracies if there is one, else those in the heads' file."""
    rates = () if known else engine.accuracy
    return Facts(engine.drafter.heads, rates, known.table if known else None, latency.step_ms if latency else None,
                 known.temperatures if known else (), engine.drafter.choices)
