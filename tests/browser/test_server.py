"""What one server does for many pages: sessions end with their tab, make room, and wait their turn. No model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from medusa_viz.ui import host as hosts
from medusa_viz.ui import page as pages
from tests.browser.conftest import watched
from tests.browser.explorer import Explorer


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, hosts.Sessions]]:
    """A page on the opening recording whose model never comes, and its sessions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sessions = hosts.Sessions({})
    demo = pages.build(sessions)
    # The browser's event loop runs in this thread; the server is started from another.
    starter = threading.Thread(target=pages.launch, args=(demo, "127.0.0.1", port), kwargs={"block": False})
    starter.start()
    starter.join()
    yield f"http://127.0.0.1:{port}", sessions
    demo.close()


def test_tabs_end_sessions_make_room_and_wait_their_turn(served, browser: Browser, monkeypatch):
    url, sessions = served
    page = browser.new_page()
    faults = watched(page)
    page.goto(url)
    explorer = Explorer(page).wait_drawn()
    assert len(sessions._sessions) == 1
    [own] = sessions._sessions
    for other in range(10 * hosts.MAX_SESSIONS):  # a look of the page in between makes it the newest again
        if own not in sessions._sessions:
            break
        sessions.act(f"other {other}", "hello", {})
    assert len(sessions._sessions) == hosts.MAX_SESSIONS
    explorer.act(lambda: page.click("#back"))
    expect(explorer.at("#model-status")).to_contain_text("idle the longest when the server was full")

    act, asked = sessions.act, threading.Event()

    def slow(token: str, action: str, payload: dict) -> str:
        if action == "back":
            asked.wait(20)
        return act(token, action, payload)

    def waiting(token: str) -> int:
        asked.set()
        return 2

    monkeypatch.setattr(sessions, "act", slow)
    monkeypatch.setattr(sessions, "waiting", waiting)
    page.evaluate("""() => {
      const status = document.querySelector('#model-status');
      window.said = [];
      const heard = new MutationObserver(() => window.said.push(status.textContent));
      heard.observe(status, {childList: true, subtree: true});
    }""")
    explorer.act(lambda: page.click("#back"))
    assert "2 people before you" in page.evaluate("window.said")

    kept = len(sessions._sessions)
    page.close()
    deadline = time.monotonic() + 20
    while len(sessions._sessions) == kept and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(sessions._sessions) == kept - 1, "the closed tab's session is gone"
    assert not faults
