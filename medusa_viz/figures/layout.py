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
ROOM = (694, 488)
"""Pixels of the panel at 1440 x 900, unless the page has said how large its own is."""
SIDE, CAPTION = 8, 22
"""Pixels: left and right margin, the line under the tree."""
_TOP, _TOP_CROWDED = 42, 25  # pixels: column headers in two lines, or in one where many leaves need the height
_CROWDED = 30  # lines
_BEFORE, _BEYOND, _AFTER = 18, 118, 78  # pixels: left of the root, last column to a ghost after it, right of that
_ROOMY = 24  # up to this many lines, families included, every family is followed by a free line
_FEWEST_LINES = 5
HEADERS, LEAST_LINE = 60, 9
"""Pixels of a panel that are no lines of the tree, and of the thinnest line a label fits in."""
_EM = 0.61  # width of a monospaced character, in font sizes
_NARROW = 64  # pixels of a column below which labels are small and have no tick


@dataclass(frozen=True)
class Scale:
    """Pixels of one column and one line, and the ends of the axes in columns and lines."""

    column: float
    line: float
    left: float
    right: float
    bottom: float
    height: int
    top: int
    """Pixels of the column headers."""

    @property
    def crowded(self) -> bool:
        """Many lines: the headers give up one of theirs."""
        return self.top == _TOP_CROWDED

    @property
    def font(self) -> int:
        """Font size of labels."""
        return 9 if self.narrow else max(9, min(13, int(self.line)))

    @property
    def narrow(self) -> bool:
        """The columns have hardly room for a label."""
        return self.height > 0 and self.column < _NARROW

    @property
    def shrink(self) -> float:
        """Markers keep their sizes until lines are closer than the font."""
        return min(1.0, max(0.7, self.line / 11))

    def columns(self, pixels: float) -> float:
        """Pixels as a part of a column."""
        return pixels / self.column

    def text_width(self, characters: int) -> float:
        """Pixels of a label."""
        return characters * self.font * _EM

    def room(self, depth: int) -> int:
        """Characters that fit on a label in that column, its tick included."""
        pixels = (self.column if depth < self.height else _BEYOND) - (30 if self.narrow else 41)
        return max(3, int(pixels / (self.font * _EM)))


def scale(height: int, lines: int, room: tuple[int, int] = ROOM) -> Scale:
    """Scale of a tree of that many heads and lines in a panel; the same for all verdicts on it."""
    inner = room[0] - 2 * SIDE
    column = (inner - _BEFORE - _BEYOND - _AFTER) / max(height, 1)
    top = _TOP if lines <= _CROWDED else _TOP_CROWDED
    line = (room[1] - top - CAPTION - 4) / lines
    return Scale(column, line, -_BEFORE / column, (inner - _BEFORE) / column, lines - 0.5 + CAPTION / line, height, top)


@dataclass(frozen=True)
class Layout:
    graph: nx.DiGraph
    """Nodes: rows; ("fold", row) for a "+n"; GHOST."""
    x: dict[Hashable, float]
    y: dict[Hashable, float]
    scale: Scale


def arrange(shape: TreeShape, folded: Folded, ghost_parent: int | None = None, room: tuple[int, int] = ROOM
            ) -> Layout:
    """Place the drawn rows, a "+n" per folded family, and the ghost next to `ghost_parent`'s children."""
    graph = _graph(shape, folded)
    leaves = sum(1 for _, children in graph.out_degree if not children)
    family_ends = sum(_ends_on_leaf(graph, node) for node in graph)
    roomy = leaves + family_ends <= _ROOMY
    beside = ghost_parent is not None and graph.out_degree(ghost_parent) > 0
    y, ghost_line = _lines(graph, roomy, ghost_parent if beside else None)
    lines = leaves + (family_ends if roomy else 1)
    shift = max(0.0, (_FEWEST_LINES - lines) / 2)
    y = {node: line + shift for node, line in y.items()}
    x = {node: _column(shape, node) for node in graph}
    size = scale(shape.height, max(lines, _FEWEST_LINES), room)
    if ghost_parent is not None:
        depth = int(shape.depth[ghost_parent])
        graph.add_edge(ghost_parent, GHOST)
        x[GHOST] = depth + (1.0 if depth < shape.height else round(size.columns(_BEYOND), 3))
        y[GHOST] = ghost_line + shift if beside else y[ghost_parent]
    return Layout(graph, x, y, size)


def _graph(shape: TreeShape, folded: Folded) -> nx.DiGraph:
    """The drawn tree. Successors stand in order of rank, the "+n" last."""
    graph = nx.DiGraph()
    graph.add_node(0)
    graph.add_edges_from((int(shape.parent[row]), row) for row in folded.visible[1:])
    graph.add_edges_from((row, ("fold", row)) for row in folded.hidden)
    return graph


def _column(shape: TreeShape, node: Hashable) -> float:
    return float(shape.depth[node[1]] + 1) if isinstance(node, tuple) else float(shape.depth[node])


def _ends_on_leaf(graph: nx.DiGraph, node: Hashable) -> bool:
    """Its last child is a leaf, so the free line after its family is not one of a child's family."""
    children = list(graph.successors(node))
    return bool(children) and graph.out_degree(children[-1]) == 0


def _lines(graph: nx.DiGraph, roomy: bool, ghost_parent: int | None) -> tuple[dict[Hashable, float], float]:
    """Line of every node, and of a ghost that follows the family of `ghost_parent`."""
    y: dict[Hashable, float] = {}
    free, ghost_line = 0, 0.0
    # Children before parents, so that a parent can stand in their middle.
    for node in nx.dfs_postorder_nodes(graph, 0):
        children = list(graph.successors(node))
        if not children:
            y[node] = float(free)
            free += 1
            continue
        y[node] = (y[children[0]] + y[children[-1]]) / 2
        if roomy and _ends_on_leaf(graph, node):
            free += 1
        if node == ghost_parent:
            ghost_line = float(free - 1 if roomy else free)
            free += 0 if roomy else 1
    return y, ghost_line
