"""Sequoia's dynamic program (Chen et al. 2402.12374), with a table of depth × rank accuracies for Medusa's heads.

Let F_d(n) be the most that n nodes can add below one node of depth d, relative to that node's own value. Its children
come from head d+1; taking them one rank after the other,
    G_d,b(n) = max over m of  G_d,b-1(n - m) + a_{d+1}(b) · (1 + F_{d+1}(m - 1)),      F_d = G_d,all ranks,
where m of the n nodes go to the child of the b-th rank and what hangs below it. No node is worth more than its parent,
so what each further node adds, to F and to G alike, never grows: merging two falling lists of such gains gives the best
m for every n, and none has to be tried. The result is exact for this surrogate, the one that `builders.sparse` is best
for too, so both reach the same value: a test says so. What the program gives beyond it is every size at once, which
`best_size` weighs against measured step times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from medusa_viz.decoding.tree import Path, TreeShape, from_paths
from medusa_viz.tuning.builders import Accuracy


@dataclass(frozen=True, eq=False)
class Program:
    """The filled tables: `gain[d]` [budget] is what each further node adds to F_d; `share[d]` [ranks, budget+1] is the
    m chosen for each rank."""

    gain: list[np.ndarray]
    share: list[np.ndarray]

    @property
    def value(self) -> np.ndarray:
        """[budget+1]: F_0, the expected accepted length of the best tree of every size."""
        return np.concatenate([[0.0], self.gain[0].cumsum()])

    def shape(self, nodes: int) -> TreeShape:
        """A best tree of at most `nodes` nodes; nodes that would add nothing are left out."""
        paths: list[Path] = []
        pending: list[tuple[Path, int]] = [((), nodes)]
        while pending:
            path, left = pending.pop()
            if len(path) == len(self.share):
                continue
            for rank in reversed(range(len(self.share[len(path)]))):
                taken = int(self.share[len(path)][rank, left])
                if taken:
                    child = path + (rank,)
                    paths.append(child)
                    pending.append((child, taken - 1))
                    left -= taken
        return from_paths(paths)


def solve(accuracy: Accuracy, budget: int) -> Program:
    """Fill the tables for trees of up to `budget` nodes and the depth of the table of accuracies."""
    gain, share = [np.zeros(budget)], []
    for row in reversed(accuracy):
        best, chosen = np.zeros(budget), np.zeros((len(row), budget + 1), np.int32)
        for rank, right in enumerate(row):
            best, chosen[rank, 1:] = _with_child(best, right * np.concatenate([[1.0], gain[0]])[:budget])
        gain.insert(0, best)
        share.insert(0, chosen)
    return Program(gain, share)


def _with_child(before: np.ndarray, child: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge what each further node adds without a child and within it: both [budget] and falling. Gives the merged
    gains, and for every n = 1..budget how many of the n nodes are the child's; of equal gains the others' come first,
    so that no node is taken which adds nothing."""
    both = np.concatenate([before, child])
    taken = np.argsort(-both, kind="stable")[: len(before)]
    return both[taken], np.cumsum(taken >= len(before))


def sequoia(accuracy: Accuracy, budget: int, top_s: Sequence[int] | None = None) -> TreeShape:
    """A tree of at most `budget` nodes, within walls of top-s, of the largest expected accepted length."""
    return solve(walled(accuracy, top_s), budget).shape(budget)


@dataclass(frozen=True)
class Size:
    """How many nodes and how deep, with what that is expected to give."""

    nodes: int
    depth: int
    tokens_per_step: float
    milliseconds: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens_per_step / self.milliseconds


def best_size(accuracy: Accuracy, step_ms: Callable[[int], float], budget: int) -> Size:
    """The size and depth of the most expected tokens per second among trees of 1 to `budget` nodes, and of none.

    `step_ms(nodes)` is the measured time of a step. All heads run at once, whatever the tree, so depth has no price of
    its own; of equal values the shallower and smaller tree is taken.
    """
    times = np.array([step_ms(nodes) for nodes in range(budget + 1)])
    best = Size(0, 0, 1.0, float(times[0]))
    for depth in range(1, len(accuracy) + 1):
        tokens = 1 + solve(accuracy[:depth], budget).value
        nodes = int((tokens / times).argmax())
        if tokens[nodes] / times[nodes] > 1e-3 * best.tokens_per_second * (1 + 1e-9):
            best = Size(nodes, depth, float(tokens[nodes]), float(times[nodes]))
    return best


def walled(accuracy: Accuracy, top_s: Sequence[int] | None) -> list[list[float]]:
    """The part of a table that lies within walls of top-s; a wall of 0 ends it."""
    if top_s is None:
        return [list(row) for row in accuracy]
    rows = [list(row[:s]) for s, row in zip(top_s, accuracy)]
    return rows[: next((k for k, row in enumerate(rows) if not row), len(rows))]
