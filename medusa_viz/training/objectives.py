"""What training minimises: L_LM + λ0 · Σ_k 0.8^k · L_k over heads k = 1..K (Medusa paper §2.2, λ_k = 0.8^k).

L_k is the mean over head k's own labelled positions of the cross entropy between a target distribution and
softmax(W2 · features_k). The target is the token that came, or a mix of it with the backbone's own distribution
at the place of that token (distillation). W2, the LM head's drafting rows, is frozen. Medusa-1 has no L_LM and λ0 = 1;
under Medusa-2 L_LM keeps the backbone what it was: KL(p_before || p_now) on replies that it wrote itself, the cross
entropy of the text on data from elsewhere.
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


class FrozenDivergence(torch.autograd.Function):
    """KL(softmax(W2 · before) || softmax(W2 · now)) per row, behind a frozen output matrix, over the whole vocabulary.

    now and before [R, d] are hidden states; returns losses [R] in now's dtype. The gradient with respect to `now`,
    (p_now − p_before) · W2, is worked out chunk by chunk in the forward. Softmax and sum run in fp32: the divergence
    is the small difference of large numbers.
    """

    @staticmethod
    def forward(ctx, now: Tensor, before: Tensor, rows: OutputRows) -> Tensor:
        gradient, losses = torch.empty_like(now), now.new_empty(len(now))
        exact = torch.promote_types(torch.float32, rows.weight.dtype)
        for first in range(0, len(now), CHUNK):
            part = slice(first, first + CHUNK)
            log_now, log_before = (F.linear(states[part].to(rows.weight.dtype), rows.weight, rows.bias).to(exact)
                                   .log_softmax(-1) for states in (now, before))
            p_before = log_before.exp()
            losses[part] = (p_before * (log_before - log_now)).sum(-1)
            gradient[part] = (log_now.exp_().sub_(p_before).to(rows.weight.dtype) @ rows.weight).to(now.dtype)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx, d_losses: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * d_losses[:, None], None, None


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


def head_weights(heads: int) -> list[float]:
    """λ_k = 0.8^k for k = 1..K."""
    return [HEAD_DECAY**k for k in range(1, heads + 1)]


@dataclass(frozen=True)
class Terms:
    """The terms of an optimiser step, or of the part of it that went through at once.

    heads [K] are the L_k, hits [K] the labels that a head's best token met, lm the backbone's own loss (0 where the
    backbone is frozen). Each is a sum divided by the labels of the whole step, so that parts and processes add up.
    """

    heads: Tensor
    hits: Tensor
    lm: Tensor

    def total(self, lambda0: float) -> Tensor:
        """L_LM + λ0 · Σ_k λ_k · L_k (Medusa paper Eq. 2; with λ0 = 1 and a frozen backbone Eq. 1)."""
        weights = torch.tensor(head_weights(len(self.heads)), dtype=self.heads.dtype, device=self.heads.device)
        return self.lm + lambda0 * (weights * self.heads).sum()


def head_losses(module: MedusaHeads, rows: OutputRows, hidden: Tensor, targets: Targets, distill: float,
                counts: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """L_k and hits, [K] each, of hidden states [B, d]; counts [K] are the labels of the whole step. A head without
    labels adds nothing."""
    losses, hits = [], []
    for k, features in enumerate(module.features(hidden)):  # K times [B, d]
        positions, ids, share = targets.of_head(k, distill)
        loss, hit = FrozenCrossEntropy.apply(features[positions], rows, ids, share)
        losses.append(loss.sum() / max(1, int(counts[k])))
        hits.append(hit.sum())
    return torch.stack(losses), torch.stack(hits)
