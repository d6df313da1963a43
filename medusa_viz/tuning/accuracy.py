"""Calibration: how often the i-th guess of each head is the token that comes, measured on recorded replies.

a_k(i) is the share of head k's own scorable positions at which exactly its rank i is right (Medusa paper §2.3.3). A
position is scorable for head k if the reply goes on for k more tokens behind the step's root; a token outside the
draft vocabulary is a miss. The ranks are kept, so that any tree can be replayed on the same text (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from medusa_viz.decoding.settings import MAX_RANKS
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.heads import Drafter
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.replay import NOT_RANKED, RankTable, steps_per_reply

KEPT_RANKS = 64
BATCH_TOKENS = 2048  # padded tokens per forward
CHUNK = 256  # positions whose logits exist at once, for all heads
RESAMPLES = 2_000
CONFIDENCE = 0.95

INTERVALS = f"{CONFIDENCE:.0%} percentile intervals of {RESAMPLES:,} bootstrap resamples of whole prompts"


class Sequences(Protocol):
    """Token sequences joined in `ids` [N]; sequence i is ids[offsets[i]:offsets[i+1]], its reply starts at
    reply_start[i] inside it."""

    ids: np.ndarray
    offsets: np.ndarray
    reply_start: np.ndarray


# -------------------------------------------------------------------------------------------------------------- ranks


@torch.inference_mode()
def rank_replies(backbone: Backbone, drafter: Drafter, replies: Sequences,
                 progress: Callable[[int, int], None] = lambda done, total: None) -> RankTable:
    """Rank of every reply token under every head, by one teacher-forced pass.

    `progress` hears of positions done and positions in all. A rank counts the draftable tokens with a larger logit,
    and those with an equal one and a lower id; from KEPT_RANKS on it is NOT_RANKED.
    """
    starts = np.maximum(replies.reply_start, 1)
    lengths = np.maximum(np.diff(replies.offsets) - starts, 0)
    first_rows = np.cumsum(lengths) - lengths
    ranks = np.full((int(lengths.sum()), drafter.heads), NOT_RANKED, np.uint8)
    place_of = _draft_places(drafter, backbone.vocab_size)
    done = 0
    for batch in _batches(np.diff(replies.offsets)):
        texts = [_text(replies, i) for i in batch]
        for i, ids, hidden in zip(batch, texts, forced_states(backbone, texts)):
            drafting = hidden[starts[i] - 1 : starts[i] - 1 + lengths[i]]
            targets = _targets(place_of[ids], int(starts[i]), int(lengths[i]), drafter.heads)
            ranks[first_rows[i] : first_rows[i] + lengths[i]] = _ranks(drafter, drafting, targets)
            done += int(lengths[i])
        progress(done, len(ranks))
    return RankTable(ranks, lengths)


def _text(replies: Sequences, i: int) -> Tensor:
    return torch.from_numpy(replies.ids[replies.offsets[i] : replies.offsets[i + 1]].astype(np.int64))


def forced_states(backbone: Backbone, texts: Sequence[Tensor]) -> Iterator[Tensor]:
    """What the LM head reads at every token of every text: [length, d] each. Texts are padded on the right, where
    causal attention never looks, so no mask is needed."""
    padded = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(backbone.device)
    captured: list[Tensor] = []

    def keep_input(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        captured.append(inputs[0])
        return (inputs[0][:, :1],)  # the logits are not wanted; one row keeps the forward going

    handle = backbone.lm_head.register_forward_pre_hook(keep_input)
    try:
        backbone.model(input_ids=padded, use_cache=False)
    finally:
        handle.remove()
    return (states[: len(ids)] for ids, states in zip(texts, captured[0]))


def _batches(lengths: np.ndarray) -> Iterator[list[int]]:
    """Sequences of like length together, longest first."""
    batch: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        if batch and lengths[batch[0]] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _draft_places(drafter: Drafter, vocab_size: int) -> Tensor:
    """Row of each vocabulary id among the drafting rows; -1 where heads cannot draft it."""
    if drafter.draft_ids is None:
        return torch.arange(vocab_size)
    places = torch.full((vocab_size,), -1)
    places[drafter.draft_ids.cpu()] = torch.arange(drafter.choices)
    return places


def _targets(places: Tensor, start: int, length: int, heads: int) -> Tensor:
    """[K, length]: what head k should have named at the step whose root is reply token i; -1 past the end."""
    padded = torch.cat([places[start:], torch.full((heads,), -1)])
    return torch.stack([padded[k : k + length] for k in range(1, heads + 1)])


def _ranks(drafter: Drafter, hidden: Tensor, targets: Tensor) -> np.ndarray:
    """uint8 [positions, K]."""
    parts = []
    for first in range(0, len(hidden), CHUNK):
        logits = drafter.logits(hidden[first : first + CHUNK])  # [K, positions, V']
        target = targets[:, first : first + CHUNK].to(logits.device)[..., None]
        wanted = logits.gather(2, target.clamp_min(0))
        rank = (logits > wanted).sum(-1)
        candidate = (target[..., 0] >= 0) & (rank < KEPT_RANKS)
        k, position = candidate.nonzero(as_tuple=True)
        before = torch.arange(logits.shape[2], device=logits.device) < target[k, position]
        rank[k, position] += ((logits[k, position] == wanted[k, position]) & before).sum(-1)
        rank = torch.where(candidate & (rank < KEPT_RANKS), rank, NOT_RANKED)
        parts.append(rank.T.to("cpu", torch.uint8).numpy())
    return np.concatenate(parts) if parts else np.zeros((0, drafter.heads), np.uint8)


# ------------------------------------------------------------------------------------------------------------ accuracy


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


def scorable(table: RankTable) -> np.ndarray:
    """bool [P, K]: the token that head k should have named lies inside the reply."""
    left = np.concatenate([np.arange(n, 0, -1) for n in table.lengths] or [np.zeros(0, np.int64)])
    return left[:, None] > np.arange(1, table.ranks.shape[1] + 1)


def accuracy(table: RankTable, prompts: np.ndarray | None = None, ranks: int = MAX_RANKS, seed: int = 0) -> Accuracy:
    """Accuracy of the first `ranks` ranks. `prompts` [replies] says which replies answer the same prompt and are
    resampled together; without it each answers its own."""
    prompts = np.arange(len(table.lengths)) if prompts is None else prompts
    owner = np.repeat(prompts, table.lengths)
    heads, n = table.ranks.shape[1], int(prompts.max(initial=-1)) + 1
    counts = scorable(table)
    hits = np.zeros((n, heads, ranks))
    seen = np.zeros((n, heads, 1))
    for k in range(heads):
        seen[:, k, 0] = np.bincount(owner[counts[:, k]], minlength=n)
        for i in range(ranks):
            hits[:, k, i] = np.bincount(owner[counts[:, k] & (table.ranks[:, k] == i)], minlength=n)
    share = hits.sum(0) / np.maximum(seen.sum(0), 1)
    low, high = _interval(hits, seen, seed)
    return Accuracy(share, low, high, tuple(int(count) for count in seen.sum(0)[:, 0]))


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
    """Replayed tokens per step of sparse trees with `nodes` nodes, and its interval."""

    nodes: int
    tokens_per_step: float
    low: float
    high: float


def cross_replay(table: RankTable, fold: np.ndarray, nodes: Sequence[int], prompts: np.ndarray | None = None,
                 seed: int = 0) -> list[Rate]:
    """Tokens per step of sparse trees, each built from one half of the replies and replayed on the other.

    `fold` [replies] is False or True. A tree judged on the text that it was built from looks better than it is.
    """
    prompts = np.arange(len(table.lengths)) if prompts is None else prompts
    halves = [subset(table, fold == half) for half in (False, True)]
    guides = [accuracy(half).share.tolist() for half in halves]
    rates = []
    for count in nodes:
        steps = np.zeros(len(table.lengths), np.int64)
        for half, guide in ((False, guides[1]), (True, guides[0])):
            steps[fold == half] = steps_per_reply(sparse(guide, count), halves[int(half)])
        tokens = np.bincount(prompts, table.lengths)
        taken = np.bincount(prompts, steps)
        low, high = _interval(tokens, taken, seed)
        rates.append(Rate(count, float(tokens.sum() / max(taken.sum(), 1)), float(low), float(high)))
    return rates


def subset(table: RankTable, chosen: np.ndarray) -> RankTable:
    """The rows of the replies for which `chosen` (bool [replies]) is True."""
    return RankTable(table.ranks[np.repeat(chosen, table.lengths)], table.lengths[chosen])


# --------------------------------------------------------------------------------------------------------------- files


def save(path: Path, table: RankTable, prompts: np.ndarray, measured: Accuracy, **more: object) -> None:
    """Write ranks and accuracy as .npz; `more` are further arrays or text that belong to them."""
    with path.open("wb") as file:
        np.savez_compressed(file, ranks=table.ranks, lengths=table.lengths, prompt=prompts.astype(np.int32),
                            accuracy=measured.share, accuracy_low=measured.low, accuracy_high=measured.high,
                            positions=np.array(measured.positions), **more)


def load(path: Path) -> tuple[RankTable, np.ndarray]:
    """Ranks, and which prompt each reply answers, of a file that `save` wrote. Raises ValueError in one sentence."""
    try:
        with np.load(path, allow_pickle=False) as file:
            table, prompts = RankTable(file["ranks"], file["lengths"]), file["prompt"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"{path} is no rank table of `calibrate` ({error}).") from error
    if table.ranks.ndim != 2 or table.lengths.sum() != len(table.ranks) or len(prompts) != len(table.lengths):
        raise ValueError(f"{path} is no rank table of `calibrate`: its lengths do not fit its ranks.")
    return table, prompts
