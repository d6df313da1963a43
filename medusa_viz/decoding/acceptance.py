"""Acceptance: which drafted tokens count. Plain functions of small arrays, one entry per row of the tree.

The backbone's logits have been reduced to a few numbers per row before they come here (argmax, p, entropy), so the
same lines judge a live step, a smaller tree inside it, and a recording without a model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from medusa_viz.decoding import records
from medusa_viz.decoding.tree import TreeShape


def greedy_tests(shape: TreeShape, tokens: np.ndarray, argmax: np.ndarray) -> np.ndarray:
    """bool [n+1]: a node's token equals the backbone's argmax [n+1] at its parent. The root's entry is True."""
    own = tokens == argmax[shape.parent]
    own[0] = True
    return own


def typical_threshold(entropy: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
    """min(ε, δ·e^(−H)), H in nats (Medusa paper §2.3.1)."""
    return np.minimum(epsilon, delta * np.exp(-entropy))


def typical_tests(p: np.ndarray, entropy: np.ndarray, epsilon: float, delta: float) -> np.ndarray:
    """bool [n+1]: p of a node's token at its parent exceeds the threshold there. The root's entry is True."""
    own = p > typical_threshold(entropy, epsilon, delta)
    own[0] = True
    return own


def passed(shape: TreeShape, own: np.ndarray) -> np.ndarray:
    """bool [n+1]: a node's own test and those of all its ancestors hold."""
    result = own.copy()
    starts = np.searchsorted(shape.depth, np.arange(1, shape.height + 2))
    for first, last in zip(starts, starts[1:]):
        result[first:last] &= result[shape.parent[first:last]]
    return result


def longest_path(shape: TreeShape, has_passed: np.ndarray, log_p: np.ndarray | None = None) -> list[int]:
    """Rows of the longest passed path, root first. Ties: larger summed log p [n+1], then the smaller path.

    Without `log_p` (greedy) no ties can arise, since siblings are different tokens and one of them at most passes.
    """
    depth = np.where(has_passed, shape.depth, -1)
    ends = np.flatnonzero(depth == depth.max())
    if len(ends) == 1 or log_p is None:
        return shape.path_to(int(ends[0]))
    return max((shape.path_to(int(end)) for end in ends), key=lambda rows: float(log_p[rows[1:]].sum()))


def cut_at_end(tokens: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """The tokens up to and including the first end token."""
    for place, token in enumerate(tokens):
        if token in end_ids:
            return list(tokens[: place + 1])
    return list(tokens)


def verdicts(shape: TreeShape, own: np.ndarray, accepted: Sequence[int], kept: int,
             seen: np.ndarray | None = None) -> list[str]:
    """Verdict of every row. `kept` of the accepted rows are committed; `seen` marks what a sampling walk looked at."""
    has_passed = passed(shape, own)
    result = []
    for row in range(shape.nodes + 1):
        if seen is not None and not seen[row]:
            result.append(records.UNSEEN)
        elif has_passed[row]:
            result.append(records.SHORTER)
        else:
            result.append(records.BEHIND if own[row] else records.REJECTED)
    for place, row in enumerate(accepted):
        result[row] = records.ACCEPTED if place < kept else records.CUT
    return result


@dataclass(frozen=True)
class Walk:
    """A sampling walk down the tree: exact, since the drafts are no samples. Drawing the backbone's next token and
    asking whether it was drafted gives what rejection sampling gives when each draft is certain (Leviathan et al.
    2211.17192, with q = 1 on the drafted token and the residual renormalised)."""

    rows: list[int]
    """Rows walked, root first; all accepted."""
    next_root: int
    """The token drawn after the last of them, which was not drafted."""

    def seen(self, shape: TreeShape) -> np.ndarray:
        """bool [n+1]: nodes whose parent was walked through."""
        walked = np.zeros(shape.nodes + 1, bool)
        walked[self.rows] = True
        seen = walked[shape.parent]
        seen[0] = True
        return seen

    def tests(self, shape: TreeShape) -> np.ndarray:
        """bool [n+1]: the node was drawn."""
        own = np.zeros(shape.nodes + 1, bool)
        own[self.rows] = True
        return own
