"""The navigation and the Train page in a real browser, on a tiny model whose training takes seconds."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from playwright.sync_api import Browser, Page, expect
from tiny_page import saved_heads, saved_model, token_file

from medusa_viz.ui import host as hosts
from medusa_viz.ui import page as pages
from tests.browser.conftest import watched
from tests.browser.explorer import Explorer

RUN_MS = 90_000
SETTINGS = {"passes": 40, "batch": 64, "heads": 2, "layers": 1, "draft_vocabulary": 40}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A page in this process, on a tiny model, with a cache folder of its own."""
    root = tmp_path_factory.mktemp("train")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_VIZ_CACHE", str(root / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        token_file(root / "cache" / "data" / "<b>some.npz")
        folder = root / "cache" / "runs" / "<img src=x onerror=alert(1)>"
        saved_heads(folder, trained={"recipe": "<b>own</b>", "data": "<i>x"})
        sessions = hosts.Sessions({"model": str(saved_model(root / "tiny")), "heads": str(saved_heads(root / "heads"))})
        sessions.load_in_background()
        demo = pages.build(sessions)
        starter = threading.Thread(target=pages.launch, args=(demo, "127.0.0.1", port), kwargs={"block": False})
        starter.start()
        starter.join()
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", sessions=sessions, root=root)
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


def test_a_run_is_started_watched_stopped_and_used(visit, server):
    page = visit("#train")
    expect(page.locator(".mv-run-name").first).to_have_text("<img src=x onerror=alert(1)>")
    assert page.locator(".mv-train img, .mv-train b:not(.mv-curve-legend b)").count() == 0
    page.select_option("#train-data", label="<b>some.npz (306 reply tokens)")
    page.fill("#train-distil", "0")
    for name, value in SETTINGS.items():
        page.fill(f".mv-fields [name={name}]", str(value))
    page.click(".mv-form-more summary")
    page.fill(".mv-fields [name=log_every]", "1")
    expect(page.locator("#train-preset")).to_have_value("")
    expect(page.locator(".mv-form-foot .mv-form-help")).to_contain_text("306 reply tokens and 200 optimiser steps")
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
    if first < 200:  # on idle cores the whole run may be over by the first look
        expect(loss).not_to_have_attribute("data-points", str(first), timeout=RUN_MS)
        assert int(loss.get_attribute("data-points")) > first, "the live curve grows"
    expect(loss.locator(".js-plotly-plot")).to_be_visible()
    expect(page.locator(".mv-run-total")).to_contain_text("total")
    assert boxes(page) == before, "nothing jumps"
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    stop = page.locator("#train-stop")
    if stop.is_enabled():
        stop.click()
    expect(page.locator(".mv-run-head")).to_have_attribute("data-state", re.compile("stopped|finished"), timeout=RUN_MS)
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


def test_other_folders_are_opened_and_a_fault_leaves_the_page_whole(visit, server):
    page = visit("#train")
    page.fill("#train-path", "/nowhere/<b>")
    page.press("#train-path", "Enter")
    expect(page.locator(".mv-page-notice")).to_have_text("There is no run and there are no heads at /nowhere/<b>.")
    page.fill("#train-path", str(server.root / "heads"))
    page.press("#train-path", "Enter")
    expect(page.locator("h2.mv-run-name")).to_have_text("heads")
    expect(page.locator(".mv-page-notice")).to_have_text("")
    page.locator(".mv-run-row").first.click()
    expect(page.locator(".mv-run-row").first).to_have_attribute("aria-pressed", "true")


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
