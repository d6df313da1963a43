"""Curves of a training run: valid figures in the palette's colours, and what the page says beside them."""

import json
import re
from pathlib import Path

import plotly.graph_objects as go
import pytest

from medusa_viz.figures import charts, curves, palette
from medusa_viz.figures.texts import Texts
from medusa_viz.ui import train_view
from medusa_viz.ui.train_log import PassLine, RunLog, StepLine

T = Texts()
WEIGHTS = [0.8, 0.64, 0.512]


def step(number, stage=1, lm=None, loss=(3.0, 4.0, None)):
    lambda0 = 1.0 if stage == 1 else 0.2
    heads = sum(weight * one for weight, one in zip(WEIGHTS, loss) if one is not None)
    total = (lm or 0) + lambda0 * heads
    return StepLine(number, total, list(loss), [0.5, 0.25, None], WEIGHTS, lm, lambda0, stage, 1.0)


def joint_log():
    steps = [step(n, 1 if n < 5 else 2, None if n < 5 else 0.03) for n in range(1, 11)]
    passes = [PassLine(n, n // 5, n // 5, [0.4, 0.2], {"3": 1.2, "7": 1.3, "15": 1.4, "63": 1.5}, (5.1234, 5.1411))
              for n in (5, 10)]
    return RunLog(Path("x"), steps, passes)


@pytest.mark.parametrize("log", [joint_log(), RunLog(Path("x")), RunLog(Path("x"), [step(1)])])
def test_every_figure_is_valid_and_in_the_palette(log):
    for name, drawn in train_view.figures(log, T).items():
        figure = json.loads(drawn["figure"])
        go.Figure(figure)
        assert drawn["points"] == (len(figure["data"][0]["x"]) if figure["data"] else 0), name
        used = set(re.findall(r"#[0-9A-F]{6}", drawn["figure"], re.I)) | {entry["color"] for entry in drawn["legend"]}
        assert used <= set(palette.DARK)
        assert [entry["label"] for entry in drawn["legend"]] == [trace["name"] for trace in figure["data"]]


def test_loss_shows_every_term_and_where_the_second_stage_begins():
    drawn = train_view.figures(joint_log(), T)
    loss = json.loads(drawn["loss"]["figure"])
    assert [trace["name"] for trace in loss["data"]] == ["total", "backbone", "head 1", "head 2", "head 3"]
    assert loss["data"][1]["y"][:4] == [None] * 4 and loss["data"][4]["y"] == [None] * 10
    assert [shape["x0"] for shape in loss["layout"]["shapes"]] == [5]
    assert loss["layout"]["annotations"][0]["text"] == "stage 2"
    colors = [trace["line"]["color"] for trace in loss["data"][2:]]
    assert colors == list(palette.CURVES[:3]), "a head's colour is its depth"
    ends = {json.loads(one["figure"])["layout"]["xaxis"]["range"][1] for one in drawn.values()}
    assert len(ends) == 1, "all four share their x axis"
    rates = json.loads(drawn["rates"]["figure"])["data"]
    assert [trace["name"] for trace in rates] == ["3 nodes", "7 nodes", "15 nodes", "63 nodes"]
    assert len({trace["marker"]["symbol"] for trace in rates}) == 4


def test_curve_colours_are_seen_on_either_ground():
    def luminance(color):
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in palette.CURVES:
        assert 1.05 / (luminance(color) + 0.05) >= 3
        dark = palette.DARK[color], palette.DARK[palette.GROUND]
        assert (luminance(dark[0]) + 0.05) / (luminance(dark[1]) + 0.05) >= 3


def test_the_total_is_printed_with_its_numbers():
    assert train_view.total(step(7), T) == "Step 7: total 4.960 = 0.8·3.000 + 0.64·4.000"
    assert train_view.total(step(8, 2, 0.03), T) == (
        "Step 8: total 1.022 = backbone 0.0300 + λ0 0.2 · (0.8·3.000 + 0.64·4.000)")
    assert train_view.total(step(8, 1, None, (None,) * 3), T) == ""


def test_long_runs_are_thinned_to_their_ends():
    for count in (0, 1, curves.MOST_POINTS, curves.MOST_POINTS + 1, 99_999):
        kept = curves.thinned(count)
        assert len(kept) == min(count, curves.MOST_POINTS) == len(set(kept))
        assert not count or (kept[0], kept[-1]) == (0, count - 1)


def test_curves_stand_in_the_frame_of_all_charts():
    layout = json.loads(train_view.figures(joint_log(), T)["top1"]["figure"])["layout"]
    frame = charts.frame(charts.Axis("", 0, 1), charts.Axis("", 0, 1), T, 12)
    own = {"margin", "hovermode", "shapes", "annotations"}
    assert layout.keys() - frame.keys() == own - frame.keys()
    assert {key for key in frame if layout[key] != frame[key]} <= {*own, "xaxis", "yaxis"}
    for name in ("xaxis", "yaxis"):
        for key in ("gridcolor", "linecolor", "tickfont", "fixedrange", "zeroline"):
            assert layout[name][key] == frame[name][key]
    assert layout["xaxis"]["range"] == [0, 10.3] and "range" not in layout["yaxis"], "shares grow as far as they go"
