"""The navigation and the Train page in a real browser, on a tiny model whose training takes seconds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from ports import launched
from tiny_page import saved_heads, saved_model, token_file, until

from medusa_viz.training import shipped
from medusa_viz.ui import host as hosts
from medusa_viz.ui import page as pages
from tests.browser.conftest import watched
from tests.browser.explorer import PATIENCE_MS, Explorer

RUN_MS = 6 * PATIENCE_MS  # beside anything else, runs of low priority crawl
SETTINGS = {"passes": 1000, "batch": 4, "heads": 2, "layers": 1, "draft_vocabulary": 40}
"""Of a run that no machine ends before it is stopped."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A page in this process, on a tiny model, with a cache folder of its own."""
    root = tmp_path_factory.mktemp("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_VIZ_CACHE", str(root / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        token_file(root / "cache" / "data" / "<b>some.npz")
        folder = root / "cache" / "runs" / "<img src=x onerror=alert(1)>"
        saved_heads(folder, trained={"recipe": "<b>own</b>", "data": "<i>x"})
        sessions = hosts.Sessions({"model": str(saved_model(root / "tiny")), "heads": str(saved_heads(root / "heads"))})
        sessions.load_in_background()
        demo = pages.build(sessions)
        yield SimpleNamespace(url=launched(demo), sessions=sessions, root=root)
        demo.close()
        sessions.shutdown()


@pytest.fixture
def visit(server: SimpleNamespace, browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the app at an address; at the end no page may have failed or asked another machine for anything."""
    opened: list[tuple[Page, list[str]]] = []

    def open_(address: str = "", width: int = 1440, height: int = 900, **context: object) -> Page:
        page = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce",
                                   **context).new_page()
        opened.append((page, watched(page)))
        page.goto(f"{server.url}/{address}")
        Explorer(page).wait_ready()
        if address == "#train":
            page.wait_for_selector(".mv-train[data-stamp]", state="attached")
        return page

    yield open_
    for page, faults in opened:
        page.context.close()
        assert not faults, faults


def is_open(page: Page, name: str) -> None:
    expect(page.locator(".mv")).to_have_attribute("data-page", name)
    expect(page.locator(f".mv-nav a[data-to={name}]")).to_have_attribute("aria-current", "page")
    expect(page.locator(".mv-nav a[aria-current]")).to_have_count(1)


def test_pages_are_opened_by_hand_key_address_and_history(visit):
    page = visit()
    is_open(page, "explorer")
    assert page.locator(".mv-train").count() == 0, "a page is made when it is first opened"
    page.locator(".mv-nav a[data-to=train]").focus()
    page.keyboard.press("Enter")
    is_open(page, "train")
    expect(page).to_have_title("Train · Medusa-Viz")
    expect(page).to_have_url(re.compile("#train$"))
    expect(page.locator("#tree")).to_be_hidden()
    phase = page.get_attribute(".mv", "data-phase")
    page.keyboard.press("1")
    page.locator("body").press("Space")
    assert page.get_attribute(".mv", "data-phase") == phase, "the Explorer's keys rest"
    page.wait_for_selector(".mv-train[data-stamp]", state="attached")  # broken off, its loading would be a fault
    page.reload()
    is_open(page, "train")
    page.click(".mv-nav a[data-to=explorer]")
    is_open(page, "explorer")
    expect(page.locator("#tree .js-plotly-plot")).to_be_visible()
    page.wait_for_function("document.querySelector('#tree .main-svg')?.clientHeight > 200")
    page.go_back()
    is_open(page, "train")
    page.goto(page.url.replace("#train", "#nonsense"))
    is_open(page, "explorer")


def boxes(page: Page) -> dict:
    names = (".mv-train-form", ".mv-run-head", "#curve-loss", "#curve-rates", ".mv-train-runs", "#train-start")
    return {name: page.locator(name).bounding_box() for name in names}


def test_a_run_is_started_watched_stopped_and_used(visit, server, monkeypatch):
    runner, stops = server.sessions.pages["train"].runner, []
    stop = runner.stop
    monkeypatch.setattr(runner, "stop", lambda *asked: stops.append(asked) or stop(*asked))
    page = visit("#train")
    expect(page.locator(".mv-run-name").first).to_have_text("<img src=x onerror=alert(1)>")
    assert page.locator(".mv-train img, .mv-train b:not(.mv-curve-legend b)").count() == 0
    page.select_option("#train-data", label="<b>some.npz (306 reply tokens)")
    page.fill("#train-distil", "0")
    for name, value in SETTINGS.items():
        page.fill(f".mv-fields [name={name}]", str(value))
    page.click(".mv-form-more summary")
    page.fill(".mv-fields [name=log_every]", "50")
    expect(page.locator("#train-preset")).to_have_value("")
    expect(page.locator(".mv-form-foot .mv-form-help")).to_contain_text("306 reply tokens and 77,000 optimiser steps")
    page.fill("#train-name", "a b")
    page.click("#train-start")
    expect(page.locator(".mv-page-notice")).to_contain_text("“a b” is no name")
    before = boxes(page)
    page.fill("#train-name", "by-hand")
    page.click("#train-start")
    expect(page.locator(".mv-run-head")).to_have_attribute("data-state", "running")
    expect(page.locator(".mv-page-notice")).to_have_text("")
    page.click("#train-start")
    expect(page.locator(".mv-page-notice")).to_contain_text("“by-hand” is being trained already")
    loss = page.locator("#curve-loss")
    expect(loss).not_to_have_attribute("data-points", "0", timeout=RUN_MS)
    first = int(loss.get_attribute("data-points"))
    expect(loss).not_to_have_attribute("data-points", str(first), timeout=RUN_MS)
    assert int(loss.get_attribute("data-points")) > first, "the live curve grows"
    expect(loss.locator(".js-plotly-plot")).to_be_visible()
    expect(page.locator(".mv-run-total")).to_contain_text("total")
    assert boxes(page) == before, "nothing jumps"
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    page.dblclick("#train-stop")
    expect(page.locator(".mv-run-head")).to_have_attribute("data-state", "stopped", timeout=RUN_MS)
    assert stops == [("by-hand", False)], "a double click ends nothing at once"
    page.click("#train-use")
    expect(page.locator("#train-use")).to_have_text("In use", timeout=RUN_MS)
    page.click(".mv-nav a[data-to=explorer]")
    explorer = Explorer(page)
    explorer.start("abc")
    expect(page.locator(".mv-top-s .mv-knob")).to_have_count(2)
    page.click("#model-menu summary")
    expect(page.locator(".mv-models")).to_contain_text("Trained by medusa1")
    page.click("#model-menu a")
    is_open(page, "train")
    expect(page.locator("#model-menu")).not_to_have_attribute("open", "")


def test_shipped_replies_are_chosen_at_first_and_two_clicks_train_once_on_them(visit, server, monkeypatch):
    own, model = server.root / "shipped.npz", str(server.root / "tiny")
    np.savez(own, ids=np.zeros(4800, np.uint16), offsets=np.arange(121) * 40, reply_start=np.full(120, 6),
             temperature=np.array([0, 0.7] * 60, np.float16), prompt=np.arange(120), split=np.zeros(120, np.uint8))
    monkeypatch.setattr(shipped, "training_file", lambda name: own if name == model else None)
    plans = []
    monkeypatch.setattr(server.sessions.pages["train"].runner, "start", plans.append)
    page = visit("#train")
    data, distil, estimate = page.locator("#train-data"), page.locator("#train-distil"), page.locator(".mv-form-foot p")
    assert data.locator("option").all_inner_texts()[:2] == [
        "Shipped: 3,570 reply tokens to train.jsonl, greedy + 0.7", "No token file"]
    expect(data).to_have_value(str(own))
    expect(distil).to_have_value("0")
    expect(estimate).to_contain_text("3,570 reply tokens and 56 optimiser steps")
    page.locator("#train-start").evaluate("(start) => { start.click(); start.click(); }")
    until(lambda: plans, "the run")
    expect(page.locator(".mv-train")).to_have_attribute("data-busy", "false")
    expect(page.locator(".mv-page-notice")).to_have_text("")
    plan, = plans
    assert (plan.distil, plan.data) == (0, (str(server.root / "cache" / "training" / "shipped.npz"),))
    data.select_option("")
    expect(distil).to_have_value("4000")
    data.select_option(str(own))
    expect(distil).to_have_value("0")
    page.click(".mv-form-more summary")
    page.fill(".mv-fields [name=tokens]", "640")
    expect(estimate).to_contain_text("640 reply tokens and 10 optimiser steps")


def test_other_folders_are_opened_and_a_fault_leaves_the_page_whole(visit, server):
    page = visit("#train")
    page.fill("#train-path", "/nowhere/<b>")
    page.press("#train-path", "Enter")
    expect(page.locator(".mv-page-notice")).to_have_text("There is no run and there are no heads at “/nowhere/<b>”.")
    page.fill("#train-path", str(server.root / "heads"))
    page.press("#train-path", "Enter")
    expect(page.locator("h2.mv-run-name")).to_have_text("heads")
    expect(page.locator(".mv-page-notice")).to_have_text("")
    page.locator(".mv-run-row").first.click()
    expect(page.locator(".mv-run-row").first).to_have_attribute("aria-pressed", "true")


def test_a_sentence_that_is_cut_can_be_read_whole(visit):
    page = visit("", 390, 844, has_touch=True)
    page.locator("#model-menu summary").tap()
    expect(page.locator(".mv-model-choice").first).to_be_visible()
    page.fill("#models-model", "/nowhere/<b>at all")
    page.locator("#models-load").tap()
    status, whole = page.locator(".mv-status"), page.locator(".mv-whole")
    expect(status).to_contain_text("/nowhere/<b>at all", timeout=PATIENCE_MS)
    sentence = status.inner_text()
    expect(status).to_have_attribute("title", sentence)
    status.tap()
    expect(whole).to_have_text(sentence)
    box = whole.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] > 40
    assert whole.evaluate("(element) => element.scrollWidth <= element.clientWidth"), "no word of it is cut"
    status.tap()
    expect(whole).to_be_hidden()
    page = visit("#train", 1100)
    page.fill("#train-path", "/nowhere/" + "x" * 300)
    page.press("#train-path", "Enter")
    notice, whole = page.locator(".mv-train .mv-page-notice"), page.locator(".mv-whole")
    expect(notice).to_contain_text("/nowhere/xxx")
    expect(notice).to_have_attribute("title", notice.inner_text())
    notice.focus()
    page.keyboard.press("Enter")
    expect(whole).to_have_text(notice.inner_text())
    page.keyboard.press("Escape")
    expect(whole).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_one_part_at_a_time(visit, scheme):
    page = visit("#train", 390, 844, has_touch=True, color_scheme=scheme)
    for segment, part in (("form", "#train-start"), ("run", "#curve-loss"), ("runs", "#train-path")):
        page.locator(f".mv-train [data-segment={segment}]").tap()
        expect(page.locator(part)).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        small = page.evaluate("""() => [...document.querySelectorAll('.mv :is(button, select, input, summary, nav a)')]
          .filter((element) => element.offsetParent && element.type !== 'radio'
            && element.getBoundingClientRect().height < 44).map((element) => element.id || element.className)""")
        assert small == []
    page.locator(".mv-nav a[data-to=explorer]").tap()
    is_open(page, "explorer")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    expect(page.locator("#step")).to_be_visible()
