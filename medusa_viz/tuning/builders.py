"""Builders: from accuracies, walls and a node budget to a tree shape."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from medusa_viz.decoding.settings import MAX_RANKS
from medusa_viz.decoding.tree import MAX_NODES, Path, TreeError, TreeShape, dense, dense_nodes, from_paths

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


def expected_tokens_per_step(shape: TreeShape, accuracy: Accuracy) -> float:
    """1 (the root) + the sum of the node values: the expectation under independence of the heads."""
    return sum(node_values(shape, accuracy))


def build(spec: str, heads: int, accuracy: Accuracy) -> TreeShape:
    """Tree from a short spec: `plain`, `chain`, `chain:3`, `dense:3,2,1`, `sparse:16` or, within walls of top-s,
    `sparse:16@4,3,2,2`. Raises TreeError."""
    kind, _, argument = spec.partition(":")
    argument, _, within = argument.partition("@")
    try:
        numbers = [int(part) for part in argument.split(",")] if argument else []
        walls = [int(part) for part in within.split(",")] if within else None
    except ValueError:
        raise TreeError(f"'{spec}' is no tree: after the colon stand whole numbers, as in dense:3,2,1.") from None
    if any(number < 0 for number in [*numbers, *(walls or ())]) or (walls and kind != "sparse"):
        raise TreeError(f"'{spec}' is no tree: numbers count from 0 up, and only sparse takes walls after @.")
    if kind == "plain" and not numbers:
        return dense([])
    if kind == "chain" and len(numbers) <= 1:
        return dense([1] * _depth(numbers[0] if numbers else heads, heads, spec))
    if kind == "dense" and numbers:
        _depth(len(numbers), heads, spec)
        if sum(dense_nodes(numbers)) > MAX_NODES:
            raise TreeError(f"The tree {spec} has {sum(dense_nodes(numbers)):,} nodes; {MAX_NODES:,} are the limit.")
        return dense(numbers)
    if kind == "sparse" and len(numbers) == 1:
        if numbers[0] and not accuracy:
            raise TreeError(f"The tree {spec} needs the heads' accuracies, and their file holds none; "
                            "name another one, such as chain or dense:3,2,1.")
        return sparse(accuracy[:heads], numbers[0], walls)
    raise TreeError(f"'{spec}' is no tree: use plain, chain:3, dense:3,2,1, sparse:16 or a JSON file of paths.")


def _depth(wanted: int, heads: int, spec: str) -> int:
    if wanted > heads:
        raise TreeError(f"The tree {spec} has depth {wanted}, but the model has {heads} heads.")
    return wanted
