"""Curves of a training run as plain Plotly dicts: losses, top-1, and what held-out replies say after each pass.

A head's colour is its depth; the total is drawn in ink, the backbone's own loss dashed in the second ink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_viz.figures import palette
from medusa_viz.figures.charts import Axis, font, frame, rounded
from medusa_viz.figures.texts import Texts

MOST_POINTS = 400
SIZES = (("circle", "●", palette.QUIET, "dot"), ("square", "■", palette.QUIET, "dash"),
         ("diamond", "◆", palette.INK_2, "dashdot"), ("triangle-up", "▲", palette.INK, "solid"))
"""How curves of tree sizes are told apart, from the smallest: symbol, the same as a character, colour, dash."""


@dataclass(frozen=True)
class Curve:
    """One line: its label, and a value or a gap at each x. With a `symbol` its points are marked."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: str
    dash: str = "solid"
    width: float = 1.8
    symbol: str = ""
    glyph: str = ""


@dataclass(frozen=True)
class StepAxis:
    """The x axis that all figures of a run share: up to `end`, with the places where another stage begins."""

    title: str
    end: float
    stages: Sequence[float] = ()


def head_color(k: int) -> str:
    """Colour of head k's curves, from 1."""
    return palette.CURVES[min(k, len(palette.CURVES)) - 1]


def total_curve(x: Sequence[float], y: Sequence[float | None], t: Texts) -> Curve:
    return Curve(t("fig.curve_total"), x, y, palette.INK, width=2.6)


def backbone_curve(x: Sequence[float], y: Sequence[float | None], t: Texts) -> Curve:
    return Curve(t("fig.curve_backbone"), x, y, palette.INK_2, "dash")


def head_curves(x: Sequence[float], rows: Sequence[Sequence[float | None]], heads: int, t: Texts,
                symbol: str = "") -> list[Curve]:
    """A curve per head from rows that hold one value per head."""
    return [Curve(t("view.head", k=k), x, [row[k - 1] if k <= len(row) else None for row in rows], head_color(k),
                  "dot" if k > len(palette.CURVES) else "solid", symbol=symbol) for k in range(1, heads + 1)]


def nodes_curves(x: Sequence[float], rows: Sequence[dict[str, float]], t: Texts) -> list[Curve]:
    """Tokens per step, a curve per tree size."""
    sizes = sorted({int(nodes) for row in rows for nodes in row})[: len(SIZES)]
    return [Curve(t("fig.nodes", n=size), x, [row.get(str(size)) for row in rows], color, dash, 1.8, symbol, glyph)
            for size, (symbol, glyph, color, dash) in zip(sizes, SIZES[len(SIZES) - len(sizes):])]


def figure(curves: Sequence[Curve], axis: StepAxis, t: Texts, *, share: bool = False) -> dict:
    """A figure of curves. `share`: the values are shares from 0 to 1."""
    return {"data": [_trace(curve, share) for curve in curves], "layout": _layout(axis, share, t)}


def legend(curves: Sequence[Curve]) -> list[dict]:
    """What the page writes above a figure."""
    return [{"label": curve.label, "color": curve.color, "dash": curve.dash, "glyph": curve.glyph} for curve in curves]


def thinned(count: int) -> list[int]:
    """Places of at most MOST_POINTS of that many points, first and last among them."""
    if count <= MOST_POINTS:
        return list(range(count))
    stride = (count - 1) / (MOST_POINTS - 1)
    return [round(place * stride) for place in range(MOST_POINTS)]


def _trace(curve: Curve, share: bool) -> dict:
    kept = thinned(len(curve.x))
    written = ".1%" if share else ".3f"
    return {
        "type": "scatter", "mode": "lines+markers" if curve.symbol or len(kept) == 1 else "lines", "name": curve.label,
        "x": [curve.x[place] for place in kept], "y": [rounded(curve.y[place]) for place in kept],
        "line": {"color": curve.color, "dash": curve.dash, "width": curve.width},
        "marker": {"color": curve.color, "size": 8, "symbol": curve.symbol or "circle"},
        "hovertemplate": f"{curve.label}: %{{y:{written}}}<extra></extra>",
    }


def _layout(steps: StepAxis, share: bool, t: Texts) -> dict:
    layout = frame(Axis(steps.title, 0, 1.03 * steps.end, format=",d"), Axis("", format=".0%" if share else ""), t, 12,
                   margin={"l": 48, "r": 8, "t": 18, "b": 36}, hovermode="x unified")
    layout["yaxis"]["rangemode"] = "tozero" if share else "normal"
    return layout | {
        "shapes": [{"type": "line", "x0": place, "x1": place, "y0": 0, "y1": 1, "yref": "paper",
                    "line": {"color": palette.QUIET, "width": 1, "dash": "dot"}} for place in steps.stages],
        "annotations": [{"x": place, "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom",
                         "showarrow": False, "text": t("fig.stage", n=number), "font": font(t, 11)}
                        for number, place in enumerate(steps.stages, start=2)],
    }
