"""What may come at the wrong moment: a word after the end, a load as the server ends, a check that gave way, a tab that
closes while its job begins, a reader while heads are written."""

import threading
from concurrent.futures import CancelledError, Future

import pytest
from tiny_page import PATIENCE, VOCAB, WIDTH, saved_heads, until
from tiny_session import serving

from medusa_viz.decoding.settings import ServerLimits
from medusa_viz.models import checkpoints
from medusa_viz.training.run_folder import TrainingError, alone_in
from medusa_viz.ui import host as hosts
from medusa_viz.ui import running, view
from medusa_viz.ui.leash import _watch
from medusa_viz.ui.snapshot import ModelStatus
from medusa_viz.ui.tuner import TunerPage


@pytest.fixture
def page():
    yield from serving()


def test_a_report_that_comes_after_the_load_says_nothing(page, monkeypatch):
    host = page.sessions.host
    heard = []

    def load(options, report, beside):
        report("hub", 0.5, "half")
        heard.append((report, host.status.coming))
        return beside

    monkeypatch.setattr(running, "load", load)
    host.use(heads="x")
    until(lambda: not host.loading, "the load")
    [(report, coming)] = heard
    assert coming.fraction == 0.5
    report("hub", 1.0, "a bar that is drawn once more")
    assert not host.loading and host.status == ModelStatus("ready", title=host.model.title)
    host.use(heads="y")  # and another model can be chosen
    until(lambda: not host.loading, "the other load")  # while it is patched


def test_a_model_that_is_loaded_as_the_server_ends_is_closed(page):
    host, model = page.sessions.host, page.sessions.host.model
    worker = type("", (), {"closed": 0, "close": lambda self: setattr(self, "closed", self.closed + 1)})()
    late = running.Model(model.engine, worker, model.live)
    host.close()
    host.start_on(late)
    assert worker.closed == 1


def test_a_check_that_gave_way_is_made_once_the_page_stands_still(page):
    page.act("start", prompt="abcdef")
    page.act("step")
    watch = page.of().watch
    until(lambda: watch._found.done(), "the check")
    watch._found = Future()  # one that waits behind another visitor's step
    page.act("knob", top_s=[4, 3, 2, 2], size=40)  # a forward pass: the check gives way
    assert watch._found.cancelled()
    until(lambda: page.act("poll")["equality"]["state"] == "equal", "the answer")


def test_a_check_that_failed_breaks_no_view(page):
    page.act("start", prompt="abcdef")
    page.act("step")
    watch = page.of().watch
    until(lambda: watch._found.done(), "the check")
    watch._found = Future()
    watch._found.set_exception(RuntimeError("the card is full"))
    assert page.act("poll")["equality"]["state"] == "failed", "nothing is under way that one could wait for"
    page.act("step")
    until(lambda: page.act("poll")["equality"]["state"] == "equal", "the next one")


def test_a_session_in_use_makes_no_room(page, monkeypatch):
    page.sessions.host.limits = ServerLimits(max_sessions=1)
    page.act("start", "busy", prompt="abcdef")
    inside, go_on = threading.Event(), threading.Event()
    build = view.build

    def held(*arguments):
        inside.set()
        assert go_on.wait(PATIENCE)
        return build(*arguments)

    monkeypatch.setattr(hosts.view, "build", held)
    step = threading.Thread(target=page.act, args=("step", "busy"))
    step.start()
    assert inside.wait(PATIENCE)
    monkeypatch.setattr(hosts.view, "build", build)
    page.act("hello", "other")
    go_on.set()
    step.join()
    assert page.act("poll", "busy")["steps"]["count"] == 2, "its step was not lost"
    page.act("hello", "third")
    assert len(page.sessions._sessions) == 1


def test_a_look_that_comes_after_the_tab_was_closed_brings_no_session_back(page):
    page.act("start", prompt="abcdef")
    page.sessions.close("one")
    page.act("poll")
    assert not page.sessions._sessions


def test_a_job_that_begins_as_its_tab_closes_does_not_run(page):
    tuner = TunerPage(page.sessions.host, page.sessions.texts)
    until(lambda: tuner._open("one")[0], "the desk")
    desk, model, _ = tuner._open("one")
    tuner.close("one")
    with pytest.raises(CancelledError):
        tuner._begin(desk, model, "one", "calibrate", None, None)
    assert desk.task is None


def test_heads_are_readable_at_every_moment_of_their_writing(tmp_path):
    folder, faults = saved_heads(tmp_path / "heads"), []
    loaded = checkpoints.load(str(folder), WIDTH, VOCAB)
    over = threading.Event()

    def read():
        while not over.is_set():
            try:
                checkpoints.load(str(folder), WIDTH, VOCAB)
            except Exception as error:
                faults.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        checkpoints.save(folder, loaded.module, loaded.config)
    over.set()
    reader.join()
    assert not faults


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    refused = pytest.raises(TrainingError, match="Another process trains in")
    with alone_in(tmp_path / "run"), refused, alone_in(tmp_path / "run"):
        pytest.fail("two at once")
    with alone_in(tmp_path / "run"):
        pass  # once the first has ended


def test_a_line_on_the_leash_stops_the_command_and_its_end_ends_it(monkeypatch):
    from medusa_viz.ui import leash

    said, waits = [b"\n", b""], []
    monkeypatch.setattr(leash.os, "read", lambda *_: said.pop(0))
    monkeypatch.setattr(leash.os, "kill", lambda pid, number: waits.append(number.name))
    monkeypatch.setattr(leash.os, "_exit", lambda code: waits.append(code))
    monkeypatch.setattr(leash.time, "sleep", lambda seconds: waits.append(seconds))
    _watch(0)
    assert waits == ["SIGINT", "SIGINT", leash.PATIENCE, 1]


def test_a_desk_of_a_tab_that_closed_meanwhile_is_given_back(page, monkeypatch):
    pages = page.sessions.pages
    tuner = pages["tuner"]
    until(lambda: tuner._open("one")[0], "the desk")
    seen = tuner.view

    def closing(token):
        pages.close(token)
        return seen(token)

    monkeypatch.setattr(tuner, "view", closing)
    pages.act("one", "tuner", "poll", {})
    assert not tuner._desks and not pages._desks
