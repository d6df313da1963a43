"""Metrics of a run, each with its definition. Prefill is no step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metrics:
    """Counts over steps that committed `committed[i]` tokens each, the root included."""

    steps: int
    tokens: int
    tokens_per_step: float
    """Committed tokens / steps: the paper's acceleration rate."""
    drafts_per_step: float
    """Committed tokens other than roots / steps."""
    accepted_per_depth: list[float]
    """Per depth 1..K, the share of steps in which the draft at that depth was committed; between 0 and 1."""


def measure(committed: Sequence[int], heads: int) -> Metrics:
    """Metrics of steps from the number of tokens each committed."""
    steps, tokens = len(committed), sum(committed)
    if not steps:
        return Metrics(0, 0, 0.0, 0.0, [0.0] * heads)
    per_depth = [sum(count > depth for count in committed) / steps for depth in range(1, heads + 1)]
    return Metrics(steps, tokens, tokens / steps, tokens / steps - 1, per_depth)
