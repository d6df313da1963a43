"""Long jobs of the Tuner page: what a stopped one keeps, whose turn it is, and which replies calibrating reads."""

import threading
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from tiny_page import PATIENCE, token_file, until
from tiny_tuner import done, fact, first, part, saved, serving

from medusa_viz import cli
from medusa_viz.decoding import engine as engines
from medusa_viz.decoding.tree import dense, from_paths
from medusa_viz.models import beside, checkpoints
from medusa_viz.models.beside import RANKS_NAME
from medusa_viz.training import own_text
from medusa_viz.tuning import accuracy, calibration, extents, formats
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.jobs import Progress
from medusa_viz.ui import tuner_plan, tuner_work

SWEEP = extents.Extent((0.01, 0.25), (0.7,), 2, 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("tuner"))


@pytest.fixture
def page(folders, tmp_path, monkeypatch):
    yield from serving(folders, tmp_path, monkeypatch)


class Held:
    """A job of `tuner_work` that waits at the first part that is `enough`, so that a test can act there."""

    def __init__(self, monkeypatch, name, enough=lambda part: True):
        self.there, self.go = threading.Event(), threading.Event()
        make = getattr(tuner_work, name)

        def waiting(*args):
            job = make(*args)
            while True:
                try:
                    now = next(job)
                except StopIteration as end:
                    return end.value
                yield now
                if enough(now):
                    self.there.set()
                    self.go.wait(PATIENCE)

        monkeypatch.setattr(tuner_work, name, waiting)

    def cancelled(self, page):
        """The view once the job was cancelled there."""
        assert self.there.wait(PATIENCE)
        assert page.act("cancel")["notice"] == ""
        self.go.set()
        return first(page, lambda view: view["job"] is None)


def names(page):
    return [row["name"] for row in part(page.act("hello"), "measured")["rows"]]


# ---- what a stopped job keeps -------------------------------------------------------------------------------------


def test_a_cancelled_measurement_keeps_the_prompts_that_every_tree_decoded(page, monkeypatch):
    monkeypatch.setitem(tuner_plan.MEASURE, "quick", (3, 6))
    page.act("choose", kind="chain", budget=2)
    with monkeypatch.context() as patch:
        held = Held(patch, "measuring", lambda now: now.so_far and now.so_far[0].prompts == 2)
        page.act("measure", extent="quick")
        view = held.cancelled(page)
    assert names(page) == ["plain · 2 of 3 prompts", "chain:2 · 2 of 3 prompts"]
    rows = part(view, "measured")["rows"]
    assert rows[0]["gain"] == "1.00" and all(row["equal"]["state"] in ("yes", "tie") for row in rows)
    assert fact(view, "measured").endswith("· 2 of 3 prompts")
    done(page, "measure", extent="quick")
    assert names(page) == ["plain", "chain:2"]
    with monkeypatch.context() as patch:
        held = Held(patch, "measuring", lambda now: now.so_far)
        page.act("measure", extent="quick")
        held.cancelled(page)
    assert names(page) == ["plain", "chain:2"], "a whole measurement is not lost to half of another"


def test_a_measurement_that_is_cancelled_at_once_leaves_the_table_as_it_was(page, monkeypatch):
    page.act("choose", kind="chain", budget=2)
    held = Held(monkeypatch, "measuring")
    page.act("measure", extent="quick")
    assert not part(held.cancelled(page), "measured")["rows"]


def test_a_cancelled_study_keeps_its_points_and_says_how_many(page, monkeypatch):
    monkeypatch.setitem(extents.STUDY, "quick", SWEEP)
    with monkeypatch.context() as patch:
        held = Held(patch, "studying", lambda now: now.so_far and len(now.so_far.points) == 3)
        page.act("thresholds", extent="quick")
        shown = part(held.cancelled(page), "thresholds")
    assert shown["caption"].endswith("Stopped early: 3 of 5 points.") and shown["points"] == 3
    shown = part(done(page, "thresholds", extent="quick"), "thresholds")
    assert "Stopped" not in shown["caption"]
    whole = shown["points"]
    with monkeypatch.context() as patch:
        held = Held(patch, "studying", lambda now: now.so_far)
        page.act("thresholds", extent="quick")
        assert part(held.cancelled(page), "thresholds")["points"] == whole, "the same study, and fuller"
        held = Held(patch, "studying", lambda now: now.so_far)
        page.act("choose", kind="chain", budget=1)
        page.act("thresholds", extent="quick")
        assert "chain:1" in part(held.cancelled(page), "thresholds")["caption"], "another tree's study is another"


def test_a_job_that_fails_keeps_what_it_has_and_says_its_one_sentence(page, monkeypatch):
    make = tuner_work.measuring

    def breaking(*args):
        for now in make(*args):
            yield now
            if now.so_far:
                raise RuntimeError("The device is on fire.")

    monkeypatch.setitem(tuner_plan.MEASURE, "quick", (2, 6))
    monkeypatch.setattr(tuner_work, "measuring", breaking)
    page.act("choose", kind="chain", budget=2)
    page.act("measure", extent="quick")
    view = first(page, lambda view: view["job"] and not view["job"]["live"])
    assert view["job"]["text"] == "The device is on fire."
    assert names(page) == ["plain · 1 of 2 prompts", "chain:2 · 1 of 2 prompts"]


def test_a_job_ends_even_if_what_it_has_cannot_be_kept(page, monkeypatch):
    held = Held(monkeypatch, "studying", lambda now: now.so_far)
    page.act("thresholds", extent="quick")
    page.sessions.pages["tuner"]._desks["one"].task._done = lambda found: 1 / 0
    held.cancelled(page)
    done(page, "time")


def test_half_a_curve_is_none_and_another_job_can_begin(page, monkeypatch):
    held = Held(monkeypatch, "timing")
    assert page.act("time")["job"]["live"]
    assert "step times is under way" in page.act("calibrate")["notice"]
    view = held.cancelled(page)
    assert view["sources"]["times_kind"] == "none" and not list(page.root.glob("latency/*"))
    assert "No job" in page.act("cancel")["notice"]
    done(page, "calibrate")


# ---- whose turn it is ---------------------------------------------------------------------------------------------


def test_a_closed_tab_ends_its_job_and_one_visitor_at_a_time_has_one(page, monkeypatch):
    held = Held(monkeypatch, "timing")
    page.act("time", "two")
    task = page.sessions.pages["tuner"]._desks["two"].task
    assert page.act("poll")["job"] is None, "another visitor's job is not mine"
    for action in ("time", "calibrate", "measure", "thresholds"):
        view = page.act(action)
        assert "Another visitor's job (step times) is under way" in view["notice"] and view["job"] is None
    page.sessions.close("two")
    held.go.set()
    until(lambda: task.state == "cancelled", "the end")
    assert page.explorer("start", prompt="abc")["steps"]["count"] == 1
    done(page, "time")


def test_a_step_of_the_explorer_waits_for_one_part_of_anothers_job_at_most(page, monkeypatch):
    waits, served, worker = [], [], page.host.model.worker
    submit = worker.submit

    def watched(owner, job):
        def on_worker():
            if owner == "one":
                waits.append(served[before:].count("two"))
            served.append(owner)
            return job()

        with worker._condition:  # so that nobody is served between the two
            before = len(served)
            return submit(owner, on_worker)

    monkeypatch.setattr(worker, "submit", watched)
    monkeypatch.setattr(tuner_work, "measuring", lambda *_: (Progress(n, 0) for n in count()))
    assert page.act("measure", "two")["job"]["live"]
    page.explorer("start", prompt="abc")
    until(lambda: page.explorer("step") and len(waits) > 5 and "two" in served[served.index("one") :], "turns of both")
    assert max(waits) <= 1
    page.sessions.close("two")


@pytest.mark.parametrize("name", ["calibrating", "timing", "measuring", "studying"])
def test_a_part_of_a_job_is_a_prefill_and_a_step_at_most(page, name):
    engine, passes = page.host.model.engine, []
    handle = engine.backbone.model.register_forward_hook(lambda *_: passes.append(1))
    arguments = {"calibrating": (page.host.model,), "timing": (engine,),
                 "measuring": (engine, {"c": dense([1, 1])}, 3, 6),
                 "studying": (engine, dense([1, 1]), (0.09,), (0.7,), 3, 6)}
    try:
        for _ in getattr(tuner_work, name)(*arguments[name]):
            assert len(passes) <= 2, "nobody waits for more"
            passes.clear()
    finally:
        handle.remove()


# ---- what calibrating reads ---------------------------------------------------------------------------------------


def test_calibrating_reads_the_training_half_of_the_shipped_replies(page, monkeypatch):
    path = token_file(page.root / "replies.npz")  # 12 replies of 40 tokens, 9 of them for training
    monkeypatch.setattr(tuner_work, "shipped", lambda engine, options: path)
    assert tuner_work.reply_tokens(None, {}) == (9 * 40, 0)
    view = done(page, "calibrate")
    assert f"{9 * 34} positions of 9 greedy replies" in view["sources"]["rates"]


def other_table(engine):
    """A rank table beside the heads that ranks everything three places lower than the user's own."""
    kept, _ = tuner_work.stored(engine)
    table = replace(kept.table, ranks=np.minimum(kept.table.ranks.astype(int) + 3, 255).astype(np.uint8))
    other = replace(kept, table=table, about=kept.about | {"replies": "held out", "own_text": False})
    path = Path(engine.loaded.source) / RANKS_NAME
    accuracy.save(path, other, accuracy.accuracy(other.table))
    return path, other


def test_in_the_tuner_the_users_own_calibration_counts_before_the_table_beside_the_heads(page):
    done(page, "calibrate")
    engine = page.host.model.engine
    kept, _ = tuner_work.stored(engine)
    path, other = other_table(engine)
    try:
        assert tuner_work.stored(engine)[0].about == kept.about
        elsewhere = replace(engine, title="another backbone")
        assert tuner_work.stored(elsewhere)[0] is None, "both tables are of heads on another backbone"
        beside.own_place(engine.drafter.module).unlink()
        assert tuner_work.stored(engine)[0].about == other.about
    finally:
        path.unlink()


def test_what_the_tuner_calibrated_counts_in_the_explorer_and_for_commands(page, capsys):
    """Heads that bring no rank table: the Explorer, without a restart, `decode`, `tune` and `export` go by it too."""
    config = page.host.model.engine.accuracy
    page.explorer("start", prompt="abc")
    done(page, "calibrate")
    study = page.sessions.pages["tuner"]._desks["one"].study
    rates = accuracy.shares(study.known.table)
    assert study.facts.rates == rates != config
    wanted = sparse(rates, 9).fingerprint
    assert wanted != sparse(config, 9).fingerprint
    for again in (False, True):
        if again:
            page.explorer("start", prompt="abc")
        view = page.explorer("knob", top_s=[10, 10, 10], size=9)
        paths = [[int(rank) for rank in node["path"].split(".")] for node in view["tree"]["nodes"] if node["path"]]
        assert from_paths(paths).fingerprint == wanted
    named = page.host.model.options
    loaded = engines.load(engines.EngineOptions(named["model"], named["heads"], "cpu"))
    assert loaded.accuracy == rates and cli.tree_from("sparse:9", loaded).fingerprint == wanted  # decode, bench
    assert calibration.known_here(loaded).about == study.known.about  # tune
    assert cli.main(["export", "--tree", "sparse:9", "--heads", loaded.loaded.source]) == 0
    assert formats.read(capsys.readouterr().out).shape.fingerprint == wanted
    beside.own_place(loaded.drafter.module).write_bytes(b"damaged")
    assert calibration.known_here(loaded) is None and tuner_work.stored(loaded)[0] is None


def test_heads_that_bring_a_rank_table_keep_it_in_the_explorer(page):
    done(page, "calibrate")
    path, other = other_table(page.host.model.engine)
    try:
        done(page, "calibrate")
        engine = page.host.model.engine
        assert engine.accuracy == accuracy.shares(other.table)
        assert calibration.known_here(engine).about == other.about
    finally:
        path.unlink()


def test_figures_of_the_original_backbones_text_are_said_to_be_that(page):
    assert "original" not in done(page, "calibrate")["sources"]["rates"]
    study = page.sessions.pages["tuner"]._desks["one"].study
    study.calibrated(replace(study.known, about=study.known.about | {"own_text": False}))
    assert "replayed figures do not tell of what the trained one writes" in page.act("poll")["sources"]["rates"]


def test_of_the_default_model_half_of_what_ships_is_read():
    path = own_text.shipped_file("smollm2-135m")
    with np.load(path) as file:
        lengths, training = np.diff(file["offsets"]), file["split"] == 0
        assert not file["temperature"].any() and 0 < training.sum() < len(training)
    assert own_text.training_part(path).ids.size == lengths[training].sum()


def test_a_damaged_table_beside_the_heads_does_not_hide_the_users_own_and_is_noticed_once(page):
    engine = page.host.model.engine
    path = Path(engine.loaded.source) / RANKS_NAME
    path.write_bytes(b"damaged")
    try:
        loaded = checkpoints.with_ranks(checkpoints.with_ranks(engine.loaded))
        assert sum("cannot be read" in notice for notice in loaded.report.notices) == 1
        done(page, "calibrate")
        study = page.sessions.pages["tuner"]._desks["one"].study
        assert page.host.model.engine.accuracy == accuracy.shares(study.known.table)
    finally:
        path.unlink()
