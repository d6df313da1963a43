"""Visitors, hostile text, themes and screens."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import REPOSITORY

HOSTILE = ["<b>bold</b><script>alert(1)</script>", "a${1+1}b `x` %{x}", "$100 and $200",
           "<img src=x onerror=alert(1)>", "&amp;", "<|im_end|>"]
UNICODE = {"  x\n\n\ty": "⏎⏎⇥y", "🙂": "<F0 9F", "日本語": "本"}


def test_two_visitors_never_mix(open_page):
    cat, dog = open_page().wait_ready(), open_page().wait_ready()
    cat.start("Tell me about cats.")
    dog.start("List three colours.")
    dog.set("tree-size", 4)
    cat.page.click("#step")
    dog.page.click("#step")
    for explorer in (cat, dog):
        explorer.wait("step", 1)
        explorer.settled()
    assert (cat.data("nodes"), dog.data("nodes")) == ("16", "4")
    assert "cats" in cat.text() and "cats" not in dog.text()
    assert "colours" in dog.text() and "colours" not in cat.text()
    alone = open_page().wait_ready().start("Tell me about cats.")
    alone.step()
    assert alone.text() == cat.text()


def test_hostile_prompts_are_shown_as_they_are(open_page):
    explorer = open_page().wait_ready()
    for prompt in HOSTILE:
        explorer.start(prompt)
        assert prompt in explorer.text(), prompt
        explorer.step()
        assert explorer.at("#text script, #text img, #text b").count() == 0


@pytest.mark.parametrize("prompt, shown", UNICODE.items())
def test_whitespace_and_split_characters_are_visible(open_page, prompt, shown):
    explorer = open_page().wait_ready().start(prompt)
    assert shown in explorer.text()
    chips = explorer.at("#text .mv-chip").all_text_contents()
    assert all(chips) and "\ufffd" not in "".join(chips)


def test_dark_follows_the_system_and_the_button(open_page):
    ink = "document.querySelector('#tree .js-plotly-plot').data.find((trace) => trace.name === 'nodes').marker.color[0]"
    explorer = open_page(color_scheme="dark").wait_ready().start("Hello")
    explorer.wait("theme", "dark", ".mv")
    explorer.page.wait_for_function(f"{ink} === '#F3F4F6'")
    expect(explorer.at(".mv")).to_have_css("background-color", "rgb(20, 24, 31)")
    explorer.page.click("#theme")
    explorer.wait("theme", "light", ".mv")
    explorer.page.wait_for_function(f"{ink} === '#1F2933'")
    explorer.page.reload()
    explorer.wait_drawn().wait("theme", "light", ".mv")


def test_a_phone_shows_the_outline_and_has_no_sideways_scroll(open_page):
    explorer = open_page(390, 844, has_touch=True).wait_ready().start("Write a short story about a cat.")
    outline = explorer.at("#tree [role=tree]")
    expect(outline).to_be_visible()
    expect(outline.locator("[role=treeitem]")).to_have_count(17)
    outline.locator("[role=treeitem]").nth(3).tap()
    expect(outline.locator("[role=treeitem]").nth(3)).to_have_attribute("aria-selected", "true")
    for segment in ("mask", "verdict", "knobs"):
        explorer.page.click(f"button[data-segment={segment}]")
        assert explorer.page.evaluate("document.documentElement.scrollWidth") == 390
    explorer.page.click("button[data-segment=mask]")
    explorer.page.wait_for_function("document.querySelector('#mask .main-svg')?.clientWidth > 300")
    small = explorer.page.evaluate("""() => [...document.querySelectorAll('.mv button, .mv select')]
      .filter((element) => element.offsetParent && element.getBoundingClientRect().height < 44)
      .map((element) => element.id)""")
    assert small == []


def test_a_panel_hidden_while_it_changed_is_drawn_at_its_size(open_page):
    explorer = open_page(390, 844).wait_ready().start("Hello")
    explorer.step()
    explorer.page.set_viewport_size({"width": 1440, "height": 900})
    explorer.page.wait_for_function("""() => ['tree', 'mask'].every((id) => {
      const plot = document.querySelector(`#${id} .main-svg`);
      const host = document.querySelector(`#${id} .mv-plot`);
      return plot && plot.clientWidth === host.clientWidth && plot.clientHeight > 200;
    })""")


def test_the_server_hands_out_only_its_own_files(open_page):
    explorer = open_page()
    loaded = explorer.page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert any(name.endswith("/assets/explorer.js") for name in loaded)
    base = explorer.page.url.rstrip("/")
    for path in (str(REPOSITORY / "app.py"), "/etc/passwd", "assets/../app.py"):
        assert explorer.page.request.get(f"{base}/gradio_api/file={path}").status in (403, 404)
