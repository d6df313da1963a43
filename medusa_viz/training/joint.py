"""Medusa-2: the backbone, through a LoRA adapter, and the heads together (Medusa paper §2.2.2).

L = L_LM + λ0 · Σ_k 0.8^k · L_k. L_LM holds the backbone where it was while its hidden states learn to say more about
the tokens further on. The backbone's own distribution before training comes from the stored hidden states of the text,
so no second forward with the adapter switched off is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from medusa_viz.models.adapter import Adapter
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.heads import MedusaHeads
from medusa_viz.training import hidden
from medusa_viz.training.data import Replies
from medusa_viz.training.heads_task import Material
from medusa_viz.training.objectives import (
    FrozenCrossEntropy,
    FrozenDivergence,
    Terms,
    head_losses,
    output_rows,
)
from medusa_viz.training.settings import JointSettings


class JointTask:
    """L_LM + λ0 · Σ_k 0.8^k · L_k over whole replies (see `trainer.Task`); the adapter is attached to the backbone."""

    def __init__(self, backbone: Backbone, replies: Replies, material: Material, settings: JointSettings,
                 module: MedusaHeads, adapter: Adapter, dtype: torch.dtype) -> None:
        material.labels.check()
        self.backbone, self.replies, self.material = backbone, replies, material
        self.settings, self.module, self.adapter, self.dtype = settings, module, adapter, dtype
        self.fingerprint, self.precision = material.fingerprint, material.precision
        self.lm_kind = settings.lm_loss
        self._vocabulary = output_rows(backbone.lm_head, None, dtype)
        self._lm_places = replies.before_reply
        self.units = len(replies)
        self.units_per_step = max(1, round(settings.batch * self.units / len(material.labels)))

    def groups(self) -> list[dict]:
        return [{"params": list(self.module.parameters()), "rate": self.settings.heads_rate},
                {"params": self.adapter.parameters(), "rate": 1.0}]

    def counts(self, chosen: np.ndarray) -> np.ndarray:
        labels = self.material.labels.draft[np.concatenate([self._positions(i) for i in chosen])]
        return np.append((labels >= 0).sum(0), sum(len(self._places(i)) for i in chosen))

    def parts(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """Replies of like length together, so that little is padding."""
        part: list[int] = []
        for i in sorted(chosen.tolist(), key=lambda i: -len(self.replies.sequence(i))):
            longest = len(self.replies.sequence(part[0] if part else i))
            if part and longest * (len(part) + 1) > self.settings.micro_batch:
                yield np.array(part)
                part = []
            part.append(i)
        if part:
            yield np.array(part)

    def terms(self, part: np.ndarray, counts: np.ndarray) -> Terms:
        device = self.backbone.device
        states = hidden.forward(self.backbone, [self.replies.sequence(i) for i in part], self.dtype)
        now = torch.cat([row[: len(self.replies.sequence(i))] for row, i in zip(states, part)])  # as in the joined ids
        starts = np.cumsum([0] + [len(self.replies.sequence(i)) for i in part])

        def rows_here(places: list[np.ndarray]) -> torch.Tensor:
            """Rows of `now` of places in the joined ids of all replies, one array per reply of the part."""
            shift = [own - self.replies.offsets[i] + start for own, i, start in zip(places, part, starts)]
            return torch.from_numpy(np.concatenate(shift)).to(device)

        positions = [self._positions(i) for i in part]
        targets = self.material.targets(np.concatenate(positions), self.module.heads, device)
        drafting = now[rows_here([self.material.labels.rows[own] for own in positions])]
        losses, hits = head_losses(self.module, self.material.rows, drafting, targets, self.settings.distill, counts)
        places = [self._places(i) for i in part]
        lm = self._lm(now[rows_here(places)], np.concatenate(places)).sum() / max(1, int(counts[-1]))
        return Terms(losses, hits, lm)

    def _lm(self, now: torch.Tensor, places: np.ndarray) -> torch.Tensor:
        """The backbone's own loss per place: of the next token there."""
        if self.lm_kind == "kl":
            return FrozenDivergence.apply(now, self.material.states(places, now.device), self._vocabulary)
        ids = torch.from_numpy(self.replies.ids[places + 1].astype(np.int64)).to(now.device)[:, None]
        return FrozenCrossEntropy.apply(now, self._vocabulary, ids, torch.ones_like(ids, dtype=torch.float32))[0]

    def _positions(self, reply: int) -> np.ndarray:
        """Indices of a reply's labelled positions."""
        first, last = np.searchsorted(self.material.labels.rows, self.replies.offsets[reply : reply + 2])
        return np.arange(first, last)

    def _places(self, reply: int) -> np.ndarray:
        """Places in the joined ids whose next token belongs to the reply."""
        first, last = np.searchsorted(self._lm_places, self.replies.offsets[reply : reply + 2])
        return self._lm_places[first:last]

    def lambda0(self, share: float) -> float:
        if self.settings.lambda0_schedule == "sine":
            return self.settings.lambda0 * math.sin(math.pi / 2 * share)
        return self.settings.lambda0

    def state(self) -> dict:
        return {"heads": self.module.state_dict(), "adapter": self.adapter.state()}

    def load_state(self, state: dict) -> None:
        self.module.load_state_dict(state["heads"])
        self.adapter.load_state(state["adapter"])
