"""Recordings: a saved session opens anywhere, and goes on live only with the model that it was made with."""

import json
from dataclasses import replace

import pytest
from tiny import random_drafter
from tiny_session import committed, serving

from medusa_viz.decoding import records
from medusa_viz.decoding.settings import Walls
from medusa_viz.ui import host as hosts


@pytest.fixture
def page():
    yield from serving()


@pytest.fixture
def recorded(page):
    """The page, whose visitors see a recording of its own model first; its last step, pending, commits several."""
    page.act("start", prompt="abcdef")
    while len(page.of().entry.step.verdict.committed) < 3 or page.of().index < 1:
        page.act("step")
    page.sessions._opening = records.from_json(page.sessions.record("one"))
    return page


def test_a_saved_session_opens_again_without_a_model(page):
    page.act("start", prompt="abcdef")
    page.act("step")
    page.act("back")
    page.act("knob", size=5)
    page.act("step")
    text = page.sessions.record("one")
    recording = records.from_json(text)
    assert records.to_json(recording) == text and "/" not in recording.heads  # a file for others names no folder here
    found = hosts.Sessions({})
    found._opening = recording
    view = json.loads(found.act("x", "hello", {}))
    assert view["run"]["recorded"] and view["run"]["banner"]
    assert found.session("x").knobs.walls == Walls()
    first = json.loads(found.act("x", "goto", {"index": 0}))
    assert first["steps"]["index"] == 0
    narrow = json.loads(found.act("x", "knob", {"temperature": 1.0, "size": 3}))
    assert narrow["knobs"]["badge"]["kind"] == "subtree" and len(narrow["tree"]["nodes"]) == 4
    wide = json.loads(found.act("x", "knob", {"top_s": [10, 10, 0, 0], "size": 100}))
    assert wide["status"]["notice"] and wide["tree"]["nodes"][1]["verdict"] == "unverified"
    assert json.loads(found.act("x", "start", {"prompt": "hi"}))["status"]["notice"]


def test_a_recording_goes_on_live_where_it_stopped(recorded):
    page = recorded
    view = page.act("hello", "late")
    assert view["run"]["recorded"]
    for _ in range(3):
        view = page.act("step", "late")
    assert not view["run"]["recorded"]
    tokens = committed(page.of("late"))
    assert tokens == page.text[: len(tokens)] and len(tokens) > len(committed(page.of()))


def test_what_goes_on_is_what_the_model_drafts_now_not_what_was_recorded(recorded):
    """On another device, or with heads trained anew, the rows of a fresh look hold other tokens than the record."""
    page, engine = recorded, recorded.sessions.host.model.engine
    engine.drafter = random_drafter(engine.backbone, heads=4)
    page.act("hello", "late")
    for _ in range(6):
        assert not page.act("step", "late")["status"]["notice"]
    tokens = committed(page.of("late"))
    assert tokens == page.text[: len(tokens)]


@pytest.mark.parametrize("other", ["model", "heads"])
def test_a_recording_of_another_model_or_of_other_heads_is_only_looked_at(recorded, other):
    page, opening = recorded, recorded.sessions._opening
    beyond = [9999] * len(opening.prompt_ids)  # no rows of the tiny model's embedding
    page.sessions._opening = replace(opening, prompt_ids=beyond, **{other: "another"})
    run = page.act("hello", "late")["run"]
    assert not run["can"]["step"] and not run["can"]["play"] and run["can"]["start"] and run["can"]["back"]
    assert "press Start" in run["verify_blocked"]
    for action in ("step", "verify"):
        view = page.act(action, "late")
        assert view["status"]["notice"] == run["verify_blocked"] and view["run"]["recorded"]
    assert page.act("back", "late")["run"]["can"]["step"], "going through it needs no model"
    assert page.act("knob", "late", temperature=1.0)["knobs"]["badge"]["kind"] == "logits"
    assert not page.act("start", "late", prompt="abcdef")["run"]["recorded"]
    assert page.act("step", "late")["steps"]["index"] == 1


def test_neither_end_tokens_nor_the_context_of_another_model_judge_a_recording(recorded):
    page = recorded
    page.sessions._opening = replace(page.sessions._opening, model="another")
    backbone = page.sessions.host.model.engine.backbone
    committed = page.act("hello", "late") and page.of("late").entry.step.verdict.committed
    backbone.model.generation_config.eos_token_id = committed[0]
    page.act("knob", "late", temperature=0.1)
    page.act("knob", "late", temperature=0)
    assert page.of("late").entry.step.verdict.committed == committed
