"""The Tuner's long work on the model: what lies stored, and one job each for calibrating, timing, decoding for real
and the threshold study. All of it runs on the model's worker; torch comes in with the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medusa_viz.models.presets import PRESETS, REPOSITORY
from medusa_viz.tuning import accuracy
from medusa_viz.tuning.accuracy import Calibration
from medusa_viz.tuning.jobs import Job, Progress, within
from medusa_viz.tuning.latency import Latency

if TYPE_CHECKING:
    from medusa_viz.training.data import Replies

PROMPTS = REPOSITORY / "assets" / "prompts"
ANSWERED, ANSWER_TOKENS = 32, 64  # prompts, and tokens of each reply, where the model has to write what it is judged on


def stored(engine: Any) -> tuple[Calibration | None, Latency | None]:
    """The calibration of these heads and the step times of this device, where they were measured before."""
    from medusa_viz.tuning import measure_latency
    from medusa_viz.tuning.calibration import known_of

    try:
        known = known_of(engine.loaded.source, engine.drafter.module) or _kept(engine)
    except ValueError:
        known = _kept(engine)
    return known, measure_latency.stored(engine)


def _file(engine: Any) -> Path:
    """Where this user's own calibration of these heads lies."""
    from medusa_viz.models.fetch import cache_root
    from medusa_viz.tuning.calibration import heads_fingerprint

    return cache_root() / "ranks" / f"{heads_fingerprint(engine.drafter.module)}.npz"


def _kept(engine: Any) -> Calibration | None:
    try:
        return accuracy.load(_file(engine))
    except ValueError:
        return None


def shipped(engine: Any, options: dict[str, str]) -> Path | None:
    """The greedy replies that ship for the model in use. Heads that change the backbone write another text."""
    path = PROMPTS / f"replies-{options.get('model')}.npz"
    return path if options.get("model") in PRESETS and path.is_file() and not engine.loaded.adapter else None


def reply_tokens(engine: Any, options: dict[str, str]) -> tuple[int, int]:
    """Tokens that calibrating reads, and tokens that the model writes before."""
    path = shipped(engine, options)
    if path is None:
        return 2 * ANSWERED * ANSWER_TOKENS, ANSWERED * ANSWER_TOKENS
    try:
        return int(json.loads(path.with_suffix(".json").read_text("utf-8"))["tokens"]), 0
    except (OSError, ValueError, KeyError, TypeError):
        return 30_000, 0


def calibrating(engine: Any, options: dict[str, str]) -> Job[Calibration]:
    """Rank greedy replies under the heads, and keep the result for this user."""
    from medusa_viz.tuning import calibration

    path = shipped(engine, options)
    replies = _greedy(path) if path else (yield from _answering(engine))
    known = yield from calibration.calibrating(engine, replies, {
        "model": engine.title, "heads": Path(engine.loaded.source).name, "replies": replies.name,
        "fingerprint": replies.fingerprint, "date": np.datetime64("today").item().isoformat()})
    target = _file(engine)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part.npz")
    accuracy.save(part, known, accuracy.accuracy(known.table, known.prompts))
    part.replace(target)
    return known


def _greedy(path: Path) -> Replies:
    from medusa_viz.training import data

    replies = data.load([path])
    return replies.select(replies.temperature == 0)


def _answering(engine: Any) -> Job[Replies]:
    """Greedy replies to prompts of the training half, written now; a part is one step."""
    from medusa_viz.decoding.decoder import PLAIN
    from medusa_viz.training import prompts
    from medusa_viz.training.data import Replies
    from medusa_viz.tuning.bench import stepping

    asked = prompts.read(PROMPTS / "prompts.jsonl", [prompts.SPLITS["train"]])[:ANSWERED]
    sequences, starts = [], []
    for done, prompt in enumerate(asked):
        ids = engine.codec.encode_prompt(prompt.text)
        limit = min(ANSWER_TOKENS, engine.backbone.context - len(ids))
        if limit < 2:
            continue
        run = yield from within(stepping(engine.backbone, None, PLAIN, ids, limit),
                                lambda _, done=done: Progress(done, len(asked), "answering"))
        sequences.append(np.asarray([*ids, *run.ids], np.int32))
        starts.append(len(ids))
    if not sequences:
        raise ValueError("No prompt fits into the model's context, so the heads cannot be calibrated here.")
    n = len(sequences)
    return Replies("replies written now", np.concatenate(sequences), np.cumsum([0, *map(len, sequences)]),
                   np.asarray(starts, np.int32), np.zeros(n, np.float32), np.zeros(n, np.uint8), ("own",),
                   (np.arange(n) % 2).astype(np.uint8))


def timing(engine: Any) -> Job[Latency]:
    """Measure this device's step times, and keep them for this user."""
    from medusa_viz.tuning import measure_latency

    return measure_latency.measuring(engine)


def prompts_of(engine: Any, count: int) -> list[list[int]]:
    """The first of the held-out prompts that `bench` uses, each of another kind."""
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
