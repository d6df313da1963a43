"""The Train page from the server's side: real commands on a tiny model, started, watched, stopped, resumed, used."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_page import PATIENCE, saved_heads, saved_model, token_file
from tiny_page import until as until_within

from medusa_viz.training import data, shipped
from medusa_viz.ui import host as hosts
from medusa_viz.ui import train_runner

SMALL = {"heads": 2, "layers": 1, "draft_vocabulary": 40, "batch": 64, "warmup": 2, "log_every": 1}
LONG = {**SMALL, "passes": 1000, "batch": 4}  # no machine ends it before it is stopped

until = functools.partial(until_within, seconds=6 * PATIENCE)  # beside anything else, runs of low priority crawl


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def page(tmp_path, model, monkeypatch):
    """act(action, **payload) -> view of the Train page of one visitor."""
    monkeypatch.setenv("MEDUSA_VIZ_CACHE", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    heads = saved_heads(tmp_path / "heads")
    sessions = hosts.Sessions({"model": str(model), "heads": str(heads), "device": "cpu"})
    sessions._opening = None
    data = token_file(tmp_path / "data" / "some.npz")

    def act(action, token="one", **payload):
        return json.loads(sessions.pages.act(token, "train", action, payload))

    def start(name, token="one", **more):
        asked = {"recipe": "medusa1", "model": str(model), "settings": dict(SMALL), "data": str(data), **more}
        return act("start", token, name=name, **asked)

    yield SimpleNamespace(act=act, start=start, sessions=sessions, data=data, root=tmp_path, model=model,
                          runner=sessions.pages["train"].runner)
    sessions.shutdown()


@pytest.fixture
def held(page, monkeypatch):
    """No command of a run begins before this is set, however late the test gets to it."""
    go, one = threading.Event(), page.runner._one

    def waiting(run, phase, words):
        run.phase = phase
        go.wait(PATIENCE)
        return one(run, phase, words)

    monkeypatch.setattr(page.runner, "_one", waiting)
    yield go
    go.set()


def state(page, token="one"):
    return page.act("poll", token)["run"]["state"]


def test_the_form_offers_what_the_commands_offer(page):
    form = page.act("hello")["form"]
    from medusa_viz.training.commands import RECIPES

    assert [recipe["name"] for recipe in form["recipes"]] == list(RECIPES)
    assert form["models"][0] == {"name": str(page.model), "label": "tiny (running)"}
    assert form["data"] == [{"path": str(page.data), "label": "some.npz (306 reply tokens)", "tokens": 306}]
    assert form["chosen"] == ""
    fields = {field["name"]: field for field in form["recipes"][0]["fields"]}
    assert fields["passes"]["main"] and fields["passes"]["low"] == 1 and fields["lr"]["help"]
    for preset in form["presets"]:
        assert set(preset["settings"]) <= set(fields)
    assert page.act("poll")["form"] is None


def test_the_shipped_replies_are_those_of_the_default_backbone():
    path = shipped.training_file("smollm2-135m")
    assert path.is_file() and shipped.training_file("smollm2-135m-medusa2") == path
    assert shipped.training_file("someone/else") is None and shipped.training_file("") is None
    tokens, heats = shipped.facts(path)
    assert tokens == 224_394 and heats == ["0.7", "1"]


def test_replies_that_ship_for_the_running_model_stand_first_and_start_with_one_click(page, monkeypatch):
    own = page.root / "shipped.npz"
    heats = np.array([0, 0, 0.7] * 8, np.float16)
    np.savez(own, ids=np.random.default_rng(0).integers(0, 40, 24 * 40).astype(np.uint16), offsets=np.arange(25) * 40,
             reply_start=np.full(24, 6), temperature=heats, prompt=np.arange(24), split=np.zeros(24, np.uint8))
    monkeypatch.setattr(shipped, "training_file", lambda model: own if model == str(page.model) else None)
    form = page.act("hello")["form"]
    label = "Shipped: 714 reply tokens to train.jsonl, greedy + 0.7"  # 21 of the 24 replies
    assert form["data"][0] == {"path": str(own), "label": label, "tokens": 714} and form["chosen"] == str(own)
    assert [one["path"] for one in form["data"][1:]] == [str(page.data)]
    assert not page.start("first", data=form["chosen"])["notice"]
    until(lambda: state(page) != "running", "the end")
    run = page.act("poll")["run"]
    assert run["state"] == "finished" and run["held_out"].startswith("Held out, after pass 5: top-1 ")
    assert "tokens per step" in run["held_out"], "the greedy ones among them are replayed"
    facts = json.loads((page.root / "runs" / "first" / "config.json").read_text())["trained"]
    assert facts["tokens"] == 714 and not data.load([own]).split.any(), "the shipped file stays as it is"
    page.sessions.host.locked = True
    assert page.act("hello")["form"] is None and "for visitors" in page.start("second", data=str(own))["notice"]


def test_a_run_grows_finishes_and_its_heads_are_used(page, held):
    view = page.start("first")
    assert not view["notice"] and view["run"]["state"] == "running" and view["busy"]
    assert "“first” is being trained already" in page.start("second", "two")["notice"]
    assert page.act("poll", "two")["run"]["name"] == "first", "another visitor sees it too"
    held.set()
    until(lambda: state(page) == "finished", "the end")
    view = page.act("poll")
    run = view["run"]
    assert run["can"] == {"stop": False, "resume": False, "use": True} and not view["busy"]
    assert run["total"].startswith("Step ") and run["held_out"].startswith("Held out, after pass 5")
    assert json.loads(view["figures"]["loss"]["figure"])["data"][0]["name"] == "total"
    assert json.loads(view["figures"]["rates"]["figure"])["data"]
    assert page.act("poll", have=view["key"])["figures"] is None, "nothing new, nothing sent"
    assert page.act("hello", have="")["notice"], "hello takes nothing"
    assert "already" in page.start("first")["notice"]

    page.sessions.host.load()
    page.act("use", run="first")
    until(lambda: page.sessions.host.status.coming is None, "the switch")
    assert page.sessions.host.model.engine.drafter.heads == 2
    shown = json.loads(page.sessions.act("one", "start", {"prompt": "abc"}))
    assert shown["knobs"]["heads"] == 2 and "medusa1" in shown["provenance"]["line"]
    run = page.act("poll")["run"]
    assert run["in_use"] and not run["can"]["use"]
    written = page.root / "runs" / "first" / "medusa_lm_head.safetensors"
    os.utime(written, ns=(0, written.stat().st_mtime_ns + 1))  # as the next pass of a resumed run writes it
    run = page.act("poll")["run"]
    assert run["can"]["use"] and not run["in_use"], "the Explorer drafts with older ones"
    page.act("use", run="first")
    until(lambda: page.sessions.host.status.coming is None, "the switch")
    assert page.act("poll")["run"]["in_use"]


def test_medusa2_shows_both_stages_and_loads_with_its_adapter(page):
    page.start("joint", recipe="medusa2", settings={**SMALL, "passes": 2, "heads_passes": 2, "lr": 1e-3})
    page.sessions.host.load()
    until(lambda: state(page) != "running", "the end")
    view = page.act("poll")
    assert view["run"]["state"] == "finished", view["run"]["sentence"]
    assert "backbone" in view["run"]["total"] and "λ0 0.2" in view["run"]["total"]
    assert "perplexity" in view["run"]["held_out"]
    assert "first choice is unchanged at" in view["run"]["held_out"]
    loss = json.loads(view["figures"]["loss"]["figure"])
    assert loss["data"][1]["name"] == "backbone" and len(loss["layout"]["shapes"]) == 1
    old = page.sessions.host.model
    page.act("use", run="joint")
    until(lambda: page.sessions.host.status.coming is None, "the switch")
    assert page.sessions.host.model.engine.backbone is not old.engine.backbone and not page.sessions.host.status.fault


def test_the_model_writes_first_and_is_trained_on_that(page, held):
    page.start("both", data="", distil=100)
    until(lambda: page.runner.current.phase == "distil", "the command")
    assert page.act("poll")["run"]["progress"] == "Loading the model…"
    held.set()
    until(lambda: state(page) != "running", "the end")
    view = page.act("poll")
    assert view["run"]["state"] == "finished", view["run"]["sentence"]
    assert (page.root / "data" / "both.npz").is_file() and (page.root / "runs" / "both" / "config.json").is_file()
    assert "both.npz" in {Path(one["path"]).name for one in page.act("hello")["form"]["data"]}


def test_stop_keeps_the_heads_and_resume_goes_on(page):
    page.start("long", settings=dict(LONG))
    until(lambda: page.act("poll")["run"]["total"], "the first step")
    before = page.act("stop", run="long")["run"]
    assert before["state"] in ("stopping", "stopped")
    until(lambda: state(page) == "stopped", "the stop")
    view = page.act("poll")
    assert "heads as they were are saved" in view["run"]["sentence"]
    assert view["run"]["can"] == {"stop": False, "resume": True, "use": True}
    assert "No run is under way" in page.act("stop", run="long")["notice"]
    steps = len(Path(page.root / "runs/long/log.jsonl").read_text().splitlines())
    assert not page.act("resume", run="long")["notice"]
    until(lambda: len(Path(page.root / "runs/long/log.jsonl").read_text().splitlines()) > steps, "further steps")
    text, _, _ = Path(page.root / "runs/long/log.jsonl").read_text().rpartition("\n")  # the last may be half written
    log = [json.loads(line) for line in text.splitlines()]
    numbers = [line["step"] for line in log if "total" in line]
    assert numbers == list(range(1, len(numbers) + 1)), "no step twice, none left out"
    child = page.runner.current.child
    page.sessions.shutdown()
    assert child.poll() is not None and page.runner.current is None, "the server takes its run along"
    assert state(page) == "stopped"


def test_a_run_that_fails_says_its_one_sentence(page, held):
    page.start("gone", data=str(token_file(page.root / "<b>x.npz")))
    (page.root / "<b>x.npz").unlink()
    held.set()
    until(lambda: state(page) == "broken", "the fault")
    run = page.act("poll")["run"]
    assert "<b>x.npz is no token file" in run["sentence"] and run["sentence"].endswith("writes one.")
    assert run["can"] == {"stop": False, "resume": True, "use": False}


@pytest.fixture
def planned(page, monkeypatch):
    """The runs that were asked for and are not begun."""
    plans = []
    monkeypatch.setattr(page.runner, "start", plans.append)
    return plans


def test_a_run_goes_to_the_servers_device_and_over_a_quantised_model_as_it_is(page, planned):
    host = page.sessions.host
    assert page.runner.device == host.asked["device"] == "cpu"
    host.options = {**host.options, "dtype": "4bit"}
    for name, more in {"alone": {}, "joint": {"recipe": "medusa2"}, "other": {"model": "smollm2-135m"}}.items():
        assert not page.start(name, **more)["notice"]
    assert [plan.dtype for plan in planned] == ["4bit", "", ""]
    host.options = {**host.options, "dtype": "bf16"}
    page.start("wide")
    assert planned[-1].dtype == "", "training has its own default for what is not quantised"


def test_heads_are_used_in_the_dtype_of_their_own_model(page, monkeypatch):
    host, asked = page.sessions.host, []
    monkeypatch.setattr(host, "use", lambda by, **options: asked.append(options))
    folder = saved_heads(page.root / "runs" / "left")
    plan = {"name": "left", "recipe": "medusa1", "model": str(page.model), "data": [str(page.data)], "settings": {}}
    train_runner.write(folder, {"plan": plan, "state": "finished"})
    host.options = {**host.options, "model": "vicuna-7b-v1.3", "dtype": "4bit"}
    page.act("use", run="left")
    host.options = {**host.options, "model": str(page.model), "dtype": "bf16"}
    page.act("use", run="left")
    assert asked == [{"model": str(page.model), "heads": str(folder), "dtype": "auto"}, {"heads": str(folder)}]


@pytest.mark.parametrize(("asked", "word"), [
    ({"name": "../up"}, "is no name"), ({"name": "<b>"}, "“<b>”"), ({"recipe": "medusa9"}, "medusa9"),
    ({"model": "/etc"}, "no model “/etc”"), ({"data": "/etc/<i>passwd"}, "“/etc/<i>passwd” is no token file"),
    ({"data": ""}, "nothing to train on"), ({"settings": {"passes": 0}}, "passes is 0"),
    ({"settings": {"rank": 8}}, "The recipe medusa1 has no setting “rank”."), ({"settings": ["x"]}, "cannot take"),
    ({"distil": "many"}, "tokens is"),
    ({"odd": 1}, "cannot take"),
])
def test_what_cannot_be_started_is_one_sentence_and_nothing_runs(page, asked, word):
    view = page.start(asked.pop("name", "fine"), **asked)
    assert word in view["notice"] and view["notice"] and view["run"] is None and page.runner.current is None
    assert not (page.root / "runs").exists() or not list((page.root / "runs").iterdir())


def test_runs_and_heads_from_elsewhere(page):
    for bad in ("/etc", "a\0b", "<script>", "../..", "~nobody"):
        assert page.act("open_path", path=bad)["notice"] == f"There is no run and there are no heads at “{bad}”."
    for action in ("open", "use", "resume"):
        assert page.act(action, run="x")["notice"] == "There is no run and there are no heads at “x”."
        for unnamed in ("", " ", None, 7, []):
            assert page.act(action, run=unnamed)["notice"] == "Name a run or a heads folder first."
    assert page.act("open_path", path=" ")["notice"] == "Name a run or a heads folder first."
    heads = saved_heads(page.root / "<b>heads")
    run = page.act("open_path", path=str(heads))["run"]
    assert run["name"] == "<b>heads" and run["state"] == "found" and run["can"]["use"] and not run["can"]["resume"]
    assert page.act("poll", "two")["run"] is None, "what one opens the other does not see"
    assert "no run" in page.act("use", "two", run=str(heads))["notice"]
    assert "was not begun on this page" in page.act("resume", run=str(heads))["notice"]
    (page.root / "log").mkdir()
    (page.root / "log" / "log.jsonl").write_text('{"step": 1, "total": 2.0, "loss": [2.5], "weights": [0.8]}\n')
    (page.root / "log" / "progress.json").write_text('{"phase": "train", "done": 1, "total": 4, "seconds": 1}')
    os.utime(page.root / "log" / "progress.json", (time.time() + 600,) * 2)  # fresh, however long this takes
    view = page.act("open_path", path=str(page.root / "log"))
    assert view["run"]["state"] == "elsewhere" and view["run"]["progress"].startswith("Training: step 1 of 4")
    assert view["poll"] == 1000 and view["run"]["total"] == "Step 1: total 2.000 = 0.8·2.500"
    assert not view["run"]["can"]["use"] and "no heads" in page.act("use", run=view["run"]["id"])["notice"]


def test_a_run_whose_server_ended_says_so_and_can_go_on(page):
    """As a server that was killed leaves it."""
    folder = saved_heads(page.root / "runs" / "left")
    plan = {"name": "left", "recipe": "medusa1", "model": str(page.model), "data": [str(page.data)], "settings": {}}
    train_runner.write(folder, {"plan": plan, "state": "running", "begun": 1.0})
    run = page.act("open", run="left")["run"]
    assert run["state"] == "interrupted" and run["can"]["resume"] and "The server ended" in run["sentence"]
    train_runner.write(folder, {"plan": {**plan, "name": "../other"}, "state": "stopped"})
    assert "was not begun on this page" in page.act("resume", run="left")["notice"]
    (folder / train_runner.RUN_NAME).write_text("[" * 9000)
    assert page.act("open", run="left")["run"]["state"] == "found"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes through /proc")
def test_a_killed_server_leaves_no_run_behind(page):
    script = (
        "import sys, time\n"
        "from medusa_viz.ui.train_plan import Plan\n"
        "from medusa_viz.ui.train_runner import Runner\n"
        "runner = Runner()\n"
        f"runner.start(Plan('orphan', 'medusa1', {str(page.model)!r}, ({str(page.data)!r},), 0, {LONG!r}))\n"
        "while runner.current.child is None: time.sleep(0.05)\n"
        "print(runner.current.child.pid, flush=True)\n"
        "time.sleep(600)\n")
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        child = int(server.stdout.readline())
        log = page.root / "runs" / "orphan" / "log.jsonl"
        until(lambda: log.is_file() and log.stat().st_size, "the first step")
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE)
        until(lambda: not running(child), "the end of the run")
    finally:
        server.kill()
        server.stdout.close()
    assert (page.root / "runs" / "orphan" / "medusa_lm_head.safetensors").is_file(), "stopped as by Ctrl-C"


def running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except OSError:
        return False
