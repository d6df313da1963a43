"""Figures: valid Plotly, few traces, positions by row and never by text, text of the model never markup."""

import base64
import io
import re

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from synthetic import ACCURACY, make_snapshot, make_step

from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense, from_paths
from medusa_viz.figures import layout, mask, numbers, palette, tokens
from medusa_viz.figures.fold import FOLD_ABOVE, MOST_LINES, fold
from medusa_viz.figures.texts import Texts, table
from medusa_viz.tuning.builders import sparse
from medusa_viz.ui import view

T = Texts()
# The paper's 63 nodes for Vicuna-7B (mc_sim_7b_63): 42 leaves.
PAPER_63 = from_paths([
    [0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [4], [0, 4], [2, 0], [0, 5],
    [0, 0, 1], [5], [0, 6], [6], [0, 7], [0, 1, 0], [1, 1], [7], [0, 8], [0, 0, 2], [3, 0], [0, 9], [8], [9], [1, 0, 0],
    [0, 2, 0], [1, 2], [0, 0, 3], [4, 0], [2, 1], [0, 0, 4], [0, 0, 5], [0, 0, 0, 0], [0, 1, 1], [0, 0, 6], [0, 3, 0],
    [5, 0], [1, 3], [0, 0, 7], [0, 0, 8], [0, 0, 9], [6, 0], [0, 4, 0], [1, 4], [7, 0], [0, 1, 2], [2, 0, 0], [3, 1],
    [2, 2], [8, 0], [0, 5, 0], [1, 5], [1, 0, 1], [0, 2, 1], [9, 0], [0, 6, 0], [0, 0, 0, 1], [1, 6], [0, 7, 0]])
SHAPES = {"plain": dense([]), "chain": dense([1, 1, 1, 1]), "paper Fig. 2": dense([2, 3]),
          "first load": sparse(ACCURACY, 16, (4, 3, 2, 2)), "63": PAPER_63, "dense 64": dense([8, 7]),
          "256": sparse(ACCURACY, 256), "deep": dense([1] * 12)}
HOSTILE = ["<b>bold</b>", "<script>alert(1)</script>", "a${1+1}b", "%{x}", "$100", "␠and␠$200",
           "<img src=x onerror=alert(1)>", "&amp;", "<|im_end|>", "<F0 9F>", "", " ", "⏎⏎", "\n\n\t", "\u200d",
           "日本語", "\ufffd"]


def built(shape, seed=1, acceptance=None, verified=True, **changes):
    step = make_step(shape, seed, acceptance, verified=verified, agree=0.8)
    return view.build(make_snapshot([step], **changes), T)


def figures(built_view):
    """Every figure of a view as go.Figure, which checks each property."""
    shown = [go.Figure(data=data, layout=built_view["tree"]["figure"]["layout"], skip_invalid=False)
             for data in built_view["tree"]["data"]]
    return [*shown, go.Figure(built_view["mask"]["figure"], skip_invalid=False)]


def trace(traces, name):
    return next(trace for trace in traces if trace["name"] == name)


def strings(value):
    """Every string inside a figure."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("acceptance", [Acceptance(), Acceptance("typical", 0.9), Acceptance("rejection", 1.2)],
                         ids=lambda acceptance: acceptance.mode)
def test_figures_are_valid_plotly_with_few_traces(name, acceptance):
    made = built(SHAPES[name], 3, acceptance)
    for figure in figures(made):
        assert len(figure.data) <= 10
    names = [[trace["name"] for trace in data] for data in made["tree"]["data"]]
    assert names == [names[0]] * 4
    assert "shapes" not in made["tree"]["figure"]["layout"] and "width" not in made["tree"]["figure"]["layout"]


def test_an_unverified_tree_and_an_empty_page_are_valid_too():
    for made in (built(dense([8, 8, 8, 8]), verified=False), view.build(make_snapshot([]), T)):
        figures(made)


@pytest.mark.parametrize("name", ["first load", "63", "dense 64"])
def test_repeated_texts_keep_their_own_rows(name):
    shape = SHAPES[name]
    made = built(shape, texts={token: "␠the" for token in range(200)})
    for phase, data in enumerate(made["tree"]["data"], start=1):
        marks, labels = trace(data, "nodes"), trace(data, "labels")
        rows = [row for row in marks["customdata"] if isinstance(row, int)]
        assert sorted(rows) == list(range(shape.nodes + 1))
        assert len(marks["x"]) == len(marks["y"]) == len(labels["x"]) == len(labels["text"])
        places = set(zip(marks["x"], marks["y"], strict=True))
        assert len(places) == len(marks["x"])
        assert ("ghost" in marks["customdata"]) == (phase >= 3)
    axis = made["mask"]["figure"]["layout"]["yaxis"]
    assert len(set(axis["tickvals"])) == len(axis["ticktext"])


def test_mask_cells_are_the_mask_and_every_row_is_labelled_by_position_row_and_token():
    shape = SHAPES["first load"]
    made = built(shape)
    heat = trace(made["mask"]["figure"]["data"], "mask")
    assert np.array_equal(np.array(heat["z"]) > 0, shape.mask)
    assert np.array_equal(np.array(heat["z"]) == mask.SELF, np.eye(17, dtype=bool))
    axis = made["mask"]["figure"]["layout"]["yaxis"]
    assert axis["tickvals"] == list(range(17))
    expected = [[str(214 + depth), str(row)] for row, depth in enumerate(shape.depth)]
    assert [label.split()[:2] for label in axis["ticktext"]] == expected
    assert [["✓" if cell else "" for cell in row] for row in shape.mask] == heat["text"]


@pytest.mark.parametrize("shape", [sparse(ACCURACY, 100), dense([8, 8, 8, 8])], ids=["100", "4,680"])
def test_overview_shows_every_open_cell(shape):
    made = built(shape, verified=shape.nodes <= 256)
    image = trace(made["mask"]["figure"]["data"], "mask")
    picture = Image.open(io.BytesIO(base64.b64decode(image["source"].split(",")[1])))
    pixels, rows = np.asarray(picture), shape.nodes + 1
    assert pixels.shape[0] <= 128 and image["dx"] * len(pixels) == pytest.approx(rows)
    bins = np.arange(rows) * len(pixels) // rows
    pooled = np.zeros(pixels.shape, bool)
    row, column = np.nonzero(shape.mask)
    pooled[bins[row], bins[column]] = True
    assert np.array_equal(pixels > 0, pooled)
    assert made["mask"]["kind"] == "overview"


def test_text_of_the_model_is_never_markup():
    texts = {token: HOSTILE[token % len(HOSTILE)] for token in range(200)}
    for name in ("first load", "63", "256"):
        made = built(SHAPES[name], 2, Acceptance("typical", 0.8), texts=texts)
        # What stays after our own markup is taken out may hold no markup, no dollar and no bare ampersand.
        for text in strings([made["tree"]["data"], made["tree"]["figure"], made["mask"]["figure"]["layout"],
                             [t for t in made["mask"]["figure"]["data"] if t["type"] != "image"]]):
            rest = re.sub(r"</?b>|<br>", "", text.replace("%{text}", ""))
            assert not re.search(r"[<>$]|&(?!amp;|lt;|gt;|#36;)", rest), text
        templates = [t for data in made["tree"]["data"] for t in data if "hovertemplate" in t or "texttemplate" in t]
        assert not templates


@pytest.mark.parametrize("text", HOSTILE)
def test_tokens_are_never_empty_and_marked_once(text):
    shown = tokens.visible(text)
    assert shown.strip() and "\ufffd" not in shown and tokens.visible(shown) == shown
    assert tokens.spaced(text).strip() and tokens.quoted(text).startswith("'")


def test_token_display():
    assert tokens.visible(" the") == tokens.visible("␠the") == "␣the"
    assert tokens.spaced("␠the") == " the" and tokens.spaced(" ") == "␣" and tokens.spaced("  x") == "␣␣x"
    assert tokens.visible("<F0 9F>") == "<F0 9F>" and tokens.visible("\n\t") == "⏎⇥"
    assert tokens.escaped("<b>&$") == "&lt;b&gt;&amp;&#36;"
    assert tokens.shortened("日本語日本語", 7) == "日本語…" and tokens.width("日x") == 3


def test_numbers_are_written_by_one_rule():
    written = {0.61: "0.610", 0.0004: "<0.001", 0.0: "0.000", 1.0: "1.000", 0.9999: ">0.999"}
    assert {p: numbers.probability(p) for p in written} == written
    assert numbers.compared(0.0901, 0.09) == ("0.0901", "0.0900")
    assert numbers.compared(-2.1, -1.4, 1) == ("−2.1", "−1.4")
    assert numbers.milliseconds(84.4) == "84" and numbers.milliseconds(3.14) == "3.1"
    assert numbers.duration(15_200) == "15 s" and numbers.duration(84.4) == "84 ms"
    assert numbers.ratio(1.857, 14) == "1.86" and numbers.ratio(1.857, 9) == "1.9" and numbers.subscript(12) == "₁₂"


def test_colours_are_known_to_the_theme_table():
    assert len({hex_.upper() for hex_ in palette.DARK}) == len(palette.DARK)
    made = [built(SHAPES[name], 2, Acceptance("typical", 0.8)) for name in ("first load", "256", "plain")]
    made.append(built(dense([8, 8, 8, 8]), verified=False))
    for one in made:
        used = {text for text in strings([one["tree"]["data"], one["tree"]["figure"], one["mask"]["figure"]["layout"],
                                          one["mask"]["figure"]["data"]]) if re.fullmatch("#[0-9A-Fa-f]{6}", text)}
        assert used and used <= set(palette.DARK)
    assert {*palette.RAMP, *palette.RAMP_INK, *(mark.color for mark in palette.MARKS.values())} <= set(palette.DARK)


def _contrast(one, other):
    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return np.dot([0.2126, 0.7152, 0.0722], linear)

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_in_both_themes():
    grounds = {palette.GROUND: palette.DARK[palette.GROUND]}
    for light, dark in grounds.items():
        for mark in palette.MARKS.values():
            if mark.edge != "dotted" or mark.color != palette.PILL:
                assert _contrast(mark.color, light) >= 3 and _contrast(palette.DARK[mark.color], dark) >= 3
        for ink in (palette.INK, palette.INK_2, palette.NEXT_ROOT):
            assert _contrast(ink, light) >= 4.5 and _contrast(palette.DARK[ink], dark) >= 4.5
        for color in palette.OVERVIEW[1:]:
            assert _contrast(color, light) >= 3 and _contrast(color, dark) >= 3
    for fill, ink in (*zip(palette.RAMP, palette.RAMP_INK, strict=True), (palette.PILL, palette.PILL_INK)):
        assert _contrast(fill, ink) >= 4.5 and _contrast(palette.DARK[fill], palette.DARK[ink]) >= 4.5


trees = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=120).map(from_paths)


@settings(max_examples=60, deadline=None)
@given(trees, st.integers(0, 99), st.data())
def test_layout_is_tidy_for_any_tree(shape, seed, data):
    path_p = np.cumprod(np.r_[1, np.random.default_rng(seed).random(shape.nodes)])
    keep = data.draw(st.lists(st.integers(0, shape.nodes), max_size=4))
    ghost = data.draw(st.sampled_from([None, 0, shape.nodes]))
    folded = fold(shape, path_p, [*keep, ghost or 0])
    assert set(keep) <= set(folded.visible) and len(folded.visible) + folded.total == shape.nodes + 1
    assert all(shape.parent[row] in folded.visible for row in folded.visible[1:])
    placed = layout.arrange(shape, folded, ghost)
    # No two marks share a place, parents stand among their children, everything lies inside the axes.
    assert len({(round(placed.x[node], 3), placed.y[node]) for node in placed.graph}) == len(placed.graph)
    for node in placed.graph:
        assert placed.x[node] < placed.scale.right and -0.5 < placed.y[node] < placed.scale.bottom
        lines = [placed.y[child] for child in placed.graph.successors(node) if child != layout.GHOST]
        if lines:
            assert placed.y[node] == pytest.approx((lines[0] + lines[-1]) / 2) and lines == sorted(lines)
    # Edges between two columns never cross: the children's order is the parents' order.
    for depth in range(shape.height):
        row = [node for node in folded.visible if shape.depth[node] == depth]
        spans = [[placed.y[child] for child in placed.graph.successors(node) if child != layout.GHOST]
                 for node in sorted(row, key=lambda node: placed.y[node])]
        flat = [line for span in spans for line in span]
        assert flat == sorted(flat)


@pytest.mark.parametrize("name", ["first load", "63", "dense 64"])
def test_axes_do_not_depend_on_the_verdicts(name):
    rules = (Acceptance(), Acceptance("typical", 1.0))
    made = [built(SHAPES[name], seed, acceptance) for seed in range(4) for acceptance in rules]
    axes = [(one["tree"]["figure"]["layout"]["xaxis"], one["tree"]["figure"]["layout"]["yaxis"]) for one in made]
    assert axes == [axes[0]] * len(axes)
    if name == "first load":  # a small tree keeps a free line for the next root, so not even the nodes move
        places = [[(node["x"], node["y"]) for node in one["tree"]["nodes"]] for one in made]
        assert places == [places[0]] * len(places)


@pytest.mark.parametrize("shape", [SHAPES["256"], dense([8, 8, 8, 8]), dense([10] * 3)], ids=["256", "4,680", "1,110"])
def test_large_trees_are_folded(shape):
    made = built(shape, verified=shape.nodes <= 256)
    marks = trace(made["tree"]["data"][2], "nodes")
    pills = [row for row in marks["customdata"] if str(row).startswith("fold:")]
    rows = [row for row in marks["customdata"] if isinstance(row, int)]
    assert pills and len(rows) <= FOLD_ABOVE + 12 and made["tree"]["folded"] == shape.nodes + 1 - len(rows)
    labels = trace(made["tree"]["data"][2], "labels")["text"]
    written = [int(text[1:].replace(",", "")) for text in labels if text.startswith("+")]
    assert sum(written) == made["tree"]["folded"]
    lines = made["tree"]["figure"]["layout"]["yaxis"]["range"][0]
    assert lines < MOST_LINES + 14
    assert any(trace["name"] == "histogram" for trace in made["tree"]["data"][0]) == (shape.nodes > 600)
    drawn = {node["row"] for node in made["tree"]["nodes"] if node["x"] is not None}
    assert drawn == set(rows)


def test_the_fold_never_hides_the_accepted_path_nor_where_it_stopped():
    shape = sparse(ACCURACY, 256)
    for seed in range(6):
        step = make_step(shape, seed, agree=0.95)
        made = view.build(make_snapshot([step]), T)
        last = step.verdict.accepted[-1]
        wanted = {*step.verdict.accepted, *np.flatnonzero(shape.parent == last).tolist()}
        drawn = {node["row"] for node in made["tree"]["nodes"] if node["x"] is not None}
        assert wanted <= drawn
        opened = view.build(make_snapshot([step]), T, opened=[(9,)])
        family = set(np.flatnonzero(shape.parent == shape.row_of[(9,)]).tolist())
        assert family <= {node["row"] for node in opened["tree"]["nodes"] if node["x"] is not None}


def test_phases_reveal_step_by_step():
    made = built(SHAPES["first load"], 3)
    propose, verify, accept, commit = [trace(data, "nodes") for data in made["tree"]["data"]]
    assert set(propose["marker"]["symbol"]) == {"square", "circle-open"}
    assert "circle" in verify["marker"]["symbol"] and "x" in verify["marker"]["symbol"]
    bold = [[text for text in trace(data, "labels")["text"] if "✓" in text] for data in made["tree"]["data"]]
    accepted = len(made["text"]["pending"]) - 1
    assert [len(texts) for texts in bold] == [0, 0, accepted, accepted]
    assert set(commit["marker"]["opacity"]) == {1, 0.22} and set(accept["marker"]["opacity"]) == {1}
    # Nothing in the first phase gives the answer away.
    assert trace(made["tree"]["data"][0], "probabilities")["text"][1].startswith("head")


def test_every_text_key_in_use_exists_and_every_key_is_used():
    import pathlib

    root = pathlib.Path(__file__).parents[1] / "medusa_viz"
    source = "\n".join(path.read_text() for folder in ("figures", "ui") for path in (root / folder).glob("*.py"))
    used = set(re.findall(r'"((?:view|fig)\.[a-z0-9_.]+)"', source))
    built_up = {prefix.rstrip(".") for prefix in re.findall(r'f"((?:view|fig)\.[a-z_.]+)\{', source)}
    known = {key for key in table()["en"] if key.startswith(("view.", "fig."))}
    assert not {key for key in used if key not in known}
    assert not {key for key in known - used if not any(key.startswith(prefix) for prefix in built_up)}
