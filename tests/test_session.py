"""Sessions as a page uses them: every action through Sessions.act, on a tiny model, no browser."""

import threading
from types import SimpleNamespace

import pytest
from tiny_page import PATIENCE, until
from tiny_session import committed, serving

from medusa_viz.ui import lines
from medusa_viz.ui import session as sessions_module


@pytest.fixture
def page():
    yield from serving()


def test_stepping_writes_the_greedy_text(page):
    page.act("start", prompt="abcdef")
    counts = []
    for _ in range(12):
        before = len(page.of().entry.step.verdict.committed)
        page.act("step")
        counts.append(before)
    tokens = committed(page.of())
    assert tokens == page.text[: len(tokens)]
    assert len(tokens) == sum(counts) and max(counts) > 1


def test_every_view_before_a_run_says_what_to_do(page):
    assert page.act("hello")["steps"]["count"] == 0
    for action in ("step", "verify", "pin", "forward", "back"):
        assert "Start" in page.act(action)["status"]["notice"]


@pytest.mark.parametrize(("action", "payload", "word"), [
    ("nonsense", {}, "nonsense"), ("knob", {"fog": 1}, "fog"), ("knob", {"temperature": 9}, "temperature"),
    ("knob", {"temperature": float("nan")}, "temperature"), ("knob", {"temperature": "1"}, "temperature"),
    ("knob", {"top_s": 4}, "Top-s"), ("knob", {"top_s": [99]}, "top-s"), ("knob", {"top_s": [-1, 1]}, "top-s"),
    ("knob", {"size": -1}, "size"), ("knob", {"mode": "psychic"}, "psychic"), ("goto", {"index": 7}, "7"),
    ("goto", {"index": None}, "cannot take"), ("branch", {"name": "Q"}, "Q"), ("preset", {"name": "?"}, "?"),
    ("step", {"odd": 1}, "step"), ("start", {"prompt": " "}, "prompt"), ("start", {"prompt": "x" * 5000}, "tokens"),
    ("start", {"prompt": "x" * 20001}, "20,001 characters"), ("open", {"path": "0.9.9"}, "0.9.9"),
])
def test_bad_input_is_one_sentence_and_nothing_is_lost(page, action, payload, word):
    page.act("start", prompt="abcdef")
    good = page.act("step")
    view = page.act(action, **payload)
    assert word in view["status"]["notice"]
    assert view["steps"] == good["steps"] and view["text"] == good["text"]
    assert page.act("step")["steps"]["count"] == good["steps"]["count"] + 1


def test_a_knob_is_answered_by_the_cheapest_true_means(page):
    page.act("start", prompt="abcdef")
    page.act("knob", top_s=[3, 3, 2, 1], size=30)
    asked = []
    submit = page.sessions.host.model.worker.submit
    page.sessions.host.model.worker.submit = lambda owner, job: asked.append(owner) or submit(owner, job)
    assert page.act("knob", temperature=0.7)["knobs"]["badge"]["kind"] == "logits"
    assert page.act("knob", size=5)["knobs"]["badge"]["kind"] == "subtree"
    assert page.act("knob", top_s=[1, 1, 0, 0])["tree"]["nodes"][-1]["depth"] == 2
    assert page.act("knob", top_s=[3, 3, 2, 1], size=30)["knobs"]["badge"]["kind"] == "subtree"
    assert asked == []
    assert page.act("knob", top_s=[4, 3, 2, 1], size=40)["knobs"]["badge"]["kind"] == "forward"
    assert asked == ["one"]


def test_a_subtree_commits_what_its_own_forward_would(page):
    page.act("start", prompt="abcdef")
    page.act("knob", top_s=[4, 3, 2, 2], size=60)
    page.act("knob", size=4)
    page.act("step")
    page.act("step")
    tokens = committed(page.of())
    assert tokens == page.text[: len(tokens)]


def test_temperature_and_mode_move_each_other(page):
    page.act("start", prompt="abcdef")
    view = page.act("knob", temperature=0.5)
    assert view["knobs"]["mode"] == "typical" and "typical" in view["status"]["notice"]
    view = page.act("knob", mode="greedy")
    assert view["knobs"]["temperature"] == 0
    assert page.act("knob", mode="typical")["knobs"]["temperature"] > 0
    view = page.act("knob", temperature=0)
    assert view["knobs"]["mode"] == "greedy"


def test_delta_follows_epsilon_until_moved(page):
    page.act("hello")
    assert page.act("knob", epsilon=0.25)["knobs"]["delta"] == 0.5
    assert page.act("knob", delta=0.2)["knobs"]["delta_locked"] is False
    assert page.act("knob", epsilon=0.16)["knobs"]["delta"] == 0.2
    assert page.act("knob", delta_locked=True)["knobs"]["delta"] == 0.4


def test_back_change_step_is_a_branch_and_keeps_the_other(page):
    page.act("start", prompt="abcdef")
    for _ in range(4):
        page.act("step")
    before = committed(page.of())
    page.act("goto", index=1)
    assert page.act("knob", top_s=[1, 0, 0, 0])["run"]["changed"]
    view = page.act("step")
    assert view["run"]["branch"] == "B" and [tab["name"] for tab in view["run"]["branches"]] == ["A", "B"]
    assert view["steps"]["index"] == 2
    page.act("step")
    tokens = committed(page.of())
    assert tokens == page.text[: len(tokens)]  # greedy: another tree, the same text
    page.act("branch", name="A")
    assert committed(page.of()) == before
    page.act("step")
    tokens = committed(page.of())
    assert tokens == page.text[: len(tokens)]


def test_an_unchanged_knob_on_a_past_step_is_no_branch(page):
    page.act("start", prompt="abcdef")
    page.act("step")
    page.act("back")
    page.act("knob", size=3)
    view = page.act("knob", size=16)
    assert not view["run"]["changed"]
    assert page.act("step")["run"]["branch"] == "A"


def test_branches_end_at_six_with_a_sentence(page):
    page.act("start", prompt="abcdef")
    page.act("step")
    for turn in range(lines.MAX_BRANCHES):
        page.act("branch", name="A")
        page.act("goto", index=0)
        page.act("knob", size=1 + turn)
        view = page.act("step")
    assert len(view["run"]["branches"]) == lines.MAX_BRANCHES
    assert str(lines.MAX_BRANCHES) in view["status"]["notice"]


def test_a_slow_tree_is_drawn_first_and_verified_on_request(page):
    page.act("start", prompt="abcdef")
    page.sessions.host.model.latency.add(17, 60_000.0)
    page.sessions.host.model.latency.add(31, 60_000.0)
    view = page.act("knob", top_s=[3, 3, 2, 1], size=30)
    assert view["run"]["verify"] and view["tree"]["nodes"][1]["verdict"] == "unverified"
    view = page.act("verify")
    assert not view["run"]["verify"] and view["tree"]["nodes"][0]["verdict"] == "accepted"


def test_over_the_limit_stays_a_drawing(page):
    page.act("start", prompt="abcdef")
    view = page.act("knob", top_s=[8, 8, 8, 8], size=4680)
    assert len(view["tree"]["nodes"]) == 4681
    assert "256" in page.act("verify")["status"]["notice"]
    assert page.act("knob", top_s=[4, 3, 2, 2], size=16)["tree"]["nodes"][0]["verdict"] == "accepted"


def test_a_run_ends_exactly_at_its_limit(page, monkeypatch):
    monkeypatch.setattr(sessions_module, "Limits", lambda: SimpleNamespace(max_new_tokens=7))
    page.act("start", prompt="abcdef")
    for _ in range(10):
        view = page.act("step")
    assert committed(page.of()) == page.text[:7]
    assert view["run"]["finished"] == "length" and not view["run"]["can"]["step"]
    assert page.act("step")["status"]["notice"]


def test_an_end_token_ends_the_run(page):
    page.act("start", prompt="abcdef")
    for _ in range(3):
        page.act("step")
    long = committed(page.of())
    end = next(token for place, token in enumerate(long) if token not in long[:place] and place >= 2)
    page.sessions.host.model.engine.backbone.model.generation_config.eos_token_id = end
    page.act("reset")
    for _ in range(10):
        view = page.act("step")
    assert committed(page.of()) == long[: long.index(end) + 1]
    assert view["run"]["finished"] == "end"


@pytest.mark.parametrize("mode", ["typical", "rejection"])
def test_sampling_modes_step(page, mode):
    page.act("start", prompt="abcdef")
    page.act("knob", mode=mode, temperature=1.0)
    for _ in range(4):
        view = page.act("step")
        assert not view["status"]["notice"]
    assert view["equality"]["state"] == "not_expected"


def test_the_text_is_compared_with_plain_greedy(page):
    page.act("start", prompt="abcdef")
    page.act("step")
    page.of().watch._found.result()
    assert page.act("poll")["equality"]["state"] == "equal"
    assert page.act("check", on=False)["equality"]["state"] == "off"


def test_pin_compares_on_the_same_prefix_only(page):
    page.act("start", prompt="abcdef")
    page.act("pin")
    view = page.act("knob", size=4)
    assert view["pin"]["here"] and {row["key"] for row in view["pin"]["rows"]} >= {"nodes", "committed"}
    assert page.act("step")["pin"]["here"] is False
    assert page.act("back")["pin"]["here"] is True
    assert page.act("unpin")["pin"] is None


def test_two_visitors_never_mix(page):
    """Each visitor's text equals a solo run, however their steps interleave."""
    solo = {}
    for token, prompt in (("a", "abcdef"), ("b", "zyxw")):
        page.act("start", token, prompt=prompt)
        for _ in range(6):
            page.act("step", token)
        solo[token] = committed(page.of(token))
        page.sessions.close(token)

    def visit(token, prompt, knobs):
        page.act("start", token, prompt=prompt)
        page.act("knob", token, **knobs)
        for _ in range(10):
            page.act("step", token)

    threads = [threading.Thread(target=visit, args=("a", "abcdef", {"size": 7})),
               threading.Thread(target=visit, args=("b", "zyxw", {"top_s": [2, 1, 1, 0]}))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for token in ("a", "b"):
        tokens = committed(page.of(token))
        least = min(len(tokens), len(solo[token]))
        assert tokens[:least] == solo[token][:least] and least >= 6
        assert page.of(token).prompt == {"a": "abcdef", "b": "zyxw"}[token]


def test_a_failing_model_leaves_the_last_good_step(page, monkeypatch):
    page.act("start", prompt="abcdef")
    good = page.act("step")

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(page.sessions.host.model.engine.backbone, "verify", broken)
    view = page.act("step")
    assert "out of memory" in view["status"]["notice"] and view["steps"] == good["steps"]
    monkeypatch.undo()
    for _ in range(3):
        page.act("step")
    tokens = committed(page.of())
    assert tokens == page.text[: len(tokens)]


def test_heads_without_accuracies_still_draft_a_tree_and_claim_no_figure(page):
    page.sessions.host.model.engine.accuracy = []
    view = page.act("start", prompt="abcdef")
    assert "accuracy table" in view["status"]["notice"]
    assert len(view["tree"]["nodes"]) == 17 and view["knobs"]["heads"] == 4
    expected = next(tile for tile in view["merits"] if tile["key"] == "expected")
    assert not any(char.isdigit() for char in expected["value"])
    assert len(page.act("knob", size=5)["tree"]["nodes"]) == 6


def test_temperatures_snap_to_those_that_records_are_exact_at(page):
    page.act("start", prompt="abcdef")
    assert page.act("knob", temperature=0.68)["knobs"]["temperature"] == 0.7
    assert page.act("knob", temperature=0.01)["knobs"]["temperature"] == 0.1
    assert page.act("knob", temperature=0)["knobs"]["temperature"] == 0


def test_a_plain_step_is_measured_every_eighth_step_once_the_page_stands_still(page):
    model = page.sessions.host.model
    page.act("start", prompt="abcdef")
    for _ in range(8):
        assert not page.act("step")["equality"]["plain_due"] or len(page.of().line.done()) == 8
    until(lambda: page.of().watch._found.done(), "the comparison")
    assert list(model.plain) == [5.0] and page.act("step")["equality"]["plain_due"]
    until(lambda: page.of().watch._found.done(), "the comparison")
    view = page.act("poll")
    assert not view["equality"]["plain_due"] and view["equality"]["state"] == "equal"
    until(lambda: len(model.plain) == 2, "the measurement")
    assert model.plain_ms == sum(model.plain) / 2
    page.act("step")
    assert page.of().watch._steps == 1
    model.plain.clear()
    page.of().watch._steps = 8
    until(lambda: page.of().watch._found.done(), "the comparison")
    begun, gate = threading.Event(), threading.Event()
    model.worker.submit("one", lambda: begun.set() or gate.wait(PATIENCE))
    assert begun.wait(PATIENCE)
    page.act("poll")
    model.worker.submit("other", lambda: None)
    gate.set()
    page.of().watch._plain.result(PATIENCE)
    assert not model.plain, "somebody else waited"
    page.act("check", on=False)
    page.of().watch._steps = 8
    assert not page.act("poll")["equality"]["plain_due"]
