"""The Medusa-1 training loop: AdamW over stored hidden states, with checkpoints that resume exactly."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from medusa_viz.decoding.settings import Checked, setting
from medusa_viz.models.heads import MedusaHeads
from medusa_viz.training.data import Labels
from medusa_viz.training.objectives import HeadLosses, OutputRows, Targets, medusa1
from medusa_viz.training.teacher import Teacher

CHECKPOINT_NAME = "checkpoint.pt"
LOG_NAME = "log.jsonl"


class TrainingError(RuntimeError):
    """A run that cannot start or go on; the message is one sentence."""


@dataclass(frozen=True)
class TrainSettings(Checked):
    """Knobs of a Medusa-1 run."""

    heads: int = setting(4, "number of heads K; head k predicts the token k+1 places ahead", 1, 16, 1)
    layers: int = setting(2, "residual layers per head", 1, 8, 1)
    draft_vocabulary: int = setting(16_384, "most frequent reply tokens that heads can draft; 0 = all", 0, 1_000_000, 1)
    passes: int = setting(5, "passes over the training positions", 1, 1_000, 1)
    batch: int = setting(512, "positions per optimiser step", 1, 1_000_000, 1)
    lr: float = setting(1.5e-3, "peak learning rate; cosine decay to 0 after the warm-up", 1e-7, 1.0)
    warmup: int = setting(50, "optimiser steps of linear warm-up", 0, 100_000, 1)
    weight_decay: float = setting(0.0, "AdamW weight decay", 0.0, 10.0)
    distill: float = setting(1.0, "share of the target taken from the backbone's own distribution", 0.0, 1.0)
    clip: float = setting(1.0, "largest gradient norm", 1e-6, 1e6)
    seed: int = setting(0, "seed of the order of positions", 0, 2**31 - 1, 1)
    log_every: int = setting(20, "optimiser steps between log lines", 1, 100_000, 1)
    checkpoint_every: int = setting(500, "optimiser steps between checkpoints", 1, 1_000_000, 1)

    @property
    def decisive(self) -> dict[str, int | float]:
        """The settings that the finished heads depend on."""
        return {name: value for name, value in asdict(self).items() if not name.endswith("_every")}


@dataclass(frozen=True, eq=False)
class Material:
    """What a run reads: hidden states float16 [N, d] of the text, labels of its positions, the frozen drafting rows,
    the ids of those rows (None: the whole vocabulary), soft targets if any, and a fingerprint of it all."""

    hidden: np.ndarray
    labels: Labels
    rows: OutputRows
    draft_ids: Tensor | None
    teacher: Teacher | None
    fingerprint: str

    def batch(self, chosen: np.ndarray, heads: int, device: torch.device) -> tuple[Tensor, Targets]:
        """Hidden states [B, d] and targets of the positions `chosen` [B]."""
        rows = self.labels.rows[chosen]
        hidden = torch.from_numpy(self.hidden[rows]).to(device, torch.float32)
        labels = torch.from_numpy(self.labels.draft[chosen].astype(np.int64)).to(device)
        if self.teacher is None:
            return hidden, Targets(labels)
        ids, p = self.teacher.targets(rows, heads)
        return hidden, Targets(labels, ids.to(device), p.to(device))


class Trainer:
    """One run in one folder: heads, optimiser and the number of finished steps. Everything else follows from them."""

    def __init__(self, material: Material, settings: TrainSettings, folder: Path, device: torch.device) -> None:
        material.labels.check()
        self.material, self.settings, self.folder, self.device = material, settings, folder, device
        self.module = MedusaHeads(settings.heads, material.hidden.shape[1], settings.layers,
                                  material.draft_ids).to(device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=settings.lr, betas=(0.9, 0.99),
                                           weight_decay=settings.weight_decay)
        self.step, self.seconds = 0, 0.0
        self._pass, self._order = -1, np.empty(0, np.int64)
        self.steps_per_pass = math.ceil(len(material.labels) / settings.batch)
        self.total_steps = self.steps_per_pass * settings.passes

    def run(self, after_pass: Callable[[int], dict | None] = lambda number: None,
            progress: Callable[[int, int, dict], None] = lambda step, total, line: None) -> MedusaHeads:
        """Train to the end. `after_pass(number)`, passes counted from 1, may return a line for the log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._cut_log()
        while self.step < self.total_steps:
            start = time.perf_counter()
            terms, norm = self._one_step()
            self.step += 1
            self.seconds += time.perf_counter() - start
            line = log_line(self.step, terms, self.optimizer.param_groups[0]["lr"], norm, self.seconds)
            if self.step % self.settings.log_every == 0 or self.step in (1, self.total_steps):
                self._log(line)
            progress(self.step, self.total_steps, line)
            if self.step % self.steps_per_pass == 0:
                self._log(after_pass(self.step // self.steps_per_pass))
                self.save_checkpoint()
            elif self.step % self.settings.checkpoint_every == 0:
                self.save_checkpoint()
        return self.module

    def _one_step(self) -> tuple[HeadLosses, float]:
        """One optimiser step. Stops before the weights are touched if a number is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * schedule(self.step, self.total_steps, self.settings.warmup)
        hidden, targets = self.material.batch(self._positions(), self.settings.heads, self.device)
        terms = medusa1(self.module, self.material.rows, hidden, targets, self.settings.distill)
        self.optimizer.zero_grad()
        norm = torch.zeros(())
        if terms.total.requires_grad:  # a batch may hold no label at all
            terms.total.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
        if not (terms.total.isfinite() and norm.isfinite()):
            raise TrainingError(f"Training stopped at step {self.step + 1}: the loss is {float(terms.total.detach())} "
                                f"and the gradient norm {float(norm)}; the heads as of step {self.step} are kept.")
        self.optimizer.step()
        return terms, float(norm)

    def _positions(self) -> np.ndarray:
        """Indices of this step's positions. A pass's order depends on seed and pass alone, so it is never stored."""
        number, within = divmod(self.step, self.steps_per_pass)
        if self._pass != number:
            self._pass = number
            self._order = np.random.default_rng((self.settings.seed, number)).permutation(len(self.material.labels))
        return self._order[within * self.settings.batch : (within + 1) * self.settings.batch]

    # ------------------------------------------------------------------------------------------------ saving

    def save_checkpoint(self) -> None:
        """Heads, optimiser and step, replaced in one move."""
        part = self.folder / (CHECKPOINT_NAME + ".part")
        torch.save({"step": self.step, "seconds": self.seconds, "settings": self.settings.decisive,
                    "material": self.material.fingerprint, "module": self.module.state_dict(),
                    "optimizer": self.optimizer.state_dict()}, part)
        os.replace(part, self.folder / CHECKPOINT_NAME)

    def resume(self) -> bool:
        """Go on from the folder's checkpoint; False where there is none. Refuses one of other data or settings."""
        path = self.folder / CHECKPOINT_NAME
        if not path.is_file():
            return False
        saved = torch.load(path, map_location=self.device, weights_only=True)
        changed = [name for name, value in self.settings.decisive.items() if saved["settings"].get(name) != value]
        if saved["material"] != self.material.fingerprint:
            changed.append("the data or the model")
        if changed:
            raise TrainingError(f"The checkpoint in {self.folder} was made with other settings ({', '.join(changed)}); "
                                "repeat those of its run, or choose another folder.")
        self.module.load_state_dict(saved["module"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        return True

    def log_lines(self) -> list[dict]:
        """The training log so far."""
        path = self.folder / LOG_NAME
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def _log(self, line: dict | None) -> None:
        if line is None:
            return
        with (self.folder / LOG_NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _cut_log(self) -> None:
        """Drop lines past the step that this run starts from: they belong to work that was lost."""
        kept = [line for line in self.log_lines() if line["step"] <= self.step]
        (self.folder / LOG_NAME).write_text("".join(json.dumps(line) + "\n" for line in kept))


def schedule(step: int, total: int, warmup: int) -> float:
    """Factor of the learning rate at a step counted from 0: linear warm-up, then a half cosine down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def log_line(step: int, terms: HeadLosses, lr: float, norm: float, seconds: float) -> dict:
    """Every term of one batch's loss: total = Σ weight · loss, heads in order, null where a head had no label."""
    return {"step": step, "total": float(terms.total.detach()), "weights": list(terms.weights),
            "loss": [None if loss is None else float(loss.detach()) for loss in terms.losses],
            "top1": [hits / count if count else None for hits, count in zip(terms.hits, terms.labelled)],
            "labelled": terms.labelled, "lr": lr, "gradient_norm": norm, "seconds": round(seconds, 3)}
