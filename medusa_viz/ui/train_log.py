"""A run's folder as it is read while it grows: the log, only its new lines each time, and the progress file.

Folders may come from anywhere, so every value is taken only if it is of the kind that it should be.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

LOG_NAME, PROGRESS_NAME = "log.jsonl", "progress.json"
HEADS_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MOST_BYTES = 32 << 20  # of a log that are read
MARK = 256  # bytes before the place reached that must still be there, or the log was written anew
FRESH = 10.0  # seconds after which a progress file says nothing of now
MOST_HEADS = 64


def number(value: object) -> float | None:
    """A finite number, or None."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def numbers_of(value: object) -> list[float | None]:
    """A list of finite numbers and gaps; empty for anything else."""
    return [number(one) for one in value[:MOST_HEADS]] if isinstance(value, list) else []


@dataclass(frozen=True)
class StepLine:
    """The terms of one optimiser step: total = lm_loss + lambda0 · Σ weight · loss."""

    step: int
    total: float | None
    loss: list[float | None]
    top1: list[float | None]
    weights: list[float | None]
    lm_loss: float | None
    lambda0: float
    stage: int
    seconds: float


@dataclass(frozen=True)
class PassLine:
    """How good the heads were on held-out replies after a pass."""

    step: int
    number: int
    stage: int
    top1: list[float | None]
    tokens_per_step: dict[str, float]
    """By number of nodes."""
    perplexity: tuple[float, float] | None
    """Before and after."""
    same_choice: float | None = None
    """Share of the tokens at which the backbone's first choice is what it was before training."""


@dataclass
class RunLog:
    """What a folder's log has said so far."""

    folder: Path
    steps: list[StepLine] = field(default_factory=list)
    passes: list[PassLine] = field(default_factory=list)
    _read: int = 0
    _mark: bytes = b""

    @property
    def key(self) -> str:
        """Another one whenever there is something new."""
        last = self.steps[-1].step if self.steps else 0
        return f"{self.folder}|{len(self.steps)}|{len(self.passes)}|{last}|{self._read}"

    @property
    def heads(self) -> int:
        return max((len(line.loss) for line in self.steps[-1:]), default=0)

    def update(self) -> RunLog:
        """Read the new lines; a log that was cut or written anew is read from its start."""
        try:
            with (self.folder / LOG_NAME).open("rb") as file:
                file.seek(max(0, self._read - MARK))
                if file.read(min(MARK, self._read)) != self._mark:
                    self.steps, self.passes, self._read, self._mark = [], [], 0, b""
                    file.seek(0)
                new = file.read(MOST_BYTES - min(self._read, MOST_BYTES))
        except OSError:
            self.steps, self.passes, self._read, self._mark = [], [], 0, b""
            return self
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
        for line in whole.splitlines():
            self._take(line)
        self._read += len(whole)
        self._mark = (self._mark + whole)[-MARK:]
        return self

    def _take(self, text: bytes) -> None:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(line, dict) or number(line.get("step")) is None:
            return
        if "pass" in line:
            self.passes.append(_pass_line(line))
        else:
            self.steps.append(_step_line(line))


def _step_line(line: dict) -> StepLine:
    lambda0 = number(line.get("lambda0"))
    return StepLine(int(line["step"]), number(line.get("total")), numbers_of(line.get("loss")),
                    numbers_of(line.get("top1")), numbers_of(line.get("weights")), number(line.get("lm_loss")),
                    1.0 if lambda0 is None else lambda0, int(number(line.get("stage")) or 1),
                    number(line.get("seconds")) or 0.0)


def _pass_line(line: dict) -> PassLine:
    groups = line.get("held_out") if isinstance(line.get("held_out"), dict) else {}
    scores = next((groups[name] for name in ("all, greedy", "all", *groups) if isinstance(groups.get(name), dict)), {})
    table = scores.get("accuracy") if isinstance(scores.get("accuracy"), list) else []
    rates = scores.get("tokens_per_step") if isinstance(scores.get("tokens_per_step"), dict) else {}
    found = line.get("perplexity") if isinstance(line.get("perplexity"), dict) else {}
    before, after = number(found.get("before")), number(found.get("after"))
    return PassLine(int(line["step"]), int(number(line["pass"]) or 0), int(number(line.get("stage")) or 1),
                    [number(row[0]) if isinstance(row, list) and row else None for row in table[:MOST_HEADS]],
                    {nodes: rate for nodes in list(rates)[:8] if nodes.isdigit() and (rate := number(rates[nodes]))},
                    None if before is None or after is None else (before, after), number(line.get("same_choice")))


@dataclass(frozen=True)
class Progress:
    """Where a run is. `fresh`: written a moment ago, so something writes it."""

    phase: str
    done: int
    total: int
    seconds: float
    fresh: bool


def progress(folder: Path) -> Progress | None:
    """The progress file; None where there is none that can be read."""
    path = folder / PROGRESS_NAME
    try:
        saved = json.loads(path.read_text("utf-8"))
        age = time.time() - path.stat().st_mtime
        done, total, seconds = (number(saved[name]) for name in ("done", "total", "seconds"))
        if done is None or total is None:
            return None
        return Progress(str(saved["phase"])[:40], int(done), int(total), seconds or 0.0, age < FRESH)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def heads_written(folder: Path) -> int | None:
    """When the heads that lie there were written, in nanoseconds; None where there are none."""
    for name in HEADS_NAMES:
        if (folder / name).is_file():
            return (folder / name).stat().st_mtime_ns
    return None


class Pace:
    """Units per second within a phase, from where it was first seen to where it is."""

    def __init__(self) -> None:
        self._seen: tuple[str, int, float] = "", 0, 0.0

    def rate(self, phase: str, done: int, seconds: float) -> float | None:
        """None until something was done."""
        name, first, begun = self._seen
        if name != phase or done < first:
            self._seen = phase, done, seconds
            return None
        return (done - first) / (seconds - begun) if done > first and seconds > begun else None
