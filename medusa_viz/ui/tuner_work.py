"""The Tuner's long work on the model: what lies stored, and one job each for calibrating, timing, decoding for real
and the threshold study. All of it runs on the model's worker; torch comes in with the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medusa_viz.tuning.accuracy import Calibration
from medusa_viz.tuning.jobs import Job
from medusa_viz.tuning.latency import Latency

if TYPE_CHECKING:
    from medusa_viz.training.data import Replies
    from medusa_viz.ui.running import Model


def stored(engine: Any) -> tuple[Calibration | None, Latency | None]:
    """The calibration of these heads, here this user's own before the one that lies beside them, and the step times of
    this device, where they were measured before."""
    from medusa_viz.tuning import calibration, measure_latency

    return calibration.own_of(engine) or calibration.known_here(engine), measure_latency.stored(engine)


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


def calibrating(model: Model) -> Job[Calibration]:
    """Rank greedy replies under the heads, and keep the result for this user. Where it counts for the heads, every
    tree that is built on the model from then on goes by it, in runs under way too."""
    from medusa_viz.models import checkpoints
    from medusa_viz.training import own_text
    from medusa_viz.tuning import calibration

    engine = model.engine
    path = shipped(engine, model.options)
    replies = _replies(path) if path else (yield from own_text.writing(engine))
    known = yield from calibration.calibrating(engine, replies, {
        "heads": Path(engine.loaded.source).name, "replies": replies.name,
        "fingerprint": replies.fingerprint, "date": np.datetime64("today").item().isoformat()})
    calibration.keep(known, engine)
    loaded = checkpoints.with_ranks(engine.loaded, engine.title, engine.backbone.placement.dtype_name)
    model.engine = replace(engine, loaded=loaded)
    return known


def timing(engine: Any) -> Job[Latency]:
    """Measure this device's step times, and keep them for this user."""
    from medusa_viz.tuning import measure_latency

    return measure_latency.measuring(engine)


def measuring(engine: Any, trees: dict[str, Any], prompts: int, tokens: int, temperature: float = 0.0) -> Job[list]:
    """Decode for real, trees taking turns; above temperature 0 with typical acceptance."""
    from medusa_viz.decoding.settings import Acceptance
    from medusa_viz.tuning import measure_trees
    from medusa_viz.tuning.bench_command import first_prompts

    settings = Acceptance()
    if temperature:
        settings = replace(settings, mode="typical", temperature=temperature)
    return measure_trees.measuring(engine, trees, first_prompts(engine, prompts), tokens, settings=settings)


def studying(engine: Any, tree: Any, epsilons: tuple[float, ...], temperatures: tuple[float, ...], prompts: int,
             tokens: int) -> Job[list]:
    """The threshold study on one tree."""
    from medusa_viz.tuning import thresholds
    from medusa_viz.tuning.bench_command import first_prompts

    return thresholds.studying(engine, tree, first_prompts(engine, prompts), epsilons, temperatures, tokens)
