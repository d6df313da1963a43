"""What one server does for many pages: sessions end with their tab, make room, and wait their turn. No model."""

from __future__ import annotations

import threading

from playwright.sync_api import Browser, expect
from tiny_page import PATIENCE, until

from tests.browser.conftest import watched
from tests.browser.explorer import Explorer


def test_tabs_end_sessions_make_room_and_wait_their_turn(served, browser: Browser, monkeypatch):
    url, sessions = served
    page = browser.new_page()
    faults = watched(page)
    page.goto(url)
    explorer = Explorer(page).wait_drawn()
    assert len(sessions._sessions) == 1
    [own] = sessions._sessions
    most = sessions.host.limits.max_sessions
    for other in range(10 * most):  # a look of the page in between makes it the newest again
        if own not in sessions._sessions:
            break
        sessions.act(f"other {other}", "hello", {})
    assert len(sessions._sessions) == most
    explorer.act(lambda: page.click("#back"))
    expect(explorer.at("#model-status")).to_contain_text("yours was idle the longest")

    act, go = sessions.act, threading.Event()

    def slow(token: str, action: str, payload: dict) -> str:
        if action == "back":
            go.wait(PATIENCE)
        return act(token, action, payload)

    def back() -> None:
        page.click("#back")
        expect(explorer.at("#model-status")).to_have_text("2 people before you")
        go.set()

    monkeypatch.setattr(sessions, "act", slow)
    monkeypatch.setattr(sessions, "waiting", lambda token: 2)
    explorer.act(back)

    kept = len(sessions._sessions)
    page.close()
    until(lambda: len(sessions._sessions) == kept - 1, "the end of the closed tab's session")
    assert not faults
