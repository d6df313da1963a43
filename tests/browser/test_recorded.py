"""The page on its opening recording, which needs no model: what is not revealed yet, what is folded, what is gone."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from medusa_viz.ui import prompt_box
from tests.browser.conftest import watched
from tests.browser.explorer import Explorer

DRAWN = "document.querySelector('#tree .js-plotly-plot').data.find((trace) => trace.name === 'nodes').customdata"


@pytest.fixture
def explorer(served, browser):
    page = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce").new_page()
    faults = watched(page)
    page.goto(served[0])
    yield Explorer(page).wait_drawn()
    page.context.close()
    assert not faults, faults


def test_examples_are_tagged_with_what_was_measured(explorer):
    expect(explorer.page.locator("#examples option", has_text="Medusa loses")).to_have_count(1)
    hint = explorer.page.locator("#examples option", has_text="Medusa loses").get_attribute("title")
    assert "plain decoding was faster" in hint and "{" not in hint
    expect(explorer.page.locator("#examples option", has_text="tokens/step")).to_have_count(7)
    expect(explorer.at(".mv-prompt .mv-note")).to_contain_text("English")


def test_predict_first_gives_nothing_away(explorer):
    explorer.page.click("#tab-gains")
    expect(explorer.at("#gains")).to_contain_text("this step accepted")
    explorer.page.check("#predict")
    explorer.act(lambda: explorer.page.click("#back"))
    explorer.act(lambda: explorer.page.click("#forward"))
    explorer.wait("phase", 1)
    for phase in (1, 2):
        explorer.phase(phase)
        expect(explorer.at("#gains")).to_contain_text("drafts a step")
        expect(explorer.at("#gains")).not_to_contain_text("accepted")
    heights = [dot.bounding_box()["height"] for dot in explorer.at(".mv-dots i").all()]
    assert heights[-1] == 4 < min(heights[:-1])
    explorer.phase(3)
    expect(explorer.at("#gains")).to_contain_text("this step accepted")


def test_the_selected_node_is_always_drawn(explorer):
    page = explorer.page
    explorer.act(lambda: page.select_option("#presets", "full"))
    page.focus(".mv-outline")
    for _ in range(3):  # the last child of the last child of the last child: far down the fold
        for key in ("ArrowRight", *["ArrowDown"] * 7):
            page.keyboard.press(key)
            explorer.settled()
    explorer.wait("path", "7.7.7")
    page.wait_for_function(f"{DRAWN}.includes({explorer.data('node')})")
    page.keyboard.press("Escape")
    page.wait_for_function(f"{DRAWN}.some((place) => String(place).startsWith('fold:'))")
    explorer.settled()
    page.wait_for_function(f"{DRAWN}.includes(Number(document.querySelector('#tree').dataset.node))")


def test_what_is_folded_can_be_opened_from_the_keyboard(explorer):
    explorer.act(lambda: explorer.page.select_option("#presets", "full"))
    more = explorer.at(".mv-outline .mv-folded")
    expect(more).to_have_attribute("role", "treeitem")
    before = explorer.at(".mv-outline [data-row]").count()
    more.focus()
    explorer.page.keyboard.press("Enter")
    expect(explorer.at(".mv-outline")).to_be_focused()
    assert explorer.at(".mv-outline [data-row]").count() > before


def test_what_is_being_typed_stays_over_redraws(served, browser):
    page = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce").new_page()
    faults = watched(page)
    page.add_init_script("""(() => {
      const real = window.fetch, held = new Promise((go) => { window.go = go; });
      window.fetch = async (...asked) => {
        if (String(asked[0].url ?? asked[0]).includes('component_server')) await held;
        return real(...asked);
      };
    })()""")
    page.goto(served[0])
    page.fill("#prompt textarea", "typed at once")
    page.evaluate("window.go()")
    explorer = Explorer(page).wait_drawn()
    expect(explorer.at("#prompt textarea")).to_have_value("typed at once")
    box = explorer.at("#tree-size input[type=number]")
    before = box.input_value()
    box.fill("")
    explorer.act(lambda: page.locator("#back").dispatch_event("click"))
    expect(box).to_be_focused()
    expect(box).to_have_value("")
    box.blur()
    expect(box).not_to_have_value("")
    page.context.close()
    assert before and not faults, faults


def test_nothing_is_saved_of_a_run_that_is_gone(explorer, served):
    sessions = served[1]
    for token in list(sessions._sessions):
        sessions.close(token)
    explorer.page.click("#export summary")
    explorer.page.click("#save")
    expect(explorer.at("#model-status")).to_contain_text("Your run is gone")
    assert explorer.at("#prompt textarea").get_attribute("maxlength") == str(prompt_box.MOST)
