"""The real app in its own process, one browser, and pages that must stay free of errors and foreign requests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO
from urllib.parse import urlparse

import pytest
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright
from ports import launched, started

from medusa_viz.models.fetch import ensure_model
from medusa_viz.ui import host as hosts
from medusa_viz.ui import page as pages
from tests.browser.explorer import ANSWER_MS, ARGUMENTS, Explorer

REPOSITORY = Path(__file__).resolve().parents[2]
expect.set_options(timeout=ANSWER_MS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int | None]]:
    """Address and process of a running app; MEDUSA_VIZ_URL names one that runs already, whose process is not known."""
    if given := os.environ.get("MEDUSA_VIZ_URL"):
        yield given, None
        return
    root = tmp_path_factory.mktemp("app")
    cache = root / "cache"  # of its own: what a person calibrated or timed here changes what the pages say
    cache.mkdir()
    model = ensure_model()
    (cache / model.name).symlink_to(model)

    def start(port: int, out: TextIO) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "app.py", "--port", str(port)], cwd=REPOSITORY, stdout=out, stderr=out,
                                env={**os.environ, "MEDUSA_VIZ_CACHE": str(cache)})

    with started(start, root / "app.log") as app:
        yield app


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
        try:
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        except Error as error:
            pytest.fail(f"No Chromium could be started; run `playwright install chromium` ({error.message[:200]}).")
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def url(app: tuple[str, int | None]) -> str:
    """Address of the app."""
    return app[0]


@pytest.fixture
def threads(app: tuple[str, int | None]) -> Callable[[], int]:
    """How many threads the app has."""
    if app[1] is None:
        return lambda: 0
    return lambda: len(list(Path(f"/proc/{app[1]}/task").iterdir()))


@pytest.fixture(scope="session")
def ready(url: str, browser: Browser) -> str:
    """The address, once the model behind it is ready."""
    page = browser.new_page()
    page.goto(url)
    Explorer(page).wait_ready()
    page.close()
    return url


@pytest.fixture
def open_page(ready: str, browser: Browser) -> Iterator[Callable[..., Explorer]]:
    """Opens a page of its own visitor; at the end none may have failed or asked another machine for anything."""
    pages: list[tuple[Page, list[str]]] = []

    def open_(width: int = 1440, height: int = 900, **context: object) -> Explorer:
        page = browser.new_context(viewport={"width": width, "height": height},
                                   **{"reduced_motion": "reduce", **context}).new_page()
        pages.append((page, watched(page)))
        page.goto(ready)
        return Explorer(page).wait_drawn()

    yield open_
    for page, faults in pages:
        page.context.close()
        assert not faults, faults


def watched(page: Page) -> list[str]:
    """Faults of a page as they come: exceptions, console errors, dialogs, requests to other hosts."""
    page.set_default_timeout(ANSWER_MS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"exception: {error}"))
    page.on("console", lambda message: faults.append(f"console: {message.text}") if message.type == "error" else None)

    def on_dialog(dialog: object) -> None:
        faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def on_request(request: object) -> None:
        place = urlparse(request.url)
        if place.scheme not in ("data", "blob") and place.hostname != "127.0.0.1":
            faults.append(f"request: {request.url}")

    page.on("dialog", on_dialog)
    page.on("request", on_request)
    return faults


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, hosts.Sessions]]:
    """A page on the opening recording whose model never comes, and its sessions."""
    sessions = hosts.Sessions({})
    demo = pages.build(sessions)
    yield launched(demo), sessions
    demo.close()
