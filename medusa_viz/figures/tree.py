"""The candidate tree as Plotly dicts: one layout, and four variants of the same traces, one per phase of a step.

Propose shows the drafts without verdicts, verify every verdict at once, accept the path, commit what it keeps.
Every variant has the same traces in the same order: edges by kind, the histogram of a very large tree, markers,
labels, and the small probabilities. Positions are rows and lines, never texts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from medusa_viz.decoding import records
from medusa_viz.figures import palette, tokens
from medusa_viz.figures.layout import GHOST, Layout

PROPOSE, VERIFY, ACCEPT, COMMIT = range(1, 5)
WIDTH, HEIGHT = 720, 560
"""Pixels that sizes and cuts are worked out for."""
HISTOGRAM_ABOVE = 600
_TOP, _SIDE, _CAPTION = 42, 8, 22  # pixels: column headers, left and right margin, the line under the tree
_LEFT, _RIGHT = 0.16, 0.62  # columns before the root and after the last marker
_SMALL_FROM = 29  # pixels per line from which a probability fits under each label
_FADED = 0.22


@dataclass(frozen=True)
class TreeDrawing:
    """What is drawn. Sequences have one entry per row of the tree; texts are the model's own, not escaped."""

    layout: Layout
    texts: Sequence[str]
    verdicts: Sequence[str]
    """Verdicts of records.py; all `unverified` before the forward pass."""
    kept: frozenset[int]
    """Rows on the accepted path that are committed, the root among them."""
    folded: dict[int, int]
    headers: Sequence[tuple[str, str]]
    """Per column 0..: title and what it predicts; words of ours."""
    small: tuple[Sequence[str], Sequence[str]]
    """Per row the probability under its label, before and after verification."""
    hover: tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]
    """Per row the lines of its hover text, before and after verification."""
    ghost: tuple[str, str] | None = None
    """Text of the next root and why the path stopped there."""
    counts: Sequence[int] | None = None
    """Nodes per depth, drawn behind the columns of a very large tree."""
    fold_hint: str = ""
    lang: str = "en"


@dataclass(frozen=True)
class _Scale:
    """Data units and pixels of one tree, the same in all phases."""

    column: float
    line: float
    span: tuple[float, float]
    bottom: float

    @property
    def font(self) -> int:
        return max(9, min(13, int(self.line * 0.95)))

    @property
    def label_columns(self) -> int:
        """Characters of a label that fit between two markers."""
        return max(4, int((self.column - 34) / (self.font * 0.61)))

    def right_of(self, x: float, pixels: float) -> float:
        return x + pixels / self.column


def _scale(layout: Layout) -> _Scale:
    span = (-_LEFT, layout.height + 0.85 + _RIGHT)
    line = (HEIGHT - _TOP - _CAPTION - 4) / layout.lines
    return _Scale((WIDTH - 2 * _SIDE) / (span[1] - span[0]), line, span, layout.lines - 0.5 + _CAPTION / line)


def figure(drawing: TreeDrawing) -> dict:
    """Plotly layout of the tree, shared by the four phases."""
    scale = _scale(drawing.layout)
    font = {"family": palette.sans(drawing.lang), "size": 12, "color": palette.INK}
    hidden = {"visible": False, "autorange": False, "zeroline": False}
    return {
        "margin": {"l": _SIDE, "r": _SIDE, "t": _TOP, "b": 0},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": font,
        "xaxis": {**hidden, "range": [round(edge, 3) for edge in scale.span]},
        "yaxis": {**hidden, "range": [round(scale.bottom, 3), -0.5]},
        "showlegend": False, "hovermode": "closest", "hoverdistance": 24, "dragmode": "pan",
        "hoverlabel": {"bgcolor": palette.GROUND, "bordercolor": palette.LINE, "align": "left", "font": font},
        "uirevision": "tree",
        "annotations": [_header(depth, title, predicts, scale, font)
                        for depth, (title, predicts) in enumerate(drawing.headers)],
    }


def _header(depth: int, title: str, predicts: str, scale: _Scale, font: dict) -> dict:
    return {
        "x": depth, "xref": "x", "xanchor": "left", "xshift": -10, "y": 1, "yref": "paper", "yanchor": "bottom",
        "yshift": 4, "showarrow": False, "align": "left", "text": f"<b>{title}</b><br>{predicts}",
        "font": {**font, "size": 11 if scale.column > 70 else 9, "color": palette.RAMP_INK[palette.source(depth)]},
        "bgcolor": palette.RAMP[palette.source(depth)], "borderpad": 3,
    }


def phases(drawing: TreeDrawing) -> list[list[dict]]:
    """Traces of the four phases."""
    return [_Variant(drawing, phase).traces() for phase in (PROPOSE, VERIFY, ACCEPT, COMMIT)]


class _Variant:
    """The traces of one phase."""

    def __init__(self, drawing: TreeDrawing, phase: int) -> None:
        self.drawing, self.phase = drawing, phase
        self.layout, self.scale = drawing.layout, _scale(drawing.layout)
        self.verified = phase >= VERIFY and any(verdict != records.UNVERIFIED for verdict in drawing.verdicts)
        self.path_shown = self.verified and phase >= ACCEPT
        self.nodes = [node for node in self.layout.graph if node != GHOST or self.path_shown]
        small_room = self.scale.line >= _SMALL_FROM and self.scale.column >= 70
        self.small = drawing.small[self.verified] if small_room else None

    def traces(self) -> list[dict]:
        return [*self._edges(), self._histogram(), self._markers(), self._labels(), self._small_labels()]

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
            return f"+{self.drawing.folded[node[1]]:,}"
        room = self.scale.label_columns
        if node == GHOST:
            return tokens.escaped(tokens.shortened(tokens.visible(self.drawing.ghost[0]), room - 2)) + " ?"
        text = tokens.visible(self.drawing.texts[node])
        if node == 0:
            return f"<b>{tokens.escaped(tokens.shortened(text, room))}</b>"
        if self.path_shown and self.state(node) == records.ACCEPTED:
            return f"<b>{tokens.escaped(tokens.shortened(text, room - 2))} ✓</b>"
        return tokens.escaped(tokens.shortened(text, room))

    def label_end(self, node: Hashable) -> float:
        """Where the label of a node ends, so that its edges start after it."""
        columns = tokens.width(tokens.shortened(tokens.visible(self.drawing.texts[node]), self.scale.label_columns))
        # Bold is no wider in a monospaced font, but the tick is two characters more.
        columns += 2 * (self.drawing.verdicts[node] == records.ACCEPTED and node != 0)
        return self.scale.right_of(self.layout.x[node], 15 + columns * self.scale.font * 0.61)

    def _edges(self) -> list[dict]:
        points: dict[str, tuple[list, list]] = {kind: ([], []) for kind in palette.EDGES}
        ends: dict[Hashable, float] = {}
        for parent, child in self.layout.graph.edges:
            if child == GHOST and not self.path_shown:
                continue
            if parent not in ends:
                ends[parent] = self.label_end(parent)
            xs, ys = points[palette.MARKS[self.state(child)].edge]
            branch = max(ends[parent], self.layout.x[parent] + 0.62)
            tip = self.scale.right_of(self.layout.x[child], -palette.MARKS[self.state(child)].size / 2)
            top, bottom = self.layout.y[parent], self.layout.y[child]
            xs += [round(ends[parent], 3), round(min(branch, tip), 3), round(tip, 3), None]
            ys += [top, top, bottom, None]
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
        counts = self.drawing.counts or ()
        for depth, count in enumerate(counts, start=1):
            top = self.scale.bottom - (self.scale.bottom + 0.5) * count / max(counts)
            xs += [depth - 0.09, depth + 0.8, depth + 0.8, depth - 0.09, None]
            ys += [round(top, 3), round(top, 3), self.scale.bottom, self.scale.bottom, None]
        return {"type": "scatter", "mode": "none", "name": "histogram", "x": xs, "y": ys, "fill": "toself",
                "fillcolor": palette.PANEL, "hoverinfo": "skip"}

    def _markers(self) -> dict:
        marks = [palette.MARKS[self.state(node)] for node in self.nodes]
        pill = [isinstance(node, tuple) for node in self.nodes]
        width = [15 if is_pill else 2 if mark.symbol.endswith("-open") else 0 for mark, is_pill in zip(marks, pill)]
        size = [self._pill_size(node) if is_pill else mark.size for node, mark, is_pill in zip(self.nodes, marks, pill)]
        return {
            "type": "scatter", "mode": "markers", "name": "nodes",
            "x": [round(self._mark_x(node), 3) for node in self.nodes], "y": [self.layout.y[node] for node in self.nodes],
            "customdata": [_identity(node) for node in self.nodes],
            "hoverinfo": "text", "hovertext": [self._hover(node) for node in self.nodes],
            "marker": {
                "symbol": [mark.symbol for mark in marks], "size": size,
                "color": [mark.color for mark in marks],
                "line": {"color": [mark.color for mark in marks], "width": width},
                "opacity": [_FADED if self.faded(node) else 1 for node in self.nodes],
            },
        }

    def _pill_size(self, node: Hashable) -> int:
        """line-ew is 2.8 times its size wide; with a thick stroke it is the pill under the label."""
        return max(9, round((8 + self.scale.font * 0.61 * len(self.label(node))) / 2.8))

    def _mark_x(self, node: Hashable) -> float:
        return self.scale.right_of(self.layout.x[node], self._pill_size(node) * 1.4 - 5) if isinstance(node, tuple) \
            else self.layout.x[node]

    def _hover(self, node: Hashable) -> str:
        if node == GHOST:
            lines: Sequence[str] = tokens.wrapped(self.drawing.ghost[1])
        elif isinstance(node, tuple):
            lines = [self.drawing.fold_hint]
        else:
            lines = self.drawing.hover[self.verified][node]
        return "<br>".join(map(tokens.escaped, lines))

    def _labels(self) -> dict:
        colors = [self._label_color(node) for node in self.nodes]
        xs = [self._mark_x(node) if isinstance(node, tuple) else self.scale.right_of(self.layout.x[node], 11)
              for node in self.nodes]
        trace = {
            "type": "scatter", "mode": "text", "name": "labels", "hoverinfo": "skip",
            "x": [round(x, 3) for x in xs], "y": [self.layout.y[node] for node in self.nodes],
            "text": [self.label(node) for node in self.nodes],
            "textposition": ["middle center" if isinstance(node, tuple) else "middle right" for node in self.nodes],
            "textfont": {"family": palette.mono(self.drawing.lang), "size": self.scale.font, "color": colors},
        }
        if self.path_shown and self.drawing.ghost:
            self._add_caption(trace)
        return trace

    def _add_caption(self, labels: dict) -> None:
        """Why the path stopped, on a line of its own under the tree."""
        labels["x"].append(round(self.scale.right_of(self.scale.span[0], 6), 3))
        labels["y"].append(round(self.scale.bottom - _CAPTION / 2 / self.scale.line, 3))
        labels["text"].append(tokens.escaped("□ " + tokens.shortened(self.drawing.ghost[1], 108)))
        labels["textposition"].append("middle right")
        labels["textfont"]["color"].append(palette.NEXT_ROOT)

    def _label_color(self, node: Hashable) -> str:
        state = self.state(node)
        if self.faded(node):
            return palette.QUIET
        if state in ("ghost", "folded"):
            return palette.NEXT_ROOT if state == "ghost" else palette.PILL_INK
        return palette.INK_2 if state in palette.DIMMED_LABELS else palette.INK

    def _small_labels(self) -> dict:
        rows = [node for node in self.nodes if isinstance(node, int)] if self.small else []
        below = (self.scale.font / 2 + 1) / self.scale.line
        return {
            "type": "scatter", "mode": "text", "name": "probabilities", "hoverinfo": "skip",
            "x": [round(self.scale.right_of(self.layout.x[row], 11), 3) for row in rows],
            "y": [round(self.layout.y[row] + below, 3) for row in rows],
            "text": [tokens.escaped(self.small[row]) for row in rows], "textposition": "bottom right",
            "textfont": {"family": palette.sans(self.drawing.lang), "size": 10,
                         "color": [palette.QUIET if self.faded(row) else palette.INK_2 for row in rows]},
        }


def _identity(node: Hashable) -> int | str:
    return f"fold:{node[1]}" if isinstance(node, tuple) else node
