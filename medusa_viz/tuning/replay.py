"""Replay: what a tree would have committed on recorded text, from the ranks alone, without a model.

Greedy Medusa commits exactly the backbone's own greedy text, so on such text the accepted path of every step follows
from how each head ranked the tokens that really came. Replay therefore keeps what the product of accuracies
(`builders.expected_tokens_per_step`) assumes away: that the heads are right and wrong together. It says nothing about
temperatures above 0, where the text depends on what is drafted: there only measuring counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from medusa_viz.decoding.tree import TreeShape

NOT_RANKED = 255
"""Rank of a token that its head did not rank high enough, cannot draft, or that lies past the end of the text."""


@dataclass(frozen=True, eq=False)
class RankTable:
    """How the heads ranked recorded replies.

    ranks   uint8 [P, K]: one row per reply token, in order, reply after reply. Row i belongs to the step whose root
            is token i of its reply; column k-1 is the 0-based rank that head k gave the token k places further on.
    lengths int64 [replies]: rows per reply; they sum to P.
    """

    ranks: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Replay:
    """tokens committed in `steps` steps; accepted[m] counts the steps that accepted m drafted tokens."""

    tokens: int
    steps: int
    accepted: tuple[int, ...]

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def reached(self) -> tuple[float, ...]:
        """P(L ≥ m) for m = 1, 2, …: the share of steps that accepted m drafted tokens or more. They sum to E[L], and
        1 + E[L] are the tokens per step."""
        beyond = np.cumsum(self.accepted[::-1])[::-1][1:]
        return tuple((beyond / max(self.steps, 1)).tolist())


def replay(shape: TreeShape, table: RankTable) -> Replay:
    """Decode every reply of the table with one tree."""
    accepted = accepted_lengths(shape, table.ranks)
    return _counted(table, walk(accepted, table.lengths), accepted, shape.height)


def replay_each(shape_at: Callable[[int], TreeShape], table: RankTable, height: int) -> tuple[Replay, np.ndarray]:
    """Decode every reply with a tree of its own for every step: `shape_at(row)` is the one at a row of the table, at
    most `height` deep. Also gives the steps of each reply."""
    accepted = np.zeros(len(table.ranks), np.int64)
    rows: list[int] = []
    row = 0
    for end in np.cumsum(table.lengths).tolist():
        while row < end:
            accepted[row] = accepted_lengths(shape_at(row), table.ranks[row : row + 1])[0]
            rows.append(row)
            row += int(accepted[row]) + 1
        row = end
    return _counted(table, rows, accepted, height), _per_reply(rows, table.lengths)


def steps_per_reply(shape: TreeShape, table: RankTable) -> np.ndarray:
    """int64 [replies]: the steps that each reply takes with one tree."""
    return _per_reply(walk(accepted_lengths(shape, table.ranks), table.lengths), table.lengths)


def walk(accepted: np.ndarray, lengths: np.ndarray) -> list[int]:
    """The rows at which steps stand, in order, if a step at row i accepts accepted[i] drafts: each step also commits
    its root, and none runs past its reply."""
    after = (np.arange(1, len(accepted) + 1) + accepted).tolist()
    rows: list[int] = []
    row = 0
    for end in np.cumsum(lengths).tolist():
        while row < end:
            rows.append(row)
            row = after[row]
        row = end
    return rows


def _counted(table: RankTable, rows: Sequence[int], accepted: np.ndarray, height: int) -> Replay:
    steps = np.asarray(rows, np.int64)
    left = np.cumsum(table.lengths)[_owner(steps, table.lengths)] - steps - 1  # the last step is cut at the end
    taken = np.minimum(accepted[steps], left)
    return Replay(int(table.lengths.sum()), len(steps), tuple(np.bincount(taken, minlength=height + 1).tolist()))


def _per_reply(rows: Sequence[int], lengths: np.ndarray) -> np.ndarray:
    return np.bincount(_owner(rows, lengths), minlength=len(lengths))


def _owner(rows: Sequence[int] | np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The reply that each row belongs to."""
    return np.searchsorted(np.cumsum(lengths), np.asarray(rows, np.int64), side="right")


def accepted_lengths(shape: TreeShape, ranks: np.ndarray) -> np.ndarray:
    """int64 [P]: drafted tokens that a step at each row would accept, its longest path that matches the ranks."""
    child = np.full((len(shape.parent), NOT_RANKED + 1), -1, np.int64)  # row of the child of a row at a rank
    child[shape.parent[1:], np.minimum(shape.rank[1:], NOT_RANKED)] = np.arange(1, len(shape.parent))
    child[:, NOT_RANKED] = -1
    row = np.zeros(len(ranks), np.int64)
    alive = np.ones(len(ranks), bool)
    length = np.zeros(len(ranks), np.int64)
    for k in range(min(shape.height, ranks.shape[1])):
        row = child[row, ranks[:, k]]
        alive &= row >= 0
        row[~alive] = 0
        length += alive
    return length


def scorable(table: RankTable) -> np.ndarray:
    """bool [P, K]: the token that head k should have named lies inside the reply."""
    left = np.concatenate([np.arange(n, 0, -1) for n in table.lengths] or [np.zeros(0, np.int64)])
    return left[:, None] > np.arange(1, table.ranks.shape[1] + 1)


def subset(table: RankTable, chosen: np.ndarray) -> RankTable:
    """The rows of the replies for which `chosen` (bool [replies]) is True."""
    return RankTable(table.ranks[np.repeat(chosen, table.lengths)], table.lengths[chosen])
