"""The replies that heads are judged on, and trees chosen by: greedy text that their own backbone writes, since replay
is exact on no other. Command line and Tuner page take them from here."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from medusa_viz.decoding.decoder import PLAIN
from medusa_viz.decoding.engine import Engine
from medusa_viz.models.presets import PRESETS, REPOSITORY
from medusa_viz.training import data, prompts
from medusa_viz.training.data import Replies
from medusa_viz.tuning.bench import stepping
from medusa_viz.tuning.calibration import greedy_training
from medusa_viz.tuning.jobs import Job, Progress, within

ANSWERED, ANSWER_TOKENS = 32, 64  # prompts, and tokens of each reply, where the model has to write them
OTHERS_TEXT = ("replayed figures are of text that the original backbone wrote; the trained one, which runs here, "
               "writes another")


def shipped_file(model: str) -> Path | None:
    """The token file of greedy replies that ships for a preset's backbone as it is without any adapter."""
    preset = PRESETS.get(model)
    path = REPOSITORY / "assets" / "prompts" / f"replies-{preset.weights}.npz" if preset else None
    return path if path and path.is_file() else None


def shipped(engine: Engine, model: str) -> Path | None:
    """Those of the model in use. Heads that bring an adapter change the backbone, which then writes another text."""
    return None if engine.loaded.adapter else shipped_file(model)


@cache
def training_part(path: Path) -> Replies:
    """What shipped replies say that trees are chosen by. Raises ValueError."""
    return greedy_training(data.load([path]))


def writing(engine: Engine) -> Job[Replies]:
    """Greedy replies to prompts of the training half, written now; a part is one step."""
    asked = prompts.read(prompts.SHIPPED, [prompts.SPLITS["train"]])[:ANSWERED]
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
        yield Progress(done + 1, len(asked), "answering")
    if not sequences:
        raise ValueError("No prompt fits into the model's context, so the heads cannot be calibrated here.")
    n = len(sequences)
    return Replies("replies written now", np.concatenate(sequences), np.cumsum([0, *map(len, sequences)]),
                   np.asarray(starts, np.int32), np.zeros(n, np.float32), np.zeros(n, np.uint8), ("own",),
                   (np.arange(n) % 2).astype(np.uint8))
