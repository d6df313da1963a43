"""Is it plain greedy's text? A session's live comparison, run behind everything that people wait for, and now and then
a plain step on the same cache, so that busy steps are compared with busy ones."""

from __future__ import annotations

from concurrent.futures import Future

from medusa_viz.ui.lines import Line
from medusa_viz.ui.running import Seat
from medusa_viz.ui.snapshot import Equality

EVERY = 8  # steps between two measured plain ones


class GreedyWatch:
    """Queues teacher-forced checks of the committed tokens on the worker and keeps the newest answer."""

    def __init__(self) -> None:
        self.on = True
        self._found: Future | None = None
        self._plain: Future | None = None
        self._steps = 0  # since a plain one was measured

    def forget(self) -> None:
        """A new text begins."""
        self._found = None

    def give_way(self) -> None:
        """A check that has not begun can wait: the one after the next step covers its tokens too."""
        for future in (self._found, self._plain):
            if future is not None:
                future.cancel()

    def stepped(self) -> None:
        """A step was committed."""
        self._steps += 1

    @property
    def due(self) -> bool:
        """A plain step is to be measured as soon as the page stands still."""
        return self._steps >= EVERY and self._found is not None and not self._found.cancelled()

    def again(self, seat: Seat | None, prompt_ids: list[int], line: Line) -> None:
        """The page stands still: a check that gave way, and that no step brought back, has its turn now."""
        if self._found is not None and self._found.cancelled():
            self.queue(seat, prompt_ids, line)

    def rest(self, seat: Seat | None) -> None:
        """The page stands still: measure a plain step if one is due."""
        if self.due and self._found.done():
            self._steps, self._plain = 0, seat.time_plain()

    def queue(self, seat: Seat | None, prompt_ids: list[int], line: Line) -> None:
        """Compare what the line has committed, if greedy acceptance alone wrote it."""
        self._found = None
        if self.on and seat is not None and _greedy(line):
            prompt, tokens = list(prompt_ids), line.committed(len(line.done()))
            self._found = seat.submit(lambda run: run.check_greedy(prompt, tokens))

    def now(self, line: Line | None, recorded: bool) -> Equality:
        """What is known at this moment."""
        if recorded or not self.on:
            return Equality(None, "recorded" if recorded else "off")
        if line is not None and not _greedy(line):
            return Equality(None, "not_expected")
        if line is None or not line.done():
            return Equality(None, "nothing")
        if self._found is None or self._found.cancelled() or not self._found.done():
            return Equality(None, "waiting")
        if self._found.exception() is not None:  # the next step tries again
            return Equality(None, "failed")
        difference = self._found.result()
        if difference is None:
            return Equality(True, "equal")
        return Equality(False, "tie" if difference.tie else "fault", difference.position, difference.gap)


def _greedy(line: Line) -> bool:
    return all(step.verdict.settings.rule == "greedy" for step in line.done())
