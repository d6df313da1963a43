"""A tree drawn before it is verified: its tokens are known from the heads' recorded top tokens, no model runs."""

from __future__ import annotations

from dataclasses import replace

from medusa_viz.decoding.records import Drafts, Step, Timings
from medusa_viz.decoding.tree import TreeShape


def unverified(step: Step, shape: TreeShape, estimate_ms: float | None = None) -> Step:
    """The step with another tree, drawn as not verified. Ranks past the recorded top tokens cannot occur: the
    widest top-s the page offers is what a record holds."""
    old = step.drafts
    token, head_p, path_p = [old.token[0]], [old.head_p[0]], [1.0]
    for parent, rank, depth in zip(shape.parent[1:].tolist(), shape.rank[1:].tolist(), shape.depth[1:].tolist()):
        top = old.heads[depth - 1]
        token.append(top.ids[rank])
        head_p.append(top.p[rank])
        path_p.append(path_p[parent] * top.p[rank])
    drafts = Drafts(shape.parent.tolist(), shape.rank.tolist(), token, head_p, path_p, old.heads)
    return replace(step, drafts=drafts, verification=None, verdict=None, timings=Timings(step.timings.propose),
                   estimate_ms=estimate_ms)


class LatencyEstimate:
    """Milliseconds of a forward against its rows, from the forwards seen so far: linear between them, and beyond
    the widest one in proportion to the rows."""

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}

    def add(self, rows: int, ms: float) -> None:
        """Newer forwards count more, since the prefix grows and the machine's load changes."""
        old = self._seen.get(rows, ms)
        self._seen[rows] = 0.5 * old + 0.5 * ms

    def of(self, rows: int) -> float | None:
        """None before any forward was seen."""
        if not self._seen:
            return None
        points = sorted(self._seen.items())
        below = max((p for p in points if p[0] <= rows), default=points[0])
        above = min((p for p in points if p[0] >= rows), default=None)
        if above is None:
            return below[1] * rows / below[0]
        if above[0] == below[0]:
            return above[1]
        share = (rows - below[0]) / (above[0] - below[0])
        return below[1] + max(share, 0.0) * (above[1] - below[1])
