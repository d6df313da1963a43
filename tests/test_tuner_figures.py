"""The Tuner's figures: valid for Plotly, and robust where there is little or odd data."""

import itertools
import json

import plotly.graph_objects as go
import pytest

from medusa_viz.figures import charts, palette, tuner_figures
from medusa_viz.figures.charts import Axis, Series
from medusa_viz.figures.texts import Texts
from medusa_viz.figures.tuner_figures import Setting, Spot, TimedCurve
from medusa_viz.tuning.specs import BUILDERS

T = Texts()
HOSTILE = "<b>bold</b> $x$ %{x} &amp;"


def valid(chart):
    """The figure as Plotly takes it; every colour has a dark partner."""
    figure = json.loads(json.dumps(chart.figure))
    go.Figure(figure)
    for color in _colors(figure):
        assert color in palette.DARK or color.startswith("rgba(0,0,0,0"), color
    return figure


def _colors(value, inside=False):
    if isinstance(value, str):
        return [value] if inside and value.startswith(("#", "rgba")) else []
    if isinstance(value, list):
        return itertools.chain.from_iterable(_colors(item, inside) for item in value)
    if isinstance(value, dict):
        return itertools.chain.from_iterable(_colors(item, inside or "color" in key) for key, item in value.items())
    return []


@pytest.mark.parametrize("share", [[], [[0.5]], [[0.4, 0.0, 0.001], [0.0, 0.0, 0.0]], [[1.0] * 10] * 5])
def test_heat_has_a_cell_for_every_head_and_rank(share):
    chart = tuner_figures.heat(share, [], [], (), T)
    figure = valid(chart)
    assert chart.points == sum(map(len, share)) == sum(len(row) for row in figure["data"][0]["z"])
    assert len(figure["layout"]["yaxis"]["ticktext"]) == len(share)


def test_heat_tells_intervals_on_hover():
    chart = tuner_figures.heat([[0.5, 0.1]], [[0.45, 0.08]], [[0.55, 0.12]], (1234,), T)
    told = valid(chart)["data"][0]["hovertext"][0][1]
    assert told == "head 1, rank 1: right at 0.100 of positions [0.08, 0.120], n = 1,234"


def spots(kind, values):
    return [Spot(kind, HOSTILE, n, value, hover=HOSTILE) for n, value in enumerate(values, start=1)]


def test_trees_draw_predicted_hollow_and_measured_filled():
    lines = {name: spots(name, [1.2, 1.4, None]) for name in BUILDERS}
    measured = [Spot("sparse", "a", 2, 1.3, 1.2, 1.5, "x"), Spot("own", "b", 4, None)]
    chosen, best = spots("own", [1.5])[0], spots("sparse", [1.6])[0]
    chart = tuner_figures.trees(lines, measured, chosen, best, "y", T, (1.0, HOSTILE))
    figure = valid(chart)
    hollow = {trace["name"]: trace["marker"]["symbol"] for trace in figure["data"]}
    assert all(hollow[name].endswith("-open") for name in BUILDERS)
    filled = next(trace for trace in figure["data"] if trace["name"] == "measured here")
    assert filled["marker"]["symbol"] == "star" and filled["error_y"]["array"] == [0.2]
    assert filled["error_y"]["arrayminus"] == [0.1]
    assert "<b>" not in figure["data"][0]["hovertext"][0] and len({key["label"] for key in chart.legend}) == 7 + 3


def test_published_trees_are_points_named_in_the_free_corner():
    high, low = spots("published", [1.8, 1.9]), spots("published", [1.1, 1.2])
    for published, corner, order in ((high, 0, [1.9, 1.8]), (low, 1, [1.2, 1.1])):
        unknown = Spot("published", "a<b>", 63, None)
        chart = tuner_figures.trees({}, [], None, None, "y", T, published=[unknown, *published])
        figure = valid(chart)
        assert not chart.legend, "the names stand below their mark"
        points, label = figure["data"][0], figure["layout"]["annotations"][0]
        assert points["mode"] == "markers" and points["y"] == order and points["marker"]["symbol"] == "pentagon-open"
        assert label["y"] == corner and label["text"].count("<br>") == 1 and "<b>" not in label["text"]
        assert f"best first: {order[0]:.3f} to {order[1]:.3f}" in label["text"]


def test_trees_of_nothing_and_of_no_nodes():
    assert tuner_figures.trees({}, [], None, None, "y", T).points == 0
    chart = tuner_figures.trees({}, [Spot("plain", "p", 0, 1.0)], Spot("own", "o", 0, 1.0), None, "y", T)
    assert valid(chart)["data"][0]["x"] == [0.8], "a log axis has no 0"


def test_scatter_has_two_panes():
    found = {"random-dense": [(4, 1.2, None, "x")], "sparse": [(4, 1.5, 40.0, "y")]}
    figure = valid(tuner_figures.scatter(found, T))
    assert [trace.get("xaxis") for trace in figure["data"]] == [None, "x2"] * 2
    assert figure["data"][0]["marker"]["symbol"] == "circle-open" and figure["data"][2]["marker"]["symbol"] == "star"
    valid(tuner_figures.scatter({}, T))


@pytest.mark.parametrize(("expected", "replayed"), [([], []), ([0.4], []), ([0.4, 0.2], [0.5, 0.1])])
def test_reached_bars_are_the_shares(expected, replayed):
    chart = tuner_figures.reached(expected, replayed, T)
    assert [sum(bar["y"]) for bar in valid(chart)["data"]] == pytest.approx([sum(v) for v in (expected, replayed) if v])


def test_latency_names_spread_and_fit():
    curve = TimedCurve("prefix 64", (1, 2), [(10.0, 9.0, 12.0), (11.0, 10.0, 11.5)], [(1, 10), (2, 11)], True)
    figure = valid(tuner_figures.latency([curve], {"heads": [2.0, 2.0], "accept": [0.0, 1.0]}, True, 2, T))
    assert figure["data"][0]["marker"]["symbol"] == "circle-open", "recorded elsewhere"
    assert figure["data"][0]["error_y"]["array"] == [2.0, 0.5]
    assert "middle half 9.0 to 12" in figure["data"][0]["hovertext"][0]
    assert tuner_figures.latency([], {}, False, None, T).points == 0


def test_thresholds_label_their_ends_and_survive_equal_values():
    settings = [Setting("epsilon", 1.5, 0.0, f"ε {e}", "x") for e in (0.01, 0.1, 0.25)]
    settings.append(Setting("greedy", 1.0, 0.0, "", "y"))
    figure = valid(tuner_figures.thresholds(settings, "proxy", T))
    assert figure["data"][0]["text"] == ["ε 0.01", "", "ε 0.25"] and "text" not in figure["data"][1]["mode"]
    assert figure["layout"]["yaxis"]["range"][0] < figure["layout"]["yaxis"]["range"][1]
    valid(tuner_figures.thresholds([], "proxy", T))


def test_series_keep_equal_labels_apart_and_gaps_open():
    trace = charts.trace(Series(HOSTILE, [1, 2], [float("nan"), None], palette.INK, hover=[HOSTILE, HOSTILE]))
    assert trace["y"] == [None, None] and len(trace["hovertext"]) == 2 and "<" not in trace["name"]
    assert charts.axis(Axis("x", 1, 1), T)["range"] == [1, 2], "no axis without a length"
