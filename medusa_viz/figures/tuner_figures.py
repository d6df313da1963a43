"""The Tuner's figures: accuracies, step times, trees of every builder, depths reached, thresholds.

Hollow marks are predicted or were recorded elsewhere, filled ones were measured on this device; in the scatter of
random trees, as the Medusa paper draws it, hollow ones are the random trees. Plain data in, plain Plotly dicts out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from medusa_viz.figures import numbers, palette, tokens
from medusa_viz.figures.charts import Axis, Series, axis, font, frame, legend, trace
from medusa_viz.figures.texts import Texts

NODE_TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
HEAT = ((0.0, "#FFFFFD"), (1.0, "#6FA8DC"))


@dataclass(frozen=True)
class Look:
    """How trees of one builder are drawn: solid and hollow glyph for legends."""

    color: str
    symbol: str
    glyph: str
    hollow: str
    dash: str


LOOKS = {
    "sparse": Look(palette.PASSED, "star", "★", "☆", "solid"),
    "best-dense": Look(palette.ACTION, "circle", "●", "○", "solid"),
    "sequoia": Look(palette.NEXT_ROOT, "diamond", "◆", "◇", "dashdot"),
    "joint": Look(palette.ACCEPTED, "triangle-up", "▲", "△", "dash"),
    "dynamic": Look(palette.INK_2, "cross", "✚", "✛", "dot"),
    "random-dense": Look(palette.ACTION, "circle", "○", "○", ""),
    "random-sparse": Look(palette.QUIET, "circle", "○", "○", ""),
    "plain": Look(palette.INK_2, "square", "■", "□", ""),
}
OTHER = Look(palette.INK, "pentagon", "⬟", "⬠", "")
"""Published trees, and those edited by hand."""


def look(kind: str) -> Look:
    return LOOKS.get(kind, OTHER)


@dataclass(frozen=True)
class Spot:
    """One tree in a chart: what it is called, its nodes, its value with its interval, and a sentence on it."""

    kind: str
    name: str
    nodes: int
    value: float | None
    low: float | None = None
    high: float | None = None
    hover: str = ""


@dataclass(frozen=True)
class Chart:
    """A figure, its legend, and how many points it holds; without any the page says why."""

    figure: dict
    legend: list[dict]
    points: int


def _chart(series: Sequence[Series], layout: dict) -> Chart:
    points = sum(value is not None for one in series for value in one.y)
    return Chart({"data": [trace(one) for one in series], "layout": layout}, legend(series), points)


# ---------------------------------------------------------------------------------------------------------- accuracies


def heat(share: Sequence[Sequence[float]], low: Sequence[Sequence[float]], high: Sequence[Sequence[float]],
         positions: Sequence[int], t: Texts) -> Chart:
    """Heads × ranks: how often exactly rank i of head k is right. Without intervals `low` and `high` are empty."""
    ranks = max((len(row) for row in share), default=0)
    hover = [[_cell(k, rank, value, low, high, positions, t) for rank, value in enumerate(row)]
             for k, row in enumerate(share)]
    layout = frame(Axis(t("tuner.fig_rank"), -0.5, ranks - 0.5, ticks=range(ranks)),
                   Axis("", len(share) - 0.5, -0.5), t, margin={"l": 52, "r": 6, "t": 6, "b": 36})
    layout["yaxis"] |= {"tickmode": "array", "tickvals": list(range(len(share))), "showgrid": False,
                        "ticktext": [t("view.head", k=k) for k in range(1, len(share) + 1)],
                        "range": [len(share) - 0.5, -0.5]}
    layout["xaxis"] |= {"showgrid": False}
    data = {
        "type": "heatmap", "name": "accuracy", "z": [[round(value**0.5, 4) for value in row] for row in share],
        "zmin": 0, "zmax": max([0.5, *(value**0.5 for row in share for value in row)]), "showscale": False,
        "colorscale": [[place, color] for place, color in HEAT], "xgap": 2, "ygap": 2,
        "text": [[_short(value) for value in row] for row in share], "texttemplate": "%{text}",
        "textfont": {"size": 11, "family": palette.sans(t.lang), "color": palette.INK},
        "hoverinfo": "text", "hovertext": hover,
    }
    return Chart({"data": [data], "layout": layout}, [], sum(map(len, share)))


def _cell(k: int, rank: int, value: float, low: Sequence, high: Sequence, positions: Sequence[int], t: Texts) -> str:
    if k >= len(low) or rank >= len(low[k]):
        return t("tuner.fig_cell", k=k + 1, rank=str(rank), share=numbers.exact(value))
    return t("tuner.fig_cell_interval", k=k + 1, rank=str(rank), share=numbers.exact(value),
             low=numbers.exact(low[k][rank]), high=numbers.exact(high[k][rank]), n=positions[k])


def _short(value: float) -> str:
    return f"{value:.2f}"[1:] if 0.005 <= value < 0.995 else "" if value < 0.005 else "1"


# ----------------------------------------------------------------------------------------------------- trees by nodes


def trees(lines: dict[str, Sequence[Spot]], measured: Sequence[Spot], chosen: Spot | None, best: Spot | None,
          title: str, t: Texts, plain: tuple[float, str] | None = None, published: Sequence[Spot] = ()) -> Chart:
    """A value of trees against their nodes: one hollow line for every builder, what was measured filled, the chosen
    tree ringed, the recommended one starred. `plain` is the value of plain decoding with its label; `published` are
    trees of fixed sizes, points without a line."""
    series = [Series(t(f"tuner.builder.{kind}"), [spot.nodes for spot in spots], [spot.value for spot in spots],
                     look(kind).color, look(kind).symbol, look(kind).hollow, look(kind).dash, True, 7,
                     hover=[spot.hover for spot in spots]) for kind, spots in lines.items()]
    published = sorted((spot for spot in published if spot.value is not None), key=lambda spot: -spot.value)
    if published:
        series.append(Series(t("tuner.builder.published"), [spot.nodes for spot in published],
                             [spot.value for spot in published], OTHER.color, OTHER.symbol, OTHER.hollow, "", True, 7,
                             hover=[spot.hover for spot in published], listed=False))
    series += [Series(t("tuner.fig_measured"), [max(spot.nodes, 0.8)], [spot.value], look(spot.kind).color,
                      look(spot.kind).symbol, "●", "", False, 10, [spot.low or spot.value], [spot.high or spot.value],
                      [spot.hover], listed=place == 0)
               for place, spot in enumerate(spot for spot in measured if spot.value is not None)]
    if chosen is not None and chosen.value is not None and chosen.nodes:
        series.append(Series(t("tuner.fig_chosen"), [chosen.nodes], [chosen.value], palette.INK, "circle", "◯", "",
                             True, 17, hover=[chosen.hover]))
    if best is not None and best.value is not None:
        series.append(Series(t("tuner.fig_best"), [best.nodes], [best.value], palette.INK, "star", "★", "", False, 15,
                             hover=[best.hover]))
    values = [value for one in series for value in one.y if value is not None]
    values += [value for one in series for value in one.high if value is not None]
    low = 1.0 if plain is None else 0.0
    high = max([*values, plain[0] if plain else 1.5])
    most = max([16, *(node for one in series for node in one.x)])
    layout = frame(Axis(t("tuner.fig_nodes"), 0.75, most * 1.25, True, [tick for tick in NODE_TICKS if tick <= most]),
                   Axis(title, low, high + 0.08 * (high - low)), t)
    if plain is not None:
        layout |= {"shapes": [_level(plain[0])], "annotations": [_note(plain[1], plain[0], t)]}
    if published:
        above = published[-1].value > (low + high) / 2  # so the corner below them is free
        layout["annotations"] = [*layout.get("annotations", ()), _named(published, above, t)]
    chart = _chart(series, layout)
    keys = [key | {"color": palette.INK} if key["label"] == t("tuner.fig_measured") else key for key in chart.legend]
    return replace(chart, legend=keys)


def _level(y: float) -> dict:
    return {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y, "layer": "below",
            "line": {"color": palette.INK_2, "width": 1.5, "dash": "dash"}}


def _named(published: Sequence[Spot], below: bool, t: Texts) -> dict:
    """Their names in a corner, best first, two a line, below their mark: they have nearly one size and one value, so
    names would not fit beside the points."""
    names = [spot.name for spot in published]
    lines = [t("tuner.fig_published", glyph=OTHER.hollow, high=f"{published[0].value:.3f}",
               low=f"{published[-1].value:.3f}"), *(" · ".join(names[i : i + 2]) for i in range(0, len(names), 2))]
    return {"text": "<br>".join(map(tokens.escaped, lines)), "x": 1, "xref": "paper", "xanchor": "right",
            "y": 0 if below else 1, "yref": "paper", "yanchor": "bottom" if below else "top", "align": "right",
            "showarrow": False, "font": font(t, 10)}


def _note(text: str, y: float, t: Texts) -> dict:
    return {"text": text, "x": 1, "xref": "paper", "xanchor": "right", "y": y, "yanchor": "bottom", "showarrow": False,
            "font": font(t, 11)}


def scatter(found: dict[str, Sequence[tuple[int, float | None, float | None, str]]], t: Texts) -> Chart:
    """Dense, random and sparse trees: tokens per step and, where step times are known, tokens per second, against
    nodes (figure 4 of the Medusa paper). `found`: nodes, the two values and a sentence by builder."""
    series = []
    for kind, spots in found.items():
        one, hollow = look(kind), kind.startswith("random")
        for pane, place in (("", 1), ("2", 2)):
            series.append(Series(t(f"tuner.builder.{kind}"), [spot[0] for spot in spots],
                                 [spot[place] for spot in spots], one.color, one.symbol, one.glyph, "", hollow,
                                 5 if hollow else 8, hover=[spot[3] for spot in spots], pane=pane, listed=not pane))
    most = max([16, *(spot[0] for spots in found.values() for spot in spots)])
    nodes = Axis(t("tuner.fig_nodes"), 0.75, most * 1.25, True, [tick for tick in (1, 4, 16, 64, 256) if tick <= most])
    tops = [max([1.5, *(spot[place] for spots in found.values() for spot in spots if spot[place] is not None)])
            for place in (1, 2)]
    layout = frame(nodes, Axis(t("tuner.fig_tokens_per_step"), 1, tops[0] * 1.05), t)
    layout["xaxis"] |= {"domain": [0, 0.44]}
    layout |= {"xaxis2": axis(nodes, t) | {"domain": [0.57, 1], "anchor": "y2"},
               "yaxis2": axis(Axis(t("tuner.fig_tokens_per_second"), 0, tops[1] * 1.08), t) | {"anchor": "x2"}}
    return _chart(series, layout)


# ----------------------------------------------------------------------------------------------------- depths reached


def reached(expected: Sequence[float], replayed: Sequence[float], t: Texts) -> Chart:
    """P(L ≥ m) by depth, expected under independence and replayed; each kind of bar sums to its E[L]."""
    depth = max(len(expected), len(replayed))
    bars = [(t("tuner.fig_expected"), expected, palette.QUIET, "rgba(0,0,0,0)", "▯"),
            (t("tuner.fig_replayed"), replayed, palette.ACCEPTED, palette.ACCEPTED, "▮")]
    data = [{
        "type": "bar", "name": name, "x": list(range(1, len(values) + 1)), "y": [round(v, 5) for v in values],
        "marker": {"color": fill, "line": {"color": color, "width": 1.5}}, "hoverinfo": "text",
        "hovertext": [t("tuner.fig_reached_hover", kind=name, m=m, p=numbers.exact(v))
                      for m, v in enumerate(values, start=1)],
        "text": [numbers.probability(v) for v in values], "textposition": "outside", "cliponaxis": False,
        "textfont": {**font(t, 11)},
    } for name, values, color, fill, _ in bars if values]
    most = max([0.2, *expected, *replayed])
    layout = frame(Axis(t("tuner.fig_depth"), 0.4, max(depth, 3) + 0.6, ticks=range(1, max(depth, 3) + 1)),
                   Axis(t("tuner.fig_p_reached"), 0, min(1.15, most * 1.2)), t, bargap=0.35, barmode="group")
    keys = [{"label": name, "color": color, "dash": "solid", "glyph": glyph}
            for name, values, color, _, glyph in bars if values]
    return Chart({"data": data, "layout": layout}, keys, len(expected) + len(replayed))


# ----------------------------------------------------------------------------------------------------------- step times


@dataclass(frozen=True)
class TimedCurve:
    """Milliseconds of a forward by rows: median, low, high; and the fit as points."""

    label: str
    rows: Sequence[int]
    spreads: Sequence[tuple[float, float, float]]
    fit: Sequence[tuple[float, float]]
    shown: bool
    """The one that counts; the others are drawn quietly."""


def latency(curves: Sequence[TimedCurve], parts: dict[str, Sequence[float]], recorded: bool, rows: int | None, t: Texts
            ) -> Chart:
    """Step times by rows with their spread and fit; `parts` are further milliseconds by rows, `rows` those of the
    chosen tree."""
    series: list[Series] = []
    for curve in curves:
        color = palette.ACCEPTED if curve.shown else palette.QUIET
        medians, lows, highs = (list(column) for column in zip(*curve.spreads, strict=True))
        hover = [t("tuner.fig_rows_hover", rows=row, ms=numbers.milliseconds(ms), low=numbers.milliseconds(low),
                   high=numbers.milliseconds(high)) + "\n" + curve.label
                 for row, (ms, low, high) in zip(curve.rows, curve.spreads, strict=True)]
        series.append(Series(curve.label, curve.rows, medians, color, "circle", "○" if recorded else "●", "", recorded,
                             7, lows, highs, hover))
        series.append(Series(t("tuner.fig_fit"), [x for x, _ in curve.fit], [y for _, y in curve.fit], color, "", "",
                             "solid" if curve.shown else "dot", listed=curve.shown))
    if curves:
        dashes = iter((("dash", palette.ACTION), ("dot", palette.NEXT_ROOT)))
        series += [Series(name, curves[0].rows, values, color, "", "", dash,
                          hover=[f"{name}: {numbers.milliseconds(ms)} ms" for ms in values])
                   for (name, values), (dash, color) in zip(parts.items(), dashes, strict=False)]
    most_rows = max([16, *(row for curve in curves for row in curve.rows)])
    every = [ms for curve in curves for spread in curve.spreads for ms in spread]
    every += [ms for values in parts.values() for ms in values]
    every = [ms for ms in every if ms > 0] or [1.0, 100.0]
    layout = frame(Axis(t("tuner.fig_rows"), 0.8, most_rows * 1.25, True,
                        [tick for tick in (1, 4, 16, 64, 256, 1024) if tick <= most_rows]),
                   Axis(t("tuner.fig_ms"), max(0.8 * min(every), 1e-3), 1.3 * max(every), True,
                        [10.0**power for power in range(-3, 6)]), t)
    if rows and 0.8 <= rows <= most_rows * 1.25:
        layout["shapes"] = [{"type": "line", "x0": rows, "x1": rows, "y0": 0, "y1": 1, "yref": "paper",
                             "line": {"color": palette.INK, "width": 1.2, "dash": "dot"}}]
    return _chart(series, layout)


# ----------------------------------------------------------------------------------------------------------- thresholds


@dataclass(frozen=True)
class Setting:
    """One setting of the threshold study: kind `epsilon`, `temperature`, `greedy` or `sampling`."""

    kind: str
    tokens_per_step: float
    proxy: float
    label: str
    hover: str


KINDS = {"epsilon": (palette.ACCEPTED, "circle", "●", "solid"), "temperature": (palette.PASSED, "diamond", "◆", "dash"),
         "greedy": (palette.INK, "square", "■", ""), "sampling": (palette.ACTION, "triangle-up", "▲", "")}


def thresholds(settings: Sequence[Setting], title: str, t: Texts) -> Chart:
    """Tokens per step against a quality proxy; ε and T each as a line, plain greedy and sampling as marks."""
    series = []
    for kind, (color, symbol, glyph, dash) in KINDS.items():
        of_kind = [setting for setting in settings if setting.kind == kind]
        if of_kind:
            ends = [setting.label if place in (0, len(of_kind) - 1) and dash else ""
                    for place, setting in enumerate(of_kind)]
            series.append(Series(t(f"tuner.fig_{kind}"), [one.tokens_per_step for one in of_kind],
                                 [one.proxy for one in of_kind], color, symbol, glyph, dash, False, 7,
                                 hover=[one.hover for one in of_kind], texts=ends if dash else (),
                                 below=kind == "temperature"))
    xs, ys = [one.tokens_per_step for one in settings] or [1, 2], [one.proxy for one in settings] or [0, 1]
    room = max(max(ys) - min(ys), 0.02) * 0.15
    layout = frame(Axis(t("tuner.fig_tokens_per_step"), 0.95, max(xs) * 1.08),
                   Axis(title, min(ys) - room, max(ys) + room), t, margin={"l": 56, "r": 10, "t": 10, "b": 36})
    return _chart(series, layout)
