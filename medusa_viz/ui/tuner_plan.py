"""How long the Tuner's jobs will take, estimated before they start; and what "quick" and "full" mean."""

from __future__ import annotations

from medusa_viz.figures.texts import Texts
from medusa_viz.tuning import latency as latencies
from medusa_viz.tuning.extents import STUDY
from medusa_viz.ui import tuner_work
from medusa_viz.ui.running import Model
from medusa_viz.ui.tuner_desk import Desk

DEFAULT_MS = 30.0  # of a plain step that was not measured
MEASURE = {"quick": (2, 32), "full": (8, 64)}  # prompts, new tokens of each


TEMPERED = 0.7  # at which trees are measured where not greedily


class Plan:
    """Estimates for one desk."""

    def __init__(self, desk: Desk, model: Model) -> None:
        self.desk, self.model = desk, model
        self.plain_ms = desk.study.plain_ms or DEFAULT_MS

    @property
    def timing_seconds(self) -> float:
        """Rounds over all rows behind both prefixes; a CPU takes longer the more rows there are."""
        growth = [1 + rows / 14 if self.desk.study.cpu else 1.5 for rows in latencies.ROWS]
        return 8 * 2 * sum(growth) * self.plain_ms / 1e3

    @property
    def calibrate_seconds(self) -> float:
        """Reading replies, after writing them where none ship."""
        read, written = tuner_work.reply_tokens(self.model.engine, self.model.options)
        row_ms = 0.11 * self.plain_ms if self.desk.study.cpu else 0.02 * self.plain_ms
        known = self.desk.study.latency
        if known:
            row_ms = 1.7 * known.curves[0].verify[-1].median / known.rows[-1]
        return (read * row_ms + written * self.plain_ms) / 1e3

    def measure_seconds(self, extent: str, ways: int) -> float:
        """So many trees and plain decoding."""
        prompts, tokens = MEASURE[extent]
        return prompts * tokens * self.plain_ms * (1 + 0.9 * ways) / 1e3

    def study_seconds(self, extent: str) -> float:
        """Both sweeps, with plain greedy once and plain sampling at every temperature."""
        depth = STUDY[extent]
        heats = len({*depth.temperatures, TEMPERED})
        ways = 1 + heats + 0.9 * (len(depth.epsilons) + len(depth.temperatures))
        return depth.prompts * depth.tokens * self.plain_ms * ways / 1e3

    def texts(self, t: Texts) -> dict:
        """What the buttons say."""
        return {
            "measure": {extent: t(f"tuner.measure_{extent}", prompts=prompts, tokens=tokens, n=2,
                                  time=duration(self.measure_seconds(extent, 2), t))
                        for extent, (prompts, tokens) in MEASURE.items()},
            "study": {extent: t(f"tuner.study_{extent}", time=duration(self.study_seconds(extent), t))
                      for extent in STUDY},
        }


def duration(seconds: float, t: Texts) -> str:
    """`40 s`, `3 min` or `1.5 h`."""
    if seconds < 90:
        return t("tuner.seconds", n=max(1, 10 * round(seconds / 10) if seconds > 20 else round(seconds)))
    return t("tuner.minutes", n=round(seconds / 60)) if seconds < 5400 else t("tuner.hours", n=f"{seconds / 3600:.1f}")
