"""Branches of a session: what each step holds, live or recorded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from medusa_viz.decoding import preview, reweigh
from medusa_viz.decoding.records import Branch, Step
from medusa_viz.decoding.tree import Path, TreeShape
from medusa_viz.ui.knobs import ActionError, Knobs

MAX_BRANCHES = 6


@dataclass(frozen=True)
class Entry:
    """One step of a branch. `verified` is the widest tree verified there, `rows` the rows in it of the shown tree.

    `position` and `look` are handles of the model side; a recording has none.
    """

    step: Step
    verified: Step
    rows: tuple[int, ...]
    knobs: Knobs
    position: Any = None
    look: Any = None

    def narrowed(self, shape: TreeShape, knobs: Knobs) -> Entry | None:
        """The entry with a tree inside the verified one, not judged yet; None where it holds more than that."""
        rows = shape.rows_in(self.verified.shape)
        if rows is None:
            return None
        whole = len(rows) == self.verified.cache_rows
        step = self.verified if whole else reweigh.subtree(self.verified, shape)[0]
        return replace(self, step=replace(step, walls=knobs.walls), rows=tuple(rows.tolist()), knobs=knobs)

    def drawn(self, shape: TreeShape, knobs: Knobs, estimate: float | None) -> Entry:
        """The entry with a tree that was not verified; `estimate`: the milliseconds that this would take."""
        step = replace(preview.unverified(self.verified, shape, estimate), walls=knobs.walls)
        return replace(self, step=step, rows=(), knobs=knobs)

    def opened(self, path: str, before: frozenset[Path]) -> frozenset[Path]:
        """The nodes, of those opened before that the tree still has and the one named `0.2.1`, that are drawn with all
        their children."""
        rows = self.step.shape.row_of
        node = tuple(int(rank) for rank in path.split(".") if rank)
        if node not in rows:
            raise ActionError("no_node", path=path[:40])
        return frozenset(old for old in before if old in rows) | {node}

    def answered(self, how: str, begun: float) -> Entry:
        """The entry, marked with how its change was answered and since when (`perf_counter`)."""
        return replace(self, step=replace(self.step, reused=how, answer_ms=(perf_counter() - begun) * 1e3))


@dataclass(frozen=True)
class Pin:
    """A frozen pending step, to compare others on the same prefix with."""

    prefix: tuple[int, ...]
    step: Step
    knobs: Knobs


@dataclass
class Line:
    """A branch: its entries, the last of which is pending unless the run is finished."""

    name: str
    entries: list[Entry] = field(default_factory=list)
    parent: str | None = None
    fork: int = 0
    finished: str | None = None

    def committed(self, before: int) -> list[int]:
        """Tokens committed by the steps before one."""
        return [token for entry in self.entries[:before] for token in entry.step.verdict.committed]

    def done(self) -> list[Step]:
        """The steps that are committed."""
        steps = [entry.step for entry in self.entries]
        return steps if self.finished else steps[:-1]


def forked(names: Collection[str], line: Line, index: int, shown: Entry) -> Line:
    """A new branch that shares a line's steps before one, and has another there."""
    if len(names) >= MAX_BRANCHES:
        raise ActionError("many_branches", limit=MAX_BRANCHES)
    name = chr(ord(max(names)) + 1)
    return Line(name, [*line.entries[:index], replace(shown, step=replace(shown.step, branch=name))], line.name, index)


def looked_at(index: int, branch: str, look: Any, knobs: Knobs) -> Entry:
    """A step that was just verified, not judged yet."""
    step = Step(index, branch, len(look.position.ids), look.drafts, look.verification, None, look.timings,
                walls=knobs.walls)
    return Entry(step, step, tuple(range(step.cache_rows)), knobs, look.position, look)


def recorded_line(branch: Branch) -> Line:
    """A branch of a recording, shown at its end."""
    entries = [Entry(step, step, tuple(range(step.cache_rows)), Knobs(step.walls, step.verdict.settings))
               for step in branch.steps]
    last = branch.steps[-1]
    finished = last.verdict.finish if last.timings.commit is not None else None  # else it is still pending
    return Line(branch.name, entries, branch.parent, branch.fork, finished)
