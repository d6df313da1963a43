"""Is it plain greedy's text? A session's live comparison, run behind everything that people wait for."""

from __future__ import annotations

from concurrent.futures import Future

from medusa_viz.ui.lines import Line
from medusa_viz.ui.running import Seat
from medusa_viz.ui.snapshot import Equality


class GreedyWatch:
    """Queues teacher-forced checks of the committed tokens on the worker and keeps the newest answer."""

    def __init__(self) -> None:
        self.on = True
        self._found: Future | None = None

    def forget(self) -> None:
        """A new text begins."""
        self._found = None

    def give_way(self) -> None:
        """A check that has not begun can wait: the one after the next step covers its tokens too."""
        if self._found is not None:
            self._found.cancel()

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
        difference = self._found.result()
        if difference is None:
            return Equality(True, "equal")
        return Equality(False, "tie" if difference.tie else "fault", difference.position, difference.gap)


def _greedy(line: Line) -> bool:
    return all(step.verdict.settings.rule == "greedy" for step in line.done())
