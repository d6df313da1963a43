"""Calibration: how often the i-th guess of each head is the token that comes, measured on recorded replies.

a_k(i) is the share of head k's own scorable positions at which exactly its rank i is right (Medusa paper §2.3.3). A
position is scorable for head k if the reply goes on for k more tokens behind the step's root; a token outside the
draft vocabulary is a miss. The ranks are kept, so that any tree can be replayed on the same text (`replay`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from medusa_viz.decoding.settings import MAX_RANKS
from medusa_viz.decoding.tree import TreeShape
from medusa_viz.models import beside
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.replay import RankTable, scorable, steps_per_reply, subset

RESAMPLES = 2_000
CONFIDENCE = 0.95

INTERVALS = f"{CONFIDENCE:.0%} percentile intervals of {RESAMPLES:,} bootstrap resamples of whole prompts"


@dataclass(frozen=True, eq=False)
class Accuracy:
    """a_k(i) with its interval: `share`, `low` and `high` are [K, ranks]; `positions` are each head's own."""

    share: np.ndarray
    low: np.ndarray
    high: np.ndarray
    positions: tuple[int, ...]

    def top(self, n: int) -> np.ndarray:
        """[K]: the share of positions at which one of the first n ranks is right."""
        return self.share[:, :n].sum(1)


def accuracy(table: RankTable, prompts: np.ndarray | None = None, ranks: int = MAX_RANKS, seed: int = 0) -> Accuracy:
    """Accuracy of the first `ranks` ranks. `prompts` [replies] says which replies answer the same prompt and are
    resampled together; without it each answers its own."""
    prompts = np.arange(len(table.lengths)) if prompts is None else prompts
    hits, seen = _hits(table, prompts, ranks)
    share = hits.sum(0) / np.maximum(seen.sum(0), 1)
    low, high = _interval(hits, seen, seed)
    return Accuracy(share, low, high, tuple(int(count) for count in seen.sum(0)[:, 0]))


def shares(table: RankTable, ranks: int = MAX_RANKS) -> list[list[float]]:
    """a_k(i) alone, as builders take it: K lists of `ranks` shares."""
    hits, seen = _hits(table, np.zeros(len(table.lengths), np.int64), ranks)
    return (hits.sum(0) / np.maximum(seen.sum(0), 1)).tolist()


def _hits(table: RankTable, prompts: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Per prompt, how often each rank of each head was right [prompts, K, ranks], of how many positions
    [prompts, K, 1]."""
    owner = np.repeat(prompts, table.lengths)
    heads, n = table.ranks.shape[1], int(prompts.max(initial=-1)) + 1
    counts = scorable(table)
    hits, seen = np.zeros((n, heads, ranks)), np.zeros((n, heads, 1))
    for k in range(heads):
        seen[:, k, 0] = np.bincount(owner[counts[:, k]], minlength=n)
        right = counts[:, k] & (table.ranks[:, k] < ranks)
        places = owner[right] * ranks + table.ranks[right, k]
        hits[:, k] = np.bincount(places, minlength=n * ranks).reshape(n, ranks)
    return hits, seen


def _interval(part: np.ndarray, whole: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Interval of Σ part / Σ whole over resampled prompts; both are [prompts, …]. Positions of one text hang
    together, so whole prompts are drawn. Of a single prompt nothing is known: 0 to infinity or 1."""
    n = len(part)
    if n < 2:
        bound = np.where(part.sum(0) <= whole.sum(0), 1.0, np.inf)
        return np.zeros_like(bound), bound
    times = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(float)
    drawn = (times @ part.reshape(n, -1)) / np.maximum(times @ np.broadcast_to(whole, part.shape).reshape(n, -1), 1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return low.reshape(part.shape[1:]), high.reshape(part.shape[1:])


# -------------------------------------------------------------------------------------------------------------- replay


@dataclass(frozen=True)
class Rate:
    """Replayed tokens per step of trees of up to `nodes` nodes, and its interval."""

    nodes: int
    tokens_per_step: float
    low: float
    high: float


class Halves:
    """A rank table in two halves of its replies, so that a tree is judged on text that it was not built from: it looks
    better on its own than it is. Where `fold` [replies] knows one half only, the table has to judge itself."""

    def __init__(self, table: RankTable, fold: np.ndarray, prompts: np.ndarray | None = None) -> None:
        self.table, self.prompts = table, prompts
        self.masks = [fold == half for half in (False, True)] if len(set(fold.tolist())) > 1 else [fold == fold]
        self.guides = [subset(table, ~mask) for mask in self.masks] if len(self.masks) > 1 else [table]
        """What trees are built from, to be judged on the replies of the mask in the same place."""
        self._judges = [subset(table, mask) for mask in self.masks]

    def steps(self, grow: Callable[[int], TreeShape]) -> tuple[np.ndarray, int]:
        """Steps that each reply takes with trees of which `grow(i)` builds one from guide i, and the most nodes of
        these."""
        steps, nodes = np.zeros(len(self.table.lengths), np.int64), 0
        for place, mask in enumerate(self.masks):
            shape = grow(place)
            steps[mask] = steps_per_reply(shape, self._judges[place])
            nodes = max(nodes, shape.nodes)
        return steps, nodes

    def judge(self, grow: Callable[[int], TreeShape], seed: int = 0) -> Rate:
        """Tokens per step of such trees."""
        steps, nodes = self.steps(grow)
        return rate(nodes, self.table.lengths, steps, self.prompts, seed)


def rate(nodes: int, tokens: np.ndarray, steps: np.ndarray, prompts: np.ndarray | None = None, seed: int = 0) -> Rate:
    """Tokens / steps over replies, with the interval over their prompts."""
    prompts = np.arange(len(tokens)) if prompts is None else prompts
    committed, taken = np.bincount(prompts, tokens), np.bincount(prompts, steps)
    low, high = _interval(committed, taken, seed)
    return Rate(nodes, float(committed.sum() / max(taken.sum(), 1)), float(low), float(high))


def cross_replay(table: RankTable, fold: np.ndarray, nodes: Sequence[int], prompts: np.ndarray | None = None,
                 seed: int = 0) -> list[Rate]:
    """Sparse trees with each number of nodes, each built from one half of the replies and replayed on the other."""
    halves = Halves(table, fold, prompts)
    guides = [shares(guide) for guide in halves.guides]
    return [halves.judge(lambda place, count=count: sparse(guides[place], count), seed) for count in nodes]


# --------------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True, eq=False)
class Calibration:
    """What `calibrate` knows about heads.

    prompts [replies]: which replies answer the same prompt. fold, bool [replies]: the half that each belongs to.
    temperatures [K], or empty: what makes each head's own probabilities right. p, float16 [P, K, ranks], or None: how
    sure each head was of its first tokens at every row of the table, at those temperatures.
    """

    table: RankTable
    prompts: np.ndarray
    fold: np.ndarray
    temperatures: tuple[float, ...] = ()
    p: np.ndarray | None = None
    about: dict = field(default_factory=dict)


def save(path: Path, known: Calibration, measured: Accuracy, **more: object) -> None:
    """Write ranks and accuracy as .npz; `more` are further arrays that belong to them."""
    sure = {} if known.p is None else {"p": known.p}
    with path.open("wb") as file:
        np.savez_compressed(file, ranks=known.table.ranks, lengths=known.table.lengths,
                            prompt=known.prompts.astype(np.int32), fold=known.fold, accuracy=measured.share,
                            accuracy_low=measured.low, accuracy_high=measured.high,
                            positions=np.array(measured.positions), temperatures=np.array(known.temperatures),
                            about=np.array(json.dumps(known.about)), **sure, **more)


def load(path: Path) -> Calibration:
    """What `save` wrote. Raises ValueError in one sentence."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        table, prompts = RankTable(arrays["ranks"], arrays["lengths"]), arrays["prompt"].astype(np.int64)
        about = json.loads(str(arrays.get("about", "{}")))
    except FileNotFoundError:
        raise ValueError(f"{path} is not there; `calibrate` writes a rank table.") from None
    except beside.NPZ_FAULTS as error:
        raise ValueError(f"{path} is no rank table of `calibrate`; that command writes one.") from error
    replies, sure = len(table.lengths), arrays.get("p")
    fold = arrays.get("fold", prompts % 2 == 1)
    temperatures = tuple(arrays.get("temperatures", np.zeros(0)).tolist())
    if table.ranks.ndim != 2 or table.lengths.sum() != len(table.ranks) or not replies == len(prompts) == len(fold):
        raise ValueError(f"{path} is no rank table of `calibrate`: its lengths do not fit its ranks.")
    if (sure is not None and sure.shape[:2] != table.ranks.shape) or len(temperatures) not in (0, table.ranks.shape[1]):
        raise ValueError(f"{path} is no rank table of `calibrate`: its probabilities do not fit its ranks.")
    return Calibration(table, prompts, fold.astype(bool), temperatures, sure, about)
