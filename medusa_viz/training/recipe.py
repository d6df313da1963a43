"""From token files to a heads folder: hidden states, labels, training in one or two stages, scores, model card."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast, broadcast_object_list

from medusa_viz.models import checkpoints
from medusa_viz.models.adapter import Adapter
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.beside import RANKS_NAME, heads_fingerprint
from medusa_viz.models.heads import MedusaHeads
from medusa_viz.training import card, data, evaluate
from medusa_viz.training.data import HELD_OUT, TRAIN, Labels, Replies
from medusa_viz.training.heads_task import HeadsTask, Material
from medusa_viz.training.hidden import fast_dtype, hidden_states, hidden_states_now, model_fingerprint
from medusa_viz.training.joint import JointTask
from medusa_viz.training.objectives import output_rows
from medusa_viz.training.run_folder import TrainingError, checkpoint_of, stored_precision
from medusa_viz.training.settings import JointSettings, TrainSettings
from medusa_viz.training.teacher import teach
from medusa_viz.training.trainer import Diverged, Trainer
from medusa_viz.tuning.accuracy import Calibration, accuracy, save
from medusa_viz.tuning.calibration import prompt_of
from medusa_viz.tuning.replay import RankTable, subset

TEACHER_WIDTH = 16  # likeliest tokens kept per soft target
LARGEST_RISE = 0.03
"""Of the perplexity of a backbone that is trained too, on the held-out replies. Beyond it the text is no longer the
model's own, and more tokens per step are no gain."""

NO_HELD_OUT = "There is no held-out reply, so nothing is measured."

Report = Callable[[str, int, int, "dict | None"], None]
"""Called with phase (hidden, teacher, train), units done, units in all, and in training the step's log line."""


def silent(phase: str, done: int, total: int, line: dict | None = None) -> None:
    """The report that goes nowhere."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run. `model` is the backbone's name as people write it; `init` heads to start from (None: heads that start
    as the LM head); `cache` keeps hidden states; `byte_ids` always belong to the draft vocabulary; `whole_text` labels
    prompts too; `say` prints one line; `stopped` tells that someone wants the run to end. The settings' kind is the
    recipe: JointSettings train the backbone too."""

    recipe: str
    backbone: Backbone
    model: str
    replies: Replies
    byte_ids: Sequence[int]
    settings: TrainSettings
    out: Path
    cache: Path
    init: checkpoints.LoadedHeads | None = None
    whole_text: bool = False
    command: str = ""
    say: Callable[[str], None] = lambda line: None
    report: Report = silent
    stopped: Callable[[], bool] = lambda: False


def run(job: Job, resume: bool = False) -> Path:
    """Train, and leave heads, adapter, config and model card in `job.out`: those of the best pass so far. What lies
    there was judged by `run_folder.check_folder`, which needs no model.

    Raises DataError or TrainingError in one sentence; after numbers that are not finite the last good heads stay.
    """
    train = job.replies.select(job.replies.split == TRAIN)
    train = data.greedy(train) if job.settings.replies == "greedy" else train
    train = data.some(train, job.settings.tokens, job.settings.seed)
    held_out = job.replies.select(job.replies.split == HELD_OUT)
    labels, draft_ids, facts = prepare(job, train)
    dtype = _precision(job, resume)
    judge = Judge(job, held_out, draft_ids)
    material = _material(job, train, labels, draft_ids, dtype)
    facts |= {"matrix_precision": str(dtype).removeprefix("torch.")}
    module = job.init.module if job.init else MedusaHeads(job.settings.heads, material.hidden.shape[1],
                                                          job.settings.layers, draft_ids)
    module.to(job.backbone.device, torch.float32).requires_grad_(True)
    if isinstance(job.settings, JointSettings):
        _run_joint(job, train, material, module, judge, dtype, facts, resume)
    else:
        _run_stage(job, Trainer(HeadsTask(material, job.settings, module), job.settings, job.out, job.backbone.device),
                   judge, facts, resume)
    return job.out


def _precision(job: Job, resume: bool) -> torch.dtype:
    """Of the large matrix products: what the run was begun with, or what is faster here. One process decides for all,
    since each would time it anew."""
    chosen: list[str | None] = [None]
    if PartialState(cpu=job.backbone.device.type == "cpu").is_main_process:
        chosen = [stored_precision(job.out) if resume else None]
        if not chosen[0]:
            dtype, reason = fast_dtype(job.backbone.device)
            job.say(f"Precision of the large matrix products: {reason}.")
            chosen = [str(dtype).removeprefix("torch.")]
    return getattr(torch, broadcast_object_list(chosen)[0])


def _run_joint(job: Job, train: Replies, material: Material, module: MedusaHeads, judge: Judge, dtype: torch.dtype,
               facts: dict, resume: bool) -> None:
    """Stage 1 trains the heads alone, over stored hidden states of the backbone as the run finds it: under the adapter
    that the given heads bring, if any. Stage 2 trains the adapter and the heads."""
    settings, device, before = job.settings, job.backbone.device, 0
    with ExitStack() as ends:
        adapter = _attached(job, ends) if job.init and job.init.adapter else None
        if settings.heads_passes:
            alone, read = settings.first_stage, _under(job, train, material, dtype) if adapter else material
            first = Trainer(HeadsTask(read, alone, module, adapter), alone, job.out, device)
            before = first.total_steps
            if not (resume and checkpoint_of(job.out, 2).is_file()):
                _run_stage(job, first, judge, facts, resume)
                _take_kept(job.out, first)
                first.save_checkpoint()  # of the heads that the second stage starts from
                judge.best = None  # the second stage is judged by itself: its backbone is another
        task = JointTask(job.backbone, train, material, settings, module, adapter or _attached(job, ends), dtype)
        _run_stage(job, Trainer(task, settings, job.out, device, stage=2, before=before), judge, facts, resume)


def _attached(job: Job, ends: ExitStack) -> Adapter:
    """A run's adapter on its backbone, as the given heads bring it or new, until `ends` closes."""
    settings = job.settings
    adapter = Adapter(job.backbone.model, settings.rank, settings.alpha, job.backbone.name, settings.seed)
    ends.callback(adapter.detach)
    if job.init and job.init.adapter:
        adapter.start_from(job.init.adapter)
    return adapter


def _under(job: Job, train: Replies, material: Material, dtype: torch.dtype) -> Material:
    """The same material, but for what the heads read: hidden states under the adapter that is attached."""
    return dataclasses.replace(material, hidden=_hidden(job, train, dtype),
                               fingerprint=f"{material.fingerprint}-{model_fingerprint(job.backbone.model)}")


@torch.no_grad()
def _take_kept(folder: Path, stage: Trainer) -> None:
    """Give a finished stage the heads of the pass that it kept, where that is not its last. They are read as the
    folder has them, in half precision, so that a resumed run starts from the same numbers."""
    if stage.processes.is_main_process:
        passes = [line for line in stage.log_lines() if "pass" in line]
        if passes and not passes[-1]["kept"]:
            kept = checkpoints.load(folder)
            if kept.config.trained["stage"] == stage.stage:  # else they were taken before a later stage saved its own
                stage.task.module.load_state_dict(kept.module.state_dict())
    for parameter in stage.task.module.parameters():
        parameter.copy_(broadcast(parameter))


def _run_stage(job: Job, trainer: Trainer, judge: Judge, facts: dict, resume: bool) -> None:
    if resume and trainer.resume():
        job.say(f"Resumed at step {trainer.step:,} of {trainer.total_steps:,}.")
        judge.remember(trainer)
    main = trainer.processes.is_main_process
    facts = facts | {"stage": trainer.stage, "steps": trainer.before + trainer.total_steps}

    def after_pass(number: int) -> dict | None:
        if not main:
            return None
        line = {"step": trainer.before + trainer.step, "stage": trainer.stage, "pass": number,
                **judge.line(trainer.task)}
        better = judge.improves(line)
        if better:
            _save(job, trainer, facts | {"passes_done": number} | judge.of_backbone(line), judge.scores,
                  [*trainer.log_lines(), line])
            judge.save_ranks(job.out, trainer.task)
        job.say(f"Stage {trainer.stage}, pass {number} of {trainer.settings.passes}: {_summary(judge.scores)}"
                f"{_backbone_words(line)}{'' if better else '; an earlier pass was better and is kept'}")
        return line | {"kept": better}

    try:
        trainer.run(after_pass, lambda step, total, line: job.report("train", step, total, line), job.stopped)
    except TrainingError as ended:
        left = _leave(job, trainer, facts)
        if isinstance(ended, Diverged):
            raise Diverged(f"{ended}; {left}.") from None
        raise


def _leave(job: Job, trainer: Trainer, facts: dict) -> str:
    """What lies in the folder of a stage that ends early, in words: the heads of the last pass that was kept. A run
    that kept none yet leaves its heads as they are, not scored."""
    kept = [line for line in trainer.log_lines() if line.get("kept")]
    if kept:
        return f"the heads of stage {kept[-1]['stage']}, pass {kept[-1]['pass']} are kept"
    if not all(parameter.isfinite().all() for parameter in trainer.task.module.parameters()):
        return "the heads hold numbers that are not finite and are not saved"
    step = trainer.before + trainer.step
    if trainer.processes.is_main_process:
        _save(job, trainer, facts | {"stopped_at_step": step}, {}, trainer.log_lines())
    return f"the heads as of step {step} are kept"


class Judge:
    """Scores of heads on the held-out replies, and which pass was the best: the one with the most tokens per step at
    15 nodes, replayed on greedy replies. Where these answer fewer than two prompts the last pass counts. A pass after
    which the backbone's perplexity has risen by more than LARGEST_RISE is only better than another such pass of higher
    perplexity."""

    def __init__(self, job: Job, held_out: Replies, draft_ids: torch.Tensor | None) -> None:
        self.backbone, self.replies = job.backbone, held_out
        self.rows = output_rows(job.backbone.lm_head, draft_ids, torch.float32)
        self.scores: dict[str, evaluate.Scores] = {}
        self.table: RankTable | None = None
        self.best: tuple[bool, float] | None = None
        """The merit of the best pass so far."""

        self._before = _hidden(job, held_out, torch.float32) if len(held_out) else None
        self._perplexity: float | None = None

    def line(self, task: HeadsTask | JointTask) -> dict:
        """What the log says about the heads as they are; kept in `scores` too."""
        if self._before is None:
            return {"held_out": {}}
        moved = task.adapter is not None
        states = hidden_states_now(self.backbone, self.replies, torch.float32) if moved else self._before
        self.table = evaluate.rank_table(task.module, self.rows, states, self.replies)
        self.scores = evaluate.evaluate(self.table, self.replies)
        line: dict = {"held_out": {name: dataclasses.asdict(score) for name, score in self.scores.items()}}
        if moved:
            whole = output_rows(self.backbone.lm_head, None, torch.float32)
            if self._perplexity is None:
                self._perplexity = evaluate.perplexity(self._before, self.replies, whole)
            line["perplexity"] = {"before": self._perplexity,
                                  "after": evaluate.perplexity(states, self.replies, whole)}
            line["same_choice"] = evaluate.same_choice(self._before, states, self.replies, whole)
        return line

    def save_ranks(self, folder: Path, task: HeadsTask | JointTask) -> None:
        """Leave the ranks of the greedy held-out replies beside the heads: they replay any static tree. The replies
        are those of the backbone before training: of one that was trained too they are not its own text."""
        greedy = self.replies.temperature == 0
        if self.table is None or not greedy.any():
            return
        table, prompts = subset(self.table, greedy), prompt_of(self.replies.select(greedy))
        about = {"replies": self.replies.name, "heads_fingerprint": heads_fingerprint(task.module)}
        about |= {"own_text": False} if task.adapter else {}
        save(folder / RANKS_NAME, Calibration(table, prompts, prompts % 2 == 1, about=about), accuracy(table, prompts))

    def improves(self, line: dict) -> bool:
        """Whether no pass before was better; remembers the best."""
        found = _merit(line)
        if self.best is not None and found < self.best:
            return False
        self.best = found
        return True

    def remember(self, trainer: Trainer) -> None:
        """Take the best pass of a resumed stage from its log."""
        past = [_merit(line) for line in trainer.log_lines()
                if "pass" in line and line["stage"] == trainer.stage and line["step"] <= trainer.before + trainer.step]
        self.best = max(past, default=None)

    @staticmethod
    def of_backbone(line: dict) -> dict:
        """What a line says of the backbone, where it was trained too."""
        return {name: line[name] for name in ("perplexity", "same_choice") if name in line}


def _merit(line: dict) -> tuple[bool, float]:
    """What passes are compared by, larger is better: whether the text is still the model's, then tokens per step; of
    a text that is not, how little its perplexity is. Without a replay every pass is as good as the one before."""
    found = line.get("perplexity")
    if found and not found["after"] <= (1 + LARGEST_RISE) * found["before"]:
        return False, -found["after"]
    judged = line["held_out"].get("all, greedy")
    return True, judged["tokens_per_step"].get("15", 0.0) if judged else 0.0


def _backbone_words(line: dict) -> str:
    if "perplexity" not in line:
        return ""
    before, after = line["perplexity"]["before"], line["perplexity"]["after"]
    lost = "" if _merit(line)[0] else f" (it rose by more than {LARGEST_RISE:.0%})"
    return (f"; held-out perplexity {before:.3f} before, {after:.3f} after{lost}, first choice unchanged at "
            f"{line['same_choice']:.1%} of the tokens")


def prepare(job: Job, train: Replies) -> tuple[Labels, torch.Tensor | None, dict]:
    """Labels and draft vocabulary of a run, and the facts about them; says how many labels each head has."""
    settings, vocab = job.settings, job.backbone.vocab_size
    if not len(train):
        raise data.DataError(f"{job.replies.name} holds no sequence of the training split.")
    if (largest := job.replies.ids.max(initial=0)) >= vocab:
        raise data.DataError(f"{job.replies.name} holds id {largest}, but {job.model} has {vocab:,} tokens: the data "
                             "belong to another model.")
    _check_logits(job)
    if job.init:
        draft_ids, heads = job.init.module.draft_ids, job.init.module.heads
        if job.init.module.output is not None:
            raise TrainingError(f"The heads in {job.init.source} own their output matrices; training starts from heads "
                                "that share the LM head.")
    else:
        restricted = 0 < settings.draft_vocabulary < vocab
        draft_ids = data.draft_vocabulary(train, job.byte_ids, settings.draft_vocabulary, vocab) if restricted else None
        heads = settings.heads
    labels = data.make_labels(train, heads, draft_ids, vocab, job.whole_text)
    labels.check()
    job.say(f"{len(train):,} sequences, {int(train.is_reply.sum()):,} reply tokens; labels per head: "
            f"{', '.join(f'{n:,}' for n in labels.labelled)}.")
    rows = vocab if draft_ids is None else len(draft_ids)
    job.say(f"The draft vocabulary has {rows:,} rows and holds {labels.coverage():.1%} of the targets; the others "
            "give no label.")
    facts = {"recipe": job.recipe, "init": Path(job.init.source).name if job.init else "",
             "data": job.replies.name, "data_fingerprint": job.replies.fingerprint,
             "sequences": len(train), "tokens": int(train.is_reply.sum()), "positions": len(labels),
             "labels_per_head": labels.labelled.tolist(), "draft_rows": rows, "draft_coverage": labels.coverage(),
             "whole_text": job.whole_text, "teacher_width": TEACHER_WIDTH if settings.distill else 0}
    return labels, draft_ids, facts


def _check_logits(job: Job) -> None:
    """Refuse what is worked out from hidden states and the LM head alone where the backbone's logits are more."""
    joint = isinstance(job.settings, JointSettings)
    if not (joint or job.settings.distill) or job.backbone.has_plain_head:
        return
    cannot = ("joint training cannot follow; train medusa1 heads for it, with --distill 0." if joint else
              "soft targets cannot follow; pass --distill 0.")
    raise TrainingError(f"{job.backbone.name} scales or caps its logits, which {cannot}")


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


def _save(job: Job, trainer: Trainer, facts: dict, scores: dict[str, evaluate.Scores], log: list[dict]) -> None:
    """Heads and adapter in fp16, the heads' config, and a model card made from the same facts."""
    module = trainer.task.module
    trained = facts | {name: value for name, value in trainer.settings.decisive.items()
                       if name not in ("heads", "layers", "draft_vocabulary", "tokens")}
    trained |= {"date": time.strftime("%Y-%m-%d"), "seconds": round(trainer.seconds), "torch": torch.__version__,
                "device": job.backbone.placement.device_name, "command": job.command}
    table = evaluate.table_to_ship({name: score.accuracy for name, score in scores.items()})
    judged = evaluate.judged(scores)
    if judged:
        trained["held_out_top1"] = [round(share, 4) for share in judged.top(1)]
        trained["tokens_per_step"] = {n: round(rate, 4) for n, rate in judged.tokens_per_step.items()}
    config = checkpoints.HeadsConfig(job.model, module.heads, module.layers, module.hidden_size,
                                     job.backbone.vocab_size, [[round(x, 5) for x in row] for row in table], trained)
    if trainer.task.adapter:
        trainer.task.adapter.save(job.out)
    checkpoints.save(job.out, module, config)  # the weights last: who sees new ones finds what belongs to them
    (job.out / "README.md").write_text(card.model_card(config, scores, job.replies, log))


def _summary(scores: dict[str, evaluate.Scores]) -> str:
    if not scores:
        return NO_HELD_OUT
    judged = evaluate.judged(scores)
    replayed = ", ".join(f"{rate:.3f} at {nodes} nodes" for nodes, rate in judged.tokens_per_step.items())
    return (f"held-out top-1 ({judged.name}) {' '.join(f'{x:.3f}' for x in judged.top(1))}; "
            f"replayed tokens per step {replayed or 'not measured'}")
