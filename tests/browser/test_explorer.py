"""The Explorer in a real browser: steps, knobs, selection, phases. What is asserted is what a visitor would see."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tiny_page import until

from tests.browser.explorer import PATIENCE_MS

PROMPT = "Write a short story about a cat."


@pytest.fixture
def explorer(open_page):
    return open_page().wait_ready().start(PROMPT)


def test_the_page_opens_by_itself_and_the_model_becomes_ready(open_page):
    explorer = open_page().wait_ready()
    expect(explorer.page).to_have_title("Medusa-Viz")
    expect(explorer.at("#model-status")).to_contain_text("ready")
    expect(explorer.at("button#start")).to_be_enabled()
    expect(explorer.at("#tree .js-plotly-plot")).to_be_visible()


def test_it_opens_on_a_recording_that_can_be_looked_at(open_page):
    explorer = open_page()
    expect(explorer.at(".mv-banner")).to_contain_text("recorded")
    last = int(explorer.data("step"))
    assert last > 0
    explorer.act(lambda: explorer.page.click("#back"))
    explorer.wait("step", last - 1)
    explorer.act(lambda: explorer.page.click("#step"))
    explorer.wait("step", last)
    assert len(explorer.at("#text .mv-pending .mv-chip").all()) >= 4


def test_everything_fits_the_window_and_nothing_moves_between_steps(explorer):
    names = ("#tree", "#mask", "#cache", "#merits", "#step-slider", "#phase")
    boxes = {name: explorer.at(name).bounding_box() for name in names}
    for _ in range(2):
        explorer.step()
    assert {name: explorer.at(name).bounding_box() for name in boxes} == boxes
    assert all(box["y"] + box["height"] <= 900 for box in boxes.values())
    assert explorer.page.evaluate("document.documentElement.scrollHeight <= innerHeight")


def test_step_back_forward_slider_and_reset(explorer):
    before = explorer.text()
    pending = explorer.at("#text .mv-pending .mv-chip").all_text_contents()
    explorer.step()
    explorer.wait("step", 1)
    assert explorer.text() == before + "".join(pending)
    explorer.step()
    explorer.wait("step", 2)
    explorer.act(lambda: explorer.page.click("#back"))
    explorer.wait("step", 1)
    expect(explorer.at("#step")).to_have_text("Forward")
    explorer.act(lambda: explorer.page.click("#forward"))
    explorer.wait("step", 2)
    explorer.act(lambda: explorer.page.fill("#step-slider input[type=range]", "0"))
    explorer.wait("step", 0)
    assert explorer.text() == before
    explorer.act(lambda: explorer.page.click("#reset"))
    explorer.wait("step", 0)
    expect(explorer.at("#step-slider input")).to_have_attribute("max", "0")


def test_play_runs_until_pause(explorer):
    explorer.page.select_option("#speed", "16")
    explorer.page.click("#play")
    explorer.page.wait_for_function("Number(document.querySelector('#tree').dataset.step) >= 3")
    explorer.page.click("#pause")
    explorer.wait("playing", "false", ".mv")
    explorer.settled()
    step, steps = explorer.data("step"), explorer.at("#step-slider input").get_attribute("max")
    explorer.page.wait_for_timeout(400)  # nothing may come: there is no event to wait for
    assert (explorer.data("step"), steps) == (step, step)
    expect(explorer.at("#play")).to_be_visible()


def test_play_pause_and_start_again_and_again_leave_nothing_behind(explorer, threads):
    """The text after a restart is that of a fresh run, and no thread is left over (five rounds)."""
    fresh = explorer.text()
    explorer.page.select_option("#speed", "16")
    before = 0
    for round_, steps in enumerate((30, 3, 3, 3, 3)):
        explorer.page.click("#play")
        reached = f"Number(document.querySelector('#tree').dataset.step) >= {steps}"
        explorer.page.wait_for_function(reached, timeout=PATIENCE_MS)
        explorer.page.click("#pause")
        explorer.wait("playing", "false", ".mv")
        explorer.start(PROMPT)
        assert explorer.text() == fresh
        before = threads() if round_ == 0 else before

    def few() -> bool:
        explorer.page.request.get(explorer.page.url)  # a request is when the server ends threads that idled for a while
        return threads() < before + 4

    until(few, "the end of further threads: one per round would be a leak")
    explorer.step()
    explorer.wait("step", 1)
    expect(explorer.at(".mv-equality")).to_have_attribute("data-state", "equal")


def test_a_finished_run_says_why_it_ended(open_page):
    explorer = open_page().wait_ready().start("What is the capital of France?")
    explorer.page.select_option("#speed", "16")
    explorer.page.click("#play")
    expect(explorer.at("#step")).to_have_text("ended: end token", timeout=PATIENCE_MS)
    expect(explorer.at("#step")).to_be_disabled()
    expect(explorer.at("#play")).to_be_disabled()


def test_a_tree_drawn_in_the_recording_is_verified_on_request(open_page):
    explorer = open_page()
    explorer.set("top-s-1", 8)
    explorer.set("tree-size", 32)
    expect(explorer.at("#verify")).to_contain_text("Verify")
    expect(explorer.at("#verdict")).to_contain_text("not been asked")
    explorer.act(lambda: explorer.page.click("#verify"))
    expect(explorer.at("#verify")).to_be_hidden()
    explorer.page.wait_for_function("""document.querySelector('#tree .js-plotly-plot').data
      .find((one) => one.name === 'nodes').marker.symbol.slice(1).some((symbol) => symbol !== 'circle-open')""")


def test_enter_starts_and_shift_enter_does_not(open_page):
    explorer = open_page().wait_ready()
    box = explorer.at("#prompt textarea")
    box.fill("One")
    box.press("Shift+Enter")
    box.press_sequentially("two")
    expect(explorer.at("#prompt")).to_contain_text("Edited")
    explorer.act(lambda: box.press("Enter"))
    explorer.wait("step", 0)
    expect(explorer.at("#text")).to_contain_text("One⏎two")
    expect(explorer.at("#prompt")).not_to_contain_text("Edited")


def test_composing_text_never_submits(open_page):
    explorer = open_page().wait_ready()
    explorer.at("#prompt textarea").fill("日本")
    explorer.settled()
    stamp = explorer.data("stamp")
    explorer.page.evaluate("""document.querySelector('#prompt textarea').dispatchEvent(
        new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true}))""")
    assert (explorer.data("stamp"), explorer.data("busy", ".mv")) == (stamp, "false")


def test_the_phases_reveal_the_step(explorer):
    marks = "document.querySelector('#tree .js-plotly-plot').data.find((trace) => trace.name === 'nodes').marker.symbol"
    explorer.phase(1)
    explorer.page.wait_for_function(f"{marks}.slice(1).every((symbol) => symbol === 'circle-open')")
    for place in ("#verdict", "#headline"):
        expect(explorer.at(place)).to_contain_text("not been asked")
    expect(explorer.at("#text .mv-pending .mv-chip").first).not_to_be_visible()
    explorer.phase(2)
    explorer.page.wait_for_function(f"{marks}.slice(1).some((symbol) => symbol !== 'circle-open')")
    explorer.phase(4)
    dropped = explorer.at("#cache i[data-kept=false]").first
    expect(dropped).to_have_css("opacity", "0.15")
    explorer.step()
    explorer.wait("phase", 3)


def test_predict_first_arrives_before_the_verdict_and_judges_the_guess(explorer):
    explorer.page.check("#predict")
    explorer.step()
    explorer.wait("phase", 1)
    explorer.at("#tree [role=tree]").press("ArrowRight")
    explorer.phase(3)
    expect(explorer.at(".mv-sentence")).to_contain_text("You expected 1 drafted token")


def test_presets_and_a_tree_too_large_to_verify_at_once(explorer):
    presets = explorer.at("#presets option").all_text_contents()
    explorer.act(lambda: explorer.page.select_option("#presets", label=presets[1]))
    explorer.wait("nodes", 8)
    full = next(text for text in presets if "4,680" in text)
    explorer.act(lambda: explorer.page.select_option("#presets", label=full))
    explorer.wait("nodes", 4680)
    expect(explorer.at("#verify")).to_contain_text("4,680")
    expect(explorer.at("#verify")).to_be_disabled()
    expect(explorer.at("#headline")).to_contain_text("not verified")
    expect(explorer.at("#headline")).to_contain_text("over the limit")
    expect(explorer.at("#mask .mv-lens")).to_be_visible()


def test_a_fold_opens_and_closes(explorer):
    explorer.set("top-s-1", 10)
    explorer.set("tree-size", 96)
    drawn = "document.querySelector('#tree .js-plotly-plot').data.find((trace) => trace.name === 'nodes').customdata"
    folded = explorer.page.evaluate(f"{drawn}.find((place) => String(place).startsWith('fold:'))")
    explorer.act(lambda: explorer.emit("tree", {"customdata": folded}))
    assert folded not in explorer.page.evaluate(drawn)
    explorer.act(lambda: explorer.at("#tree [role=tree]").press("Escape"))
    assert folded in explorer.page.evaluate(drawn)


def test_top_s_and_size_change_the_tree(explorer):
    explorer.set("tree-size", 8)
    explorer.wait("nodes", 8)
    explorer.set("tree-size", 24, "range")
    explorer.wait("nodes", 24)
    explorer.set("top-s-4", 0, "range")
    explorer.set("top-s-3", 0)
    explorer.set("top-s-2", 1, "range")
    explorer.wait("nodes", 8)
    expect(explorer.at("#tree-size input[type=number]")).to_have_value("24")
    explorer.set("top-s-1", 2)
    explorer.wait("nodes", 4)
    for panel in ("#mask", "#cache", "#heads-table"):
        explorer.wait("nodes", 4, panel)
    expect(explorer.at("#badge")).to_contain_text("on screen after")


def test_acceptance_knobs_work_and_say_when_they_do_not(explorer):
    expect(explorer.at("#epsilon input[type=range]")).to_be_disabled()
    explorer.set("temperature", 1, "range")
    expect(explorer.at("#accept-mode input[value=typical]")).to_be_checked()
    expect(explorer.at("#epsilon input[type=range]")).to_be_enabled()
    explorer.set("epsilon", 0.04)
    expect(explorer.at("#delta input[type=number]")).to_have_value("0.2")
    strict = explorer.at("#tree [role=treeitem] .mv-is-accepted").count()
    explorer.set("epsilon", 0.01)
    explorer.set("delta", 0.01)
    assert explorer.at("#tree [role=treeitem] .mv-is-accepted").count() >= strict
    explorer.act(lambda: explorer.page.check("#accept-mode input[value=greedy]"))
    expect(explorer.at("#temperature input[type=number]")).to_have_value("0")
    explorer.act(lambda: explorer.page.check("#accept-mode input[value=rejection]"))
    expect(explorer.at("#top-p input[type=range]")).to_be_enabled()


def test_a_knob_on_a_past_step_makes_a_branch(explorer):
    explorer.step()
    explorer.act(lambda: explorer.page.click("#back"))
    explorer.set("tree-size", 2)
    expect(explorer.at("#step")).to_have_text("Branch here")
    explorer.step()
    expect(explorer.at(".mv-branches button")).to_have_count(2)
    explorer.act(lambda: explorer.at(".mv-branches button").first.click())
    expect(explorer.at(".mv-branches button").first).to_have_attribute("aria-pressed", "true")


def test_a_burst_of_slider_moves_ends_on_the_last(explorer):
    explorer.page.evaluate("""() => {
      const range = document.querySelector('#tree-size input[type=range]');
      for (let size = 2; size <= 12; size += 1) { range.value = size; range.dispatchEvent(new Event('input')); }
    }""")
    explorer.wait("nodes", 12)
    explorer.settled()
    expect(explorer.at("#tree-size input[type=number]")).to_have_value("12")
    assert explorer.data("nodes") == "12"


def test_keys_move_over_detents_and_through_the_tree(explorer):
    explorer.act(lambda: explorer.at("#tree-size input[type=range]").press("ArrowRight"))
    explorer.wait("nodes", 24)
    tree = explorer.at("#tree [role=tree]")
    walk = [("Right", "0"), ("Down", "1"), ("Up", "0"), ("Right", "0.0"), ("Left", "0"), ("Left", ""), ("Left", "")]
    for key, path in walk:
        tree.press(f"Arrow{key}")
        explorer.wait("path", path)
    explorer.phase(3)
    tree.press("Space")
    explorer.wait("phase", 4)
    explorer.act(lambda: tree.press("Space"))
    explorer.wait("step", 1)
    explorer.act(lambda: tree.press(","))
    explorer.wait("step", 0)
