"""One visitor's long job at the Tuner: done part by part, each part one turn on the model's worker, so that nobody
waits for more than a part. A cancelled job ends before its next part, with what it has complete by then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from medusa_viz.models.worker import WorkerClosed
from medusa_viz.tuning.jobs import Job, Progress
from medusa_viz.ui.running import Model
from medusa_viz.ui.tuner_study import Study

log = logging.getLogger(__name__)
RUNNING, FINISHED, CANCELLED, FAILED = "running", "finished", "cancelled", "failed"


class Task:
    """Runs from when it is made. `done` gets the result, on the worker's thread; of a job that ends early, what was
    complete by then, if anything was. While it is `timed`, the survey of trees stands still."""

    def __init__(self, name: str, model: Model, study: Study, token: str, job: Job, done: Callable[[Any], None],
                 timed: bool = False) -> None:
        self.name, self.state, self.fault = name, RUNNING, ""
        self.progress = Progress(0, 0)
        self._since, self._from = time.monotonic(), 0
        self._model: Model | None = model
        self._study, self._token, self._job, self._done = study, token, job, done
        self._wanted, self._lock = True, threading.Lock()
        self._timed = timed
        if timed:
            study.quiet(True)
        self._queue()

    def cancel(self) -> None:
        """Do no further part."""
        self._wanted = False

    @property
    def seconds_left(self) -> float | None:
        """Of the stretch under way, by its pace so far; a job may have several, each with a total of its own."""
        done, total = self.progress.done - self._from, self.progress.total - self._from
        return (time.monotonic() - self._since) * (total - done) / done if done > 0 and total else None

    def _queue(self) -> None:
        try:
            self._model.worker.submit(self._token, self._part).add_done_callback(self._after)
        except WorkerClosed:
            self._end(CANCELLED)

    def _part(self) -> bool:
        """On the worker: one part. False where there is nothing left to do."""
        if not self._wanted:
            self._end(CANCELLED)
            return False
        try:
            progress = next(self._job)
            if progress.total != self.progress.total:
                self._since, self._from = time.monotonic(), progress.done
            self.progress = progress
        except StopIteration as end:
            self._done(end.value)
            self._end(FINISHED)
            return False
        return True

    def _after(self, future: Future) -> None:
        try:
            if future.result():
                self._queue()
        except CancelledError:
            self._end(CANCELLED)
        except (ValueError, RuntimeError) as error:
            self._end(FAILED, str(error))
        except Exception:
            log.exception("the job %s failed", self.name)
            self._end(FAILED)

    def _end(self, state: str, fault: str = "") -> None:
        """Once."""
        with self._lock:
            if self.state != RUNNING:
                return
            if state != FINISHED and self.progress.so_far is not None:
                self._keep()
            self.state, self.fault = state, fault
        self._job.close()
        self._model = None
        if self._timed:
            self._study.quiet(False)

    def _keep(self) -> None:
        """Hand over what was complete, before anybody can see that the job has ended."""
        try:
            self._done(self.progress.so_far)
        except Exception:
            log.exception("what the job %s had complete could not be kept", self.name)
