"""The backbone's own next-token distributions over the training text, as soft targets for the heads.

At position t the target of head k is the token at t+k+1, of which the backbone's state at t+k gives the whole
distribution: LM head(h_{t+k}). The hidden states are on disk already, so this costs one matrix product. Backbones that
scale or cap their logits have another distribution, so `recipe` refuses soft targets for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from medusa_viz.training.objectives import OutputRows

CHUNK = 1024  # positions whose logits exist at once


@dataclass(frozen=True, eq=False)
class Teacher:
    """Per token of the text the S likeliest next drafting rows, ids int32 [N, S], and their shares p float16 [N, S].

    The shares are those of the softmax over the draft vocabulary, made to sum to 1 over the S.
    """

    ids: np.ndarray
    p: np.ndarray

    def targets(self, rows: np.ndarray, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Soft targets of heads 1..K at positions `rows` [B]: ids int64 and p [B, K, S]. Past the end of the text the
        last row stands in; such positions have no label and are never read."""
        ahead = np.minimum(rows[:, None] + np.arange(1, heads + 1), len(self.ids) - 1)
        return torch.from_numpy(self.ids[ahead].astype(np.int64)), torch.from_numpy(self.p[ahead])


@torch.inference_mode()
def teach(hidden: np.ndarray, rows: OutputRows, width: int,
          progress: Callable[[int, int], None] = lambda done, total: None) -> Teacher:
    """Soft targets from hidden states [N, d]."""
    width = min(width, len(rows.weight))
    ids = np.empty((len(hidden), width), np.int32)
    p = np.empty((len(hidden), width), np.float16)
    for first in range(0, len(hidden), CHUNK):
        part = slice(first, first + CHUNK)
        states = torch.tensor(hidden[part]).to(rows.weight)
        logits = torch.nn.functional.linear(states, rows.weight, rows.bias)
        best = logits.topk(width, dim=-1)
        ids[part] = best.indices.cpu().numpy()
        p[part] = best.values.float().softmax(-1).half().cpu().numpy()
        progress(min(first + CHUNK, len(hidden)), len(hidden))
    return Teacher(ids, p)
