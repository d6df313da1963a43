"""What Medusa-1 minimises: Σ_k 0.8^k · L_k over heads k = 1..K (Medusa paper §2.2, λ_k = 0.8^k).

L_k is the mean over head k's own labelled positions of the cross entropy between a target distribution and
softmax(W2 · features_k). The target is the token that came, or a mix of it with the backbone's own distribution
at the place of that token (distillation). W2, the LM head's drafting rows, is frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_viz.models.heads import MedusaHeads

HEAD_DECAY = 0.8
CHUNK = 1024  # rows whose logits exist at once: 1,024 x 16,384 in bf16 are 34 MB


@dataclass(frozen=True)
class OutputRows:
    """The frozen matrix that turns features into logits: weight [V', d] and bias [V'] or None, in the fast dtype."""

    weight: Tensor
    bias: Tensor | None = None


def output_rows(lm_head: torch.nn.Module, draft_ids: Tensor | None, dtype: torch.dtype) -> OutputRows:
    """The rows of an LM head that heads draft from; all of them without a draft vocabulary."""
    bias = getattr(lm_head, "bias", None)
    if draft_ids is None:
        return OutputRows(lm_head.weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype))
    ids = draft_ids.to(lm_head.weight.device)
    return OutputRows(lm_head.weight.detach()[ids].to(dtype), None if bias is None else bias.detach()[ids].to(dtype))


class FrozenCrossEntropy(torch.autograd.Function):
    """Cross entropy per row behind a frozen output matrix, without ever holding all logits.

    features [R, d]; targets are sparse distributions, ids int64 [R, S] (drafting rows) with weights [R, S] that sum
    to 1. Returns losses [R] and hits [R], whether the likeliest token is ids[:, 0]. The gradient with respect to the
    features, (softmax − target) · W2, is worked out chunk by chunk in the forward, where the logits are at hand; W2
    itself needs none.
    """

    @staticmethod
    def forward(ctx, features: Tensor, rows: OutputRows, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(features)
        losses = features.new_empty(len(features))
        hits = torch.empty(len(features), dtype=torch.bool, device=features.device)
        for first in range(0, len(features), CHUNK):
            part = slice(first, first + CHUNK)
            logits = F.linear(features[part].to(rows.weight.dtype), rows.weight, rows.bias)
            hits[part] = logits.max(-1).indices == ids[part, 0]  # on CPU a sixth of argmax's time
            p = logits.softmax(-1)
            log_p = p.gather(1, ids[part]).to(features.dtype).clamp_min(torch.finfo(torch.float32).tiny).log()
            losses[part] = -(weights[part] * log_p).sum(-1)
            row = torch.arange(len(p), device=p.device)[:, None]
            p.index_put_((row, ids[part]), -weights[part].to(p.dtype), accumulate=True)
            gradient[part] = (p @ rows.weight).to(features.dtype)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    def backward(ctx, d_losses: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * d_losses[:, None], None, None, None


@dataclass(frozen=True)
class Targets:
    """What the heads should say at the B positions of a batch.

    labels int64 [B, K]: drafting row of the token at t+k+1, or -1 for no label;
    soft_ids int64 and soft_p [B, K, S]: the backbone's own likeliest drafting rows there and their shares, which sum
    to 1; None trains on the labels alone.
    """

    labels: Tensor
    soft_ids: Tensor | None = None
    soft_p: Tensor | None = None

    def of_head(self, k: int, distill: float) -> tuple[Tensor, Tensor, Tensor]:
        """Positions [R] with a label for head k (from 0), and their sparse target: ids and weights [R, 1 + S]."""
        positions = (self.labels[:, k] >= 0).nonzero()[:, 0]
        ids = self.labels[positions, k, None]
        if self.soft_ids is None or distill == 0:
            return positions, ids, torch.ones_like(ids, dtype=torch.float32)
        hard = torch.full_like(ids, 1 - distill, dtype=torch.float32)
        return (positions, torch.cat([ids, self.soft_ids[positions, k]], 1),
                torch.cat([hard, distill * self.soft_p[positions, k].float()], 1))


@dataclass(frozen=True)
class HeadLosses:
    """One batch's terms. total = Σ_k weights[k] · losses[k]; a head without labels adds nothing and reads None."""

    total: Tensor
    losses: list[Tensor | None]
    weights: Sequence[float]
    labelled: list[int]
    hits: list[int]


def head_weights(heads: int) -> list[float]:
    """λ_k = 0.8^k for k = 1..K."""
    return [HEAD_DECAY**k for k in range(1, heads + 1)]


def medusa1(module: MedusaHeads, rows: OutputRows, hidden: Tensor, targets: Targets, distill: float) -> HeadLosses:
    """Loss terms of one batch of hidden states [B, d]."""
    features = module.features(hidden)  # [K, B, d]
    weights = head_weights(module.heads)
    losses: list[Tensor | None] = []
    labelled, hits = [], []
    total = features.new_zeros(())
    for k in range(module.heads):
        positions, ids, share = targets.of_head(k, distill)
        labelled.append(len(positions))
        if not len(positions):
            losses.append(None)
            hits.append(0)
            continue
        loss, hit = FrozenCrossEntropy.apply(features[k, positions], rows, ids, share)
        losses.append(loss.mean())
        hits.append(int(hit.sum()))
        total = total + weights[k] * losses[-1]
    return HeadLosses(total, losses, weights, labelled, hits)
