"""Observation: from a step's tensors to the numbers a record keeps. Pages need them; `decode` does not pay for them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from medusa_viz.decoding.decoder import Candidates, best_tokens
from medusa_viz.decoding.records import TEMPERATURES, Drafts, TopTokens, Verification
from medusa_viz.decoding.tree import TreeShape
from medusa_viz.models.backbone import Forward

TOP = 10
_CHUNK = 256  # rows per block of a comparison against the whole vocabulary; bounds memory for large trees
_BLOCK, _BLOCK_CPU = 1 << 26, 1 << 20  # numbers at once in a temperature table: on a CPU one row's, for its caches
_LOG2_E = 1 / math.log(2)


@torch.inference_mode()
def drafts(shape: TreeShape, candidates: Candidates, root_p: float) -> Drafts:
    """What the heads proposed; `root_p` is the backbone's probability of the root."""
    head_p = np.ones(shape.nodes + 1)
    head_p[0] = root_p
    heads: list[TopTokens] = []
    if candidates.top is not None:
        ids, p = candidates.top.ids.cpu().numpy(), candidates.top.p.cpu().double().numpy()
        head_p[1:] = p[shape.depth[1:] - 1, shape.rank[1:]]
        heads = [TopTokens(row_ids[:TOP].tolist(), row_p[:TOP].tolist()) for row_ids, row_p in zip(ids, p)]
    path_p = np.ones(shape.nodes + 1)
    for row in range(1, shape.nodes + 1):
        path_p[row] = path_p[shape.parent[row]] * head_p[row]
    return Drafts(shape.parent.tolist(), shape.rank.tolist(), candidates.tokens.tolist(), head_p.tolist(),
                  path_p.tolist(), heads)


@torch.inference_mode()
def verification(shape: TreeShape, candidates: Candidates, forward: Forward, head_logits: Tensor | None,
                 draft_row: Tensor) -> Verification:
    """What the backbone said of every row. `head_logits` [K, V'] are what the heads said over their drafting rows,
    `draft_row` [V] is the drafting row of an id, or -1."""
    logits = forward.logits.float()
    argmax = best_tokens(logits)
    best = logits.topk(min(TOP, logits.shape[-1]), dim=-1)
    logit, rank = _node_numbers(logits, shape, candidates.tokens, argmax)
    ids, p = _argmax_first(best.indices, argmax).tolist(), logits.softmax(-1).gather(1, best.indices).tolist()
    parents = np.unique(shape.parent[1:])
    lse, mean_logit = temperature_tables(logits[torch.as_tensor(parents, device=logits.device)])
    return Verification(
        logit=logit, rank=rank,
        top={row: TopTokens(ids[row], p[row]) for row in range(shape.nodes + 1)},
        lse=dict(zip(parents.tolist(), lse.tolist())),
        mean_logit=dict(zip(parents.tolist(), mean_logit.tolist())),
        next_rank=_next_ranks(shape, argmax, head_logits, draft_row),
    )


def temperature_tables(logits: Tensor) -> tuple[Tensor, Tensor]:
    """log-sum-exp of z / T and E_T[z] of float32 logits [rows, V] at TEMPERATURES: float64 [rows, 20] each, on the CPU,
    since not every device has float64."""
    grid = torch.tensor(TEMPERATURES, dtype=torch.float64)
    total, moment = (logits.new_empty(len(logits), len(grid)) for _ in range(2))
    if not len(logits):
        return total.cpu().double(), moment.cpu().double()
    peak = logits.amax(-1, keepdim=True)
    below = logits - peak
    exponent = (_LOG2_E / grid).to(logits.dtype).to(logits.device)[:, None]  # exp2 takes a third of the time of exp
    numbers = _BLOCK_CPU if logits.device.type == "cpu" else _BLOCK
    block = max(numbers // (len(grid) * logits.shape[-1]), 1)  # rows
    for first in range(0, len(logits), block):
        rows = below[first : first + block]
        weight = (rows[:, None] * exponent).exp2_()  # [rows, 20, V]
        total[first : first + block] = weight.sum(-1)
        moment[first : first + block] = (weight @ rows[:, :, None])[:, :, 0]
    total, moment, peak = (part.cpu().double() for part in (total, moment, peak))
    return total.log() + peak / grid, moment / total + peak


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
    rank = _count_above(logits, parent, own)
    # A token tied with the argmax is not it: greedy takes one of them.
    rank = rank.where((rank > 0) | (argmax[parent] == tokens[1:]), 1)
    return [0.0, *own.tolist()], [0, *rank.tolist()]


def _next_ranks(shape: TreeShape, wanted: Tensor, head_logits: Tensor | None, draft_row: Tensor) -> dict[int, int]:
    """Rank, in the head of the next depth, of the token the backbone wants after each row; -1 where it has none."""
    ranks = torch.full_like(wanted, -1)
    if head_logits is not None:
        row, depth = draft_row[wanted], torch.as_tensor(shape.depth.astype(np.int64), device=wanted.device)
        asked = ((depth < len(head_logits)) & (row >= 0)).nonzero()[:, 0]
        head = depth[asked]
        ranks[asked] = _count_above(head_logits, head, head_logits[head, row[asked]])
    return dict(enumerate(ranks.tolist()))


def _count_above(logits: Tensor, rows: Tensor, bounds: Tensor) -> Tensor:
    """int64 [n]: how many of logits[rows[i]] exceed bounds[i]."""
    if logits.device.type == "cpu":  # numpy counts ten times as fast as torch
        table = logits.numpy()
        counts = [np.count_nonzero(table[row] > bound) for row, bound in zip(rows.tolist(), bounds.numpy())]
        return torch.tensor(counts, dtype=torch.long)
    parts = [(logits[rows[first : first + _CHUNK]] > bounds[first : first + _CHUNK, None]).sum(-1)
             for first in range(0, len(rows), _CHUNK)]
    return torch.cat(parts) if parts else rows
