"""Editing a tree by hand: every edit is a new shape, so undoing is going back to an earlier one."""

from __future__ import annotations

from medusa_viz.decoding.tree import Path, TreeError, TreeShape, from_paths


def prune(shape: TreeShape, path: Path) -> TreeShape:
    """The shape without a node and everything below it."""
    path = tuple(path)
    if not path or path not in shape.row_of:
        raise TreeError("The root stays." if not path else f"The tree has no node {_named(path)}.")
    return from_paths(other for other in shape.paths[1:] if other[: len(path)] != path)


def add_child(shape: TreeShape, path: Path, rank: int | None = None) -> TreeShape:
    """The shape with one more node below `path`; without a rank, the lowest one that is not there yet."""
    path = tuple(path)
    if path not in shape.row_of:
        raise TreeError(f"The tree has no node {_named(path)}.")
    taken = {int(shape.rank[row]) for row in range(1, shape.nodes + 1) if shape.paths[row][:-1] == path}
    if rank is None:
        rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
    if rank in taken:
        raise TreeError(f"The tree already has the node {_named(path + (rank,))}.")
    return from_paths([*shape.paths[1:], path + (rank,)])


def slots(shape: TreeShape, heads: int, ranks: int) -> list[Path]:
    """The empty places that the page offers: below each row the lowest rank that is not there yet, as far as `heads`
    heads and `ranks` ranks reach."""
    taken: dict[Path, set[int]] = {path: set() for path in shape.paths}
    for path in shape.paths[1:]:
        taken[path[:-1]].add(path[-1])
    free = ((path, next((rank for rank in range(ranks) if rank not in ranks_there), None))
            for path, ranks_there in taken.items() if len(path) < heads)
    return [path + (rank,) for path, rank in free if rank is not None]


def _named(path: Path) -> str:
    return f"({', '.join(map(str, path))})"
