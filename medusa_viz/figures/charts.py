"""Charts as plain Plotly dicts: one frame for all of them, series of points, and the legend beside them.

Labels and hover lines pass through `tokens.escaped`, since names of devices and trees may come from a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from medusa_viz.figures import palette, tokens
from medusa_viz.figures.texts import Texts

MARGIN = {"l": 48, "r": 10, "t": 10, "b": 36}


@dataclass(frozen=True)
class Axis:
    """One axis: its title, its ends, and the values that are written on it. Without ends or values: Plotly's choice."""

    title: str
    low: float = 0.0
    high: float | None = None
    log: bool = False
    ticks: Sequence[float] = ()
    format: str = ""


@dataclass(frozen=True)
class Series:
    """Points with one look, joined by a line where `dash` names one. `low` and `high` are ends of intervals; `hover`
    has one sentence per point. `hollow`: predicted or recorded elsewhere; filled ones were measured here."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: str
    symbol: str = "circle"
    glyph: str = "●"
    dash: str = ""
    hollow: bool = False
    size: int = 8
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    hover: Sequence[str] = ()
    texts: Sequence[str] = ()
    """Written above the points, or below them."""
    below: bool = False
    pane: str = ""
    """"2" for the second pane of a figure that has two."""
    width: float = 1.6
    listed: bool = field(default=True)
    """In the legend."""


def frame(x: Axis, y: Axis, t: Texts, size: int = 11, **more: object) -> dict:
    """Layout of one chart, its values written in that size; `more` are further keys of Plotly's layout."""
    return {
        "margin": dict(MARGIN), "showlegend": False, "hovermode": "closest", "hoverdistance": 16, "font": font(t),
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "dragmode": False,
        "xaxis": axis(x, t, size), "yaxis": axis(y, t, size),
        "hoverlabel": {"bgcolor": palette.GROUND, "bordercolor": palette.INK_2, "align": "left",
                       "font": {**font(t), "color": palette.INK}},
        **more,
    }


def font(t: Texts, size: int = 12) -> dict:
    return {"family": palette.sans(t.lang), "size": size, "color": palette.INK_2}


def axis(given: Axis, t: Texts, size: int = 11) -> dict:
    """Plotly's axis; its ends are fixed, so that nothing moves under the mouse."""
    ticks = {"tickmode": "array", "tickvals": list(given.ticks), "ticktext": [f"{tick:,g}" for tick in given.ticks]}
    return {
        "type": "log" if given.log else "linear", "fixedrange": True,
        "title": {"text": tokens.escaped(given.title), "font": font(t), "standoff": 4}, "gridcolor": palette.GRID,
        "linecolor": palette.LINE, "zeroline": False, "tickfont": font(t, size), "automargin": False, "nticks": 6,
        "tickformat": given.format, **(ticks if given.ticks else {}),
        **({} if given.high is None else {"range": _ends(given.low, given.high, given.log)}),
    }


def _ends(low: float, high: float, log: bool) -> list[float]:
    ends = low, high if high > low else low + 1
    return [round(math.log10(max(end, 1e-9)) if log else end, 5) for end in ends]


def trace(series: Series) -> dict:
    """One series as a Plotly trace."""
    modes = [name for name, wanted in (("lines", series.dash), ("markers", series.symbol), ("text", series.texts))
             if wanted]
    made = {
        "type": "scatter", "mode": "+".join(modes) or "none", "name": tokens.escaped(series.label),
        "x": [rounded(value) for value in series.x], "y": [rounded(value) for value in series.y],
        "hoverinfo": "text" if series.hover else "skip", "connectgaps": False,
        "hovertext": [tokens.escaped(line).replace("\n", "<br>") for line in series.hover],
        "marker": {"symbol": series.symbol + "-open" * series.hollow if series.symbol else "circle",
                   "size": series.size, "color": series.color, "line": {"color": series.color, "width": 1.5}},
        "line": {"color": series.color, "dash": series.dash or "solid", "width": series.width},
    }
    if series.texts:
        made |= {"text": [tokens.escaped(text) for text in series.texts],
                 "textposition": "bottom center" if series.below else "top center",
                 "textfont": {"size": 12, "color": series.color}}
    if len(series.low):
        made["error_y"] = {
            "type": "data", "symmetric": False, "color": series.color, "thickness": 1.2, "width": 3,
            "array": [rounded(high - y) for high, y in zip(series.high, series.y, strict=True)],
            "arrayminus": [rounded(y - low) for low, y in zip(series.low, series.y, strict=True)]}
    if series.pane:
        made |= {"xaxis": f"x{series.pane}", "yaxis": f"y{series.pane}"}
    return made


def legend(series: Sequence[Series]) -> list[dict]:
    """What the page writes above a chart, once for each label."""
    shown = [one for one in series if one.listed and any(value is not None for value in one.y)]
    by_label = {one.label: {"label": one.label, "color": one.color, "dash": one.dash or "solid",
                            "glyph": one.glyph if one.symbol else ""} for one in shown}
    return list(by_label.values())


def rounded(value: float | None) -> float | None:
    """Five significant digits; what is no number leaves a gap."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
