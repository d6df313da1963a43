"""Layout: where the nodes of a candidate tree stand. Root at the left, one column per head, one line per leaf.

A tidy pass over a networkx graph: leaves take lines in order, a parent stands in the middle of its children, so no
edges cross. The next root (a ghost beside the accepted path) has a line kept for it: in a small tree a free line
follows every family of siblings, so nothing moves when the verdicts change; in a large one, only the lines below
the ghost move by one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import networkx as nx

from medusa_viz.decoding.tree import TreeShape
from medusa_viz.figures.fold import Folded

GHOST = "ghost"
_ROOMY = 24
"""Up to this many lines, families included, every family is followed by a free line."""
_FEWEST_LINES = 5
_BEYOND = 0.85
"""Columns from the last head's column to a ghost after it."""


@dataclass(frozen=True)
class Layout:
    graph: nx.DiGraph
    """Nodes: rows; ("fold", row) for a "+n"; GHOST."""
    x: dict[Hashable, float]
    y: dict[Hashable, float]
    lines: int
    """Lines of text, free ones included; the same for every verdict on one tree."""
    height: int
    """Columns after the root's."""


def arrange(shape: TreeShape, folded: Folded, ghost_parent: int | None = None) -> Layout:
    """Place the drawn rows, a "+n" per folded family, and the ghost next to `ghost_parent`'s children."""
    graph = _graph(shape, folded)
    leaves = sum(1 for _, children in graph.out_degree if not children)
    family_ends = sum(1 for node in graph if (last := _last_child(graph, node)) is not None
                      and _last_child(graph, last) is None)
    roomy = leaves + family_ends <= _ROOMY
    beside = ghost_parent is not None and graph.out_degree(ghost_parent) > 0
    y, ghost_line = _lines(graph, roomy, ghost_parent if beside else None)
    lines = leaves + (family_ends if roomy else 1)
    shift = max(0.0, (_FEWEST_LINES - lines) / 2)
    y = {node: line + shift for node, line in y.items()}
    x = {node: _column(shape, node) for node in graph}
    if ghost_parent is not None:
        depth = int(shape.depth[ghost_parent])
        graph.add_edge(ghost_parent, GHOST)
        x[GHOST] = depth + (1.0 if depth < shape.height else _BEYOND)
        y[GHOST] = ghost_line + shift if beside else y[ghost_parent]
    return Layout(graph, x, y, max(lines, _FEWEST_LINES), shape.height)


def _graph(shape: TreeShape, folded: Folded) -> nx.DiGraph:
    """The drawn tree. Successors stand in order of rank, the "+n" last."""
    graph = nx.DiGraph()
    graph.add_node(0)
    graph.add_edges_from((int(shape.parent[row]), row) for row in folded.visible[1:])
    graph.add_edges_from((row, ("fold", row)) for row in folded.hidden)
    return graph


def _column(shape: TreeShape, node: Hashable) -> float:
    return float(shape.depth[node[1]] + 1) if isinstance(node, tuple) else float(shape.depth[node])


def _last_child(graph: nx.DiGraph, node: Hashable) -> Hashable | None:
    return next(reversed(graph.adj[node]), None)


def _lines(graph: nx.DiGraph, roomy: bool, ghost_parent: int | None) -> tuple[dict[Hashable, float], float]:
    """Line of every node, and of a ghost that follows the family of `ghost_parent`."""
    y: dict[Hashable, float] = {}
    free, ghost_line = 0, 0.0
    # Children before parents, so that a parent can stand in their middle.
    for node in nx.dfs_postorder_nodes(graph, 0):
        children = list(graph.adj[node])
        if not children:
            y[node] = float(free)
            free += 1
            continue
        y[node] = (y[children[0]] + y[children[-1]]) / 2
        if roomy and not graph.adj[children[-1]]:
            free += 1  # families that end on one leaf share the free line after it
        if node == ghost_parent:
            ghost_line = float(free - 1 if roomy else free)
            free += 0 if roomy else 1
    return y, ghost_line
