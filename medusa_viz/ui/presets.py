"""Presets: trees in one click, as walls and a size."""

from __future__ import annotations

from medusa_viz.decoding.settings import MAX_RANKS, Walls
from medusa_viz.ui.knobs import ActionError

PRESETS: dict[str, tuple[tuple[int, ...], int]] = {
    "paper": ((2, 3), 8),
    "full": ((8, 8, 8, 8), 4680),
    "sparse64": ((MAX_RANKS,) * 64, 63),
    "chain": ((1,) * 64, 64),
    "plain": ((4, 3, 2, 2), 0),
}
"""Name: top-s of the first heads (0 for the rest) and size. `view.preset.<name>` is its label."""


def walls(name: str, heads: int) -> Walls:
    """The preset's knobs for a model of that many heads. Raises ActionError for an unknown name."""
    if name not in PRESETS:
        raise ActionError("no_preset", name=str(name)[:40])
    top_s, size = PRESETS[name]
    padded = (top_s + (0,) * heads)[:heads]
    return Walls(padded, min(size, heads) if name == "chain" else size)
