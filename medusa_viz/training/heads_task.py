"""Medusa-1: heads over stored hidden states of a frozen backbone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medusa_viz.models.adapter import Adapter
from medusa_viz.models.heads import MedusaHeads
from medusa_viz.training.data import Labels
from medusa_viz.training.objectives import OutputRows, Targets, Terms, head_losses
from medusa_viz.training.settings import TrainSettings
from medusa_viz.training.teacher import Teacher


@dataclass(frozen=True, eq=False)
class Material:
    """What a run reads: the frozen backbone's hidden states float16 [N, d] of the text, labels of its positions, the
    frozen drafting rows, the ids of those rows (None: the whole vocabulary), soft targets if any, and a fingerprint of
    it all."""

    hidden: np.ndarray
    labels: Labels
    rows: OutputRows
    draft_ids: Tensor | None
    teacher: Teacher | None
    fingerprint: str

    @property
    def precision(self) -> str:
        """Of the matrix products that the rows take part in."""
        return str(self.rows.weight.dtype).removeprefix("torch.")

    def states(self, places: np.ndarray, device: torch.device) -> Tensor:
        """Hidden states [B, d] of the tokens `places` [B]."""
        return torch.from_numpy(self.hidden[places]).to(device, torch.float32)

    def targets(self, positions: np.ndarray, heads: int, device: torch.device) -> Targets:
        """What the heads should say at the labelled positions `positions` [B]."""
        labels = torch.from_numpy(self.labels.draft[positions].astype(np.int64)).to(device)
        if self.teacher is None:
            return Targets(labels)
        ids, p = self.teacher.targets(self.labels.rows[positions], heads)
        return Targets(labels, ids.to(device), p.to(device))


class HeadsTask:
    """Σ_k 0.8^k · L_k over positions (see `trainer.Task`). `adapter` is the one that the hidden states were made
    under."""

    lm_kind = None

    def __init__(self, material: Material, settings: TrainSettings, module: MedusaHeads,
                 adapter: Adapter | None = None) -> None:
        material.labels.check()
        self.material, self.settings, self.module, self.adapter = material, settings, module, adapter
        self.units, self.units_per_step = len(material.labels), settings.batch
        self.fingerprint, self.precision = material.fingerprint, material.precision

    def groups(self) -> list[dict]:
        return [{"params": list(self.module.parameters()), "rate": 1.0}]

    def counts(self, chosen: np.ndarray) -> np.ndarray:
        return np.append((self.material.labels.draft[chosen] >= 0).sum(0), 0)

    def parts(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        for first in range(0, len(chosen), self.settings.micro_batch):
            yield chosen[first : first + self.settings.micro_batch]

    def terms(self, part: np.ndarray, counts: np.ndarray) -> Terms:
        device = self.module.weight.device
        hidden = self.material.states(self.material.labels.rows[part], device)
        targets = self.material.targets(part, self.module.heads, device)
        losses, hits = head_losses(self.module, self.material.rows, hidden, targets, self.settings.distill, counts)
        return Terms(losses, hits, losses.new_zeros(()))

    def lambda0(self, share: float) -> float:
        return 1.0

    def state(self) -> dict:
        return self.module.state_dict()

    def load_state(self, state: dict) -> None:
        self.module.load_state_dict(state)
