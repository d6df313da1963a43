"""How long the parts of a step took, without asking a CUDA device more often than the step itself does."""

from __future__ import annotations

from time import perf_counter

import torch

from medusa_viz.decoding.records import Timings


class Clock:
    """Marks between propose, verify, accept and commit, the last of which may be missing.

    On CUDA the first three marks are events in the device's stream. They have passed once accept has its numbers, the
    step's one synchronisation. Accept is what is left of the time up to there; commit is queued behind it, so its time
    is that of queuing.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        if self._stream is not None and len(self._events) < 3:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record(self._stream)
        self._marks.append(perf_counter())

    def timings(self) -> Timings:
        """Milliseconds between the marks; starts over."""
        parts = [(b - a) * 1e3 for a, b in zip(self._marks, self._marks[1:])]
        if self._events:
            on_device = [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:])]
            parts = [*on_device, max(sum(parts[:3]) - sum(on_device), 0.0), *parts[3:]]
        self._marks, self._events = [], []
        return Timings(*parts)
