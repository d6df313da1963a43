"""Trees from what the heads did together: paths scored by how often they occurred whole.

The product of accuracies takes heads as independent, but where head 1 is right, head 2 is right more often than
usual, and where head 1's third guess is right, less. The chance of a path is therefore estimated as
    P(path + rank) = P(path) · (times both occurred + w · a(rank)) / (times the path occurred + w),
so that rare paths fall back on the heads' own accuracies a(rank) and frequent ones on what was counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from medusa_viz.decoding.tree import Path, TreeShape, from_paths
from medusa_viz.tuning.builders import Accuracy
from medusa_viz.tuning.replay import RankTable, scorable
from medusa_viz.tuning.sequoia import walled

WEIGHT = 1_000.0
"""Positions that the heads' own accuracies are worth beside the counted ones."""


def joint(table: RankTable, accuracy: Accuracy, budget: int, top_s: Sequence[int] | None = None,
          weight: float = WEIGHT) -> TreeShape:
    """The `budget` likeliest paths, best first; no path is likelier than its parent, so the result is closed."""
    tables = [np.array(row) for row in walled(accuracy, top_s)]
    seen = scorable(table)
    chosen: list[Path] = []
    heap: list[tuple[float, int, Path, np.ndarray]] = []

    def open_children(path: Path, p: float, rows: np.ndarray) -> None:
        """Queue the children of a node; `rows` are those of the table at which the node's whole path is right."""
        k = len(path)
        if k == len(tables) or not len(tables[k]):
            return
        known = rows[seen[rows, k]]
        ranks = table.ranks[known, k]
        counts = np.bincount(ranks[ranks < len(tables[k])], minlength=len(tables[k]))
        for rank, chance in enumerate((counts + weight * tables[k]) / (len(known) + weight)):
            heapq.heappush(heap, (-p * float(chance), k + 1, path + (rank,), known))

    open_children((), 1.0, np.arange(len(table.ranks)))
    while heap and len(chosen) < budget:
        negative, depth, path, known = heapq.heappop(heap)
        chosen.append(path)
        open_children(path, -negative, known[table.ranks[known, depth - 1] == path[-1]])
    return from_paths(chosen)
