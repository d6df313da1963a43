"""The Tuner page: which tree is fastest with these heads on this device; measured, explained, chosen, exported."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

from medusa_viz.figures.texts import Texts
from medusa_viz.tuning import edits, formats, latency, specs
from medusa_viz.tuning.jobs import Job
from medusa_viz.ui import tuner_desk, tuner_view, tuner_work
from medusa_viz.ui.knobs import ActionError
from medusa_viz.ui.pages import Page
from medusa_viz.ui.running import Model
from medusa_viz.ui.tuner_charts import PROXIES
from medusa_viz.ui.tuner_desk import PLAIN, Chosen, Desk, Measured, Swept
from medusa_viz.ui.tuner_plan import MEASURE, STUDY, TEMPERED
from medusa_viz.ui.tuner_study import Study
from medusa_viz.ui.tuner_task import RUNNING, Task

MOST_TEXT = 2_000_000  # characters of a curve that is pasted
COMPARED_NODES = (3, 7, 15)
TIMED = ("time", "measure")


class TunerPage(Page):
    """A study for each model, shared; a desk for each visitor."""

    name = "tuner"

    def __init__(self, host: Any, t: Texts) -> None:
        super().__init__(host, t)
        self._studies: weakref.WeakKeyDictionary[Model, Study] = weakref.WeakKeyDictionary()
        self._desks: dict[str, Desk] = {}
        self._have: dict[str, dict[str, str]] = {}
        self._rooms: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def close(self, token: str) -> None:
        """A closed tab's job ends before its next part."""
        self._have.pop(token, None)
        self._rooms.pop(token, None)
        with self._lock:
            desk = self._desks.pop(token, None)
        if desk is not None and desk.task is not None:
            desk.task.cancel()

    def shutdown(self) -> None:
        for token in list(self._desks):
            self.close(token)
        for study in list(self._studies.values()):
            study.close()

    # ---- looks ------------------------------------------------------------------------------------------------

    def do_poll(self, token: str, have: dict | None = None) -> None:
        """Show what is new; `have` are the keys of the parts on screen."""
        self._have[token] = have if isinstance(have, dict) else {}

    def do_room(self, token: str, width: int, height: int) -> None:
        """Draw the tree for the room that the page has."""
        self._rooms[token] = tuple(min(max(int(side), 160), 4000) for side in (width, height))

    def view(self, token: str) -> dict:
        have = self._have.pop(token, {})
        desk, model, switched = self._open(token)
        if desk is None:
            status = self.host.status
            return tuner_view.loading(status.detail if status.state == "error" else "", self.t)
        desk.room = self._rooms.get(token, desk.room)
        desk.follow()
        shown = tuner_view.view(desk, model, have, self.t)
        return {**shown, "notice": self.t("tuner.switched")} if switched else shown

    # ---- jobs -------------------------------------------------------------------------------------------------

    def do_calibrate(self, token: str) -> None:
        """Rank greedy replies under these heads."""
        desk, model = self._desk(token)
        study = desk.study
        self._begin(desk, model, token, "calibrate", tuner_work.calibrating(model), study.calibrated)

    def do_time(self, token: str) -> None:
        """Measure this device's step times."""
        desk, model = self._desk(token)

        def done(found: latency.Latency) -> None:
            desk.study.timed(found)
            desk.elsewhere = False

        self._begin(desk, model, token, "time", tuner_work.timing(model.engine), done)

    def do_measure(self, token: str, extent: str = "full", more: bool = False, sampled: bool = False) -> None:
        """Decode for real with the chosen tree, the recommended one, and perhaps sparse and dense ones."""
        desk, model = self._desk(token)
        if extent not in MEASURE:
            raise ActionError("odd_payload", name="measure")
        prompts, tokens = MEASURE[extent]
        heat, asked = TEMPERED if sampled else 0.0, self._asked(desk, bool(more))
        trees = {name: chosen.option.tree for name, chosen in asked.items()}
        own = desk.study.latency
        priced = {name: replace(chosen.option, milliseconds=own and own.step_ms(
            chosen.option.nodes, rebuilt=specs.is_dynamic(chosen.option.tree))) for name, chosen in asked.items()}

        def done(runs: list) -> None:
            predicted, plain = own and 1e3 / own.step_ms(0), runs[0].tokens_per_second
            found = {}
            for run in runs:
                chosen, option = asked.get(run.name), priced.get(run.name)
                found[chosen.key if chosen else PLAIN, heat] = Measured(
                    run, chosen.kind if chosen else PLAIN, option, option.tokens_per_second if option else predicted,
                    run.tokens_per_second / plain if plain else None)
            desk.take_measured(found)

        self._begin(desk, model, token, "measure",
                    tuner_work.measuring(model.engine, trees, prompts, tokens, heat), done)

    def do_thresholds(self, token: str, extent: str = "quick") -> None:
        """The threshold study of typical acceptance, with the chosen tree."""
        desk, model = self._desk(token)
        if extent not in STUDY:
            raise ActionError("odd_payload", name="thresholds")
        depth, chosen = STUDY[extent], desk.chosen
        of, title = (chosen.key, extent), tuner_view.title(chosen, self.t)
        self._verifiable(title, chosen)

        def done(found: Any) -> None:
            desk.take_swept(Swept(of, title, found))

        self._begin(desk, model, token, "thresholds",
                    tuner_work.studying(model.engine, chosen.option.tree, depth.epsilons, depth.temperatures,
                                        depth.prompts, depth.tokens), done)

    def do_cancel(self, token: str) -> None:
        """Stop the job under way. What it has complete is kept: prompts that all trees decoded, points of the study."""
        desk, _ = self._desk(token)
        if desk.task is None or desk.task.state != RUNNING:
            raise ActionError("tuner_no_job")
        desk.task.cancel()

    # ---- which tree -------------------------------------------------------------------------------------------

    def do_choose(self, token: str, kind: str, budget: int | None = None, name: str = "", seed: int = 0) -> None:
        """A tree of a builder, or a published one."""
        desk, _ = self._desk(token)
        if not isinstance(kind, str) or not isinstance(seed, int) or not 0 <= seed < 2**31:
            raise ActionError("odd_payload", name="choose")
        budget = desk.chosen.budget if budget is None else budget
        desk.choose(tuner_desk.build(desk.study, kind, budget, name, seed))

    def do_take(self, token: str) -> None:
        """The recommended tree."""
        desk, _ = self._desk(token)
        found = desk.advice()
        if found is None or found.best is None:
            raise ActionError("tuner_no_advice")
        kind, _, budget = found.best.spec.partition(":")
        desk.choose(tuner_desk.build(desk.study, kind, int(budget)))

    def do_prune(self, token: str, path: str) -> None:
        """Without a node and everything below it."""
        desk, _ = self._desk(token)
        desk.edit(edits.prune, tuner_desk.path_of(path, desk.study))

    def do_add(self, token: str, path: str, below: bool = False) -> None:
        """With one more node: the one named, or the best place that is free below it."""
        desk, _ = self._desk(token)
        path = tuner_desk.path_of(path, desk.study)
        desk.edit(edits.add_child if below else tuner_desk.with_path, path)

    def do_undo(self, token: str) -> None:
        self._desk(token)[0].undo()

    def do_redo(self, token: str) -> None:
        self._desk(token)[0].redo()

    # ---- how it is shown --------------------------------------------------------------------------------------

    def do_show(self, token: str, editing: bool | None = None, cutting: bool | None = None, grown: int | None = None,
                proxy: str | None = None, format: str | None = None) -> None:
        """Slots, what the budget cuts, growth up to so many nodes, the proxy of the study, the format of the text."""
        desk, _ = self._desk(token)
        desk.editing = desk.editing if editing is None else bool(editing)
        desk.cutting = desk.cutting if cutting is None else bool(cutting)
        if grown is not None:
            desk.grown = min(max(int(grown), 0), desk.chosen.option.nodes)
        if proxy in PROXIES:
            desk.proxy = proxy
        if format in formats.FORMATS:
            desk.format = format

    def do_open(self, token: str, path: str) -> None:
        """Draw a node's children although the tree is folded."""
        desk, _ = self._desk(token)
        desk.opened |= {tuner_desk.path_of(path, desk.study)}

    def do_fold(self, token: str) -> None:
        self._desk(token)[0].opened = frozenset()

    def do_price(self, token: str, batch: int | None = None, curve: int | None = None, elsewhere: bool | None = None
                 ) -> None:
        """At which batch, behind which prefix and on which device steps are priced."""
        desk, _ = self._desk(token)
        if batch is not None and batch not in latency.BATCHES:
            raise ActionError("odd_payload", name="price")
        desk.batch = batch or desk.batch
        desk.curve = desk.curve if curve is None else min(max(int(curve), 0), 9)
        desk.elsewhere = desk.elsewhere if elsewhere is None else bool(elsewhere) and desk.loaded is not None

    # ---- in and out -------------------------------------------------------------------------------------------

    def do_load_curve(self, token: str, text: str, name: str = "") -> None:
        """Step times recorded on another device."""
        desk, _ = self._desk(token)
        if not isinstance(text, str):
            raise ActionError("odd_payload", name="load_curve")
        if len(text) > MOST_TEXT:
            raise ActionError("tuner_long_curve")
        name = " ".join(name.split())[:80] if isinstance(name, str) else ""
        called = self.t("tuner.curve_named", name=name) if name else self.t("tuner.curve_pasted")
        desk.loaded, desk.elsewhere = latency.from_json(text, called), True

    def do_save_curve(self, token: str) -> None:
        """This device's step times as a file that another Tuner can load."""
        desk, _ = self._desk(token)
        if desk.study.latency is None:
            raise ActionError("tuner_no_curve")
        desk.give = {"file": latency.to_json(desk.study.latency), "name": "medusa-viz-step-times.json"}

    def do_import(self, token: str, text: str) -> None:
        """A tree out of pasted text of any format; parsed, never evaluated."""
        desk, _ = self._desk(token)
        if not isinstance(text, str):
            raise ActionError("odd_payload", name="import")
        found = formats.read(text)
        notes = [self.t("tuner.read_as", format=found.title), *found.notes]
        chosen = tuner_desk.own(desk.study, found.shape)
        desk.choose(chosen)
        desk.imported = notes

    def do_use(self, token: str) -> None:
        """Hand the chosen tree to the page, for its Explorer."""
        desk, _ = self._desk(token)
        shape = desk.chosen.shape
        desk.give = {"tree": {"dynamic": desk.chosen.option.nodes} if shape is None
                     else {"paths": [list(path) for path in shape.paths[1:]]}}

    # ---- small parts ------------------------------------------------------------------------------------------

    def _open(self, token: str) -> tuple[Desk | None, Model | None, bool]:
        """The visitor's desk at the running model; a new one where the model or its heads were changed."""
        model = self.host.model
        if model is None:
            return None, None, False
        with self._lock:
            study = self._studies.get(model)
            if study is None:
                study = self._studies[model] = Study(model)
            if not study.opened.is_set():
                return None, model, False
            desk, old = self._desks.get(token), None
            if desk is None or desk.study is not study:
                old, desk = desk, tuner_desk.begin(study)
                self._desks[token] = desk
        if old is not None:
            old.study.close()
            if old.task is not None:
                old.task.cancel()
        return desk, model, old is not None

    def _desk(self, token: str) -> tuple[Desk, Model]:
        """The desk that an action is for. Raises ActionError."""
        desk, model, switched = self._open(token)
        if desk is None:
            raise ActionError("tuner_not_ready")
        if switched:
            raise ActionError("tuner_switched")
        return desk, model

    def _begin(self, desk: Desk, model: Model, token: str, name: str, job: Job, done: Any) -> None:
        """One job at a time for all visitors: the model is kept from nobody for more than a part of one, and nothing
        is timed beside another."""
        with self._lock:
            if self._desks.get(token) is not desk:  # the tab was closed meanwhile
                raise CancelledError
            for other in (desk, *self._desks.values()):
                if other.task is not None and other.task.state == RUNNING:
                    raise ActionError("tuner_busy" if other is desk else "tuner_taken",
                                      name=self.t(f"tuner.job_{other.task.name}"))
            desk.task = Task(name, model, desk.study, token, job, done, timed=name in TIMED)

    def _asked(self, desk: Desk, more: bool) -> dict[str, Chosen]:
        """Trees to decode with, by the name that stands in the table."""
        study, found = desk.study, desk.advice()
        asked = {tuner_view.title(desk.chosen, self.t): desk.chosen} if desk.chosen.option.nodes else {}
        if found and found.best:
            kind, _, budget = found.best.spec.partition(":")
            asked.setdefault(found.best.spec, tuner_desk.build(study, kind, int(budget)))
        if more and study.facts.rates:
            for kind in ("sparse", "best-dense"):
                for nodes in COMPARED_NODES:
                    asked.setdefault(f"{kind}:{nodes}", tuner_desk.build(study, kind, nodes))
        if not asked:
            raise ActionError("tuner_nothing")
        for name, chosen in asked.items():
            self._verifiable(name, chosen)
        return asked

    def _verifiable(self, name: str, chosen: Chosen) -> None:
        """Raise ActionError for a tree that is larger than is verified here."""
        most = self.host.max_nodes(self.host.model)
        if chosen.option.tree.nodes > most:
            raise ActionError("tuner_too_large", name=name, most=f"{most:,}")
