"""The tree-attention mask as a Plotly dict: rows look, columns are seen.

Cell (column j, row i) stands at x = j, y = i. Left of the cells stand the prefix block, which every row sees, and the
row labels. Up to 24 rows every open cell has a glyph, up to 64 cells are plain; above that the cells are a max-pooled
image, worked out from the ancestors without ever building the n x n matrix.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from medusa_viz.decoding.tree import TreeShape
from medusa_viz.figures import palette, tokens
from medusa_viz.figures.texts import Texts

GLYPHS_UP_TO, CELLS_UP_TO = 24, 64
ROOM = (470, 266)
"""Pixels of the panel at 1440 x 900, unless the page has said how large its own is."""
CLOSED, ANCESTOR, SELF = 0, 1, 2
_LABELS, _PREFIX = 118, 64  # pixels left of the cells
_TOP, _BARS, _BOTTOM = 24, 7, 18  # pixels: titles and bars over the columns, the caption under them
_CELL = 20  # pixels at most
_GLYPH = 8  # pixels of a cell from which a glyph fits
_POOLED = 128  # pixels of the overview at most, so that one is about two on the screen
_LABEL_COLUMNS = 9


@dataclass(frozen=True)
class MaskDrawing:
    """What is drawn; sequences have one entry per row. Texts are the model's own, not escaped."""

    shape: TreeShape
    texts: Sequence[str]
    prefix: int
    """Tokens before the root."""
    kept: frozenset[int]
    """Rows that are committed; empty before verification."""
    bands: Sequence[str]
    """Title of each depth's columns."""
    room: tuple[int, int] = ROOM
    """Pixels of the panel."""


@dataclass(frozen=True)
class _Scale:
    """Pixels per cell, and the x axis in cells."""

    cell_x: float
    cell_y: float
    left: float
    prefix: float
    right: float
    bottom: float

    @property
    def prefix_span(self) -> tuple[float, float]:
        return -0.5 - self.prefix, -0.5


def _scale(rows: int, room: tuple[int, int]) -> _Scale:
    room_x, room_y = room[0] - _LABELS - _PREFIX - 8, room[1] - _TOP - _BARS - _BOTTOM
    cell_x, cell_y = min(_CELL, room_x / rows), min(_CELL, room_y / rows)
    return _Scale(cell_x, cell_y, -0.5 - (_PREFIX + _LABELS) / cell_x, _PREFIX / cell_x,
                  -0.5 + room_x / cell_x + 6 / cell_x, -0.5 + room_y / cell_y)


def kind(rows: int) -> str:
    """How the cells are drawn: `glyph`, `cells` or `overview`."""
    return "glyph" if rows <= GLYPHS_UP_TO else "cells" if rows <= CELLS_UP_TO else "overview"


def figure(drawing: MaskDrawing, t: Texts) -> dict:
    """Plotly dict {layout, data}."""
    rows = drawing.shape.nodes + 1
    scale = _scale(rows, drawing.room)
    cell = min(scale.cell_x, scale.cell_y)
    cells = _overview(drawing.shape) if kind(rows) == "overview" else _heatmap(drawing.shape, cell)
    return {"data": [_prefix_block(drawing, scale), cells, _grid(rows), _bands(drawing, scale),
                     _kept_bars(drawing, scale)],
            "layout": _layout(drawing, scale, t)}


def _layout(drawing: MaskDrawing, scale: _Scale, t: Texts) -> dict:
    font = {"family": palette.sans(t.lang), "size": 11, "color": palette.INK}
    axis = {"autorange": False, "zeroline": False, "showgrid": False, "ticks": "", "fixedrange": False}
    labelled = _labelled_rows(drawing, scale)
    return {
        "margin": {"l": 0, "r": 0, "t": _TOP, "b": _BOTTOM},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font": font,
        "xaxis": {**axis, "range": [round(scale.left, 3), round(scale.right, 3)], "showticklabels": False},
        "yaxis": {**axis, "range": [round(scale.bottom, 3), round(-0.5 - _BARS / scale.cell_y, 3)],
                  "scaleanchor": False, "tickmode": "array", "tickvals": labelled,
                  "ticktext": [_row_label(drawing, row) for row in labelled], "ticklabelposition": "inside",
                  "ticklabeloverflow": "allow", "tickfont": {**font, "family": palette.mono(t.lang)}},
        "showlegend": False, "hovermode": "closest", "dragmode": "pan", "bargap": 0,
        "uirevision": "mask",
        "annotations": [*_band_titles(drawing, scale, font), *_prefix_titles(drawing, scale, font, t),
                        _caption(drawing, scale, font, t)],
    }


def _labelled_rows(drawing: MaskDrawing, scale: _Scale) -> list[int]:
    """Rows with room for a label of 11 pixels: kept rows first, then the first of each depth, then the others."""
    rows = drawing.shape.nodes + 1
    apart = max(1, int(np.ceil(11 / scale.cell_y)))
    if apart == 1:
        return list(range(rows))
    firsts = np.searchsorted(drawing.shape.depth, np.arange(drawing.shape.height + 1)).tolist()
    taken = np.zeros(rows, bool)
    chosen = []
    for row in (*sorted(drawing.kept), *firsts, *range(rows)):
        if not taken[row]:
            chosen.append(row)
            taken[max(0, row - apart + 1): row + apart] = True
    return sorted(chosen)


def _row_label(drawing: MaskDrawing, row: int) -> str:
    """Position id, row number, token: fixed columns, since siblings share a position and tokens repeat."""
    text = tokens.shortened(tokens.visible(drawing.texts[row]), _LABEL_COLUMNS)
    return f"{drawing.prefix + int(drawing.shape.depth[row])} {row:>2} {tokens.escaped(text)}"


def _band_titles(drawing: MaskDrawing, scale: _Scale, font: dict) -> list[dict]:
    """Titles over the columns of each depth; left out where they have no room."""
    edges = np.searchsorted(drawing.shape.depth, np.arange(drawing.shape.height + 2)).tolist()
    titles, free = [], -np.inf
    for depth, title in enumerate(drawing.bands[: drawing.shape.height + 1]):
        wide = len(title) * 6.8 / scale.cell_x
        middle = min((edges[depth] + edges[depth + 1] - 1) / 2, scale.right - wide / 2)
        if middle - wide / 2 < free:
            title, wide = str(depth), 9 / scale.cell_x
        if middle - wide / 2 >= free:
            free = middle + wide / 2
            titles.append({"x": middle, "y": 1, "xref": "x", "yref": "paper", "yanchor": "bottom", "yshift": 2,
                           "showarrow": False, "text": title, "font": font})
    return titles


def _prefix_titles(drawing: MaskDrawing, scale: _Scale, font: dict, t: Texts) -> list[dict]:
    middle = sum(scale.prefix_span) / 2
    title = {"x": middle, "y": 1, "xref": "x", "yref": "paper", "yanchor": "bottom", "yshift": 2, "showarrow": False,
             "text": t("fig.mask.prefix", n=drawing.prefix), "font": font}
    columns = {**title, "x": scale.left, "xanchor": "left", "xshift": 4, "text": t("fig.mask.columns"),
               "font": {**font, "color": palette.INK_2}}
    return [title, columns]


def _caption(drawing: MaskDrawing, scale: _Scale, font: dict, t: Texts) -> dict:
    """Under the prefix block, what it stands for."""
    return {"x": scale.prefix_span[0], "y": drawing.shape.nodes + 0.5, "xref": "x", "yref": "y", "xanchor": "left",
            "yanchor": "top", "showarrow": False, "text": t("fig.mask.prefix_all", n=drawing.prefix),
            "font": {**font, "color": palette.INK_2}}


def _prefix_block(drawing: MaskDrawing, scale: _Scale) -> dict:
    rows = drawing.shape.nodes + 1
    return {
        "type": "bar", "orientation": "h", "name": "prefix", "x": [round(scale.prefix, 3)],
        "base": [round(scale.prefix_span[0], 3)], "y": [(rows - 1) / 2], "width": [rows],
        "marker": {"color": palette.LINE, "line": {"width": 0},
                   "pattern": {"shape": "/", "fgcolor": palette.MASK_ANCESTOR, "bgcolor": palette.LINE, "size": 7,
                               "solidity": 0.15}},
        "hoverinfo": "none",
    }


def _heatmap(shape: TreeShape, cell: float) -> dict:
    """Hover says nothing itself: the page words a cell when one is looked at."""
    z = shape.mask.astype(np.int8) + np.eye(len(shape.parent), dtype=np.int8)
    glyphs = len(z) <= GLYPHS_UP_TO and cell >= _GLYPH
    steps = (palette.GROUND, palette.MASK_ANCESTOR, palette.MASK_SELF)
    trace = {
        "type": "heatmap", "name": "mask", "z": z.tolist(), "zmin": CLOSED, "zmax": SELF, "showscale": False,
        "colorscale": [[edge, color] for i, color in enumerate(steps) for edge in (i / 3, (i + 1) / 3)],
        "hoverinfo": "none", "hoverongaps": False,
    }
    if glyphs:
        trace["text"] = [["✓" if cell else "" for cell in row] for row in z.tolist()]
        trace["texttemplate"] = "%{text}"
        trace["textfont"] = {"color": palette.GROUND, "size": min(10, int(cell) - 1)}
    return trace


def _grid(rows: int) -> dict:
    """Lines between the cells, where these are large enough to be counted."""
    edges = np.arange(rows + 1) - 0.5 if rows <= GLYPHS_UP_TO else np.array([])
    return _line_trace("grid", *_crossing(edges, -0.5, rows - 0.5), palette.GRID, 1)


def _bands(drawing: MaskDrawing, scale: _Scale) -> dict:
    """Lines between the depths."""
    edges = np.searchsorted(drawing.shape.depth, np.arange(drawing.shape.height + 2)) - 0.5
    return _line_trace("bands", *_crossing(edges, scale.prefix_span[0], float(edges[-1])), palette.BAND, 1)


def _crossing(edges: np.ndarray, left: float, end: float) -> tuple[list, list]:
    """A vertical and a horizontal line at every edge, as one run with gaps."""
    xs: list = []
    ys: list = []
    for edge in edges.tolist():
        xs += [edge, edge, None, round(left, 3), end, None]
        ys += [-0.5, end, None, edge, edge, None]
    return xs, ys


def _line_trace(name: str, xs: list, ys: list, color: str, width: float) -> dict:
    return {"type": "scatter", "mode": "lines", "name": name, "x": xs, "y": ys, "hoverinfo": "skip",
            "line": {"color": color, "width": width}, "cliponaxis": False}


def _kept_bars(drawing: MaskDrawing, scale: _Scale) -> dict:
    """A bar at the margin of every kept row and over every kept column."""
    xs: list = []
    ys: list = []
    left, top = scale.prefix_span[0] - 4 / scale.cell_x, -0.5 - 4 / scale.cell_y
    for row in sorted(drawing.kept):
        xs += [left, left, None, row - 0.5, row + 0.5, None]
        ys += [row - 0.5, row + 0.5, None, top, top, None]
    return _line_trace("kept", xs, ys, palette.ACCEPTED, 3)


def _overview(shape: TreeShape) -> dict:
    """The cells as an image. A pixel is open where any cell under it is, so thin lines never vanish."""
    rows = shape.nodes + 1
    pixels = min(rows, _POOLED)
    bins = np.arange(rows) * pixels // rows
    image = np.zeros((pixels, pixels), np.uint8)
    ancestor = shape.parent
    while (open_ := ancestor >= 0).any():
        image[bins[open_], bins[ancestor[open_]]] = ANCESTOR
        ancestor = np.where(open_, shape.parent[ancestor], -1)
    image[bins, bins] = SELF
    size = rows / pixels
    return {"type": "image", "name": "mask", "source": _png(image), "x0": -0.5 + size / 2, "dx": size,
            "y0": -0.5 + size / 2, "dy": size, "hoverinfo": "skip"}


def _png(image: np.ndarray) -> str:
    """As a data URI. Closed cells are transparent and the two colours read on either ground, since the page cannot
    recolour an image when the theme changes."""
    picture = Image.fromarray(image, mode="P")
    picture.putpalette(bytes.fromhex("".join(color[1:] for color in palette.OVERVIEW)))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", bits=2, transparency=CLOSED)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
