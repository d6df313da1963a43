"""Fold: which nodes of a large tree are drawn, and how many stand behind each "+n"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from medusa_viz.decoding.tree import TreeShape

FOLD_ABOVE = 64
"""Trees of more nodes are folded, to about as many."""
MOST_LINES = 44
"""Lines of text that a folded tree may take: one per leaf and one per "+n" beside shown siblings."""


@dataclass(frozen=True)
class Folded:
    visible: list[int]
    """Rows drawn, root first, in row order; closed under ancestors."""
    hidden: dict[int, int]
    """Per drawn row with undrawn children, the nodes below it that are not drawn."""

    @property
    def total(self) -> int:
        return sum(self.hidden.values())


def fold(shape: TreeShape, path_p: Sequence[float], keep: Iterable[int] = (), above: int = FOLD_ABOVE,
         most_lines: int = MOST_LINES) -> Folded:
    """Rows to draw: all of a small tree; of a large one `keep` first, then the best path probabilities."""
    if shape.nodes <= above:
        return Folded(list(range(shape.nodes + 1)), {})
    chosen = _Choice(shape)
    for row in keep:
        chosen.add(row)
    for row in np.argsort(-np.asarray(path_p), kind="stable").tolist():
        if len(chosen.rows) > above or chosen.lines >= most_lines:
            break
        chosen.add(row)
    visible = sorted(chosen.rows)
    below = _below(shape)
    hidden = below[visible].tolist()
    place = {row: at for at, row in enumerate(visible)}
    for row in visible[1:]:
        hidden[place[int(shape.parent[row])]] -= int(below[row]) + 1
    return Folded(visible, {row: count for row, count in zip(visible, hidden, strict=True) if count})


def _below(shape: TreeShape) -> np.ndarray:
    """Descendants of each row."""
    below = np.zeros(shape.nodes + 1, np.int64)
    starts = np.searchsorted(shape.depth, np.arange(1, shape.height + 2))
    for first, last in zip(starts[-2::-1], starts[:0:-1], strict=True):
        np.add.at(below, shape.parent[first:last], below[first:last] + 1)
    return below


class _Choice:
    """Rows chosen so far, and the lines of text that they take."""

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape
        self.rows = {0}
        self.lines = 1
        self._children = np.bincount(shape.parent[1:], minlength=shape.nodes + 1)
        self._shown: dict[int, int] = {}

    def add(self, row: int) -> None:
        """Choose the row and its ancestors."""
        for step in self.shape.path_to(row):
            if step not in self.rows:
                self.rows.add(step)
                self._count(int(self.shape.parent[step]))

    def _count(self, parent: int) -> None:
        """One more child of `parent` is drawn. The first takes over its parent's line; a "+n" needs one of its own
        as soon as it stands beside drawn siblings, until all of them are drawn."""
        before = self._shown.get(parent, 0)
        total = int(self._children[parent])
        self._shown[parent] = before + 1
        pill_before, pill_after = 0 < before < total, before + 1 < total
        self.lines += (before > 0) + pill_after - pill_before
