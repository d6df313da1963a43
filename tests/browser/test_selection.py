"""One selection for tree, mask, table, cache, text and outline."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

PANELS = ("#tree", "#mask", "#cache", "#heads-table", "#tree .js-plotly-plot", "#mask .js-plotly-plot")


@pytest.fixture
def explorer(open_page):
    return open_page().wait_ready().start("Write a short story about a cat.")


def selected(explorer, row: int) -> None:
    for panel in PANELS:
        explorer.wait("node", row, panel)
        explorer.wait("row", row, panel)
    expect(explorer.at(f"#outline-{row}")).to_have_attribute("aria-selected", "true")
    expect(explorer.at(f"#cache i[data-row='{row}']")).to_have_attribute("data-selected", "")


def press(explorer, pixel: tuple[float, float], row: int) -> None:
    """Click a figure where it shows a row; Plotly loses a press that comes before it heard of the move."""
    explorer.page.mouse.move(*pixel)
    expect(explorer.at(f"#cache i[data-row='{row}']")).to_have_attribute("data-hovered", "")
    explorer.page.mouse.down()
    explorer.page.mouse.up()


def test_a_click_on_any_panel_selects_in_all(explorer):
    press(explorer, explorer.node_pixel(2), 2)
    selected(explorer, 2)
    assert explorer.shapes("tree") >= 2, "ring and halo"
    assert explorer.shapes("mask") == 2, "row and column"
    press(explorer, explorer.pixel("mask", 0, 5), 5)
    selected(explorer, 5)
    explorer.page.click("#cache i[data-row='3']")
    selected(explorer, 3)


@pytest.mark.parametrize("below", [0, 11])
def test_a_click_on_the_words_beside_a_marker_selects_its_node(explorer, below):
    x, y = explorer.node_pixel(4)
    explorer.page.mouse.click(x + 40, y + below)
    selected(explorer, 4)
    explorer.page.click("#tab-heads")
    explorer.page.click("#heads-table [data-head='1'][data-rank='0']")
    selected(explorer, 1)
    explorer.page.click("#text .mv-pending .mv-chip >> nth=0")
    selected(explorer, 0)


def test_scripted_plotly_events_select_too(explorer):
    explorer.emit("tree", {"customdata": 4})
    selected(explorer, 4)
    explorer.emit("mask", {"x": 0, "y": 6})
    selected(explorer, 6)


def test_hover_previews_and_lets_go(explorer):
    sentence = explorer.at(".mv-sentence")
    own = sentence.text_content()
    explorer.page.mouse.move(*explorer.node_pixel(3))
    expect(explorer.at("#cache i[data-row='3']")).to_have_attribute("data-hovered", "")
    expect(sentence).not_to_have_text(own)
    assert explorer.data("node") == "0", "hover does not select"
    explorer.page.mouse.move(700, 20)
    expect(sentence).to_have_text(own)


def test_the_selection_survives_redraws_and_moves_to_the_parent(explorer):
    explorer.emit("tree", {"customdata": 6})
    path = explorer.data("path")
    assert "." in path
    explorer.set("tree-size", 24)
    explorer.wait("path", path)
    explorer.set("top-s-2", 0)
    explorer.wait("path", path.split(".")[0])


def test_a_moved_figure_stays_so_over_steps(explorer):
    plot = "document.querySelector('#tree .js-plotly-plot')"
    reach = f"{plot}._fullLayout.xaxis.range.map((edge) => edge.toFixed(2)).join()"
    whole, mouse = explorer.page.evaluate(reach), explorer.page.mouse
    x, y = explorer.node_pixel(0)
    mouse.move(x + 40, y + 60)
    mouse.down()
    mouse.move(x + 140, y + 60, steps=4)
    mouse.up()
    explorer.page.wait_for_function(f"{reach} !== '{whole}'")
    moved = explorer.page.evaluate(reach)
    explorer.step()
    assert explorer.page.evaluate(reach) == moved
