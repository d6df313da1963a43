"""Medusa-1 from token files to a heads folder: hidden states, labels, training, scores, model card."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from medusa_viz.models import checkpoints
from medusa_viz.models.backbone import Backbone
from medusa_viz.training import card, data, evaluate
from medusa_viz.training.data import HELD_OUT, TRAIN, Labels, Replies
from medusa_viz.training.hidden import fast_dtype, hidden_states, model_fingerprint
from medusa_viz.training.objectives import output_rows
from medusa_viz.training.teacher import teach
from medusa_viz.training.trainer import CHECKPOINT_NAME, Material, Trainer, TrainingError, TrainSettings

TEACHER_WIDTH = 16  # likeliest tokens kept per soft target
NO_HELD_OUT = "There is no held-out reply, so nothing is measured."

Report = Callable[[str, int, int, "dict | None"], None]
"""Called with phase (hidden, teacher, train), units done, units in all, and in training the step's log line."""


def silent(phase: str, done: int, total: int, line: dict | None = None) -> None:
    """The report that goes nowhere."""


@dataclass(frozen=True, eq=False)
class Job:
    """One Medusa-1 run. `model` is the backbone's name as people write it; `cache` keeps hidden states;
    `byte_ids` always belong to the draft vocabulary; `whole_text` labels prompts too; `say` prints one line."""

    backbone: Backbone
    model: str
    replies: Replies
    byte_ids: Sequence[int]
    settings: TrainSettings
    out: Path
    cache: Path
    whole_text: bool = False
    command: str = ""
    say: Callable[[str], None] = lambda line: None
    report: Report = silent


def run(job: Job, resume: bool = False) -> Path:
    """Train, and leave heads, config and model card in `job.out`; they are renewed after every pass.

    Raises DataError or TrainingError in one sentence; after numbers that are not finite the last good heads stay.
    """
    if (job.out / CHECKPOINT_NAME).is_file() and not resume:
        raise TrainingError(f"{job.out} holds a run already: add --resume to go on with it, or choose another folder.")
    train = job.replies.select(job.replies.split == TRAIN)
    held_out = job.replies.select(job.replies.split == HELD_OUT)
    labels, draft_ids, facts = prepare(job, train)
    dtype, reason = fast_dtype(job.backbone.device)
    job.say(f"Precision of the large matrix products: {reason}.")
    judged = _hidden(job, held_out, torch.float32) if len(held_out) else None
    material = _material(job, train, labels, draft_ids, dtype)
    trainer = Trainer(material, job.settings, job.out, job.backbone.device)
    if resume and trainer.resume():
        job.say(f"Resumed at step {trainer.step:,} of {trainer.total_steps:,}.")
    exact = output_rows(job.backbone.lm_head, draft_ids, torch.float32)
    facts |= {"matrix_precision": str(dtype).removeprefix("torch."), "steps": trainer.total_steps}

    def after_pass(number: int) -> dict:
        scores = evaluate.evaluate(trainer.module, exact, judged, held_out) if len(held_out) else {}
        line = {"step": trainer.step, "pass": number,
                "held_out": {name: dataclasses.asdict(score) for name, score in scores.items()}}
        _save(job, trainer, facts | {"passes_done": number}, scores, [*trainer.log_lines(), line])
        job.say(f"Pass {number} of {job.settings.passes}: {_summary(scores)}")
        return line

    try:
        trainer.run(after_pass, lambda step, total, line: job.report("train", step, total, line))
    except TrainingError:
        if all(parameter.isfinite().all() for parameter in trainer.module.parameters()):
            _save(job, trainer, facts | {"stopped_at_step": trainer.step}, {}, trainer.log_lines())
        raise
    return job.out


def prepare(job: Job, train: Replies) -> tuple[Labels, torch.Tensor | None, dict]:
    """Labels and draft vocabulary of a run, and the facts about them; says how many labels each head has."""
    settings, vocab = job.settings, job.backbone.vocab_size
    if not len(train):
        raise data.DataError(f"{job.replies.name} holds no sequence of the training split.")
    if train.ids.max() >= vocab:
        raise data.DataError(f"{job.replies.name} holds id {train.ids.max()}, but {job.model} has {vocab:,} tokens: "
                             "the data belong to another model.")
    restricted = 0 < settings.draft_vocabulary < vocab
    draft_ids = data.draft_vocabulary(train, job.byte_ids, settings.draft_vocabulary, vocab) if restricted else None
    labels = data.make_labels(train, settings.heads, draft_ids, vocab, job.whole_text)
    labels.check()
    job.say(f"{len(train):,} sequences, {int(train.is_reply.sum()):,} reply tokens; labels per head: "
            f"{', '.join(f'{n:,}' for n in labels.labelled)}.")
    rows = vocab if draft_ids is None else len(draft_ids)
    job.say(f"The draft vocabulary has {rows:,} rows and holds {labels.coverage():.1%} of the targets; the others "
            "give no label.")
    facts = {"recipe": "medusa1", "data": job.replies.name, "data_fingerprint": job.replies.fingerprint,
             "sequences": len(train), "tokens": int(train.is_reply.sum()), "positions": len(labels),
             "labels_per_head": labels.labelled.tolist(), "draft_rows": rows, "draft_coverage": labels.coverage(),
             "whole_text": job.whole_text, "teacher_width": TEACHER_WIDTH if settings.distill else 0}
    return labels, draft_ids, facts


def _material(job: Job, train: Replies, labels: Labels, draft_ids: torch.Tensor | None, dtype: torch.dtype) -> Material:
    rows = output_rows(job.backbone.lm_head, draft_ids, dtype)
    hidden = _hidden(job, train, dtype)
    teacher = None
    if job.settings.distill:
        teacher = teach(hidden, rows, TEACHER_WIDTH, lambda done, total: job.report("teacher", done, total, None))
    model = model_fingerprint(job.backbone.model)
    digest = hashlib.sha256(f"{model} {train.fingerprint} {job.whole_text} {dtype}".encode())
    digest.update(b"all" if draft_ids is None else draft_ids.numpy().tobytes())
    return Material(hidden, labels, rows, draft_ids, teacher, digest.hexdigest()[:16])


def _hidden(job: Job, replies: Replies, dtype: torch.dtype) -> np.ndarray:
    return hidden_states(job.backbone, replies, job.cache, dtype,
                         lambda done, total: job.report("hidden", done, total, None))


def _save(job: Job, trainer: Trainer, facts: dict, scores: dict[str, evaluate.Scores],
          log: list[dict]) -> None:
    """Heads in fp16, their config, and a model card made from the same facts."""
    settings, module = dataclasses.asdict(job.settings), trainer.module
    trained = facts | {name: settings[name] for name in ("passes", "batch", "lr", "warmup", "weight_decay", "distill",
                                                        "clip", "seed")}
    trained |= {"date": time.strftime("%Y-%m-%d"), "seconds": round(trainer.seconds), "torch": torch.__version__,
                "device": job.backbone.placement.device_name, "command": job.command}
    table = evaluate.table_to_ship({name: score.accuracy for name, score in scores.items()})
    config = checkpoints.HeadsConfig(job.model, module.heads, module.layers, module.hidden_size,
                                     job.backbone.vocab_size, [[round(x, 5) for x in row] for row in table], trained)
    checkpoints.save(job.out, module, config)
    (job.out / "README.md").write_text(card.model_card(config, scores, job.replies, log))


def _summary(scores: dict[str, evaluate.Scores]) -> str:
    if not scores:
        return NO_HELD_OUT
    judged = scores.get("all, greedy", scores["all"])
    replayed = ", ".join(f"{rate:.3f} at {nodes} nodes" for nodes, rate in judged.tokens_per_step.items())
    return (f"held-out top-1 ({judged.name}) {' '.join(f'{x:.3f}' for x in judged.top(1))}; "
            f"replayed tokens per step {replayed or 'not measured'}")
