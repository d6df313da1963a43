"""Medusa heads: K small residual blocks on the backbone's last hidden state (Medusa paper §2.1.1).

p_t^(k) = softmax(W2 · (h_t + SiLU(W1^(k)·h_t + b^(k)))) predicts the token at t+k+1. W2 is the backbone's LM head
(shared) or the head's own matrix; a draft vocabulary restricts it to some of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_viz.models.packed import linear_like


class HeadsError(ValueError):
    """Heads that cannot be used; the message is one sentence."""


class OtherModelError(HeadsError):
    """Heads that belong to another backbone: `base`, as far as their config names one."""

    def __init__(self, message: str, base: str = "") -> None:
        super().__init__(message)
        self.base = base


class MedusaHeads(nn.Module):
    """Parameters of K heads with L residual layers each.

    weight [L, K, d, d], bias [L, K, d]; output [K, V', d] where heads own their matrices, else None;
    draft_ids [V'] int64: vocabulary ids of the output rows in rising order, or None for the whole vocabulary.
    Weights and biases start at zero, so that every head starts as the backbone's LM head.
    """

    def __init__(self, heads: int, hidden: int, layers: int = 1, draft_ids: Tensor | None = None,
                 output: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers, heads, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(layers, heads, hidden))
        self.output = None if output is None else nn.Parameter(output)
        self.register_buffer("draft_ids", draft_ids)

    @property
    def heads(self) -> int:
        return self.weight.shape[1]

    @property
    def layers(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[2]

    def features(self, hidden: Tensor) -> Tensor:
        """What each head feeds its output matrix: hidden [rows, d] -> [K, rows, d]."""
        x = hidden.expand(self.heads, *hidden.shape)
        for weight, bias in zip(self.weight, self.bias):
            x = x + F.silu(torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)))
        return x


@dataclass(frozen=True)
class DraftTokens:
    """The best tokens of each head, best first: ids and p (at temperature 1) are [K, width]. `logits` [K, V'] are
    all that the heads said, over their drafting rows."""

    ids: Tensor
    p: Tensor
    logits: Tensor | None = None


class Drafter:
    """Heads bound to one backbone's LM head, ready to draft. Holds the drafting rows of the LM head once more, packed
    where the LM head itself is (see `packed`)."""

    def __init__(self, heads: MedusaHeads, lm_head: nn.Module) -> None:
        weight = lm_head.weight
        self.module = heads.to(weight.device, weight.dtype).requires_grad_(False)
        self.heads, self.draft_ids = heads.heads, heads.draft_ids
        ids, bias = self.draft_ids, getattr(lm_head, "bias", None)
        self._own = self._shared = None
        if heads.output is not None:
            self._own = [linear_like(lm_head, matrix) for matrix in heads.output]
        elif ids is None:
            self._shared = lm_head
        else:
            self._shared = linear_like(lm_head, weight[ids], None if bias is None else bias[ids])
        self.choices = heads.output.shape[1] if heads.output is not None else len(weight) if ids is None else len(ids)
        """Tokens a head can draft: the size of its vocabulary."""
        self.draft_row = torch.full((len(weight),), -1, device=weight.device)
        """int64 [V]: the drafting row of a vocabulary id, or -1."""
        self.draft_row[slice(self.choices) if ids is None else ids] = torch.arange(self.choices, device=weight.device)

    @property
    def drafts_from(self) -> str:
        """Whose output matrices the heads draft by, and from how many of their rows, in words."""
        of = len(self.draft_row)
        rows = f"all {of:,} rows" if self.choices == of else f"{self.choices:,} of {of:,} rows"
        matrix = "shared output matrix (the backbone's LM head)" if self._own is None else "own output matrix per head"
        return f"{matrix}, {rows}"

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, d] -> [K, rows, V'], V' the draft vocabulary."""
        features = self.module.features(hidden)
        if self._own is not None:
            return torch.stack([product(x) for product, x in zip(self._own, features)])
        return self._shared(features)

    @torch.inference_mode()
    def top(self, hidden: Tensor, width: int, with_p: bool = False) -> DraftTokens:
        """The `width` best tokens of every head at one hidden state [1, d]; p and logits only where asked for."""
        logits = self.logits(hidden)[:, 0]
        best = logits.topk(min(width, self.choices), dim=-1)
        ids = best.indices if self.draft_ids is None else self.draft_ids[best.indices]
        if not with_p:
            return DraftTokens(ids, best.values[:, :0])
        logits = logits.float()
        return DraftTokens(ids, (best.values.float() - logits.logsumexp(-1, keepdim=True)).exp(), logits)
