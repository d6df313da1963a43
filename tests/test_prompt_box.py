"""The prompt box: one bound for page and server, and examples that say truthfully what Medusa gains on them."""

import json
import runpy
from types import SimpleNamespace

import pytest
from tiny_session import make_sessions

from medusa_viz.decoding import records
from medusa_viz.ui import page, prompt_box


@pytest.fixture(scope="module")
def maker():
    return SimpleNamespace(**runpy.run_path(str(page.EXAMPLES.with_name("make_examples.py")), run_name="make_examples"))


def test_the_page_is_told_the_bound_that_the_server_keeps():
    assert json.loads(page._setup("en"))["options"]["longest_prompt"] == prompt_box.MOST


def test_one_example_shows_where_medusa_loses():
    examples = json.loads(page.EXAMPLES.read_text("utf-8"))
    losing = [one for one in examples if one.get("loses")]
    assert len(losing) == 1 and losing[0] is examples[-1]
    assert 1 <= losing[0]["tokens_per_step"] < losing[0]["overhead"] < examples[-2]["tokens_per_step"]


def test_an_example_loses_where_its_steps_commit_less_than_they_cost(maker):
    rates = [3.0, 1.4, 2.5, 2.0, 1.9, 1.8, 1.7, 1.2, 1.6]
    measured = [maker.Measured(rate, "kind", f"prompt {rate}", [90.0, 150.0], [100.0, 60.0]) for rate in rates]
    found = maker.chosen(measured)  # a step costs 120 ms, a plain one 80
    assert [one["tokens_per_step"] for one in found] == [3.0, 2.5, 2.0, 1.9, 1.8, 1.7, 1.2]
    assert [one.get("overhead") for one in found] == [None] * 6 + [1.5]
    slow = [maker.Measured(one.rate, one.kind, one.prompt, [200.0], [100.0]) for one in measured]
    assert [bool(one.get("loses")) for one in maker.chosen(slow)] == [False] * 2 + [False] + [True] * 4


def test_the_opening_is_recorded_at_a_step_that_commits_enough(maker):
    sessions, _ = make_sessions()
    maker.recorded.__globals__["is_word"] = lambda text: True  # the tiny model writes none
    session = records.from_json(maker.recorded(sessions, ["zyxw", "abcdef"]))  # of the second the heads know more
    sessions.host.close()
    steps = session.branches[0].steps
    assert session.prompt == "abcdef" and len(steps) >= 4
    assert len(steps[-1].verdict.committed) >= maker.OPENING_TOKENS


@pytest.mark.parametrize(("text", "word"), [("␣and", True), ("Panc", True), ("⏎", False), ("␣(", False), ("1", False)])
def test_signs_are_no_words(maker, text, word):
    assert maker.is_word(text) is word
