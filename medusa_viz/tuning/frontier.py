"""What a bigger budget would add to a tree, and what a smaller one cuts: gains beside their price."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from medusa_viz.decoding.tree import Path, TreeShape
from medusa_viz.tuning.builders import Accuracy, node_values

SHOWN = 5


@dataclass(frozen=True)
class Candidate:
    """A node with its gain in expected tokens per step, and the milliseconds that a step takes longer with it (None
    where step times were not measured)."""

    path: Path
    gain: float
    milliseconds: float | None


@dataclass(frozen=True)
class Cut:
    """Nodes of a larger tree that a budget leaves out: how many, what they would add together, the best of them."""

    nodes: int
    gain: float
    milliseconds: float | None
    best: list[Candidate]


def frontier(shape: TreeShape, accuracy: Accuracy, step_ms: Callable[[int], float] | None = None, count: int = SHOWN
             ) -> list[Candidate]:
    """The next `count` nodes that best-first growth would add to any shape, in order. Ranks past the table of
    accuracies are never taken."""
    order = [sorted(range(len(row)), key=lambda rank: (-row[rank], rank)) for row in accuracy]
    present: dict[Path, set[int]] = {path: set() for path in shape.paths}
    for path in shape.paths[1:]:
        present[path[:-1]].add(path[-1])
    heap: list[tuple[float, int, Path]] = []

    def open_slot(parent: Path, value: float) -> None:
        """Queue the best child of a node that is not there yet."""
        k = len(parent)
        rank = next((rank for rank in order[k] if rank not in present[parent]), None) if k < len(order) else None
        if rank is not None:
            heapq.heappush(heap, (-value * accuracy[k][rank], k + 1, parent + (rank,)))

    values = dict(zip(shape.paths, node_values(shape, accuracy)))
    for path, value in values.items():
        open_slot(path, value)
    added: list[Candidate] = []
    while heap and len(added) < count:
        negative, _, path = heapq.heappop(heap)
        values[path], present[path] = -negative, set()
        present[path[:-1]].add(path[-1])
        added.append(Candidate(path, -negative, _price(step_ms, shape.nodes + len(added))))
        open_slot(path[:-1], values[path[:-1]])
        open_slot(path, -negative)
    return added


def cut(shape: TreeShape, whole: TreeShape, accuracy: Accuracy, step_ms: Callable[[int], float] | None = None,
        count: int = SHOWN) -> Cut:
    """What of `whole` is not in `shape`: all of it counted, the `count` best nodes by name."""
    missing = [(value, path) for path, value in zip(whole.paths, node_values(whole, accuracy))
               if path not in shape.row_of]
    best = heapq.nsmallest(count, missing, key=lambda entry: (-entry[0], len(entry[1]), entry[1]))
    more = step_ms(shape.nodes + len(missing)) - step_ms(shape.nodes) if step_ms else None
    return Cut(len(missing), sum(value for value, _ in missing), more,
               [Candidate(path, value, _price(step_ms, shape.nodes)) for value, path in best])


def _price(step_ms: Callable[[int], float] | None, nodes: int) -> float | None:
    """Milliseconds of one node more than `nodes`."""
    return step_ms(nodes + 1) - step_ms(nodes) if step_ms else None
