"""Pin and compare, the plain causal mask, gains, what can be taken away, and the switches of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

NEXT_ROOT = "#6A35C9"


@pytest.fixture
def explorer(open_page):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    return page.wait_ready().start("Write a short story about a cat.")


def markers(explorer) -> dict:
    return explorer.page.evaluate("""() => {
      const {marker, customdata} = document.querySelector('#tree .js-plotly-plot').data
        .find((one) => one.name === 'nodes');
      return {symbol: marker.symbol, row: customdata};
    }""")


def rings(explorer) -> int:
    return explorer.page.evaluate("""(color) => (document.querySelector('#tree .js-plotly-plot').layout.shapes ?? [])
      .filter((shape) => shape.line.color === color).length""", NEXT_ROOT)


def test_pin_compares_a_with_b_on_the_same_prefix(explorer):
    page = explorer.page
    explorer.act(lambda: page.keyboard.press("p"))
    expect(explorer.at("#pin")).to_have_text("Unpin A")
    expect(explorer.at("[data-key=pin-nodes] .mv-ab")).to_have_text("A 16 B 16 Δ ±0")
    before = markers(explorer)
    explorer.set("temperature", 1.2)
    differing = rings(explorer)
    assert differing and differing % 2 == 0, "two rings for each node with another verdict"
    judged_b = markers(explorer)
    assert judged_b["symbol"] != before["symbol"]
    page.keyboard.down("\\")
    explorer.page.wait_for_function("document.querySelector('.mv').hasAttribute('data-showing-a')")
    page.wait_for_function("""(symbols) => JSON.stringify(document.querySelector('#tree .js-plotly-plot').data
      .find((one) => one.name === 'nodes').marker.symbol) === symbols""",
                           arg=json.dumps([symbol for symbol, row in zip(before["symbol"], before["row"], strict=True)
                                           if row != "ghost"], separators=(",", ":")))
    page.keyboard.up("\\")
    page.wait_for_function("!document.querySelector('.mv').hasAttribute('data-showing-a')")
    explorer.set("tree-size", 8)
    expect(explorer.at("[data-key=pin-nodes] .mv-ab")).to_have_text("A 16 B 8 Δ −8")
    explorer.step()
    expect(explorer.at(".mv-pin-note")).to_contain_text("another prefix")
    expect(explorer.at("#show-a")).to_be_disabled()
    expect(explorer.at("[data-key=tokens_per_step]")).to_be_visible()
    explorer.act(lambda: page.click("#pin"))
    expect(explorer.at("#pin")).to_have_text("Pin A")


def test_the_plain_causal_mask_is_crossed_out_and_says_why(explorer):
    mask = "document.querySelector('#mask .js-plotly-plot').data"
    crosses = f"({mask}.find((one) => one.name === 'causal')?.x ?? []).length"
    explorer.page.check("#causal")
    explorer.page.wait_for_function(f"{crosses} > 0")
    open_cells = explorer.page.evaluate(f"{mask}.find((one) => one.name === 'mask').z.flat().filter(Boolean).length")
    assert explorer.page.evaluate(crosses) == 17 * 18 // 2 - open_cells
    mouse = explorer.page.mouse
    mouse.move(*explorer.pixel("mask", 1, 2))
    expect(explorer.at(".mv-tip")).to_contain_text("rivals for the same place")
    mouse.move(700, 20)
    expect(explorer.at(".mv-tip")).to_be_hidden()
    explorer.set("top-s-1", 10)
    explorer.set("tree-size", 96)
    expect(explorer.at("#causal")).to_be_disabled()
    assert "64 rows" in explorer.at("label:has(#causal)").get_attribute("title")
    explorer.page.wait_for_function(f"{crosses} === 0")


def test_gains_are_sorted_and_select(explorer):
    explorer.page.click("#tab-gains")
    lines = explorer.at("#gains .mv-gain")
    expect(lines).to_have_count(16)
    values = [float(text) for text in lines.locator(".mv-number").all_text_contents() if "<" not in text]
    assert values == sorted(values, reverse=True)
    expect(explorer.at("#gains")).to_contain_text("drafts a step")
    lines.nth(2).click()
    explorer.wait("row", lines.nth(2).get_attribute("data-row"))
    expect(lines.nth(2)).to_have_attribute("data-selected", "")


def test_session_text_and_command_can_be_taken_away(explorer, tmp_path: Path):
    page = explorer.page
    explorer.step()
    explorer.step()
    explorer.listen()
    with page.expect_download() as download:
        page.click("#export summary")
        page.click("#save")
    download.value.save_as(tmp_path / "session.json")
    saved = json.loads((tmp_path / "session.json").read_text())
    assert saved["prompt"] == "Write a short story about a cat." and len(saved["branches"][0]["steps"]) == 3
    explorer.heard("Saved medusa-viz-")
    page.click("#export summary")
    page.click("#copy-text")
    explorer.heard("Text copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied and copied.split()[-1] in explorer.text()
    page.click("#export summary")
    page.click("#copy-command")
    explorer.heard("Command copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("python -m medusa_viz decode --prompt")


def test_the_greedy_check_switches_off_and_on(explorer):
    tile = explorer.at(".mv-equality")
    expect(tile).to_contain_text("nothing committed yet")
    explorer.step()
    expect(tile).to_have_attribute("data-state", "equal")
    explorer.act(lambda: explorer.page.uncheck("#check"))
    expect(tile).to_contain_text("not compared")
    explorer.act(lambda: explorer.page.check("#check"))
    expect(tile).to_have_attribute("data-state", "equal")


def test_the_projector_enlarges_the_page_and_folds_earlier(open_page):
    explorer = open_page(1920, 1080).wait_ready().start("Hello")
    explorer.set("tree-size", 32)
    drawn = "document.querySelector('#tree .js-plotly-plot').data.find((one) => one.name === 'nodes').customdata"
    assert not explorer.page.evaluate(f"{drawn}.some((place) => String(place).startsWith('fold:'))")
    box = explorer.at(".mv-panel-head").first.bounding_box()
    explorer.act(lambda: explorer.page.click("#projector"))
    explorer.page.wait_for_function(f"{drawn}.some((place) => String(place).startsWith('fold:'))")
    assert explorer.at(".mv-panel-head").first.bounding_box()["height"] == pytest.approx(1.55 * box["height"], abs=2)
    size = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
    assert explorer.page.evaluate(size) == [1920, 1080]
    explorer.wait_drawn()
    explorer.page.mouse.move(*explorer.page.evaluate("""() => {
      const box = document.querySelectorAll('#tree .points path')[3].getBoundingClientRect();
      return [box.x + box.width / 2, box.y + box.height / 2];
    }"""))
    expect(explorer.at(".mv-tip")).to_contain_text("head")


def test_keys_are_all_told(open_page):
    explorer = open_page()
    explorer.page.click("#help")
    told = explorer.at("dialog dt").all_text_contents()
    assert {"Space", "Home", "End", "P", "\\", "Esc", ", ."} <= set(told)
    explorer.page.keyboard.press("Escape")
    expect(explorer.at("dialog")).to_be_hidden()
