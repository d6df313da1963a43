"""Trees rebuilt at each step from what the heads say in that step (as EAGLE-2, OPT-Tree and DDTree do).

Where the heads are sure, a deep thin tree pays; where they are not, a broad flat one. A node is worth the product of
the probabilities along its path, each head's own, put right by a temperature that calibration fitted for it; the best
nodes are taken as `builders.sparse` takes them. Greedy text stays that of plain greedy: whatever is drafted, the
backbone judges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from medusa_viz.decoding.settings import MAX_RANKS
from medusa_viz.decoding.tree import TreeShape
from medusa_viz.tuning.builders import sparse


class Said(Protocol):
    """What the heads said in a step: `logits` [K, V']."""

    logits: object


@dataclass(frozen=True)
class DynamicTrees:
    """Trees of up to `nodes` nodes, one for each step; what `decode` takes in the place of a shape.

    temperatures [K]: per head. walls [K]: ranks that may be taken of each.
    """

    nodes: int
    temperatures: tuple[float, ...]
    walls: tuple[int, ...]

    @property
    def height(self) -> int:
        """Deepest node of any tree."""
        return next((k for k, wall in enumerate(self.walls) if not wall), len(self.walls)) if self.nodes else 0

    @property
    def width(self) -> int:
        """Ranks of every head that a tree may take."""
        return max(self.walls[: self.height], default=0)

    def shape(self, top: Said) -> TreeShape:
        """The tree of one step."""
        from medusa_viz.tuning.ranking import top_p

        return self.of(top_p(top.logits[:, None], self.temperatures, self.width)[0])

    def of(self, p: np.ndarray) -> TreeShape:
        """The tree for calibrated probabilities [K, ranks]."""
        return sparse(p.tolist(), self.nodes, self.walls)

    def replayed(self, p: np.ndarray) -> Callable[[int], TreeShape]:
        """The tree at every row of a rank table, from the probabilities [P, K, ranks] kept with it; `replay_each`
        takes it."""
        return lambda row: self.of(p[row])


def dynamic(heads: int, budget: int, top_s: Sequence[int] | None = None, temperatures: Sequence[float] = (),
            choices: int = MAX_RANKS) -> DynamicTrees:
    """Trees of up to `budget` nodes within walls of top-s (None: 10 ranks a head, or as many as can be drafted)."""
    widest = min(MAX_RANKS, choices)
    walls = [widest] * heads if top_s is None else [min(s, widest) for s in top_s[:heads]]
    return DynamicTrees(budget, tuple(temperatures) or (1.0,) * heads, tuple(walls))
