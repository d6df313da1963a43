"""What the Tuner knows of one pair of model and heads, shared by all visitors: accuracies, ranks, step times, and
trees of every builder and size, surveyed in the background. Nothing here is one visitor's own, and nothing holds the
model."""

from __future__ import annotations

import logging
import threading
from typing import Any

from medusa_viz.decoding.settings import MAX_RANKS
from medusa_viz.tuning import accuracy, recommend, specs
from medusa_viz.tuning.accuracy import Accuracy, Calibration
from medusa_viz.tuning.jobs import Job
from medusa_viz.tuning.latency import Latency
from medusa_viz.tuning.recommend import Option, Survey
from medusa_viz.ui import tuner_work
from medusa_viz.ui.running import Model

log = logging.getLogger(__name__)
SURVEYED = ("sparse", "best-dense", "joint", "sequoia", "dynamic")
"""In this order; trees rebuilt at each step take longest."""


class Study:
    """Read on the model's worker when it is made; `opened` is set then."""

    def __init__(self, model: Model) -> None:
        engine = model.engine
        self.title, self.place = engine.title, engine.place
        self.heads, self.ranks = engine.drafter.heads, min(MAX_RANKS, engine.drafter.choices)
        self.plain_ms, self.cpu = model.plain_ms, engine.backbone.device.type == "cpu"
        self.known: Calibration | None = None
        self.measured: Accuracy | None = None
        self.latency: Latency | None = None
        self.facts = specs.Facts(self.heads, engine.accuracy, choices=engine.drafter.choices)
        self.survey = Survey(self.facts)
        self.options: dict[str, list[Option]] = {}
        self.published: list[Option] = []
        self.scatter: dict[str, list[Option]] = {}
        self.surveying = False
        self.opened = threading.Event()
        self._config, self._choices = engine.accuracy, engine.drafter.choices
        self._calm = threading.Condition()
        self._measuring, self._turn = 0, 0
        model.worker.submit("", lambda: tuner_work.stored(engine)).add_done_callback(self._read)

    @property
    def settled(self) -> bool:
        """All builders of one tree for all steps were surveyed."""
        return bool(self.options) and (not self.surveying or SURVEYED[-2] in self.options)

    @property
    def all_options(self) -> list[Option]:
        return [option for options in list(self.options.values()) for option in options]

    def calibrated(self, known: Calibration) -> None:
        """Take a calibration, and survey anew what follows from it."""
        self.known, self.measured = known, accuracy.accuracy(known.table, known.prompts, self.ranks)
        self._restart()

    def timed(self, latency: Latency) -> None:
        """Take the step times of this device."""
        self.latency = latency

    def quiet(self, on: bool) -> None:
        """While something is timed, the survey stands still."""
        with self._calm:
            self._measuring += 1 if on else -1
            self._calm.notify_all()

    def close(self) -> None:
        """End the survey; the study is of no use any more."""
        with self._calm:
            self._turn += 1

    def _read(self, future: Any) -> None:
        """What lies stored came in; on the worker's thread."""
        try:
            known, self.latency = future.result()
        except Exception:
            log.exception("stored measurements could not be read")
            known = None
        if known is not None:
            self.known, self.measured = known, accuracy.accuracy(known.table, known.prompts, self.ranks)
        self._restart()
        self.opened.set()

    def _restart(self) -> None:
        with self._calm:
            self._begin()

    def _begin(self) -> None:
        self._turn += 1
        rates, known = () if self.known else self._config, self.known
        self.facts = specs.Facts(self.heads, rates, known.table if known else None, None,
                                 known.temperatures if known else (), self._choices)
        # Emptied before the survey is a new one: whoever sees that finds no figure of the old one beside it.
        self.options, self.published, self.scatter = {}, [], {}
        self.survey = Survey(self.facts, known)
        self.surveying = bool(self.facts.rates)
        if self.surveying:
            threading.Thread(target=self._go, args=(self._turn, self.survey), name="survey", daemon=True).start()

    def _go(self, turn: int, survey: Survey) -> None:
        """On a thread of its own: every builder at every budget, the published trees, then the scatter."""
        try:
            for name in SURVEYED[:-1]:
                self._take(turn, name, self._finished(turn, survey.running((name,))))
            for name, job in (("published", recommend.publishing(survey)), ("scatter", recommend.scattering(survey))):
                found = self._finished(turn, job)
                with self._calm:
                    if turn == self._turn:
                        setattr(self, name, found)
            self._take(turn, SURVEYED[-1], self._finished(turn, survey.running(SURVEYED[-1:])))
        except Exception:
            log.exception("the survey of trees failed")
        with self._calm:
            if turn == self._turn:
                self.surveying = False

    def _take(self, turn: int, name: str, options: list[Option] | None) -> None:
        with self._calm:
            if options and turn == self._turn:
                self.options = {**self.options, name: options}

    def _finished(self, turn: int, job: Job) -> Any:
        """The result of a job, part by part while nothing is timed; None once it is out of date."""
        while turn == self._turn:
            with self._calm:
                self._calm.wait_for(lambda: not self._measuring)
            try:
                next(job)
            except StopIteration as end:
                return end.value
        job.close()
        return None
