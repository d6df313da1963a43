"""Visitors of one server: whose run is gone is told so, and nothing grows with what strangers send."""

import json

import pytest
from tiny_session import serving

from medusa_viz.decoding import records
from medusa_viz.decoding.settings import ServerLimits
from medusa_viz.ui.page import answer

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def page():
    yield from serving()


def test_the_oldest_idle_session_makes_room_and_its_owner_is_told(page):
    page.sessions.host.limits = ServerLimits(max_sessions=2)
    page.act("start", "old", prompt="abcdef")
    page.act("hello", "second")
    page.act("hello", "third")
    assert set(page.sessions._sessions) == {"second", "third"}
    view = page.act("poll", "old")
    assert view["steps"]["count"] == 0 and "idle" in view["status"]["notice"]
    assert "idle" in page.act("poll", "old")["status"]["notice"], "a look that nobody asked for may pass unread"


def test_whose_run_is_gone_is_told_so_and_nothing_is_done_in_its_place(page):
    page.act("start", "maker", prompt="abcdef")
    page.act("step", "maker")
    page.sessions._opening = records.from_json(page.sessions.record("maker"))
    page.act("start", prompt="zyxw")
    page.act("step")
    page.sessions.close("one")  # its connection broke
    assert page.sessions.record("one") == page.sessions.written("one") == "", "no file of somebody else's run"
    view = page.act("step")
    assert "connection broke" in view["status"]["notice"] and "Press Start" in view["status"]["notice"]
    assert view["run"]["recorded"] and view["steps"]["index"] == 1, "the recording's own step is not committed"
    assert not page.act("start", prompt="zyxw")["status"]["notice"]


@pytest.mark.parametrize("action", ["hello", "start"])
def test_a_page_that_comes_anew_hears_of_no_loss(page, action):
    payload = {"prompt": "abc"} if action == "start" else {}
    assert not page.act(action, "new", **payload)["status"]["notice"]


def test_a_page_tells_its_room_even_to_a_session_that_was_lost(page):
    page.act("screen", "gone", tree=[900, 500], mask=[470, 266], fold=24)
    assert page.of("gone").screen.fold == 24
    assert page.sessions.record("gone") == ""
    view = page.act("knob", "gone", size=3)  # sent before the page could say that the run is gone
    assert "connection broke" in view["status"]["notice"] and page.of("gone").knobs.walls.size != 3
    page.act("knob", "gone", size=3)
    assert page.of("gone").knobs.walls.size == 3 and page.of("gone").screen.fold == 24


def test_only_nodes_of_the_shown_tree_are_kept_open(page):
    page.act("start", prompt="abcdef")
    page.act("knob", top_s=[4, 3, 2, 2], size=88)
    page.act("open", path="0.1")
    assert page.of().opened == {(0, 1)}
    assert "9.9" in page.act("open", path="9.9")["status"]["notice"]
    page.act("knob", top_s=[2, 1, 0, 0], size=3)
    page.act("open", path="1")
    assert page.of().opened == {(1,)}


@pytest.mark.parametrize("token", ["", "x" * 32, TOKEN + "0", TOKEN.upper(), TOKEN + "\n", None, 7, [TOKEN]])
def test_what_is_no_token_of_a_page_makes_no_session(page, token):
    for message in ({"action": "hello"}, {"action": "poll", "page": "train"}, {"action": "record"}):
        assert answer(page.sessions, {"token": token, "payload": {}, **message}) == "{}"
    assert not page.sessions._sessions and not page.sessions.pages._desks


def test_a_token_as_the_page_makes_them_is_served(page):
    assert json.loads(answer(page.sessions, {"token": TOKEN, "action": "hello", "payload": {}}))["stamp"] > 0
    assert set(page.sessions._sessions) == {TOKEN}
