"""The Tuner page in a browser: recommend, choose, edit, export, import, use in the Explorer; jobs, sizes, keys."""

import json

import pytest
from playwright.sync_api import expect

from tests.browser.explorer import PATIENCE_MS, Explorer

ROWS = (1, 2, 4, 8, 16, 64, 256)
SPREADS = [{"median": 10 + row / 4, "low": 9 + row / 4, "high": 11 + row / 3} for row in ROWS]
NOTHING = {"median": 0.2, "low": 0.2, "high": 0.2}
CURVE = json.dumps({
    "medusa_viz_latency": 1, "about": {"device": "<b>Far away</b>", "date": "2026-01-02"}, "rows": ROWS,
    "curves": [{"prefix": 64, "verify": SPREADS}, {"prefix": 1024, "verify": SPREADS}], "heads": NOTHING,
    "redraft": NOTHING, "accept": [NOTHING] * len(ROWS), "commit": [NOTHING] * len(ROWS)})
EXACT = "[[0], [0, 0], [1], [0, 0, 0]]"
MARKS = "document.querySelector('#tuner-tree .js-plotly-plot').data.find((trace) => trace.name === 'nodes')"
FIRST_SLOT = f"() => {MARKS}.customdata[{MARKS}.marker.symbol.indexOf('circle-open')]"


@pytest.fixture
def tuner(open_page):
    """Opens a visitor's Tuner; returns its page."""
    def open_(*size):
        explorer = open_page(*size)
        page = explorer.page
        page.evaluate("location.hash = 'tuner'")
        expect(page.locator(".mv-tuner[data-ready=true]")).to_be_visible(timeout=PATIENCE_MS)
        return page

    return open_


def act(page, do):
    """Do something that asks the server, and wait for its answer."""
    stamp = page.get_attribute(".mv-tuner", "data-stamp")
    do()
    expect(page.locator(".mv-tuner")).not_to_have_attribute("data-stamp", stamp or "", timeout=PATIENCE_MS)
    expect(page.locator(".mv-tuner")).to_have_attribute("data-busy", "false", timeout=PATIENCE_MS)


def paste(page, text):
    page.click("#tuner-tab-exchange")
    page.fill("#tuner-import-text", text)
    act(page, lambda: page.click("#tuner-import"))


def nodes(page):
    return int(page.get_attribute("#tuner-tree", "data-nodes"))


def load_curve(page):
    page.click("#tuner-load-curve")
    page.fill("#curve-text", CURVE)
    act(page, lambda: page.click("#curve-load"))
    expect(page.locator(".mv-curve-dialog")).not_to_be_visible()


def test_a_recorded_curve_leads_to_a_tree_that_the_explorer_drafts(tuner):
    page = tuner()
    load_curve(page)
    expect(page.locator("#tuner-device")).to_have_value("loaded")
    assert page.locator("#tuner-device option:checked").inner_text() == "<b>Far away</b>, recorded on 2026-01-02"
    expect(page.locator(".mv-advice[data-state=tree] h2")).to_contain_text("★", timeout=PATIENCE_MS)
    for tab in ("speed", "steps", "reached", "scatter"):
        page.click(f"#tuner-tab-{tab}")
        curve = page.locator(f"#tuner-{tab} .mv-curve-box")
        expect(curve).not_to_have_attribute("data-points", "0", timeout=PATIENCE_MS)
        expect(page.locator(f"#tuner-{tab} .js-plotly-plot .main-svg").first).to_be_visible(timeout=PATIENCE_MS)
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight"), "one screen"
    act(page, lambda: page.click(".mv-batches [data-batch='32']"))
    expect(page.locator(".mv-batches [aria-pressed=true]")).to_have_attribute("data-batch", "32")
    paste(page, EXACT)
    page.click("#tuner-use")
    expect(page.locator(".mv")).to_have_attribute("data-page", "explorer")
    expect(page.locator(".mv-readout")).to_contain_text("own tree of 4 nodes (2/1/1)", timeout=PATIENCE_MS)


def test_sequoia_takes_the_size_that_step_times_favour(tuner):
    page = tuner()
    act(page, lambda: page.select_option("#tuner-kind", "best-dense"))
    expect(page.locator("#tuner-sized")).not_to_be_visible()
    act(page, lambda: page.select_option("#tuner-kind", "sequoia"))
    act(page, lambda: page.fill("#tuner-budget input[type=number]", "4680"))
    assert nodes(page) == 4680, "every builder takes every budget"
    load_curve(page)
    expect(page.locator(".mv-choice-help")).to_contain_text("Step times favour")
    act(page, lambda: page.click("#tuner-sized"))
    assert 0 < nodes(page) < 64 and f"favour {nodes(page)} node" in page.inner_text(".mv-choice-help")
    expect(page.locator("#tuner-sized")).to_be_disabled()


def test_a_download_ends_as_its_format_does(tuner):
    page = tuner()
    paste(page, "[[0], [0, 0]]")
    expect(page.locator(".mv-choice-notes")).to_contain_text("Read as: Medusa list or TensorRT-LLM JSON, all nodes.")
    for name, ending in (("triton", "txt"), ("tensorrt", "json"), ("tgi", "txt")):
        act(page, lambda name=name: page.select_option("#tuner-format", name))
        with page.expect_download() as download:
            page.click("#tuner-download")
        assert download.value.suggested_filename == f"medusa-viz-{name}.{ending}"


def test_a_dynamic_tree_is_rebuilt_at_each_step_of_the_explorer(tuner):
    page = tuner()
    act(page, lambda: page.select_option("#tuner-kind", "dynamic"))
    act(page, lambda: page.fill("#tuner-budget input[type=number]", "7"))
    page.click("#tuner-use")
    expect(page.locator(".mv")).to_have_attribute("data-page", "explorer")
    title, readout = page.locator(".mv-tree-panel h2"), page.locator(".mv-readout")
    expect(title).to_have_text("Tree, rebuilt each step", timeout=PATIENCE_MS)
    explorer = Explorer(page).start("Name three animals that live in the sea.")
    drawn = set()
    for _ in range(5):
        explorer.step()
        explorer.wait("nodes", 7)
        drawn.add(page.evaluate("""() => {
          const { data } = document.querySelector('#tree .js-plotly-plot');
          const { x, y } = data.find((trace) => trace.name === 'nodes');
          return JSON.stringify([x, y]);
        }"""))
    assert len(drawn) > 1
    expect(readout).to_contain_text("dynamic 10·10·10·10: up to 7 nodes, here")
    explorer.set("tree-size", 4)
    expect(page.locator("#badge")).to_have_attribute("data-kind", "subtree")
    expect(readout).to_contain_text("dynamic 10·10·10·10: up to 4 nodes, here")
    explorer.step()
    explorer.wait("nodes", 4)
    explorer.act(lambda: page.click("#back"))
    explorer.act(lambda: page.click("#back"))
    explorer.wait("nodes", 7)
    expect(readout).to_contain_text("dynamic 10·10·10·10: up to 7 nodes, here")
    explorer.act(lambda: page.select_option("#presets", "chain"))
    expect(title).to_have_text("Candidate tree")
    explorer.step()


def test_choose_prune_add_undo_by_mouse_and_keys(tuner):
    page = tuner()
    act(page, lambda: page.select_option("#tuner-kind", "best-dense"))
    act(page, lambda: page.fill("#tuner-budget input[type=number]", "12"))
    before = nodes(page)
    assert 6 <= before <= 12
    act(page, lambda: page.select_option("#tuner-kind", "published:mc_sim_7b_63"))
    assert nodes(page) == 63 and page.locator("#tuner-budget input[type=number]").is_disabled()
    act(page, lambda: page.click("#tree-undo"))
    assert nodes(page) == before
    act(page, lambda: page.click("#tree-edit"))
    row = page.wait_for_function(FIRST_SLOT).json_value()  # the figure is drawn a frame later
    act(page, lambda: click_row(page, row))
    assert nodes(page) == before + 1
    act(page, lambda: page.click("#tree-edit"))
    page.locator("#tuner-tree").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    act(page, lambda: page.keyboard.press("Delete"))
    assert nodes(page) < before
    act(page, lambda: page.keyboard.press("+"))
    act(page, lambda: page.keyboard.press("Control+z"))
    act(page, lambda: page.keyboard.press("Control+z"))
    assert nodes(page) == before + 1
    act(page, lambda: page.click("#tree-redo"))
    assert nodes(page) < before


def click_row(page, row):
    page.locator("#tuner-tree .js-plotly-plot").evaluate(
        "(plot, row) => plot.emit('plotly_click', {points: [{customdata: row}]})", row)


def test_growth_is_played_node_by_node(tuner):
    page = tuner()
    act(page, lambda: page.select_option("#tuner-kind", "chain"))
    total = nodes(page)
    page.locator("#tuner-tree").evaluate("""(tree) => {
      const keep = (element, name) => {  // the value, and each that comes after it
        const now = () => element.getAttribute(name), values = [now()];
        const heard = new MutationObserver(() => { if (now() !== values.at(-1)) values.push(now()); });
        heard.observe(element, {attributes: true, attributeFilter: [name]});
        return values;
      };
      window.grown = keep(tree, 'data-grown');
      window.labels = keep(document.querySelector('#tuner-play'), 'aria-label');
    }""")
    page.click("#tuner-play")
    page.wait_for_function("window.labels.length === 3", timeout=PATIENCE_MS)
    assert page.evaluate("window.labels") == ["Play", "Pause", "Play"]
    assert page.evaluate("window.grown.map(Number)") == [total, *range(total + 1)]


def test_export_and_import_round_trip_and_hostile_text_is_text(tuner):
    page = tuner()
    paste(page, EXACT)
    fingerprint = page.get_attribute(".mv-tuner-tree-panel h2", "title")
    for name in ("medusa", "tensorrt-leaves", "triton", "tree"):
        act(page, lambda name=name: page.select_option("#tuner-format", name))
        text = page.input_value("#tuner-export")
        act(page, lambda: page.select_option("#tuner-kind", "chain"))
        paste(page, text)
        assert page.get_attribute(".mv-tuner-tree-panel h2", "title") == fingerprint
    act(page, lambda: page.select_option("#tuner-format", "vllm"))
    expect(page.locator(".mv-exchange-notes")).to_contain_text("cannot express this tree")
    expect(page.locator("#tuner-copy")).to_be_disabled()
    paste(page, "[[<img src=x onerror=alert(1)>]]")
    expect(page.locator(".mv-tuner .mv-page-notice")).to_contain_text("not a list of paths")
    assert page.locator(".mv-tuner img").count() == 0 and nodes(page) == 4


def test_a_job_shows_its_progress_and_is_cancelled(tuner):
    page = tuner()
    act(page, lambda: page.click("#tuner-time"))
    expect(page.locator(".mv-job")).to_have_attribute("data-job", "time")
    expect(page.locator(".mv-job-text")).to_contain_text("rows behind", timeout=PATIENCE_MS)
    expect(page.locator("#tuner-calibrate")).to_be_disabled()
    act(page, lambda: page.click("#tuner-cancel"))
    expect(page.locator(".mv-job")).to_have_attribute("data-job", "", timeout=PATIENCE_MS)
    expect(page.locator("#tuner-time")).to_be_enabled()


def test_on_a_phone_it_is_one_column_with_room_for_thumbs(tuner):
    page = tuner(390, 844)
    expect(page.locator("#tuner-tree .js-plotly-plot .main-svg").first).to_be_visible(timeout=PATIENCE_MS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    small = page.evaluate("""() => [...document.querySelectorAll('.mv-tuner :is(button, select)')]
      .filter((one) => one.offsetParent && one.getBoundingClientRect().height < 43.5)
      .map((one) => one.id || one.textContent)""")
    assert not small, small
    wide = page.evaluate("""() => [...document.querySelectorAll('.mv-tuner .mv-panel')]
      .filter((one) => one.offsetParent && one.getBoundingClientRect().width < 340).map((one) => one.id)""")
    assert not wide, wide
    cut = page.evaluate("""() => [...document.querySelectorAll('.mv-tuner [role=tab]')].filter((one) =>
      one.getBoundingClientRect().right > 390 || one.scrollWidth > one.clientWidth).map((one) => one.id)""")
    assert not cut, cut
