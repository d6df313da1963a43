"""Ranks of recorded replies: one teacher-forced pass that says how every head ranked the token that came.

Where asked for, the same pass notes how sure each head was of its best tokens, at temperatures fitted beforehand, so
that trees rebuilt at each step can be replayed without the model too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from medusa_viz.decoding.settings import MAX_RANKS
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.heads import Drafter
from medusa_viz.tuning.jobs import Job, Progress, finish
from medusa_viz.tuning.replay import NOT_RANKED, RankTable

KEPT_RANKS = 64
BATCH_TOKENS, CUDA_BATCH_TOKENS = 256, 1024  # padded tokens per forward; a CPU takes longer per token from 256 on
CHUNK = 256  # positions whose logits exist at once, for all heads

FITTED_POSITIONS = 1_024
TEMPERATURES = tuple(round(0.6 * 1.1**i, 3) for i in range(12))  # 0.6 to 1.71


class Sequences(Protocol):
    """Token sequences joined in `ids` [N]; sequence i is ids[offsets[i]:offsets[i+1]], its reply starts at
    reply_start[i] inside it."""

    ids: np.ndarray
    offsets: np.ndarray
    reply_start: np.ndarray


@dataclass(frozen=True, eq=False)
class Ranked:
    """`p` float16 [P, K, ranks], where temperatures were given: what each head gave its best tokens at every row.
    `perplexity`: e to the mean of the backbone's own −log p over the reply tokens; None for a model whose logits are
    not its LM head's product."""

    table: RankTable
    p: np.ndarray | None
    perplexity: float | None


def ranking(backbone: Backbone, drafter: Drafter, replies: Sequences, temperatures: Sequence[float] = (),
            ranks: int = MAX_RANKS) -> Job[Ranked]:
    """Rank of every reply token under every head, counted in positions; a part is one forward pass over a few replies
    at most, and CHUNK positions under the heads.

    A rank counts the draftable tokens with a larger logit, and those with an equal one and a lower id; from KEPT_RANKS
    on it is NOT_RANKED. With `temperatures`, one per head, the probabilities of the best `ranks` tokens are kept too.
    """
    starts, lengths = _drafting(replies)
    first_rows = np.cumsum(lengths) - lengths
    total, width = int(lengths.sum()), min(ranks, drafter.choices)
    table = np.full((total, drafter.heads), NOT_RANKED, np.uint8)
    p = np.zeros((total, drafter.heads, width), np.float16) if len(temperatures) else None
    place_of, done, surprise = _draft_places(drafter, backbone.vocab_size), 0, 0.0
    for batch in _batches(np.diff(replies.offsets), backbone):
        for i, logits, targets, first, own in _forced(backbone, drafter, replies, batch, starts, lengths, place_of):
            surprise += own
            rows = slice(first_rows[i] + first, first_rows[i] + first + logits.shape[1])
            table[rows] = ranks_of(logits, targets)
            if p is not None:
                p[rows] = top_p(logits, temperatures, width)
            done += logits.shape[1]
            yield Progress(done, total, "ranking")
    perplexity = math.exp(surprise / max(1, total)) if backbone.has_plain_head else None
    return Ranked(RankTable(table, lengths), p, perplexity)


def rank_replies(backbone: Backbone, drafter: Drafter, replies: Sequences) -> RankTable:
    """The rank table of `ranking`, all at once."""
    return finish(ranking(backbone, drafter, replies)).table


def fitting_temperatures(backbone: Backbone, drafter: Drafter, replies: Sequences, chosen: np.ndarray | None = None,
                         positions: int = FITTED_POSITIONS) -> Job[tuple[float, ...]]:
    """Per head the temperature of TEMPERATURES at which its probabilities lose least on the tokens that came: mean of
    −log p over the first of the `chosen` replies (numbers; None: all) that hold `positions` positions. Parts are those
    of `ranking`."""
    starts, lengths = _drafting(replies)
    chosen = np.arange(len(lengths)) if chosen is None else chosen
    chosen = chosen[: int(np.searchsorted(np.cumsum(lengths[chosen]), positions)) + 1]
    place_of, total, done = _draft_places(drafter, backbone.vocab_size), int(lengths[chosen].sum()), 0
    loss = np.zeros((drafter.heads, len(TEMPERATURES)))
    for places in _batches(np.diff(replies.offsets)[chosen], backbone):
        batch = chosen[places]
        for _, logits, targets, _, _ in _forced(backbone, drafter, replies, batch, starts, lengths, place_of):
            loss += _losses(logits, targets)
            done += logits.shape[1]
            yield Progress(done, total, "temperatures")
    return tuple(TEMPERATURES[best] for best in loss.argmin(1).tolist())


@torch.inference_mode()
def _losses(logits: Tensor, targets: Tensor) -> np.ndarray:
    """float64 [K, temperatures]: −log p of the targets that can be drafted, summed over the positions."""
    logits = logits.float()
    known = (targets >= 0).to(logits.device)
    wanted = logits.gather(2, targets.clamp_min(0).to(logits.device)[..., None])[..., 0]
    columns = [torch.where(known, (logits / heat).logsumexp(-1) - wanted / heat, 0.0).sum(1) for heat in TEMPERATURES]
    return torch.stack(columns, 1).double().cpu().numpy()


@torch.inference_mode()
def top_p(logits: Tensor, temperatures: Sequence[float], width: int) -> np.ndarray:
    """float32 [positions, K, width]: probabilities of each head's best tokens at its temperature, best first, from
    logits [K, positions, V']."""
    heat = torch.tensor(temperatures, device=logits.device)[:, None, None]
    logits = logits.float() / heat
    best = logits.topk(min(width, logits.shape[-1]), dim=-1).values
    return (best - logits.logsumexp(-1, keepdim=True)).exp().transpose(0, 1).cpu().numpy()


def _drafting(replies: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Per reply, where its tokens start in its sequence, and how many they are."""
    starts = np.maximum(replies.reply_start, 1)
    return starts, np.maximum(np.diff(replies.offsets) - starts, 0)


@torch.inference_mode()
def _forced(backbone: Backbone, drafter: Drafter, replies: Sequences, batch: Sequence[int], starts: np.ndarray,
            lengths: np.ndarray, place_of: Tensor) -> Iterator[tuple[int, Tensor, Tensor, int, float]]:
    """(reply, logits [K, positions, V'], targets [K, positions], first position, the backbone's −log p of the tokens
    at those positions, summed), CHUNK positions at a time."""
    texts = [_text(replies, i) for i in batch]
    for i, ids, hidden in zip(batch, texts, forced_states(backbone, texts)):
        drafting = hidden[starts[i] - 1 : starts[i] - 1 + lengths[i]]
        targets = _targets(place_of[ids], int(starts[i]), int(lengths[i]), drafter.heads)
        came = ids[starts[i] : starts[i] + lengths[i]].to(hidden.device)
        for first in range(0, int(lengths[i]), CHUNK):
            part = slice(first, first + CHUNK)
            said = backbone.lm_head(drafting[part]).float()
            own = torch.nn.functional.cross_entropy(said, came[part], reduction="sum")
            yield i, drafter.logits(drafting[part]), targets[:, part], first, float(own)


def _text(replies: Sequences, i: int) -> Tensor:
    return torch.from_numpy(replies.ids[replies.offsets[i] : replies.offsets[i + 1]].astype(np.int64))


def forced_states(backbone: Backbone, texts: Sequence[Tensor]) -> Iterator[Tensor]:
    """What the LM head reads at every token of every text: [length, d] each."""
    return (states[: len(ids)] for ids, states in zip(texts, backbone.states(texts)))


def _batches(lengths: np.ndarray, backbone: Backbone) -> Iterator[list[int]]:
    """Sequences of like length together, longest first."""
    most = CUDA_BATCH_TOKENS if backbone.device.type == "cuda" else BATCH_TOKENS
    batch: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        if batch and lengths[batch[0]] * (len(batch) + 1) > most:
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


@torch.inference_mode()
def ranks_of(logits: Tensor, targets: Tensor) -> np.ndarray:
    """uint8 [positions, K]: how each head ranked its target, from logits [K, positions, V'] and targets [K, positions],
    drafting rows or -1. Larger logits come first, equal ones by lower row."""
    target = targets.to(logits.device)[..., None]
    wanted = logits.gather(2, target.clamp_min(0))
    rank = (logits > wanted).sum(-1)
    candidate = (target[..., 0] >= 0) & (rank < KEPT_RANKS)
    k, position = candidate.nonzero(as_tuple=True)
    before = torch.arange(logits.shape[2], device=logits.device) < target[k, position]
    rank[k, position] += ((logits[k, position] == wanted[k, position]) & before).sum(-1)
    rank = torch.where(candidate & (rank < KEPT_RANKS), rank, NOT_RANKED)
    return rank.T.to("cpu", torch.uint8).numpy()
