"""The model menu in a real browser: tiny models switched by hand, on a desktop and a phone, and a server that keeps its
model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from playwright.sync_api import Browser, Page, expect
from ports import launched
from tiny_page import saved_heads, saved_model, until

from medusa_viz.models import memory
from medusa_viz.ui import host as hosts
from medusa_viz.ui import page as pages
from tests.browser.conftest import watched
from tests.browser.explorer import PATIENCE_MS, Explorer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Two servers in this process on tiny models, one of which keeps its model."""
    root = tmp_path_factory.mktemp("menu")
    made = SimpleNamespace(root=root, model=saved_model(root / "tiny"), heads=saved_heads(root / "heads"),
                           other=saved_model(root / "<b>other"), more=saved_heads(root / "more", 4, 1), url={}, open={})
    demos = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEDUSA_VIZ_CACHE", str(root / "cache"))
        patch.setattr(memory, "free", lambda device: int(7e9))
        for locked in (False, True):
            sessions = hosts.Sessions({"model": str(made.model), "heads": str(made.heads)}, locked=locked)
            sessions.load_in_background()
            demo = pages.build(sessions)
            made.url[locked], made.open[locked] = launched(demo), sessions
            demos.append((demo, sessions))
        yield made
        for demo, sessions in demos:
            demo.close()
            sessions.shutdown()


@pytest.fixture
def visit(servers: SimpleNamespace, browser: Browser) -> Iterator[Callable[..., Page]]:
    opened: list[tuple[Page, list[str]]] = []

    def open_(width: int = 1440, height: int = 900, locked: bool = False, address: str = "", **context: object) -> Page:
        page = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce",
                                   **context).new_page()
        opened.append((page, watched(page)))
        page.goto(f"{servers.url[locked]}/{address}")
        Explorer(page).wait_ready()
        return page

    yield open_
    for page, faults in opened:
        page.context.close()
        assert not faults, faults


def opened(page: Page) -> None:
    page.click("#model-menu summary")
    expect(page.locator(".mv-model-choice").first).to_be_visible()


def named(page: Page, model: str, heads: str) -> None:
    """Ask for a model in the menu's form."""
    opened(page)
    page.fill("#models-model", model)
    page.fill("#models-heads", heads)
    page.press("#models-heads", "Enter")
    expect(page.locator("#model-menu")).not_to_have_attribute("open", "")


def test_a_model_is_switched_while_the_old_run_goes_on(visit, servers):
    page = visit()
    explorer = Explorer(page)
    explorer.start("abc")
    opened(page)
    expect(page.locator(".mv-model-choice[aria-current]")).to_contain_text("tiny with heads")
    large = page.locator(".mv-model-choice", has_text="Vicuna 33B v1.3 (Medusa-2)")
    expect(large).to_contain_text("Does not fit here: it needs 141.8 GB")
    expect(large).to_be_disabled()
    expect(page.locator(".mv-model-choice", has_text="TinyLlama")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.locator("#model-menu summary")).to_be_focused()
    phase = page.get_attribute(".mv", "data-phase")
    named(page, str(servers.other), str(servers.more))
    expect(page.locator(".mv-status")).to_contain_text("<b>other · CPU", timeout=PATIENCE_MS)
    expect(page.locator(".mv-status")).to_contain_text("is ready: Start uses it")
    assert page.locator(".mv-header b:text-is('other')").count() == 0
    assert page.get_attribute(".mv", "data-phase") == phase
    explorer.step()
    expect(page.locator(".mv-top-s .mv-knob")).to_have_count(3)
    explorer.start("abc")
    expect(page.locator(".mv-top-s .mv-knob")).to_have_count(4)
    expect(page.locator(".mv-model")).to_contain_text("<b>other")
    opened(page)
    expect(page.locator(".mv-model-choice[aria-current]")).to_have_count(0)
    page.locator(".mv-model-choice", has_text="tiny with heads").click()
    expect(page.locator(".mv-status")).to_contain_text("tiny · CPU", timeout=PATIENCE_MS)


def test_a_fault_is_one_sentence_and_letters_are_typed_into_the_boxes_alone(visit, servers):
    page = visit()
    explorer = Explorer(page)
    explorer.start("abc")
    opened(page)
    page.locator("#models-model").press_sequentially("/no p,.\\where")
    expect(page.locator(".mv")).not_to_have_attribute("data-showing-a", "")
    page.click("#models-load")
    expect(page.locator(".mv-status")).to_contain_text("/no p,.\\where is no folder here", timeout=PATIENCE_MS)
    expect(page.locator(".mv-status")).to_contain_text("The running model stays in use.")
    # What a letter had asked for would have been answered before that.
    assert page.locator("#step-slider .mv-step-count").inner_text().startswith("step 1")
    expect(page.locator(".mv-pin button").first).to_have_attribute("aria-pressed", "false")
    explorer.step()
    expect(page.locator(".mv-status")).to_have_text("ready")


def test_heads_of_a_model_that_nobody_knows_wait_in_the_form(visit, servers):
    lone = saved_heads(servers.root / "<i>lone", width=8)
    config = json.loads((lone / "config.json").read_text())
    (lone / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "N/A"}))
    page = visit()
    expect(page.locator(".mv-banner")).to_be_visible()
    named(page, "", str(lone))
    expect(page.locator(".mv-status")).to_contain_text("Name the model of these heads too", timeout=PATIENCE_MS)
    assert page.locator(".mv-status").bounding_box()["width"] > 200, "a recording's banner makes room"
    page.locator("#models-heads").evaluate("(box) => { box.value = 'typed since'; }")
    opened(page)
    expect(page.locator("#models-heads")).to_have_value(str(lone))
    expect(page.locator("#models-model")).to_have_value("")
    expect(page.locator("#models-model")).to_be_focused()
    expect(page.locator("#models-asked")).to_have_text("Name the model of these heads, and they load with it.")
    page.fill("#models-model", str(servers.model))
    page.fill("#models-heads", str(servers.heads))
    page.press("#models-model", "Enter")
    until(lambda: servers.open[False].host.status.astray is None and servers.open[False].host.status.coming is None,
          "the model")
    opened(page)
    expect(page.locator("#models-asked")).to_have_text("")


def test_details_open_beside_a_model_without_choosing_it(visit, servers):
    page = visit()
    opened(page)
    entry = page.locator(".mv-model-entry", has_text="Vicuna 33B v1.3 (Medusa-2)")
    more, facts = entry.get_by_role("button", name="Details of"), entry.locator("dl")
    expect(facts).to_be_hidden()
    height = entry.bounding_box()["height"]
    more.click()
    expect(facts).to_contain_text("FasterDecoding/medusa-1.0-vicuna-33b-v1.3")
    expect(facts).to_contain_text("on CUDA cards only: 38.8 GB in 8bit, 23.3 GB in 4bit")
    expect(more).to_have_attribute("aria-expanded", "true")
    more.click()
    expect(facts).to_be_hidden()
    assert entry.bounding_box()["height"] == height
    own = page.locator(".mv-model-entry", has_text="tiny with heads")
    expect(own.get_by_role("button")).to_have_count(1)
    told = page.locator(".mv-models > div > .mv-facts").first
    expect(told).to_contain_text("shared output matrix (the backbone's LM head)")
    expect(told).to_contain_text("0 unused, 0 missing")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_menu_on_a_phone(visit, scheme):
    page = visit(390, 844, has_touch=True, color_scheme=scheme)
    page.locator("#model-menu summary").tap()
    expect(page.locator(".mv-model-choice").first).to_be_visible()
    box = page.locator(".mv-models").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["y"] + box["height"] <= 844
    page.locator(".mv-model-more").last.tap()
    expect(page.locator(".mv-model-entry dl").last).to_be_visible()
    assert page.locator(".mv-models").evaluate("(menu) => menu.scrollWidth <= menu.clientWidth")
    small = page.evaluate("""() => [...document.querySelectorAll('.mv-models :is(button, select, input, a)')]
      .filter((element) => element.getBoundingClientRect().height < 44).map((element) => element.textContent)""")
    assert small == []
    page.locator("#models-load").scroll_into_view_if_needed()
    expect(page.locator("#models-load")).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_of_another_model_only_what_holds_for_it_is_said(visit):
    page = visit(locked=True)
    expect(page.locator("#step")).to_be_disabled()
    expect(page.locator("#step")).to_have_attribute("title", re.compile("press Start"))
    expect(page.locator("#examples")).to_contain_text("Translate this into German")
    expect(page.locator("#examples")).not_to_contain_text("tokens/step")
    expect(page.locator(".mv-prompt .mv-note")).to_have_text("")
    explorer = Explorer(page).start("abc")
    page.click("#export summary")
    expect(page.locator("#copy-text")).to_be_disabled()
    expect(page.locator("#copy-command")).to_be_disabled()
    expect(page.locator("#copy-command")).to_have_attribute("title", re.compile("does not tell"))
    page.keyboard.press("Escape")
    explorer.step()
    page.click("#export summary")
    expect(page.locator("#copy-text")).to_be_enabled()


def test_a_locked_server_only_informs(visit):
    page = visit(locked=True)
    opened(page)
    expect(page.locator(".mv-models")).to_contain_text("This server keeps its model.")
    assert page.locator(".mv-model-choice:enabled").count() == 0
    expect(page.locator("#models-model")).to_be_hidden()
    train = visit(locked=True, address="#train")
    train.wait_for_selector(".mv-train[data-stamp]", state="attached")
    expect(train.locator(".mv-train-form")).to_contain_text("trains nothing for visitors")
    expect(train.locator("#train-start")).to_be_hidden()
    expect(train.locator("#train-path")).to_be_hidden()
    expect(train.locator(".mv-page-notice")).to_have_text(re.compile("^$"))
