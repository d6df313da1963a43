"""The replies that ship with the project to train heads on. No torch: the Train page lists them."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from medusa_viz.models.fetch import cache_root
from medusa_viz.models.presets import PRESETS, REPOSITORY

HELD_OUT_EVERY = 8  # of the prompts that heads are trained on, one in so many is kept for judging them


def training_file(model: str) -> Path | None:
    """The token file that ships for a preset's backbone as it is without any adapter: replies to train.jsonl."""
    preset = PRESETS.get(model)
    path = REPOSITORY / "assets" / "prompts" / f"train-replies-{preset.weights}.npz" if preset else None
    return path if path and path.is_file() else None


def with_held_out(path: Path) -> Path:
    """A copy of a shipped file in the user's cache in which the replies to one prompt in eight are held out: the file
    itself is all for training, and heads are judged, and trees built for them, on replies that they did not learn."""
    copy = cache_root() / "training" / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    with NamedTemporaryFile(dir=copy.parent, suffix=".part", delete=False) as part:
        np.savez(part, **arrays | {"split": held_out(arrays["prompt"]).astype(np.uint8)})
    os.replace(part.name, copy)
    return copy


def held_out(prompt: np.ndarray) -> np.ndarray:
    """bool [n]: which replies to the prompts of these numbers are kept for judging."""
    return prompt % HELD_OUT_EVERY == 0


def facts(path: Path) -> tuple[int, list[str]]:
    """Of a shipped file, the reply tokens that are there to train on, and the temperatures above 0 as text."""
    with np.load(path, allow_pickle=False) as file:
        chosen = ~held_out(file["prompt"])
        tokens = int((np.diff(file["offsets"]) - file["reply_start"])[chosen].sum())
        return tokens, [f"{float(str(heat)):g}" for heat in np.unique(file["temperature"]) if heat > 0]
