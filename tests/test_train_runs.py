"""Training runs as the page reads and starts them: logs that grow, hostile files, plans and their commands."""

import json
import os
import time
from types import SimpleNamespace

import pytest
from tiny_page import token_file

from medusa_viz.decoding.settings import SettingsError
from medusa_viz.ui import train_plan, train_runner
from medusa_viz.ui.knobs import ActionError
from medusa_viz.ui.train_log import Pace, RunLog, progress
from medusa_viz.ui.train_plan import Plan


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEDUSA_VIZ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def line(step, **more):
    return json.dumps({"step": step, "total": 3.0, "weights": [0.8], "loss": [3.75], "top1": [0.5], **more})


def test_only_new_whole_lines_are_read(tmp_path):
    log, path = RunLog(tmp_path), tmp_path / "log.jsonl"
    assert log.update().steps == [] and log.heads == 0
    path.write_text(line(1) + "\n" + line(2)[:20])
    assert [one.step for one in log.update().steps] == [1]
    first, key = log.steps[0], log.key
    assert log.update().key == key
    path.write_text(line(1) + "\n" + line(2) + "\n")
    assert [one.step for one in log.update().steps] == [1, 2] and log.steps[0] is first and log.key != key


def test_a_log_that_was_cut_is_read_anew(tmp_path):
    log, path = RunLog(tmp_path), tmp_path / "log.jsonl"
    path.write_text("".join(line(step) + "\n" for step in range(1, 9)))
    log.update()
    path.write_text("".join(line(step) + "\n" for step in (1, 2)))
    assert [one.step for one in log.update().steps] == [1, 2]
    path.write_text("".join(line(step, total=9.0) + "\n" for step in (1, 2, 3)))  # longer, but not the same
    assert [one.total for one in log.update().steps] == [9.0] * 3
    path.unlink()
    assert log.update().steps == []


@pytest.mark.parametrize("text", [
    "not json", "[1]", "null", "{}", '{"step": "x"}', '{"step": NaN}', "[" * 5000, '{"step": true, "total": 1}'])
def test_lines_that_are_none_are_left_out(tmp_path, text):
    (tmp_path / "log.jsonl").write_text(text + "\n" + line(3) + "\n")
    assert [one.step for one in RunLog(tmp_path).update().steps] == [3]


def test_odd_values_become_gaps(tmp_path):
    held_out = {"<b>": {"accuracy": [["x"], 3, [], [0.5]], "tokens_per_step": {"<i>": 1, "15": 1.5, "7": "x"}}}
    (tmp_path / "log.jsonl").write_text(
        line(1, total="x", loss="no", top1=[None, float("nan"), "<b>", 0.5], lambda0=None) + "\n"
        + json.dumps({"step": 2, "pass": "<img>", "held_out": held_out, "perplexity": [1]}) + "\n"
        + json.dumps({"step": 3, "pass": 1, "held_out": [], "perplexity": {"before": 2, "after": 3}}) + "\n")
    log = RunLog(tmp_path).update()
    assert (log.steps[0].total, log.steps[0].loss, log.steps[0].top1) == (None, [], [None, None, None, 0.5])
    odd, plain = log.passes
    assert (odd.number, odd.top1) == (0, [None, None, None, 0.5])
    assert (odd.tokens_per_step, odd.perplexity) == ({"15": 1.5}, None)
    assert plain.perplexity == (2, 3)


def test_progress_and_pace(tmp_path):
    path = tmp_path / "progress.json"
    for text in ("", "{}", "[]", '{"phase": 1, "done": "x", "total": 2, "seconds": 1}'):
        path.write_text(text)
        assert progress(tmp_path) is None
    path.write_text('{"phase": "train", "done": 5, "total": 9, "seconds": 2}')
    assert progress(tmp_path).fresh and progress(tmp_path).done == 5
    os.utime(path, (time.time() - 60,) * 2)
    assert not progress(tmp_path).fresh
    pace = Pace()
    assert [pace.rate("hidden", 0, 1.0), pace.rate("hidden", 10, 3.0)] == [None, 5.0]
    assert [pace.rate("train", 1, 4.0), pace.rate("train", 1, 4.0), pace.rate("train", 3, 5.0)] == [None, None, 2.0]


def test_the_last_error_is_no_progress_bar(tmp_path):
    errors = tmp_path / train_runner.ERRORS_NAME
    assert train_runner.last_error(tmp_path) == ""
    errors.write_bytes(b"hidden states:  50%|xx  | 5/10 [00:01<00:01, 5.00token/s]\r"
                       b"writing:  12%|xx  | 480/4000 [00:01<00:01, 5.00token/s]\n"
                       b"python -m medusa_viz train: <b>x.npz is no token file.\n"
                       b"training:   3%|  | 2/61 [00:00<00:01, 9.1step/s]\r\n")
    assert train_runner.last_error(tmp_path) == "<b>x.npz is no token file."
    assert train_runner.counted(tmp_path) == (480, 4000)


def test_a_plan_is_two_commands_that_go_on_with_what_is_there(cache):
    plan = Plan("mine", "medusa1", "tiny", distil=4000, settings={"passes": 2, "draft_vocabulary": 64})
    (first, distil), (second, train) = plan.commands()
    assert (first, second) == ("distil", "train") and distil[0] == "distill" and "--resume" not in distil + train
    assert train[train.index("--draft-vocabulary") + 1] == "64" and str(plan.written) in train
    prompts = [json.loads(text) for text in plan.written.with_suffix(".prompts.jsonl").read_text().splitlines()]
    held_out = sum(one.get("split") == "held_out" for one in prompts)
    assert held_out == -(-len(prompts) // train_plan.HELD_OUT_EVERY) > 0, "one in so many, the first among them"
    plan.written.touch()
    plan.folder.mkdir(parents=True)
    (plan.folder / "log.jsonl").touch()
    [(phase, train)] = plan.commands()
    assert phase == "train" and "--resume" in train
    assert all(words[words.index("--device") + 1] == "cuda:1" and "--dtype" not in words
               for _, words in plan.commands("cuda:1"))
    assert all(words[words.index("--dtype") + 1] == "4bit"
               for _, words in Plan("four", "medusa1", "tiny", distil=400, dtype="4bit").commands())
    assert train_plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    bad = {"name": "x", "recipe": "medusa1", "model": "m", "data": ["a"], "dtype": "--out"}
    for broken in (None, {}, [], bad, {"name": "../x", "recipe": "medusa1", "model": "m", "data": ["a"]}):
        assert train_plan.from_json(broken) is None


def test_a_run_is_ended_at_once_only_by_whoever_saw_it_stopping():
    """A double click, two visitors at once, and a page that still shows a run which is over."""
    told = []
    leash = SimpleNamespace(write=told.append)
    child = SimpleNamespace(poll=lambda: None, stdin=leash, kill=lambda: told.append("kill"))
    runner = train_runner.Runner()
    with pytest.raises(ActionError, match="train_not_running"):
        runner.stop("mine")
    runner.current = train_runner.Running(Plan("mine", "medusa1", "tiny", distil=400), child=child)
    with pytest.raises(ActionError, match="train_other_run"):
        runner.stop("older", now=True)
    assert not told and not runner.current.stopping
    runner.stop("mine", now=True)  # of a run of that name that was stopped and went on
    for _ in range(3):
        runner.stop("mine")
    assert told == [b"\n"] and runner.current.stopping
    runner.stop("mine", now=True)
    assert told == [b"\n", "kill"]


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "-x", "<b>", "a b", "x" * 61, "a\0b", None])
def test_names_that_could_leave_the_folder_are_refused(name):
    with pytest.raises(ActionError) as refused:
        Plan(name, "medusa1", "tiny", ("x.npz",))
    assert refused.value.key == "train_name"


def test_settings_are_checked_before_anything_starts(tmp_path):
    assert train_plan.changed("medusa1", {"passes": 5, "lr": 1}) == {"lr": 1.0}
    for bad in ({"passes": 0}, {"lr": None}, {"batch": "64"}, {"batch": 1.5}, {"passes": True}):
        with pytest.raises(SettingsError):
            Plan("mine", "medusa1", "tiny", ("x.npz",), 0, train_plan.changed("medusa1", bad))
    with pytest.raises(ActionError):
        train_plan.changed("medusa1", {"fog": 1})
    with pytest.raises(SettingsError):
        Plan("mine", "medusa1", "tiny", (), -1)
    with pytest.raises(ActionError):
        Plan("mine", "medusa1", "tiny")


def test_token_files_are_told_from_others(tmp_path):
    path = token_file(tmp_path / "data.npz")
    assert train_plan.token_file(str(path)) == path and train_plan.reply_tokens(path) == 9 * 34
    (tmp_path / "text.npz").write_text("no archive")
    for bad in ("", "/nowhere", str(tmp_path), str(tmp_path / "text.npz"), "a\0b", "~nobody/x", "x" * 9999):
        with pytest.raises(ActionError):
            train_plan.token_file(bad)
