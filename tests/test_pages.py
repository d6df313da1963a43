"""Further pages: one call reaches them all, and whatever fails is one sentence in their view."""

import json
import threading

import pytest
from tiny_page import PATIENCE

from medusa_viz.figures.texts import Texts
from medusa_viz.ui import page as page_of_gradio
from medusa_viz.ui import pages as pages_module
from medusa_viz.ui.host import Sessions
from medusa_viz.ui.knobs import ActionError
from medusa_viz.ui.pages import Page, Pages


class Counter(Page):
    name = "counter"

    def __init__(self, host, t):
        super().__init__(host, t)
        self.counts, self.closed, self.down = {}, [], False

    def do_add(self, token, n=1):
        if n > 9:
            raise ValueError("No more than 9 at once.")
        if n < 0:
            raise ActionError("no_step", index=n, branch="A")
        self.counts[token] = self.counts.get(token, 0) + 1 / n * n

    def view(self, token):
        return {"poll": 0, "count": self.counts.get(token, 0)}

    def close(self, token):
        self.closed.append(token)

    def shutdown(self):
        self.down = True


@pytest.fixture
def pages():
    return Pages([Counter], None, Texts())


def act(pages, action, payload=None, token="a", page="counter"):
    return json.loads(pages.act(token, page, action, payload or {}))


@pytest.mark.parametrize(("action", "payload", "word"), [
    ("add", {"n": 10}, "No more than 9"), ("add", {"n": -1}, "no step -1"), ("add", {"odd": 1}, "cannot take"),
    ("add", {"n": 0}, "went wrong"), ("nothing", {}, "“nothing”"), ("__init__", {}, "__init__"),
])
def test_what_fails_is_a_sentence_that_stays_until_the_next_action(pages, action, payload, word):
    assert word in act(pages, action, payload)["notice"]
    assert word in act(pages, "poll")["notice"] and word in act(pages, "hello")["notice"]
    view = act(pages, "add")
    assert view["notice"] == "" and view["count"] == 1


def test_visitors_and_pages_are_told_apart(pages):
    act(pages, "add")
    assert act(pages, "poll", token="b")["count"] == 0
    assert "“<b>”" in act(pages, "hello", page="<b>")["notice"]
    stamps = [act(pages, "poll")["stamp"] for _ in range(2)]
    assert stamps[0] < stamps[1]
    pages.close("a")
    pages.shutdown()
    assert pages["counter"].closed == ["a"] and pages["counter"].down


def test_one_visitor_comes_at_a_time_and_the_idle_make_room(pages, monkeypatch):
    monkeypatch.setattr(pages_module, "MAX_DESKS", 2)
    inside, go, most = [], threading.Event(), []

    def slow(token):
        inside.append(token)
        most.append(inside.count(token))
        go.wait(PATIENCE)
        inside.remove(token)

    pages["counter"].do_slow = slow
    calls = [threading.Thread(target=act, args=(pages, "slow", {}, token)) for token in ("a", "a", "b")]
    for call in calls:
        call.start()
    act(pages, "add", token="c")
    go.set()
    for call in calls:
        call.join(PATIENCE)
    assert max(most) == 1
    for token in "def":
        act(pages, "add", token=token)
    assert "c" in pages["counter"].closed and len(pages._desks) == 2


@pytest.mark.parametrize("bad", ["x", float("nan"), float("inf"), "\ud800"])
def test_values_that_are_no_numbers_are_one_sentence_of_ours(pages, bad):
    class Counting(Counter):
        def do_add(self, token, n=1):
            self.counts[token] = int(n)

    counting = Pages([Counting], None, Texts())
    answer = json.loads(counting.act("a", "counter", "add", page_of_gradio.readable({"n": bad})))
    assert answer["notice"] == "The page sent values that add cannot take; reload the page."
    assert json.loads(counting.act("a", "counter", "poll", {}))["count"] == 0


def test_text_that_json_cannot_hold_comes_in_without_it():
    told = page_of_gradio.readable({"\ud800": ["a\ud800b", 1, None, {"c": "d\0e"}]})
    assert told == {"?": ["a?b", 1, None, {"c": "de"}]}


def test_the_explorer_answers_hostile_text_and_goes_on():
    sessions = Sessions({})
    for action, payload in (("use", {"model": "\ud800"}), ("start", {"prompt": "a\ud800"}), ("knob", {"\ud800": 1}),
                            ("preset", {"name": "\ud800"}), ("\ud800", {}), ("open", {"path": "x"})):
        message = page_of_gradio.readable({"action": action, "payload": payload})
        assert json.loads(sessions.act("a", message["action"], message["payload"]))["stamp"] > 0
    assert json.loads(sessions.act("b", "hello", {}))["stamp"] > 0
    sessions.shutdown()
