"""Replies for tests: prompts with the text that follows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from medusa_viz.training.data import Replies


def greedy_replies(texts: Sequence[tuple[Sequence[int], Sequence[int]]], split: Sequence[int] | None = None) -> Replies:
    """One reply per (prompt, text)."""
    n = len(texts)
    lengths = [len(ids) + len(text) for ids, text in texts]
    return Replies("made up", np.array([token for ids, text in texts for token in [*ids, *text]], np.int32),
                   np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                   np.array([len(ids) for ids, _ in texts], np.int32), np.zeros(n, np.float32), np.zeros(n, np.uint8),
                   ("x",), np.zeros(n, np.uint8) if split is None else np.array(split, np.uint8))
