"""Medusa-2: heads and adapter together, on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from medusa_viz.decoding.settings import SettingsError
from medusa_viz.models import adapter, backbone, checkpoints, device
from medusa_viz.models.beside import RANKS_NAME
from medusa_viz.models.heads import MedusaHeads
from medusa_viz.training import evaluate, hidden, joint, objectives, recipe
from medusa_viz.training.heads_task import HeadsTask
from medusa_viz.training.joint import JointTask
from medusa_viz.training.run_folder import LOG_NAME, TrainingError
from medusa_viz.training.settings import JointSettings, settings_for
from medusa_viz.tuning import accuracy
from tests import tiny
from tests.tiny_training import SETTINGS, VOCAB, WIDTH, job_in, random_replies, tiny_backbone

pytestmark = pytest.mark.usefixtures("one_precision")
JOINT = JointSettings(layers=1, distill=0.5, batch=64, micro_batch=90, passes=2, heads_passes=2, warmup=2, lr=1e-2,
                      rank=2, alpha=4, log_every=1, checkpoint_every=2)


def joint_task(folder: Path, settings=JOINT, seed=0) -> JointTask:
    """A task over the training replies, its material made as a run makes it."""
    job = job_in(folder, settings=settings, backbone=tiny_backbone(seed), name="medusa2")
    train = job.replies.select(job.replies.split == 0)
    labels, draft_ids, _ = recipe.prepare(job, train)
    material = recipe._material(job, train, labels, draft_ids, torch.float32)
    lora = adapter.Adapter(job.backbone.model, settings.rank, settings.alpha, job.backbone.name, settings.seed)
    return JointTask(job.backbone, train, material, job.settings, MedusaHeads(4, WIDTH, 1, draft_ids), lora,
                     torch.float32)


def everything(task: JointTask) -> np.ndarray:
    return np.arange(task.units)


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_chunked_divergence_is_the_plain_one_and_so_is_its_gradient(monkeypatch, with_bias):
    monkeypatch.setattr(objectives, "CHUNK", 3)
    torch.manual_seed(0)
    now, before = (torch.randn(8, 5, dtype=torch.float64, requires_grad=grad) for grad in (True, False))
    rows = objectives.OutputRows(torch.randn(7, 5, dtype=torch.float64),
                                 torch.randn(7, dtype=torch.float64) if with_bias else None)
    losses = objectives.FrozenDivergence.apply(now, before, rows)
    log_now, log_before = (torch.nn.functional.linear(x, rows.weight, rows.bias).log_softmax(-1)
                           for x in (now, before))
    plain = torch.nn.functional.kl_div(log_now, log_before, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(losses, plain) and (losses > 0).all()
    pull = torch.randn(8, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(loss, now, pull, retain_graph=True)[0] for loss in (losses, plain))
    assert torch.allclose(ours, theirs)


def test_the_terms_are_those_of_a_plain_forward_of_every_reply(tmp_path):
    task = joint_task(tmp_path, replace(JOINT, lm_loss="ce", distill=0.0))
    counts = task.counts(everything(task))
    parts = [task.terms(part, counts) for part in task.parts(everything(task))]
    assert len(parts) > 2  # accumulated
    heads, lm = sum(part.heads for part in parts), sum(part.lm for part in parts)
    losses, surprises = [[] for _ in range(4)], []
    draft = task.module.draft_ids.tolist()
    for i in range(len(task.replies)):
        ids = torch.from_numpy(task.replies.sequence(i)).long()
        states = task.backbone.model.model(ids[None]).last_hidden_state[0]
        logits = task.backbone.lm_head(states)
        features = task.module.features(states)
        for t in range(int(task.replies.reply_start[i]) - 1, len(ids) - 1):
            surprises.append(-logits[t].log_softmax(-1)[ids[t + 1]])
            for k in range(1, 5):
                if t + k + 1 < len(ids) and int(ids[t + k + 1]) in draft and t + 2 < len(ids):
                    own = task.backbone.lm_head(features[k - 1, t])[draft].log_softmax(-1)
                    losses[k - 1].append(-own[draft.index(int(ids[t + k + 1]))])
    assert lm.item() == pytest.approx(torch.stack(surprises).mean().item(), abs=1e-5)
    for k in range(4):
        assert heads[k].item() == pytest.approx(torch.stack(losses[k]).mean().item(), abs=1e-4)
        assert counts[k] == len(losses[k])


def test_before_the_first_step_the_divergence_is_zero_and_both_parts_get_gradients(tmp_path):
    task = joint_task(tmp_path)
    counts = task.counts(everything(task))
    for part in task.parts(everything(task)):
        terms = task.terms(part, counts)
        assert abs(terms.lm.item()) < 1e-4  # stored in half precision
        terms.total(0.2).backward()
    assert task.module.weight.grad.abs().sum() > 0
    assert sum(float(parameter.grad.abs().sum()) for parameter in task.adapter.parameters()) > 0


def test_the_first_stage_leaves_the_backbone_alone_and_the_second_changes_it(tmp_path):
    backbone_ = tiny_backbone()
    before = hidden.model_fingerprint(backbone_.model)
    seen = []

    def watch(phase, done, total, line):
        if phase == "train" and line["stage"] == 1 and done == total:
            seen.append(hidden.model_fingerprint(backbone_.model))

    job = job_in(tmp_path, settings=JOINT, backbone=backbone_, name="medusa2", report=watch)
    recipe.run(job)
    assert seen == [before]
    assert hidden.model_fingerprint(backbone_.model) == before  # the adapter is taken off at the end
    log = [json.loads(line) for line in (job.out / LOG_NAME).read_text().splitlines()]
    steps = [line for line in log if "total" in line]
    assert {line["stage"] for line in steps} == {1, 2}
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    for line in steps:
        heads = sum(weight * loss for weight, loss in zip(line["weights"], line["loss"]))
        assert line["total"] == pytest.approx((line["lm_loss"] or 0) + line["lambda0"] * heads, abs=1e-5)
        assert line["lambda0"] == (1 if line["stage"] == 1 else 0.2)
        if line["stage"] == 2:
            assert line["lr_heads"] == pytest.approx(4 * line["lr"])
    last = [line for line in log if "pass" in line][-1]
    assert last["perplexity"]["before"] > 1 and last["perplexity"]["after"] != last["perplexity"]["before"]
    assert 0 < last["same_choice"] <= 1


def test_the_saved_folder_holds_heads_and_adapter_and_decodes_as_trained(tmp_path):
    tiny_model = tmp_path / "model"
    base = tiny_backbone()
    base.model.save_pretrained(tiny_model)
    seen = []

    def watch(phase, done, total, line):
        if phase == "train" and line["stage"] == 2 and done == total:
            ids = torch.tensor([[5, 6, 7, 8, 9]])
            seen.append(base.model(ids).logits.detach())

    replies = random_replies()
    none_held_out = replace(replies, split=np.zeros_like(replies.split))  # so the last pass is the one that is kept
    job = job_in(tmp_path, none_held_out, JOINT, base, name="medusa2", report=watch)
    recipe.run(job)
    assert adapter.is_adapter(job.out)
    assert checkpoints.load(job.out, WIDTH, VOCAB).report.notices == []
    again = backbone.load(tiny_model, device.choose("cpu", "fp32"), adapter=job.out)
    plain = backbone.load(tiny_model, device.choose("cpu", "fp32"))
    with torch.no_grad():
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        logits, untrained = again.model(ids).logits, plain.model(ids).logits
    assert torch.allclose(logits, seen[0], atol=2e-2) and not torch.allclose(untrained, seen[0], atol=2e-2)
    assert "adapter" in (job.out / "README.md").read_text()
    config = json.loads((job.out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny" and "lm_head" not in config["target_modules"]


def test_a_joint_run_goes_on_from_the_adapter_of_given_heads(tmp_path):
    first = job_in(tmp_path, settings=replace(JOINT, heads_passes=0), name="medusa2")
    recipe.run(first)
    given = checkpoints.load(first.out, WIDTH, VOCAB)
    still = replace(JOINT, heads_passes=0, passes=1, lr=1e-7)
    second = job_in(tmp_path / "more", settings=still, name="medusa2", init=given)
    recipe.run(second)
    old, new = (load_file(folder / adapter.ADAPTER_WEIGHTS) for folder in (first.out, second.out))
    assert all(torch.allclose(old[name], new[name], atol=1e-3) for name in old)
    with pytest.raises(adapter.AdapterError, match="--rank"):
        recipe.run(job_in(tmp_path / "other", settings=replace(still, rank=3), name="medusa2", init=given))


def test_the_first_stage_trains_heads_for_the_adapter_that_they_bring(tmp_path, monkeypatch):
    """What they read are states under it; what they are taught is still the backbone's own text."""
    first = job_in(tmp_path, settings=replace(JOINT, heads_passes=0), name="medusa2")
    recipe.run(first)
    given, start, seen = checkpoints.load(first.out, WIDTH, VOCAB), HeadsTask.__init__, []

    def watched(task, material, settings, module, lora):
        seen.append(material)
        start(task, material, settings, module, lora)

    monkeypatch.setattr(HeadsTask, "__init__", watched)
    monkeypatch.setattr(recipe, "fast_dtype", lambda device: (torch.float32, "as the test needs it"))
    second = job_in(tmp_path / "more", settings=replace(JOINT, heads_passes=1), name="medusa2", init=given,
                    stopped=lambda: (second.out / RANKS_NAME).is_file())  # before a pass of the second stage
    with pytest.raises(TrainingError, match="--resume goes on"):
        recipe.run(second)
    train = second.replies.select(second.replies.split == 0)
    merged, plain = tiny_backbone(), tiny_backbone()
    merged.model = adapter.merge(merged.model, first.out)
    under, bare = (hidden.hidden_states_now(one, train, torch.float32).astype(np.float32) for one in (merged, plain))
    material, = seen
    assert np.abs(material.hidden - under).max() < 1e-2 < np.abs(material.hidden - bare).max()
    teacher = recipe.teach(bare.astype(np.float16), material.rows, recipe.TEACHER_WIDTH)
    assert np.array_equal(material.teacher.ids, teacher.ids)
    assert checkpoints.load(second.out, WIDTH, VOCAB).config.trained["stage"] == 1
    old, new = (load_file(folder / adapter.ADAPTER_WEIGHTS) for folder in (first.out, second.out))
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(second.backbone.model.named_parameters(),
                                                           plain.model.named_parameters(), strict=True))


def test_an_adapter_of_another_model_is_refused_in_one_sentence(tmp_path):
    job = job_in(tmp_path, settings=replace(JOINT, heads_passes=0, passes=1), name="medusa2")
    recipe.run(job)
    tiny.model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(adapter.AdapterError, match="belongs to another backbone"):
        backbone.load(tmp_path / "model", device.choose("cpu", "fp32"), adapter=job.out)


@pytest.mark.parametrize("first_is_best", [False, True])
@pytest.mark.parametrize("at", [4, 8, 9, 12])
def test_both_stages_resume_exactly(tmp_path, monkeypatch, at, first_is_best):
    if first_is_best:
        monkeypatch.setattr(recipe, "_merit", lambda line: (True, -line["pass"]))
    whole = job_in(tmp_path / "whole", settings=JOINT, name="medusa2")
    recipe.run(whole)
    steps = []

    def stop() -> bool:
        steps.append(1)
        return len(steps) == at

    parts = job_in(tmp_path / "parts", settings=JOINT, name="medusa2", stopped=stop)
    with pytest.raises(TrainingError, match="Stopped after step"):
        recipe.run(parts)
    assert checkpoints.load(parts.out, WIDTH, VOCAB).module.weight.isfinite().all()
    recipe.run(job_in(tmp_path / "parts", settings=JOINT, name="medusa2"), resume=True)
    for name in (checkpoints.WEIGHTS_NAME, adapter.ADAPTER_WEIGHTS):
        assert (parts.out / name).read_bytes() == (whole.out / name).read_bytes()
    logs = [[{key: value for key, value in json.loads(line).items() if key != "seconds"}
             for line in (job.out / LOG_NAME).read_text().splitlines()] for job in (whole, parts)]
    assert logs[0] == logs[1]


def kept_in(folder: Path) -> dict[str, bytes]:
    """The files that other commands read."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix not in (".jsonl", ".pt")}


@pytest.mark.parametrize("fault", [False, True])
def test_a_second_stage_that_ends_before_its_first_pass_leaves_the_scored_heads_of_the_first(tmp_path, monkeypatch,
                                                                                             fault):
    plain, start, calls, before = joint.head_losses, JointTask.__init__, [], {}

    def no_number(*arguments):
        losses, hits = plain(*arguments)
        calls.append(1)
        return (losses * float("nan") if fault and len(calls) > 2 else losses), hits

    def begun(*arguments):
        before.update(kept_in(job.out))
        start(*arguments)

    monkeypatch.setattr(JointTask, "__init__", begun)
    monkeypatch.setattr(joint, "head_losses", no_number)
    job = job_in(tmp_path, settings=JOINT, name="medusa2", stopped=lambda: bool(calls) and not fault)
    said = r"the heads of stage 1, pass \d are kept\.$" if fault else "--resume goes on"
    with pytest.raises(TrainingError, match=said):
        recipe.run(job)
    assert kept_in(job.out) == before and RANKS_NAME in before and not adapter.is_adapter(job.out)
    assert checkpoints.load(job.out, WIDTH, VOCAB).config.accuracy


def test_the_second_stage_starts_from_the_heads_that_the_first_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "_merit", lambda line: (True, -line["pass"]))
    start, seen = JointTask.__init__, []

    def watched(task, backbone_, train, material, settings, module, lora, dtype):
        seen.append((module.weight.detach().clone(), checkpoints.load(job.out, WIDTH, VOCAB)))
        start(task, backbone_, train, material, settings, module, lora, dtype)

    monkeypatch.setattr(JointTask, "__init__", watched)
    job = job_in(tmp_path, settings=JOINT, name="medusa2")
    recipe.run(job)
    (weight, kept), = seen
    assert kept.config.trained["passes_done"] == 1 and torch.equal(weight, kept.module.weight)
    assert accuracy.load(job.out / RANKS_NAME).about["own_text"] is False


@pytest.mark.parametrize(("passes", "kept"), [
    ([(1.02, 1.5), (1.08, 1.9)], 1), ([(1.08, 1.9), (1.02, 1.5)], 2), ([(1.08, 1.5), (1.05, 1.4)], 2),
    ([(1.05, 1.4), (1.08, 1.9)], 1), ([(1.01, 1.5), (1.02, 1.6)], 2), ([(0.98, 1.7), (1.02, 1.6)], 1)])
def test_a_pass_that_leaves_the_model_s_text_is_worse_than_any_that_does_not(tmp_path, monkeypatch, passes, kept):
    perplexities, rates, plain = iter([2.0, *(2 * rise for rise, _ in passes)]), iter(passes), evaluate.evaluate

    def scored(*arguments):
        scores = plain(*arguments)
        scores["all, greedy"].tokens_per_step["15"] = next(rates)[1]
        return scores

    monkeypatch.setattr(evaluate, "perplexity", lambda *_: next(perplexities))
    monkeypatch.setattr(evaluate, "evaluate", scored)
    said: list[str] = []
    job = job_in(tmp_path, settings=replace(JOINT, heads_passes=0), name="medusa2", say=said.append)
    recipe.run(job)
    trained = checkpoints.load(job.out, WIDTH, VOCAB).config.trained
    assert trained["passes_done"] == kept and trained["perplexity"]["after"] == 2 * passes[kept - 1][0]
    words = [line for line in said if "perplexity" in line]
    assert ["rose by more than 3%" in line for line in words] == [rise > 1.03 for rise, _ in passes]


def test_the_sine_schedule_raises_lambda_from_nothing(tmp_path):
    task = joint_task(tmp_path, replace(JOINT, lambda0_schedule="sine"))
    assert task.lambda0(0) == 0 and task.lambda0(1) == pytest.approx(0.2)
    assert task.lambda0(1 / 3) == pytest.approx(0.1)


def test_direct_is_joint_from_the_start_at_one_rate():
    direct = settings_for("direct", {})
    assert (direct.heads_passes, direct.heads_rate, direct.lambda0, direct.warmup) == (0, 1.0, 1.0, 0)
    with pytest.raises(SettingsError, match="rank belongs to the recipes that train the backbone"):
        settings_for("medusa1", {"rank": 4})


def test_a_model_that_caps_its_logits_is_refused(tmp_path):
    capped = backbone.Backbone(tiny.model("gemma2", attention="eager"), device.choose("cpu", "fp32"), "capped")
    job = job_in(tmp_path, random_replies(), settings=replace(JOINT, heads_passes=0), backbone=capped, name="medusa2")
    with pytest.raises(TrainingError, match="capped scales or caps its logits, which joint training cannot follow"):
        recipe.run(job)


def test_soft_targets_of_a_model_that_caps_its_logits_are_refused(tmp_path):
    capped = backbone.Backbone(tiny.model("gemma2", attention="eager"), device.choose("cpu", "fp32"), "capped")
    with pytest.raises(TrainingError, match=r"capped scales or caps its logits.* pass --distill 0\."):
        recipe.run(job_in(tmp_path, settings=replace(SETTINGS, distill=0.5), backbone=capped))
    recipe.run(job_in(tmp_path, settings=replace(SETTINGS, distill=0.0, passes=1), backbone=capped))


WORKER = """
import os, sys
from pathlib import Path
from dataclasses import replace
import torch
from tests.test_joint import JOINT
from tests.tiny_training import job_in
from medusa_viz.training import recipe
rank, decide = os.environ["RANK"], recipe._precision
recipe.fast_dtype = lambda device: (torch.float32 if rank == "0" else torch.bfloat16, "it was made up")
def decided(job, resume):
    dtype = decide(job, resume)
    Path(sys.argv[1] + rank).write_text(str(dtype))
    return dtype
recipe._precision = decided
recipe.run(job_in(Path(sys.argv[1]), settings=replace(JOINT, passes=1, heads_passes=1), name="medusa2"))
"""


def test_two_processes_train_what_one_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "fast_dtype", lambda device: (torch.float32, "it was made up"))
    (tmp_path / "worker.py").write_text(WORKER)
    alone = job_in(tmp_path / "alone", settings=replace(JOINT, passes=1, heads_passes=1), name="medusa2")
    recipe.run(alone)
    launched = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
         "1", "--main_process_port", "0",  # any that is free
         "--mixed_precision", "no", "--dynamo_backend", "no",  # --cpu would start one process only
         str(tmp_path / "worker.py"), str(tmp_path / "two")],
        cwd=Path(__file__).parents[1], env=_environment(), capture_output=True, text=True, timeout=600)
    assert launched.returncode == 0, launched.stderr[-2000:]
    assert {(tmp_path / f"two{rank}").read_text() for rank in (0, 1)} == {"torch.float32"}, "the first one's choice"
    logs = [[json.loads(line) for line in (folder / "out" / LOG_NAME).read_text().splitlines()]
            for folder in (tmp_path / "alone", tmp_path / "two")]
    assert len(logs[0]) == len(logs[1])
    for one, other in zip(*logs):
        if "total" in one:
            assert other["total"] == pytest.approx(one["total"], rel=1e-3)
            assert other["labelled"] == one["labelled"]
    heads = [checkpoints.load(tmp_path / name / "out", WIDTH, VOCAB).module.weight for name in ("alone", "two")]
    assert torch.allclose(*heads, atol=2e-3)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
