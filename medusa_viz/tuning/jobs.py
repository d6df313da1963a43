"""Long work in small parts.

A `Job` is a generator: every `next` does one part, on the caller's thread, and tells how far it has come; its return
value is the result. A page runs each part as one job of the model's worker, so nobody waits for more than a part, and
stops by asking for no more of them. `finish` does all parts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """`done` of `total` parts are done; `part` names the one that was. `so_far`: the result that the job leaves if it
    ends here, of what is complete by now; None where that is nothing."""

    done: int
    total: int
    part: str = ""
    so_far: Any = None


Job = Generator[Progress, None, T]


class Cancelled(RuntimeError):
    """Work that was stopped on request."""


def finish(job: Job[T], progress: Callable[[Progress], None] = lambda progress: None,
           cancelled: Callable[[], bool] = lambda: False) -> T:
    """Do all parts of a job and return its result. Raises Cancelled once `cancelled` says so, between two parts."""
    while True:
        if cancelled():
            job.close()
            raise Cancelled("Stopped on request.")
        try:
            progress(next(job))
        except StopIteration as end:
            return end.value


def within(job: Job[T], tell: Callable[[Progress], Progress]) -> Job[T]:
    """A job as a part of a larger one, whose progress `tell` puts in the place of its own."""
    while True:
        try:
            part = next(job)
        except StopIteration as end:
            return end.value
        yield tell(part)
