"""Replay: what a tree would have committed on recorded text, from the ranks alone, without a model.

Greedy Medusa commits exactly the backbone's own greedy text, so on such text the accepted path of every step follows
from how each head ranked the tokens that really came. Replay therefore keeps what the product of accuracies
(`builders.expected_tokens_per_step`) assumes away: that the heads are right and wrong together.
"""

from __future__ import annotations

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


def replay(shape: TreeShape, table: RankTable) -> Replay:
    """Decode every reply of the table with one tree, all replies side by side."""
    accepted = accepted_lengths(shape, table.ranks)
    ends = np.cumsum(table.lengths)
    cursor, ends = (ends - table.lengths)[table.lengths > 0], ends[table.lengths > 0]
    counts = np.zeros(shape.height + 1, np.int64)
    while len(cursor):
        taken = np.minimum(accepted[cursor], ends - cursor - 1)  # a step never runs past its reply
        counts += np.bincount(taken, minlength=len(counts))
        cursor = cursor + taken + 1  # the root is committed too
        cursor, ends = cursor[cursor < ends], ends[cursor < ends]
    return Replay(int(table.lengths.sum()), int(counts.sum()), tuple(counts.tolist()))


def steps_per_reply(shape: TreeShape, table: RankTable) -> np.ndarray:
    """int64 [replies]: the steps that each reply takes with one tree."""
    accepted = accepted_lengths(shape, table.ranks)
    ends = np.cumsum(table.lengths)
    cursor = ends - table.lengths
    steps = np.zeros(len(table.lengths), np.int64)
    going = np.flatnonzero(table.lengths)
    while len(going):
        steps[going] += 1
        cursor[going] += accepted[cursor[going]] + 1  # a draft past the end of the reply ends it all the same
        going = going[cursor[going] < ends[going]]
    return steps


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
