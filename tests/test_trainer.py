"""The training loop and whole runs of it, on tiny models."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from medusa_viz.decoding.settings import SettingsError
from medusa_viz.models import backbone, checkpoints
from medusa_viz.models.beside import RANKS_NAME
from medusa_viz.models.device import Placement
from medusa_viz.models.heads import Drafter
from medusa_viz.training import commands, data, evaluate, heads_task, hidden, objectives, recipe
from medusa_viz.training.run_folder import LOG_NAME, TrainingError
from medusa_viz.training.trainer import Stopped
from medusa_viz.tuning import accuracy, calibration
from tests import tiny
from tests.tiny_training import (
    CPU,
    HEADS,
    SETTINGS,
    VOCAB,
    WIDTH,
    heads_trainer,
    job_in,
    replies_of,
    stub_material,
    tiny_backbone,
    trained,
)

pytestmark = pytest.mark.usefixtures("one_precision")


def test_heads_learn_a_period_of_five_and_each_gets_a_gradient_on_step_one(tmp_path):
    material, lm_head = stub_material(np.tile(np.arange(10, 15), 40))
    run = heads_trainer(material, replace(SETTINGS, passes=60, lr=2e-2), tmp_path)
    assert run._one_step()["gradient_norm"] > 0
    for k in range(HEADS):
        assert run.task.module.weight.grad[:, k].abs().sum() > 0 and run.task.module.bias.grad[:, k].abs().sum() > 0
    module = trained(material, replace(SETTINGS, passes=60, lr=2e-2), tmp_path)
    labels = material.labels
    logits = Drafter(module, lm_head).logits(torch.from_numpy(material.hidden[labels.rows]).float())
    for k in range(HEADS):
        there = labels.token[:, k] >= 0
        assert (logits[k].argmax(-1).numpy()[there] == labels.token[there, k]).all()


def test_a_resumed_run_ends_exactly_where_an_uninterrupted_one_does(tmp_path):
    material, _ = stub_material(np.random.default_rng(1).integers(0, VOCAB, 300))
    whole = trained(material, SETTINGS, tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop_at_seven(step, total, line):
        if step == 7:  # the checkpoint is of step 6: one step is lost and must be repeated alike
            raise Stop

    first = heads_trainer(material, SETTINGS, tmp_path / "parts")
    with pytest.raises(Stop):
        first.run(progress=stop_at_seven)
    second = heads_trainer(material, SETTINGS, tmp_path / "parts")
    assert second.resume() and second.step == 6
    second.run()
    resumed = second.task.module
    for one, other in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(one, other)
    logs = [[{key: value for key, value in line.items() if key != "seconds"} for line in run.log_lines()]
            for run in (heads_trainer(material, SETTINGS, tmp_path / name) for name in ("whole", "parts"))]
    assert logs[0] == logs[1] and [line["step"] for line in logs[0]] == list(range(1, len(logs[0]) + 1))


def test_a_checkpoint_of_other_settings_or_data_is_refused(tmp_path):
    material, _ = stub_material(np.tile(np.arange(10, 15), 8))
    trained(material, SETTINGS, tmp_path)
    with pytest.raises(TrainingError, match="lr"):
        heads_trainer(material, replace(SETTINGS, lr=1e-2), tmp_path).resume()
    with pytest.raises(TrainingError, match="data"):
        heads_trainer(replace(material, fingerprint="other"), SETTINGS, tmp_path).resume()


def test_every_logged_total_equals_its_parts(tmp_path):
    material, _ = stub_material(np.random.default_rng(1).integers(0, VOCAB, 200))
    run = heads_trainer(material, SETTINGS, tmp_path)
    run.run()
    for line in run.log_lines():
        assert line["total"] == pytest.approx(sum(w * x for w, x in zip(line["weights"], line["loss"])), abs=1e-5)


@pytest.mark.parametrize("sequences", [[[1, 2, 3]], [[1, 2, 3], [4, 5, 6]]])
def test_no_usable_label_is_refused_before_training(tmp_path, sequences):
    with pytest.raises(data.DataError, match="no label to learn from"):
        recipe.run(job_in(tmp_path, replies_of(sequences)))
    assert not (tmp_path / "out" / checkpoints.WEIGHTS_NAME).exists()


def test_an_empty_training_split_is_refused(tmp_path):
    with pytest.raises(data.DataError, match="no sequence of the training split"):
        recipe.run(job_in(tmp_path, replies_of([[1, 2, 3, 4, 5]], split=[1])))


def test_ids_of_another_model_are_refused_where_only_held_out_replies_have_them(tmp_path):
    with pytest.raises(data.DataError, match="holds id 48, but tiny has 48 tokens"):
        recipe.run(job_in(tmp_path, replies_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, VOCAB]], split=[0, 1])))


def test_heads_without_labels_add_nothing_and_the_others_train(tmp_path):
    material, _ = stub_material([1, 2, 3, 4, 5])  # positions 1 and 2: heads 3 and 4 have no target
    assert material.labels.labelled.tolist() == [2, 1, 0, 0]
    run = heads_trainer(material, SETTINGS, tmp_path)
    run.run()
    module = run.task.module
    line = run.log_lines()[0]
    assert line["loss"][2:] == [None, None] and line["labelled"] == [2, 1, 0, 0]
    assert module.weight[0, :2].abs().sum() > 0 and module.weight[0, 2:].abs().sum() == 0


def test_a_batch_without_labels_is_passed_over(tmp_path):
    material, _ = stub_material(np.r_[np.full(40, 1), np.full(40, 2)], draft_ids=torch.tensor([2]))
    module = trained(material, replace(SETTINGS, batch=4), tmp_path)
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_a_loss_that_is_no_number_stops_with_the_step_and_keeps_the_last_good_heads(tmp_path, monkeypatch):
    job = job_in(tmp_path)
    monkeypatch.setattr(heads_task, "head_losses", no_number_at(3))
    with pytest.raises(TrainingError, match=r"stopped at step 3.*; the heads as of step 2 are kept\.$"):
        recipe.run(job)
    kept = checkpoints.load(job.out, WIDTH, VOCAB)
    assert kept.config.trained["stopped_at_step"] == 2
    assert kept.module.weight.isfinite().all() and kept.module.weight.abs().sum() > 0


def test_after_a_pass_the_heads_of_the_best_one_are_what_a_loss_that_is_no_number_leaves(tmp_path, monkeypatch):
    job = job_in(tmp_path)
    monkeypatch.setattr(heads_task, "head_losses", no_number_at(6))
    with pytest.raises(TrainingError, match=r"stopped at step 6.*; the heads of stage 1, pass 1 are kept\.$"):
        recipe.run(job)
    kept = checkpoints.load(job.out, WIDTH, VOCAB).config
    assert kept.trained["passes_done"] == 1 and kept.accuracy and "stopped_at_step" not in kept.trained


def test_heads_that_are_no_numbers_are_not_saved_and_the_message_says_so(tmp_path, monkeypatch):
    job = job_in(tmp_path, settings=replace(SETTINGS, lr=1.0))
    plain = torch.optim.AdamW.step

    def overflow(self, *arguments):
        plain(self, *arguments)
        self.param_groups[0]["params"][0].data.fill_(float("inf"))

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    with pytest.raises(TrainingError, match=r"stopped at step 2.*; the heads hold numbers that are not finite"):
        recipe.run(job)
    assert not (job.out / checkpoints.WEIGHTS_NAME).exists()


def no_number_at(step):
    """A loss that is none at this step; every step is one part."""
    plain, calls = objectives.head_losses, []

    def broken(*arguments):
        losses, hits = plain(*arguments)
        calls.append(1)
        return (losses * float("nan") if len(calls) == step else losses), hits

    return broken


# ----------------------------------------------------------------------------------------------- the whole of a run


def test_a_run_leaves_heads_that_load_and_a_backbone_that_is_bit_identical(tmp_path):
    backbone = tiny_backbone()
    before = hidden.model_fingerprint(backbone.model)
    job = job_in(tmp_path, settings=replace(SETTINGS, distill=0.5), backbone=backbone)
    recipe.run(job)
    assert hidden.model_fingerprint(backbone.model) == before
    loaded = checkpoints.load(job.out, WIDTH, VOCAB)
    assert loaded.report.notices == [] and loaded.report.unused == []
    assert len(loaded.config.accuracy) == HEADS and all(len(row) == 10 for row in loaded.config.accuracy)
    assert loaded.config.trained["passes_done"] == 3 and {0, 1} <= set(loaded.module.draft_ids.tolist())
    known = accuracy.load(job.out / RANKS_NAME)  # of the greedy held-out replies, and of these heads
    greedy = (job.replies.split == 1) & (job.replies.temperature == 0)
    assert known.table.lengths.sum() == job.replies.select(greedy).is_reply.sum()
    assert calibration.known_of(str(job.out), loaded.module) is not None
    assert known.about.get("own_text", True), "the backbone that wrote the text is the one that decodes"
    card = (job.out / "README.md").read_text()
    assert "## Held-out scores" in card and "nan" not in card and "## Learning curve" in card
    rate = loaded.config.trained["tokens_per_step"]["15"]
    known_rate, = accuracy.cross_replay(known.table, known.fold, [15])
    assert rate == pytest.approx(known_rate.tokens_per_step, abs=1e-4) and f"| {rate:.3f} |" in card
    top1 = accuracy.accuracy(known.table).top(1)  # of the same replies
    assert loaded.config.trained["held_out_top1"] == pytest.approx(top1.tolist(), abs=1e-4) and top1.any()
    assert "built from the replies to one half of the prompts and replayed on those to the other" in card
    json.loads((job.out / checkpoints.CONFIG_NAME).read_text())
    recipe.run(job, resume=True)  # nothing left to do, nothing broken


def test_saved_heads_draft_what_trained_heads_drafted(tmp_path):
    material, lm_head = stub_material(np.tile(np.arange(10, 15), 8), torch.arange(0, VOCAB, 2))
    module = trained(material, SETTINGS, tmp_path)
    checkpoints.save(tmp_path / "heads", module, checkpoints.HeadsConfig(), torch.float32)
    loaded = checkpoints.load(tmp_path / "heads", VOCAB, VOCAB).module
    states = torch.from_numpy(material.hidden[:7]).float()
    assert torch.equal(Drafter(loaded, lm_head).logits(states), Drafter(module, lm_head).logits(states))


def test_hidden_states_equal_a_plain_forward_and_an_interrupted_pass_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden, "BATCH_TOKENS", 64)
    backbone = tiny_backbone()
    rng = np.random.default_rng(0)
    replies = replies_of([rng.integers(0, VOCAB, n) for n in (9, 30, 14, 22, 5, 30)])
    whole = hidden.hidden_states(backbone, replies, tmp_path / "whole", torch.float32)
    for i in range(len(replies)):
        ids = torch.from_numpy(replies.sequence(i)).long()[None]
        plain = backbone.model.model(ids).last_hidden_state[0]
        assert np.allclose(whole[replies.offsets[i] : replies.offsets[i + 1]], plain, atol=5e-3)

    class Stop(Exception):
        pass

    def stop(done, total):
        raise Stop

    with pytest.raises(Stop):
        hidden.hidden_states(backbone, replies, tmp_path / "parts", torch.float32, stop)
    seen = []
    parts = hidden.hidden_states(backbone, replies, tmp_path / "parts", torch.float32,
                                 lambda done, total: seen.append(done))
    assert np.array_equal(parts, whole) and seen[0] > 60 and seen[-1] == len(replies.ids)
    assert hidden.hidden_states(backbone, replies, tmp_path / "parts", torch.float32, stop) is not None  # all done


def test_the_command_refuses_bad_settings_and_names_no_folder_of_this_machine(tmp_path):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    words = ["train", "--data", str(tmp_path / "replies.npz"), "--out", str(tmp_path / "heads")]
    args = parser.parse_args([*words, "--passes", "9"])
    assert commands.command_line(args).startswith(
        "python -m medusa_viz train --recipe medusa1 --model smollm2-135m --data replies.npz --out heads --heads 4")
    with pytest.raises(data.DataError, match="is no token file"):
        args.run(args)
    args = parser.parse_args([*words, "--passes", "0"])
    with pytest.raises(SettingsError, match="passes is 0"):
        args.run(args)


def test_help_says_which_recipe_a_default_is_of(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    listed = parser._subparsers._group_actions[0].choices["train"].format_help()
    for said in ("passes over the training text (default: 5; medusa2 and direct 1)",
                 "linear warm-up (default: 50; direct 0)", "largest gradient norm (default: 1.0)",
                 "over the backbone's (medusa2) (default: 4.0; direct 1.0)"):
        assert said in listed


def test_parts_of_a_step_add_up_to_the_whole_step(tmp_path):
    material, _ = stub_material(np.random.default_rng(2).integers(0, VOCAB, 200))
    whole = trained(material, SETTINGS, tmp_path / "whole")
    parts = trained(material, replace(SETTINGS, micro_batch=7), tmp_path / "parts")
    for one, other in zip(whole.parameters(), parts.parameters()):
        assert torch.allclose(one, other, atol=1e-5)
    logs = [heads_trainer(material, SETTINGS, tmp_path / name).log_lines() for name in ("whole", "parts")]
    for one, other in zip(*logs):
        assert one["total"] == pytest.approx(other["total"], abs=1e-5) and one["top1"] == pytest.approx(other["top1"])


def test_a_run_that_is_stopped_leaves_usable_heads_and_goes_on_exactly(tmp_path):
    whole = job_in(tmp_path / "whole")
    recipe.run(whole)
    asked = iter([False, False, True])
    stopped = job_in(tmp_path / "parts", stopped=lambda: next(asked))
    with pytest.raises(Stopped, match="Stopped after step 3 of"):
        recipe.run(stopped)
    left = checkpoints.load(stopped.out, WIDTH, VOCAB)
    assert left.config.trained["stopped_at_step"] == 3 and left.module.weight.abs().sum() > 0
    recipe.run(replace(stopped, stopped=lambda: False), resume=True)
    for name in ("weight", "bias"):
        assert torch.equal(getattr(checkpoints.load(stopped.out, WIDTH, VOCAB).module, name),
                           getattr(checkpoints.load(whole.out, WIDTH, VOCAB).module, name))


def test_the_best_pass_is_kept(tmp_path, monkeypatch):
    merits, plain = iter([1.5, 1.7, 1.6]), evaluate.evaluate

    def scored(*arguments):
        scores = plain(*arguments)
        scores["all, greedy"].tokens_per_step["15"] = next(merits)
        return scores

    monkeypatch.setattr(evaluate, "evaluate", scored)
    job = job_in(tmp_path)
    recipe.run(job)
    kept = checkpoints.load(job.out, WIDTH, VOCAB)
    assert kept.config.trained["passes_done"] == 2
    log = [json.loads(line) for line in (job.out / LOG_NAME).read_text().splitlines()]
    assert [line["kept"] for line in log if "pass" in line] == [True, True, False]


def test_a_share_of_the_tokens_takes_replies_to_written_prompts_first():
    replies = replies_of([[1, 2, 3, 4, 5, 6]] * 6, kind=[0, 1, 0, 1, 0, 1])
    assert data.some(replies, 8, 0).kind.tolist() == [1, 1]
    assert sorted(data.some(replies, 16, 0).kind.tolist()) == [0, 1, 1, 1]
    assert data.some(replies, 0, 0) is replies


def test_training_starts_from_given_heads_and_their_draft_vocabulary(tmp_path):
    first = job_in(tmp_path)
    recipe.run(first)
    given = checkpoints.load(first.out, WIDTH, VOCAB)
    second = job_in(tmp_path / "more", settings=replace(SETTINGS, lr=1e-7, passes=1), init=given)
    recipe.run(second)
    more = checkpoints.load(second.out, WIDTH, VOCAB)
    assert torch.allclose(more.module.weight, given.module.weight, atol=1e-3)
    assert more.module.draft_ids.tolist() == given.module.draft_ids.tolist()
    assert more.config.trained["init"] == "out"


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_a_quantised_backbone_is_the_same_after_training(tmp_path, bits):
    tiny.model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    quantised = backbone.load(tmp_path / "model", Placement(CPU, torch.bfloat16, "", bits), packed=False)
    packed = {name: tensor.clone() for name, tensor in quantised.model.named_parameters()}
    before = hidden.forward(quantised, [np.arange(20)], torch.float32)
    job = job_in(tmp_path, backbone=quantised)
    recipe.run(job)
    assert torch.equal(hidden.forward(quantised, [np.arange(20)], torch.float32), before)
    assert all(torch.equal(tensor, packed[name]) for name, tensor in quantised.model.named_parameters())
    left = checkpoints.load(job.out, quantised.hidden_size, quantised.vocab_size)
    assert left.module.weight.abs().sum() > 0 and left.config.trained["steps"] > 0


def test_a_joint_recipe_refuses_a_quantised_backbone(tmp_path):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers())
    args = parser.parse_args(["train", "--recipe", "medusa2", "--dtype", "4bit", "--data", "x.npz", "--out", "out"])
    with pytest.raises(ValueError, match="choose fp32 or bf16, or the recipe medusa1"):
        args.run(args)
