"""The training loop: AdamW over whatever a task minimises, with checkpoints that resume exactly.

One loop serves every recipe. The task says what a pass goes through, computes the terms of a part of a step, and names
the parameters; the loop shuffles, accumulates, schedules, logs and saves. Several processes (`accelerate launch`) share
each step's units and add up their gradients, which are those of one process up to rounding.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor

from medusa_viz.training.objectives import Terms, head_weights
from medusa_viz.training.run_folder import (
    LOG_NAME,
    TrainingError,
    changed_settings,
    checkpoint_of,
    read_checkpoint,
    refuse_changed,
)
from medusa_viz.training.settings import TrainSettings


class Stopped(TrainingError):
    """A run that was asked to stop. Its checkpoint is saved."""


class Diverged(TrainingError):
    """A loss or gradient that is no finite number. The weights are those of the step before; the message ends without
    a full stop, so that it can go on with what is kept."""


class Task(Protocol):
    """What a loop minimises. Units are what a pass goes through once: positions, or whole replies."""

    units: int
    units_per_step: int
    lm_kind: str | None
    """kl, ce, or None where the backbone is frozen."""
    fingerprint: str
    """Of everything that the terms depend on besides the settings."""
    precision: str
    """Of the large matrix products: float32 or bfloat16."""

    def groups(self) -> list[dict]:
        """AdamW's parameter groups, each with its `rate`, a factor on the learning rate."""

    def counts(self, chosen: np.ndarray) -> np.ndarray:
        """int64 [K + 1]: labels of each head among the units `chosen`, and places of the backbone's own loss."""

    def parts(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """The units, cut into what goes through at once."""

    def terms(self, part: np.ndarray, counts: np.ndarray) -> Terms:
        """The terms of one part, divided by the counts of the whole step."""

    def lambda0(self, share: float) -> float:
        """Weight of the heads' loss after `share` of the steps."""

    def state(self) -> dict:
        """Everything that training changes."""

    def load_state(self, state: dict) -> None:
        """Take back what `state` gave."""


class Trainer:
    """One run, or one stage of it, in one folder: a task, an optimiser and the number of finished steps. Everything
    else follows from them. `before` counts the steps of the stages that came first."""

    def __init__(self, task: Task, settings: TrainSettings, folder: Path, device: torch.device, stage: int = 1,
                 before: int = 0) -> None:
        self.task, self.settings, self.folder, self.device = task, settings, folder, device
        self.stage, self.before = stage, before
        self.optimizer = torch.optim.AdamW(task.groups(), lr=settings.lr, betas=(0.9, 0.99),
                                           weight_decay=settings.weight_decay)
        self.processes = PartialState(cpu=device.type == "cpu")
        self.step, self.seconds = 0, 0.0
        self._pass, self._order = -1, np.empty(0, np.int64)
        self.steps_per_pass = math.ceil(task.units / task.units_per_step)
        self.total_steps = self.steps_per_pass * settings.passes
        self.checkpoint = checkpoint_of(folder, stage)

    def run(self, after_pass: Callable[[int], dict | None] = lambda number: None,
            progress: Callable[[int, int, dict], None] = lambda step, total, line: None,
            stopped: Callable[[], bool] = lambda: False) -> None:
        """Train to the end. `after_pass(number)`, passes counted from 1, may return a line for the log; `stopped()` is
        asked after every step, and where it says True the checkpoint is saved and Stopped raised."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._cut_log()
        while self.step < self.total_steps:
            start = time.perf_counter()
            line = self._one_step()
            self.step += 1
            self.seconds += time.perf_counter() - start
            line |= {"step": self.before + self.step, "stage": self.stage, "seconds": round(self.seconds, 3)}
            if self.step % self.settings.log_every == 0 or self.step in (1, self.total_steps):
                self._log(line)
            progress(self.step, self.total_steps, line)
            if self.step % self.steps_per_pass == 0:
                self._log(after_pass(self.step // self.steps_per_pass))
                self.save_checkpoint()
            elif self.step % self.settings.checkpoint_every == 0:
                self.save_checkpoint()
            if self.step < self.total_steps and self._anyone(stopped()):
                self.save_checkpoint()
                raise Stopped(f"Stopped after step {self.step:,} of {self.total_steps:,}; --resume goes on from there.")

    def _one_step(self) -> dict:
        """One optimiser step, and its log line. Stops before the weights are touched if a number is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * group["rate"] * schedule(self.step, self.total_steps, self.settings.warmup)
        lambda0 = self.task.lambda0(self.step / self.total_steps)
        chosen = self._chosen()
        counts = self.task.counts(chosen)
        self.optimizer.zero_grad()
        figures = torch.zeros(2 * len(counts) - 1, dtype=torch.float64, device=self.device)
        for part in self.task.parts(chosen[self.processes.process_index :: self.processes.num_processes]):
            terms = self.task.terms(part, counts)
            total = terms.total(lambda0)
            if total.requires_grad:  # a part may hold no label at all
                total.backward()
            figures += torch.cat([terms.heads, terms.hits, terms.lm[None]]).detach().double()
        figures = self._added_up(figures)
        line = log_line(figures, counts, lambda0, self.task.lm_kind)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters(), self.settings.clip)
        if not (math.isfinite(line["total"]) and norm.isfinite()):
            raise Diverged(f"Training stopped at step {self.before + self.step + 1}: the loss is {line['total']} and "
                           f"the gradient norm {float(norm)}")
        self.optimizer.step()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return line | {"lr": rates[-1], "lr_heads": rates[0], "gradient_norm": float(norm)}

    def _added_up(self, figures: Tensor) -> Tensor:
        """Sum figures and gradients over the processes."""
        if self.processes.num_processes == 1:
            return figures
        for parameter in self._parameters():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(own, "sum")
        return reduce(figures.float(), "sum").double()

    def _anyone(self, stopped: bool) -> bool:
        """Whether any process was told to stop: all stop at the same step."""
        if self.processes.num_processes == 1:
            return stopped
        return bool(reduce(torch.tensor(float(stopped), device=self.device), "sum") > 0)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _chosen(self) -> np.ndarray:
        """Units of this step. A pass's order depends on seed and pass alone, so it is never stored."""
        number, within = divmod(self.step, self.steps_per_pass)
        if self._pass != number:
            self._pass = number
            self._order = np.random.default_rng((self.settings.seed, number)).permutation(self.task.units)
        return self._order[within * self.task.units_per_step : (within + 1) * self.task.units_per_step]

    # ------------------------------------------------------------------------------------------------ saving

    def save_checkpoint(self) -> None:
        """What training changed, optimiser and step, replaced in one move."""
        if not self.processes.is_main_process:
            return
        part = self.checkpoint.with_suffix(".part")
        torch.save({"step": self.step, "seconds": self.seconds, "settings": self.settings.decisive,
                    "material": self.task.fingerprint, "precision": self.task.precision, "task": self.task.state(),
                    "optimizer": self.optimizer.state_dict()}, part)
        os.replace(part, self.checkpoint)

    def resume(self) -> bool:
        """Go on from the folder's checkpoint; False where there is none. Refuses one of other data or settings."""
        if not self.checkpoint.is_file():
            return False
        saved = read_checkpoint(self.checkpoint, self.device)
        changed = changed_settings(saved, self.settings)
        if saved["material"] != self.task.fingerprint:
            changed.append("the data or the model")
        refuse_changed(self.folder, changed)
        self.task.load_state(saved["task"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        return True

    def log_lines(self) -> list[dict]:
        """The training log so far."""
        path = self.folder / LOG_NAME
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def _log(self, line: dict | None) -> None:
        if line is None or not self.processes.is_main_process:
            return
        with (self.folder / LOG_NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _cut_log(self) -> None:
        """Drop lines past the step that this run starts from: they belong to work that was lost."""
        if self.processes.is_main_process:
            kept = [line for line in self.log_lines() if line["step"] <= self.before + self.step]
            (self.folder / LOG_NAME).write_text("".join(json.dumps(line) + "\n" for line in kept))


def schedule(step: int, total: int, warmup: int) -> float:
    """Factor of the learning rate at a step counted from 0: linear warm-up, then a half cosine down to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def log_line(figures: Tensor, counts: Sequence[int], lambda0: float, lm_kind: str | None) -> dict:
    """Every term of one step's loss: total = lm_loss + lambda0 · Σ weight · loss, heads in order, null where a head
    had no label or the backbone no loss."""
    heads = len(counts) - 1
    losses, hits, lm = figures[:heads].tolist(), figures[heads : 2 * heads].tolist(), float(figures[-1])
    weights, labelled = head_weights(heads), [int(count) for count in counts[:heads]]
    return {"total": lm + lambda0 * sum(weight * loss for weight, loss in zip(weights, losses)), "weights": weights,
            "loss": [loss if count else None for loss, count in zip(losses, labelled)],
            "top1": [hit / count if count else None for hit, count in zip(hits, labelled)], "labelled": labelled,
            "lm_loss": lm if lm_kind else None, "lm_kind": lm_kind, "lambda0": lambda0}
