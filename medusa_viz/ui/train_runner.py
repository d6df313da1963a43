"""Runs the commands of one training run after another, as child processes of low priority; one run at a time.

The run belongs to the server: it outlives the page that began it, and ends with the server.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from medusa_viz.models.presets import REPOSITORY
from medusa_viz.ui.knobs import ActionError
from medusa_viz.ui.train_plan import Plan

log = logging.getLogger(__name__)
RUN_NAME, OUTPUT_NAME, ERRORS_NAME = "run.json", "output.txt", "errors.txt"
STOPPED = (130, -signal.SIGINT)
GRACE = 15.0  # seconds that a run has to save what it has when the server ends
TAIL = 8192  # bytes of the errors that are looked at
BAR = re.compile(r"\d+%\||\d+(token|step)s? \[|, *[\d.?]+ ?(token|step|s)/(s|token|step)")
COUNT = re.compile(r"writing: [^\r\n]*?(\d+)/(\d+) \[")


@dataclass(eq=False)
class Running:
    """The run under way."""

    plan: Plan
    phase: str = ""
    stopping: bool = False
    child: subprocess.Popen | None = None
    since: float = field(default_factory=time.monotonic)


class Runner:
    """At most one run, on `device` as the command line names it."""

    def __init__(self, device: str = "auto") -> None:
        self.device = device
        self.current: Running | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, plan: Plan) -> None:
        """Begin a run, or go on with one that ended early. Raises ActionError while another runs."""
        with self._lock:
            if self.current is not None:
                raise ActionError("train_busy", name=self.current.plan.name)
            plan.folder.mkdir(parents=True, exist_ok=True)
            write(plan.folder, {"plan": plan.to_json(), "begun": time.time(), "state": "running"})
            self.current = Running(plan)
            self._thread = threading.Thread(target=self._go, args=(self.current,), name="train", daemon=True)
            self._thread.start()

    def stop(self, name: str, now: bool = False) -> None:
        """Ask the run of that name to stop, which takes as long as its step under way. One that was asked already is
        ended `now` or left to stop: two people may ask at once, and what is ended loses what it did not save."""
        with self._lock:
            run = self.current
            if run is None:
                raise ActionError("train_not_running")
            if run.plan.name != name:
                raise ActionError("train_other_run", name=name[:60], other=run.plan.name)
            if not run.stopping:
                run.stopping = True
                _interrupt(run.child)
            elif now:
                _end(run.child)

    def shutdown(self) -> None:
        """The server ends: let go of the leash, and wait a while."""
        with self._lock:
            run, thread = self.current, self._thread
            if run is None:
                return
            run.stopping = True
            _interrupt(run.child)
        thread.join(GRACE)
        with self._lock:
            _end(run.child)
        thread.join(GRACE)

    def _go(self, run: Running) -> None:
        """On a thread of its own: all commands, then how it ended."""
        ending: dict[str, object] = {"state": "broken", "sentence": ""}
        try:
            for phase, words in run.plan.commands(self.device):
                code = self._one(run, phase, words)
                ending = _ending(code, run)
                if code:
                    break
        except OSError as error:
            ending = {"state": "broken", "sentence": f"The run could not go on ({error.strerror or error})."}
        finally:
            try:
                write(run.plan.folder, {**read(run.plan.folder), **ending, "ended": time.time()})
            except OSError:
                log.exception("how the run %s ended could not be written down", run.plan.name)
            with self._lock:
                self.current = None

    def _one(self, run: Running, phase: str, words: list[str]) -> int:
        """Run one command to its end; its exit status."""
        folder = run.plan.folder
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (folder / OUTPUT_NAME).open("ab") as output, (folder / ERRORS_NAME).open("wb") as errors:
            with self._lock:
                if run.stopping:
                    return 130
                run.phase, run.since = phase, time.monotonic()
                run.child = subprocess.Popen([sys.executable, "-m", "medusa_viz.ui.leash", *words],
                                             stdin=subprocess.PIPE, bufsize=0, stdout=output, stderr=errors,
                                             start_new_session=True, env={**os.environ, "PYTHONPATH": path})
            try:
                return run.child.wait()
            finally:
                run.child.stdin.close()


def _interrupt(child: subprocess.Popen | None) -> None:
    """Stop a command as Ctrl-C does, by its leash: a signal would be lost on one that has not begun to listen."""
    if child is not None and child.poll() is None:
        with suppress(OSError, ValueError):  # it ended this moment
            child.stdin.write(b"\n")


def _end(child: subprocess.Popen | None) -> None:
    if child is not None and child.poll() is None:
        child.kill()


def _ending(code: int, run: Running) -> dict[str, object]:
    if code == 0:
        return {"state": "finished", "sentence": ""}
    if code in STOPPED or run.stopping:
        return {"state": "stopped", "sentence": ""}
    return {"state": "broken", "sentence": last_error(run.plan.folder), "code": code}


def last_error(folder: Path) -> str:
    """The last line of the command's errors that is no progress bar."""
    lines = [line.strip() for line in re.split(r"[\r\n]", _tail(folder / ERRORS_NAME))]
    said = [line for line in lines if line and not BAR.search(line)]
    return re.sub(r"^python -m medusa_viz \w+: ", "", said[-1])[:400] if said else ""


def counted(folder: Path) -> tuple[int, int] | None:
    """Tokens written and wanted, as the last progress bar of `distill` says."""
    found = COUNT.findall(_tail(folder / ERRORS_NAME))
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def read(folder: Path) -> dict:
    """What a run's folder says of itself; empty where it says nothing readable."""
    try:
        saved = json.loads((folder / RUN_NAME).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return saved if isinstance(saved, dict) else {}


def write(folder: Path, saved: dict) -> None:
    part = folder / (RUN_NAME + ".part")
    part.write_text(json.dumps(saved, indent=1, ensure_ascii=False), "utf-8")
    os.replace(part, folder / RUN_NAME)
