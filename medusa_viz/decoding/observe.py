"""Observation: from a step's tensors to the numbers a record keeps. Pages need them; `decode` does not pay for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from medusa_viz.decoding.decoder import Candidates
from medusa_viz.decoding.records import TEMPERATURES, Drafts, TopTokens, Verification
from medusa_viz.decoding.tree import TreeShape
from medusa_viz.models.backbone import Forward
from medusa_viz.models.heads import Drafter

TOP = 10
_CHUNK = 256  # rows per block of a comparison against the whole vocabulary; bounds memory for large trees


@torch.inference_mode()
def drafts(shape: TreeShape, candidates: Candidates, root_p: float) -> Drafts:
    """What the heads proposed; `root_p` is the backbone's probability of the root."""
    head_p = np.ones(shape.nodes + 1)
    head_p[0] = root_p
    heads: list[TopTokens] = []
    if candidates.top is not None:
        ids, p = candidates.top.ids.cpu().numpy(), candidates.top.p.double().cpu().numpy()
        head_p[1:] = p[shape.depth[1:] - 1, shape.rank[1:]]
        heads = [TopTokens(row_ids[:TOP].tolist(), row_p[:TOP].tolist()) for row_ids, row_p in zip(ids, p)]
    path_p = np.ones(shape.nodes + 1)
    for row in range(1, shape.nodes + 1):
        path_p[row] = path_p[shape.parent[row]] * head_p[row]
    return Drafts(shape.parent.tolist(), shape.rank.tolist(), candidates.tokens.tolist(), head_p.tolist(),
                  path_p.tolist(), heads)


@torch.inference_mode()
def verification(shape: TreeShape, candidates: Candidates, forward: Forward, head_ranks: Tensor | None,
                 draft_place: Tensor | None) -> Verification:
    """What the backbone said of every row. `head_ranks` and `draft_place` come from `rank_tables`."""
    logits = forward.logits.float()
    argmax = logits.argmax(-1)
    best = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
    logit, rank = _node_numbers(logits, shape, candidates.tokens, argmax)
    normaliser = logits.logsumexp(-1, keepdim=True)
    ids, p = _argmax_first(best.indices, argmax).tolist(), (best.values - normaliser).exp().tolist()
    parents = np.unique(shape.parent[1:])
    lse, mean_logit = temperature_tables(logits[torch.as_tensor(parents, device=logits.device)])
    return Verification(
        logit=logit, rank=rank,
        top={row: TopTokens(ids[row], p[row]) for row in range(shape.nodes + 1)},
        lse=dict(zip(parents.tolist(), lse.tolist())),
        mean_logit=dict(zip(parents.tolist(), mean_logit.tolist())),
        next_rank=_next_ranks(shape, argmax, head_ranks, draft_place),
    )


def temperature_tables(logits: Tensor) -> tuple[Tensor, Tensor]:
    """log-sum-exp of z / T and E_T[z] of float32 logits [rows, V] at TEMPERATURES: float64 [rows, 20] each."""
    lse = torch.empty(len(logits), len(TEMPERATURES), dtype=torch.float64, device=logits.device)
    mean = torch.empty_like(lse)
    if not len(logits):
        return lse, mean
    peak = logits.max(-1, keepdim=True).values
    below = logits - peak
    for place, temperature in enumerate(TEMPERATURES):
        weight = torch.exp(below / temperature)
        total = weight.sum(-1)
        lse[:, place] = total.double().log() + peak[:, 0].double() / temperature
        mean[:, place] = (torch.linalg.vecdot(weight, below) / total).double() + peak[:, 0].double()
    return lse, mean


@torch.inference_mode()
def rank_tables(drafter: Drafter, hidden: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """ranks [K, V']: rank of each drafting row in each head at hidden [1, d]; place [V]: the row of an id, or -1."""
    order = drafter.logits(hidden)[:, 0].argsort(-1, descending=True)
    ranks = torch.empty_like(order)
    ranks.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    place = torch.full((vocab_size,), -1, dtype=torch.long, device=order.device)
    ids = drafter.draft_ids if drafter.draft_ids is not None else torch.arange(order.shape[1], device=order.device)
    place[ids] = torch.arange(len(ids), device=order.device)
    return ranks, place


def _argmax_first(ids: Tensor, argmax: Tensor) -> Tensor:
    """Top ids [rows, n] with the argmax in front: of equal logits, common in half precision, topk may put any first."""
    found = ids == argmax[:, None]
    found[:, -1] |= ~found.any(-1)  # more equal logits than places: the last one gives way
    ids = torch.where(found, ids[:, :1], ids)
    ids[:, 0] = argmax
    return ids


def _node_numbers(logits: Tensor, shape: TreeShape, tokens: Tensor, argmax: Tensor) -> tuple[list[float], list[int]]:
    """Logit and 0-based rank of each row's token at its parent; zeros for the root."""
    parent = torch.as_tensor(shape.parent[1:].astype(np.int64), device=logits.device)
    own = logits[parent, tokens[1:]]
    ranks = [(logits[parent[first : first + _CHUNK]] > own[first : first + _CHUNK, None]).sum(-1)
             for first in range(0, shape.nodes, _CHUNK)]
    rank = torch.cat(ranks) if ranks else parent
    # A token tied with the argmax is not it: greedy takes one of them.
    rank = rank.where((rank > 0) | (argmax[parent] == tokens[1:]), 1)
    return [0.0, *own.tolist()], [0, *rank.tolist()]


def _next_ranks(shape: TreeShape, wanted: Tensor, head_ranks: Tensor | None, place: Tensor | None) -> dict[int, int]:
    """Rank, in the head of the next depth, of the token the backbone wants after each row; -1 where it has none."""
    if head_ranks is None or place is None:
        return {row: -1 for row in range(shape.nodes + 1)}
    depth = torch.as_tensor(shape.depth.astype(np.int64), device=wanted.device)
    row = place[wanted]
    known = (depth < len(head_ranks)) & (row >= 0)
    ranks = torch.where(known, head_ranks[depth.clamp(max=len(head_ranks) - 1), row.clamp(min=0)], -1)
    return dict(enumerate(ranks.tolist()))
