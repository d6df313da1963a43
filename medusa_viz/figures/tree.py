"""The candidate tree as Plotly dicts: one layout, and four variants of the same traces, one per phase of a step.

Propose shows the drafts without verdicts, verify every verdict at once, accept the path, commit what it keeps.
Every variant has the same traces in the same order: edges by kind, the histogram of a very large tree, markers,
labels, probabilities, and the caption. Positions are rows and lines, never texts.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from medusa_viz.decoding import records
from medusa_viz.figures import palette, tokens
from medusa_viz.figures.layout import CAPTION, GHOST, SIDE, Layout, Scale
from medusa_viz.figures.texts import Texts

PROPOSE, VERIFY, ACCEPT, COMMIT = range(1, 5)
HISTOGRAM_ABOVE = 600
_LABEL = 16  # pixels from the middle of a marker to its label; the ring of a selected node fits between
_SMALL_FROM = 24  # pixels per line from which a probability fits under each label
_FADED = 0.22


@dataclass(frozen=True)
class TreeDrawing:
    """What is drawn. Sequences have one entry per row of the tree; texts are the model's own, not escaped."""

    layout: Layout
    texts: Sequence[str]
    depths: Sequence[int]
    verdicts: Sequence[str]
    """Verdicts of records.py; all `unverified` before the forward pass."""
    kept: frozenset[int]
    """Rows on the accepted path that are committed, the root among them."""
    folded: dict[int, int]
    small: tuple[Mapping[int, str], Mapping[int, str]]
    """Per drawn row the probability under its label, before and after verification."""
    counts: Sequence[int]
    """Nodes per depth, drawn behind the columns of a very large tree."""
    ghost: tuple[str, str] | None = None
    """Text of the next root and why the path stopped there."""


def figure(drawing: TreeDrawing, t: Texts) -> dict:
    """Plotly layout of the tree, shared by the four phases."""
    scale = drawing.layout.scale
    font = {"family": palette.sans(t.lang), "size": 12, "color": palette.INK}
    hidden = {"visible": False, "autorange": False, "zeroline": False}
    return {
        "margin": {"l": SIDE, "r": SIDE, "t": scale.top, "b": 0},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": font,
        "xaxis": {**hidden, "range": [round(scale.left, 3), round(scale.right, 3)]},
        "yaxis": {**hidden, "range": [round(scale.bottom, 3), -0.5]},
        "showlegend": False, "hovermode": "closest", "hoverdistance": 24, "dragmode": "pan",
        "uirevision": "tree",
        "annotations": [_header(depth, drawing, scale, font, t) for depth in range(scale.height + 1)],
    }


def _header(depth: int, drawing: TreeDrawing, scale: Scale, font: dict, t: Texts) -> dict:
    """Over a column: which head drafts it, what it predicts, and in a very large tree how many nodes it has."""
    title = "<b>" + (t("view.head", k=depth) if depth else t("view.root")) + "</b>"
    long = depth and scale.column >= 84 and not scale.crowded
    predicts = t("fig.predicts" if long else "fig.place", next=depth + 1)
    if depth and sum(drawing.counts) > HISTOGRAM_ABOVE:
        predicts = t("fig.nodes", n=drawing.counts[depth - 1])
    size = 9 if scale.column <= 50 else 10 if scale.crowded else 11
    # One line has room for both only where the columns are wide.
    lines = [title] if scale.crowded and scale.column < 84 else [title, predicts]
    return {
        "x": depth, "xref": "x", "xanchor": "left", "xshift": -10, "y": 1, "yref": "paper", "yanchor": "bottom",
        "yshift": 4, "showarrow": False, "align": "left", "text": (" · " if scale.crowded else "<br>").join(lines),
        "font": {**font, "size": size, "color": palette.RAMP_INK[palette.source(depth)]},
        "bgcolor": palette.RAMP[palette.source(depth)], "borderpad": 3,
    }


def phases(drawing: TreeDrawing, t: Texts) -> list[list[dict]]:
    """Traces of the four phases."""
    labels = _Labels(drawing)
    return [_Variant(labels, phase, t).traces() for phase in (PROPOSE, VERIFY, ACCEPT, COMMIT)]


class _Labels:
    """What all phases share: the tokens as they are written, and where labels and pills stand."""

    def __init__(self, drawing: TreeDrawing) -> None:
        self.drawing, self.layout, self.scale = drawing, drawing.layout, drawing.layout.scale
        rows = [node for node in self.layout.graph if isinstance(node, int)]
        self.shown = {row: self._shown(row) for row in rows}
        self.ends = {row: self._end(row) for row in rows}

    def _shown(self, row: int) -> str:
        """The row's token, cut to its room."""
        room = self.scale.room(int(self.drawing.depths[row])) - self.has_lone_pill(row) * 6
        return tokens.shortened(tokens.visible(self.drawing.texts[row]), max(room, 3))

    def _end(self, row: int) -> float:
        """Where the row's label ends, so that its edges start after it; with its tick, drawn yet or not."""
        ticked = self.drawing.verdicts[row] == records.ACCEPTED and row != 0 and not self.scale.narrow
        characters = tokens.width(self.shown[row]) + 2 * ticked
        return self.layout.x[row] + self.scale.columns(_LABEL + 4 + self.scale.text_width(characters))

    def has_lone_pill(self, row: int) -> bool:
        """Everything below the row is folded: its "+n" stands beside its label, on no line of its own."""
        return row in self.drawing.folded and self.layout.graph.out_degree(row) == 1

    def pill(self, node: tuple) -> str:
        """Text of a "+n"."""
        return f"+{self.drawing.folded[node[1]]:,}"

    def pill_width(self, node: tuple) -> float:
        return 8 + self.scale.text_width(len(self.pill(node)))

    def place(self, node: Hashable) -> float:
        """The middle of its marker on the x axis."""
        if not isinstance(node, tuple):
            return self.layout.x[node]
        half = self.scale.columns(self.pill_width(node) / 2)
        start = self.ends[node[1]] if self.has_lone_pill(node[1]) else self.layout.x[node] + self.scale.columns(_LABEL)
        return start + half


class _Variant:
    """The traces of one phase."""

    def __init__(self, labels: _Labels, phase: int, t: Texts) -> None:
        self.labels, self.drawing, self.phase, self.t = labels, labels.drawing, phase, t
        drawing = self.drawing
        self.layout, self.scale = drawing.layout, drawing.layout.scale
        self.verified = phase >= VERIFY and any(verdict != records.UNVERIFIED for verdict in drawing.verdicts)
        self.path_shown = self.verified and phase >= ACCEPT
        self.nodes = [node for node in self.layout.graph if node != GHOST or self.path_shown]
        small_room = self.scale.line >= _SMALL_FROM and self.scale.column >= 70
        self.small = drawing.small[self.verified] if small_room else None

    def traces(self) -> list[dict]:
        huge = sum(self.drawing.counts) > HISTOGRAM_ABOVE
        return [*self._edges(), *([self._histogram()] if huge else []), self._markers(), self._labels(),
                *([] if huge else [self._probabilities()]), self._caption()]

    # ---- one node ------------------------------------------------------------------------------------------------

    def state(self, node: Hashable) -> str:
        """The key of its mark."""
        if node == GHOST:
            return "ghost"
        if isinstance(node, tuple):
            return "folded"
        if node == 0:
            return "root"
        return self.drawing.verdicts[node] if self.verified else records.UNVERIFIED

    def faded(self, node: Hashable) -> bool:
        """Commit drops it."""
        return self.path_shown and self.phase == COMMIT and node != GHOST and node not in self.drawing.kept

    def label(self, node: Hashable) -> str:
        """Escaped label of a node; bold and ticked on the accepted path once that is shown."""
        if isinstance(node, tuple):
            return self.labels.pill(node)
        if node == GHOST:
            text = tokens.visible(self.drawing.ghost[0])
            return tokens.escaped(tokens.shortened(text, self.scale.room(self.scale.height) + 1)) + " ?"
        label = tokens.escaped(self.labels.shown[node])
        if node == 0:
            return f"<b>{label}</b>"
        if self.path_shown and self.state(node) == records.ACCEPTED:
            return f"<b>{label}</b>" if self.scale.narrow else f"<b>{label} ✓</b>"
        return label

    # ---- traces ----------------------------------------------------------------------------------------------------

    def _edges(self) -> list[dict]:
        points: dict[str, tuple[list, list]] = {kind: ([], []) for kind in palette.EDGES}
        for parent, child in self.layout.graph.edges:
            beside_label = isinstance(child, tuple) and self.labels.has_lone_pill(parent)
            if beside_label or (child == GHOST and not self.path_shown):
                continue
            xs, ys = points[palette.MARKS[self.state(child)].edge]
            tip = self.layout.x[child] - self.scale.columns(palette.MARKS[self.state(child)].size / 2)
            start = min(self.labels.ends[parent], tip - self.scale.columns(8))
            bend = min(max(start, self.layout.x[parent] + 0.62), tip - self.scale.columns(8))
            xs += [round(start, 3), round(bend, 3), round(tip, 3), None]
            ys += [self.layout.y[parent], self.layout.y[parent], self.layout.y[child], None]
        return [self._edge_trace(kind, *points[kind]) for kind in palette.EDGES]

    def _edge_trace(self, kind: str, xs: list, ys: list) -> dict:
        line = palette.EDGES[kind]
        # Before the path is shown, no accepted edge stands out.
        width = 1.5 if kind == "accepted" and not self.path_shown else line.width
        keeps = kind in ("accepted", "ghost")
        return {
            "type": "scatter", "mode": "lines", "name": kind, "x": xs, "y": ys, "hoverinfo": "skip",
            "line": {"color": line.color, "dash": line.dash, "width": width},
            "opacity": _FADED if self.path_shown and self.phase == COMMIT and not keeps else 1,
        }

    def _histogram(self) -> dict:
        """Nodes per depth as bars behind the columns, one outline with gaps."""
        xs: list = []
        ys: list = []
        counts = self.drawing.counts
        for depth, count in enumerate(counts, start=1):
            left, right = depth - self.scale.columns(_LABEL), depth + self.scale.columns(76)
            top = round(self.scale.bottom - (self.scale.bottom + 0.5) * count / max(counts), 3)
            xs += [round(left, 3), round(left, 3), round(right, 3), round(right, 3), None]
            ys += [self.scale.bottom, top, top, self.scale.bottom, None]
        return {"type": "scatter", "mode": "none", "name": "histogram", "x": xs, "y": ys, "fill": "toself",
                "fillcolor": palette.HISTOGRAM, "hoverinfo": "skip"}

    def _markers(self) -> dict:
        marks = [palette.MARKS[self.state(node)] for node in self.nodes]
        colors = [mark.color for mark in marks]
        return {
            "type": "scatter", "mode": "markers", "name": "nodes",
            "x": [round(self.labels.place(node), 3) for node in self.nodes],
            "y": [self.layout.y[node] for node in self.nodes],
            "customdata": [f"fold:{node[1]}" if isinstance(node, tuple) else node for node in self.nodes],
            "hoverinfo": "none",
            "marker": {
                "symbol": [mark.symbol for mark in marks], "color": colors,
                "size": [round(self._size(node, mark), 1) for node, mark in zip(self.nodes, marks, strict=True)],
                "line": {"color": colors, "width": [self._stroke(mark) for mark in marks]},
                "opacity": [_FADED if self.faded(node) else 1 for node in self.nodes],
            },
        }

    def _size(self, node: Hashable, mark: palette.Mark) -> float:
        # The symbol line-ew is 1.4 times its size wide; with a thick stroke it is the pill under its label.
        return self.labels.pill_width(node) / 1.4 if isinstance(node, tuple) else mark.size * self.scale.shrink

    def _stroke(self, mark: palette.Mark) -> float:
        if mark is palette.MARKS["folded"]:
            return round(min(15.0, self.scale.line - 1), 1)
        return 2 if mark.symbol.endswith("-open") else 0

    def _labels(self) -> dict:
        pills = [isinstance(node, tuple) for node in self.nodes]
        gap = self.scale.columns(_LABEL)
        xs = [self.labels.place(node) + gap * (not isinstance(node, tuple)) for node in self.nodes]
        return {
            "type": "scatter", "mode": "text", "name": "labels", "hoverinfo": "skip",
            "x": [round(x, 3) for x in xs], "y": [self.layout.y[node] for node in self.nodes],
            "text": [self.label(node) for node in self.nodes],
            "textposition": ["middle center" if pill else "middle right" for pill in pills],
            "textfont": {"family": palette.mono(self.t.lang), "size": self.scale.font,
                         "color": [self._ink(node) for node in self.nodes]},
        }

    def _ink(self, node: Hashable) -> str:
        state = self.state(node)
        if self.faded(node):
            return palette.QUIET
        if state in ("ghost", "folded"):
            return palette.NEXT_ROOT if state == "ghost" else palette.PILL_INK
        return palette.INK_2 if state in palette.DIMMED_LABELS else palette.INK

    def _probabilities(self) -> dict:
        """Under each label, where the lines are far enough apart."""
        rows = [node for node in self.nodes if isinstance(node, int)] if self.small else []
        below = (self.scale.font / 2 + 1) / self.scale.line
        xs = [self.layout.x[row] + self.scale.columns(_LABEL) for row in rows]
        colors = [palette.QUIET if self.faded(row) else palette.INK_2 for row in rows]
        return self._small("probabilities", xs, [self.layout.y[row] + below for row in rows],
                           [self.small[row] for row in rows], 10, colors)

    def _caption(self) -> dict:
        """Why the path stopped, on a line of its own under the tree."""
        shown = self.path_shown and self.drawing.ghost is not None
        x = self.scale.left + self.scale.columns(8)
        y = self.scale.bottom - (CAPTION - 1) / self.scale.line
        return self._small("caption", [x] * shown, [y] * shown, [self.drawing.ghost[1]] if shown else [], 12,
                           palette.NEXT_ROOT)

    def _small(self, name: str, xs: list, ys: list, texts: list[str], size: int, color: str | list[str]) -> dict:
        return {
            "type": "scatter", "mode": "text", "name": name, "hoverinfo": "skip", "textposition": "bottom right",
            "x": [round(x, 3) for x in xs], "y": [round(y, 3) for y in ys], "text": list(map(tokens.escaped, texts)),
            "textfont": {"family": palette.sans(self.t.lang), "size": size, "color": color},
        }
