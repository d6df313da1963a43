"""From the heads' accuracies and a node budget to a tree shape, and what a shape is worth by them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from medusa_viz.decoding.settings import MAX_RANKS
from medusa_viz.decoding.tree import Path, TreeShape, dense, from_paths

Accuracy = Sequence[Sequence[float]]
"""a_k(i): chance that exactly rank i of head k is the right token; K rows, one per head, ranks 0.. in order."""


def sparse(accuracy: Accuracy, budget: int, top_s: Sequence[int] | None = None) -> TreeShape:
    """The `budget` nodes of the largest expected accepted length, best first (Medusa paper §2.3.3, appendix C).

    With heads taken as independent a node is right with the product of the accuracies along its path, and the
    expected number of accepted drafts is the sum over the nodes. No product exceeds its parent's, so taking the
    best node adjacent to the tree, again and again, takes the `budget` largest of all: optimal under independence.
    Equal values go to the shallower node, then to the smaller path. `top_s` walls the ranks of each head in (None: no
    walls); ranks past the table's have no measured accuracy and are never taken.
    """
    walls = [len(row) for row in accuracy] if top_s is None else [min(s, len(row)) for s, row in zip(top_s, accuracy)]
    # Per head, ranks by falling accuracy: a table measured on few positions need not fall with the rank.
    order = [sorted(range(s), key=lambda rank: (-row[rank], rank)) for s, row in zip(walls, accuracy)]

    def entry(parent: Path, value: float, place: int) -> tuple:
        rank = order[len(parent)][place] if value else place  # below a node worth nothing all are equal
        path = parent + (rank,)
        return (-value * accuracy[len(parent)][rank], len(path), path, parent, value, place)

    def can_grow(depth: int) -> bool:
        return depth < len(order) and bool(order[depth])

    chosen: list[Path] = []
    heap = [entry((), 1.0, 0)] if can_grow(0) else []
    while heap and len(chosen) < budget:
        negative, depth, path, parent, parent_value, place = heapq.heappop(heap)
        chosen.append(path)
        if can_grow(depth):
            heapq.heappush(heap, entry(path, -negative, 0))
        if place + 1 < len(order[depth - 1]):
            heapq.heappush(heap, entry(parent, parent_value, place + 1))
    return from_paths(chosen)


def best_dense(accuracy: Accuracy, budget: int, top_s: Sequence[int] | None = None) -> TreeShape:
    """The dense tree of at most `budget` nodes, within walls of top-s, of the largest expected accepted length; of
    equals the one with fewer nodes. All are looked at, but for those that even full further levels could not save."""
    walls = [len(row) for row in accuracy] if top_s is None else [min(s, len(row)) for s, row in zip(top_s, accuracy)]
    hit = [[0.0, *accumulate(row[:wall])] for row, wall in zip(accuracy, walls)]  # one of the first s ranks is right
    more = [0.0]  # the most that all heads from k on can add to a node of value 1
    for row in reversed(hit):
        more.insert(0, row[-1] * (1 + more[0]))
    best: tuple[float, int, tuple[int, ...]] = (0.0, 0, ())
    pending = [(0.0, 1.0, 1, 0, ())]  # value so far, chance of reaching the last level, its width, nodes, top-s
    while pending:
        value, reach, level, nodes, chosen = pending.pop()
        best = max(best, (value, -nodes, chosen))
        k = len(chosen)
        if k == len(hit) or value + reach * more[k] <= best[0]:
            continue
        for s in range(1, min(len(hit[k]) - 1, (budget - nodes) // level) + 1):
            reached = reach * hit[k][s]
            pending.append((value + reached, reached, level * s, nodes + level * s, chosen + (s,)))
    return dense(best[2])


def assumed_accuracy(heads: int) -> list[list[float]]:
    """A table for heads that bring none: each head half as often right as the one before, ranks falling off as
    1 / (i + 1)^1.3, which is near what trained heads measure. Good for an order of nodes, never for a figure."""
    return [[0.4 * 0.5**k / (rank + 1) ** 1.3 for rank in range(MAX_RANKS)] for k in range(heads)]


def node_values(shape: TreeShape, accuracy: Accuracy) -> list[float]:
    """Per row, the product of accuracies along its path; 1 for the root, 0 where the table has no such rank."""
    values = [1.0]
    for parent, rank, depth in zip(shape.parent[1:].tolist(), shape.rank[1:].tolist(), shape.depth[1:].tolist()):
        row = accuracy[depth - 1] if depth <= len(accuracy) else ()
        values.append(values[parent] * (row[rank] if rank < len(row) else 0.0))
    return values


def growth(shape: TreeShape, accuracy: Accuracy) -> list[tuple[Path, float]]:
    """The nodes in the order in which best-first growth would add them, each with its gain in expected tokens per
    step."""
    values = node_values(shape, accuracy)
    rows = sorted(range(1, len(values)), key=lambda row: (-values[row], shape.depth[row], shape.paths[row]))
    return [(shape.paths[row], values[row]) for row in rows]


def expected_tokens_per_step(shape: TreeShape, accuracy: Accuracy) -> float:
    """1 (the root) + the sum of the node values: the expectation under independence of the heads."""
    return sum(node_values(shape, accuracy))
