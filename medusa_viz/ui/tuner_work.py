"""The Tuner's long work on the model: what lies stored, and one job each for calibrating, timing, decoding for real
and the threshold study. All of it runs on the model's worker; torch comes in with the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medusa_viz.tuning import accuracy
from medusa_viz.tuning.accuracy import Calibration
from medusa_viz.tuning.jobs import Job
from medusa_viz.tuning.latency import Latency

if TYPE_CHECKING:
    from medusa_viz.training.data import Replies


def stored(engine: Any, options: dict[str, str]) -> tuple[Calibration | None, Latency | None]:
    """The calibration of these heads, this user's own before the one that lies beside them, and the step times of this
    device, where they were measured before."""
    from medusa_viz.tuning import measure_latency
    from medusa_viz.tuning.calibration import known_here

    return _kept(engine, options) or known_here(engine), measure_latency.stored(engine)


def _file(engine: Any) -> Path:
    """Where this user's own calibration of these heads lies."""
    from medusa_viz.models.beside import heads_fingerprint
    from medusa_viz.models.fetch import cache_root

    return cache_root() / "ranks" / f"{heads_fingerprint(engine.drafter.module)}.npz"


def _kept(engine: Any, options: dict[str, str]) -> Calibration | None:
    """This user's own calibration; none where it was made on another backbone, or other replies ship by now."""
    from medusa_viz.models.beside import is_of

    path = shipped(engine, options)
    try:
        known = accuracy.load(_file(engine))
        stale = path is not None and known.about.get("fingerprint") != _replies(path).fingerprint
    except ValueError:
        return None
    here = is_of(known.about, engine.drafter.module, engine.title, engine.backbone.placement.dtype_name)
    return known if here and not stale else None


def shipped(engine: Any, options: dict[str, str]) -> Path | None:
    """The greedy replies that ship for the model in use."""
    from medusa_viz.training import own_text

    return own_text.shipped(engine, options.get("model", ""))


def _replies(path: Path) -> Replies:
    from medusa_viz.training import own_text

    return own_text.training_part(path)


def reply_tokens(engine: Any, options: dict[str, str]) -> tuple[int, int]:
    """Tokens that calibrating reads, and tokens that the model writes before."""
    from medusa_viz.training.own_text import ANSWER_TOKENS, ANSWERED

    path = shipped(engine, options)
    if path is None:
        return 2 * ANSWERED * ANSWER_TOKENS, ANSWERED * ANSWER_TOKENS
    try:
        return len(_replies(path).ids), 0
    except ValueError:  # calibrating says why
        return 0, 0


def calibrating(engine: Any, options: dict[str, str]) -> Job[Calibration]:
    """Rank greedy replies under the heads, and keep the result for this user."""
    from medusa_viz.training import own_text
    from medusa_viz.tuning import calibration

    path = shipped(engine, options)
    replies = _replies(path) if path else (yield from own_text.writing(engine))
    known = yield from calibration.calibrating(engine, replies, {
        "heads": Path(engine.loaded.source).name, "replies": replies.name,
        "fingerprint": replies.fingerprint, "date": np.datetime64("today").item().isoformat()})
    target = _file(engine)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part.npz")
    accuracy.save(part, known, accuracy.accuracy(known.table, known.prompts))
    part.replace(target)
    return known


def timing(engine: Any) -> Job[Latency]:
    """Measure this device's step times, and keep them for this user."""
    from medusa_viz.tuning import measure_latency

    return measure_latency.measuring(engine)


def prompts_of(engine: Any, count: int) -> list[list[int]]:
    """The first of the prompts that `bench` uses, each of another kind; no token file holds replies to them."""
    from medusa_viz.tuning import bench, bench_command

    return [engine.codec.encode_prompt(prompt.text) for prompt in bench.read_prompts(bench_command.PROMPTS)[:count]]


def measuring(engine: Any, trees: dict[str, Any], prompts: int, tokens: int, temperature: float = 0.0) -> Job[list]:
    """Decode for real, trees taking turns; above temperature 0 with typical acceptance."""
    from medusa_viz.decoding.settings import Acceptance
    from medusa_viz.tuning import measure_trees

    settings = Acceptance()
    if temperature:
        settings = replace(settings, mode="typical", temperature=temperature)
    return measure_trees.measuring(engine, trees, prompts_of(engine, prompts), tokens, settings=settings)


def studying(engine: Any, tree: Any, epsilons: tuple[float, ...], temperatures: tuple[float, ...], prompts: int,
             tokens: int) -> Job[list]:
    """The threshold study on one tree."""
    from medusa_viz.tuning import thresholds

    return thresholds.studying(engine, tree, prompts_of(engine, prompts), epsilons, temperatures, tokens)
