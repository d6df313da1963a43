"""Training: labels, objective, trainer, hidden states, replay. Tiny random models; nothing is fetched."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_viz.decoding.settings import SettingsError
from medusa_viz.decoding.tree import from_paths
from medusa_viz.models import checkpoints, device
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.heads import Drafter, MedusaHeads
from medusa_viz.training import commands, data, evaluate, hidden, objectives, recipe, teacher, trainer
from medusa_viz.training.trainer import Material, Trainer, TrainingError, TrainSettings
from medusa_viz.tuning import builders
from medusa_viz.tuning.replay import NOT_RANKED, RankTable, replay

VOCAB, WIDTH, HEADS = 48, 16, 4
CPU = torch.device("cpu")


def replies_of(sequences, reply_start=2, split=None, temperature=None, kind=None) -> data.Replies:
    n = len(sequences)
    lengths = [len(ids) for ids in sequences]
    return data.Replies("made up", np.concatenate([np.asarray(ids, np.int32) for ids in sequences]),
                        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                        np.full(n, reply_start, np.int32),
                        np.zeros(n, np.float32) if temperature is None else np.asarray(temperature, np.float32),
                        np.zeros(n, np.uint8) if kind is None else np.asarray(kind, np.uint8),
                        (data.SELF_SYNTHESISED, "writing"),
                        np.zeros(n, np.uint8) if split is None else np.asarray(split, np.uint8))


def random_replies(n=12, length=30, seed=0) -> data.Replies:
    rng = np.random.default_rng(seed)
    return replies_of(rng.integers(0, VOCAB, (n, length)), 6, split=np.arange(n) % 4 == 0, kind=np.arange(n) % 2,
                      temperature=0.7 * (np.arange(n) % 3 == 1))


def tiny_backbone(seed=0) -> Backbone:
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
    return Backbone(LlamaForCausalLM(config), device.choose("cpu", "fp32"), "tiny")


def stub_material(sequence, draft_ids=None, heads=HEADS) -> tuple[Material, torch.nn.Linear]:
    """Hidden states that name the last token (one row of an orthogonal basis each), and an LM head that reads them."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(VOCAB, VOCAB))[0]
    lm_head = torch.nn.Linear(VOCAB, VOCAB, bias=False)
    lm_head.weight.data = basis.clone()
    replies = replies_of([sequence])
    labels = data.make_labels(replies, heads, draft_ids, VOCAB)
    states = (4 * basis)[torch.from_numpy(replies.ids).long()].half().numpy()
    rows = objectives.output_rows(lm_head, draft_ids, torch.float32)
    return Material(states, labels, rows, draft_ids, None, "stub"), lm_head


SETTINGS = TrainSettings(layers=1, distill=0.0, batch=64, passes=3, warmup=2, lr=3e-3, log_every=1, checkpoint_every=2)


def job_in(folder: Path, replies=None, settings=SETTINGS, backbone=None) -> recipe.Job:
    return recipe.Job(backbone or tiny_backbone(), "tiny", replies or random_replies(), [0, 1],
                      replace(settings, draft_vocabulary=40), folder / "out", folder / "cache")


# ------------------------------------------------------------------------------------------------- labels and data


def test_head_k_at_position_t_is_labelled_with_the_token_at_t_plus_k_plus_1():
    sequence = np.tile(np.arange(10, 15), 40)
    labels = data.make_labels(replies_of([sequence]), HEADS, None, VOCAB)
    for row, tokens in zip(labels.rows, labels.token):
        for k, token in enumerate(tokens, start=1):
            assert token == (sequence[row + k + 1] if row + k + 1 < len(sequence) else -1)
    after_ten = labels.token[sequence[labels.rows] == 10][0]
    assert after_ten.tolist() == [12, 13, 14, 10]


def test_labels_are_reply_tokens_of_the_same_sequence_only():
    replies = replies_of([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]], reply_start=3)
    labels = data.make_labels(replies, 3, None, VOCAB)
    assert labels.rows.tolist() == [2, 3, 8]  # from the last prompt token on, as long as head 1 has a target
    assert labels.token.tolist() == [[5, 6, -1], [6, -1, -1], [11, -1, -1]]
    assert labels.scorable.tolist() == [3, 1, 0]
    everywhere = data.make_labels(replies, 3, None, VOCAB, whole_text=True)
    assert everywhere.rows.tolist() == [0, 1, 2, 3, 6, 7, 8]


def test_targets_outside_the_draft_vocabulary_have_no_label_but_stay_scorable():
    draft_ids = torch.tensor([3, 5])
    labels = data.make_labels(replies_of([[1, 2, 3, 4, 5, 6, 3]]), 1, draft_ids, VOCAB)
    assert labels.token[:, 0].tolist() == [4 - 1, 4, 5, 6, 3][1:]
    assert labels.draft[:, 0].tolist() == [-1, 1, -1, 0]
    assert labels.scorable[0] == 4 and labels.labelled[0] == 2 and labels.coverage() == 0.5


def test_a_genuine_end_of_text_is_a_label_even_where_padding_uses_the_same_id():
    end = 0  # pad_sequence pads with 0, and a tokenizer may pad with its end of text
    labels = data.make_labels(replies_of([[5, 6, 7, 8, end], [5, 6, 7, 8, 9, 10, end]]), 1, None, VOCAB)
    assert (labels.token == end).sum() == 2


def test_the_draft_vocabulary_holds_frequent_reply_tokens_of_the_training_split_and_all_bytes():
    replies = replies_of([[9, 9, 20, 20, 21], [9, 9, 20, 22, 22]])
    ids = data.draft_vocabulary(replies, [1, 3, 20], 2, VOCAB)
    assert ids.tolist() == [1, 3, 20, 22]  # 9 stands in prompts alone; sorted, without duplicates


def test_byte_tokens_are_found_in_byte_level_and_byte_fallback_vocabularies():
    class Tokenizer:
        def __init__(self, vocabulary):
            self.get_vocab = lambda: vocabulary

    assert data.byte_token_ids(Tokenizer({"Ġ": 5, "a": 3, "the": 9})) == [3, 5]
    assert data.byte_token_ids(Tokenizer({"<0x0A>": 7, "the": 9})) == [7]


def test_token_files_are_joined_and_kinds_merged_by_name(tmp_path):
    for name, kinds in (("a", ["x", "y"]), ("b", ["y"])):
        np.savez(tmp_path / f"{name}.npz", ids=np.arange(6, dtype=np.uint16), offsets=[0, 2, 6], reply_start=[1, 1],
                 temperature=[0, 0.7], kind=[len(kinds) - 1] * 2, kinds=kinds, split=[0, 1])
    both = data.load([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert both.offsets.tolist() == [0, 2, 6, 8, 12] and [both.kinds[k] for k in both.kind] == ["y"] * 4
    assert both.sequence(3).tolist() == [2, 3, 4, 5]
    assert both.select(both.split == 1).ids.tolist() == [2, 3, 4, 5] * 2


@pytest.mark.parametrize("content", [b"", b"no zip"])
def test_a_file_that_is_no_token_file_is_refused_in_one_sentence(tmp_path, content):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(data.DataError, match="is no token file"):
        data.load([path])


# -------------------------------------------------------------------------------------------------------- objective


def test_the_total_equals_its_parts_and_weights_count_from_one():
    material, _ = stub_material(np.tile(np.arange(10, 15), 8))
    module = MedusaHeads(HEADS, VOCAB)
    states, targets = material.batch(np.arange(len(material.labels)), HEADS, CPU)
    terms = objectives.medusa1(module, material.rows, states, targets, 0.0)
    assert terms.weights == pytest.approx([0.8, 0.64, 0.512, 0.4096])
    parts = sum(weight * loss.item() for weight, loss in zip(terms.weights, terms.losses))
    assert terms.total.item() == pytest.approx(parts, abs=1e-5)
    logits = Drafter(MedusaHeads(HEADS, VOCAB), _linear(material.rows.weight)).logits(states)
    for k in range(HEADS):
        there = targets.labels[:, k] >= 0
        plain = torch.nn.functional.cross_entropy(logits[k][there], targets.labels[there, k])
        assert terms.losses[k].item() == pytest.approx(plain.item(), abs=1e-5)


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    return linear


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_chunked_cross_entropy_has_the_gradient_of_the_plain_one(monkeypatch, with_bias):
    monkeypatch.setattr(objectives, "CHUNK", 3)
    torch.manual_seed(0)
    features = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    rows = objectives.OutputRows(torch.randn(7, 5, dtype=torch.float64),
                                 torch.randn(7, dtype=torch.float64) if with_bias else None)
    ids, share = torch.randint(7, (8, 3)), torch.rand(8, 3, dtype=torch.float64).softmax(-1)
    losses, hits = objectives.FrozenCrossEntropy.apply(features, rows, ids, share)
    logits = torch.nn.functional.linear(features, rows.weight, rows.bias)
    plain = -(share * logits.log_softmax(-1).gather(1, ids)).sum(-1)
    assert torch.allclose(losses, plain) and (hits == (logits.argmax(-1) == ids[:, 0])).all()
    pull = torch.randn(8, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(loss, features, pull, retain_graph=True)[0] for loss in (losses, plain))
    assert torch.allclose(ours, theirs)


def test_soft_targets_of_head_k_are_the_backbone_s_distribution_k_places_on():
    torch.manual_seed(0)
    states = torch.randn(10, WIDTH).half().numpy()
    rows = objectives.OutputRows(torch.randn(VOCAB, WIDTH))
    taught = teacher.teach(states, rows, VOCAB)
    ids, p = taught.targets(np.array([2, 9]), 3)
    expected = (torch.from_numpy(states).float() @ rows.weight.t()).softmax(-1)
    for k in range(1, 4):
        found = torch.zeros(VOCAB).scatter(0, ids[0, k - 1], p[0, k - 1].float())
        assert torch.allclose(found, expected[2 + k], atol=1e-3)
    assert ids.shape == (2, 3, VOCAB)  # past the end a row stands in


# ---------------------------------------------------------------------------------------------------------- trainer


def test_heads_learn_a_period_of_five_and_each_gets_a_gradient_on_step_one(tmp_path):
    material, lm_head = stub_material(np.tile(np.arange(10, 15), 40))
    run = Trainer(material, replace(SETTINGS, passes=60, lr=2e-2), tmp_path, CPU)
    _, norm = run._one_step()
    assert norm > 0
    for k in range(HEADS):
        assert run.module.weight.grad[:, k].abs().sum() > 0 and run.module.bias.grad[:, k].abs().sum() > 0
    module = Trainer(material, replace(SETTINGS, passes=60, lr=2e-2), tmp_path, CPU).run()
    labels = material.labels
    logits = Drafter(module, lm_head).logits(torch.from_numpy(material.hidden[labels.rows]).float())
    for k in range(HEADS):
        there = labels.token[:, k] >= 0
        assert (logits[k].argmax(-1).numpy()[there] == labels.token[there, k]).all()


def test_a_resumed_run_ends_exactly_where_an_uninterrupted_one_does(tmp_path):
    material, _ = stub_material(np.random.default_rng(1).integers(0, VOCAB, 300))
    whole = Trainer(material, SETTINGS, tmp_path / "whole", CPU).run()

    class Stop(Exception):
        pass

    def stop_at_seven(step, total, line):
        if step == 7:  # the checkpoint is of step 6: one step is lost and must be repeated alike
            raise Stop

    first = Trainer(material, SETTINGS, tmp_path / "parts", CPU)
    with pytest.raises(Stop):
        first.run(progress=stop_at_seven)
    second = Trainer(material, SETTINGS, tmp_path / "parts", CPU)
    assert second.resume() and second.step == 6
    resumed = second.run()
    for one, other in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(one, other)
    logs = [[{key: value for key, value in line.items() if key != "seconds"} for line in run.log_lines()]
            for run in (Trainer(material, SETTINGS, tmp_path / name, CPU) for name in ("whole", "parts"))]
    assert logs[0] == logs[1] and [line["step"] for line in logs[0]] == list(range(1, len(logs[0]) + 1))


def test_a_checkpoint_of_other_settings_or_data_is_refused(tmp_path):
    material, _ = stub_material(np.tile(np.arange(10, 15), 8))
    Trainer(material, SETTINGS, tmp_path, CPU).run()
    with pytest.raises(TrainingError, match="lr"):
        Trainer(material, replace(SETTINGS, lr=1e-2), tmp_path, CPU).resume()
    with pytest.raises(TrainingError, match="data"):
        Trainer(replace(material, fingerprint="other"), SETTINGS, tmp_path, CPU).resume()


def test_every_logged_total_equals_its_parts(tmp_path):
    material, _ = stub_material(np.random.default_rng(1).integers(0, VOCAB, 200))
    run = Trainer(material, SETTINGS, tmp_path, CPU)
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


def test_heads_without_labels_add_nothing_and_the_others_train(tmp_path):
    material, _ = stub_material([1, 2, 3, 4, 5])  # positions 1 and 2: heads 3 and 4 have no target
    assert material.labels.labelled.tolist() == [2, 1, 0, 0]
    run = Trainer(material, SETTINGS, tmp_path, CPU)
    module = run.run()
    line = run.log_lines()[0]
    assert line["loss"][2:] == [None, None] and line["labelled"] == [2, 1, 0, 0]
    assert module.weight[0, :2].abs().sum() > 0 and module.weight[0, 2:].abs().sum() == 0


def test_a_batch_without_labels_is_passed_over(tmp_path):
    material, _ = stub_material(np.r_[np.full(40, 1), np.full(40, 2)], draft_ids=torch.tensor([2]))
    module = Trainer(material, replace(SETTINGS, batch=4), tmp_path, CPU).run()
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_a_loss_that_is_no_number_stops_with_the_step_and_keeps_the_last_good_heads(tmp_path, monkeypatch):
    job = job_in(tmp_path)
    plain, calls = objectives.medusa1, []

    def broken(*arguments):
        terms = plain(*arguments)
        calls.append(1)
        return replace(terms, total=terms.total * float("nan")) if len(calls) == 3 else terms

    monkeypatch.setattr(trainer, "medusa1", broken)
    with pytest.raises(TrainingError, match=r"stopped at step 3.*as of step 2"):
        recipe.run(job)
    kept = checkpoints.load(job.out, WIDTH, VOCAB)
    assert kept.config.trained["stopped_at_step"] == 2
    assert kept.module.weight.isfinite().all() and kept.module.weight.abs().sum() > 0


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
    card = (job.out / "README.md").read_text()
    assert "## Held-out scores" in card and "nan" not in card and "## Learning curve" in card
    json.loads((job.out / checkpoints.CONFIG_NAME).read_text())
    with pytest.raises(TrainingError, match="--resume"):
        recipe.run(job)
    recipe.run(job, resume=True)  # nothing left to do, nothing broken


def test_saved_heads_draft_what_trained_heads_drafted(tmp_path):
    material, lm_head = stub_material(np.tile(np.arange(10, 15), 8), torch.arange(0, VOCAB, 2))
    module = Trainer(material, SETTINGS, tmp_path, CPU).run()
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


# ------------------------------------------------------------------------------------------- evaluation and replay


def test_ranks_and_accuracy_equal_a_plain_count(tmp_path):
    torch.manual_seed(0)
    backbone, replies = tiny_backbone(), random_replies()
    draft_ids = torch.arange(0, VOCAB, 2)
    module = MedusaHeads(3, WIDTH, draft_ids=draft_ids)
    torch.nn.init.normal_(module.weight)
    states = hidden.hidden_states(backbone, replies, tmp_path, torch.float32)
    rows = objectives.output_rows(backbone.lm_head, draft_ids, torch.float32)
    table = evaluate.rank_table(module, rows, states, replies)
    drafter, row, counts = Drafter(module, backbone.lm_head), 0, np.zeros((3, 10))
    for i in range(len(replies)):
        ids = replies.sequence(i)
        for t in range(replies.reply_start[i] - 1, len(ids) - 1):
            best = drafter.top(torch.tensor(states[replies.offsets[i] + t][None]).float(), 10).ids
            for k in range(1, 4):
                target = ids[t + k + 1] if t + k + 1 < len(ids) else -1
                rank = best[k - 1].tolist().index(target) if target in best[k - 1] else NOT_RANKED
                assert table.ranks[row, k - 1] == rank
                if rank < 10:
                    counts[k - 1, rank] += 1
            row += 1
    assert row == len(table.ranks)
    measured = evaluate.accuracy(table)
    reply_tokens = (np.diff(replies.offsets) - replies.reply_start).sum()
    assert measured.positions == tuple(reply_tokens - k * len(replies) for k in (1, 2, 3))
    assert np.allclose(measured.share * np.array(measured.positions)[:, None], counts)


def brute_force_steps(paths: set, ranks: np.ndarray, length: int) -> tuple[int, list[int]]:
    """Steps of one reply, decoded one by one: the longest path of the tree that equals the true ranks."""
    at, accepted = 0, []
    while at < length:
        best = max([0] + [len(p) for p in paths if len(p) < length - at and tuple(ranks[at, : len(p)]) == p])
        accepted.append(best)
        at += best + 1
    return len(accepted), accepted


@pytest.mark.parametrize("seed", range(20))
def test_replay_equals_a_brute_force_simulation(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 25, 8)
    ranks = rng.choice([0, 0, 0, 1, 2, 3, NOT_RANKED], (lengths.sum(), 4)).astype(np.uint8)
    shape = from_paths([tuple(rng.integers(0, 4, rng.integers(1, 5)).tolist()) for _ in range(12)])
    found = replay(shape, RankTable(ranks, lengths))
    steps, accepted, first = 0, [], 0
    for n in lengths:
        more, taken = brute_force_steps(set(shape.paths[1:]), ranks[first : first + n], n)
        steps, accepted, first = steps + more, accepted + taken, first + n
    assert (found.steps, found.tokens) == (steps, lengths.sum())
    assert found.accepted == tuple(np.bincount(accepted, minlength=shape.height + 1))
    assert found.tokens_per_step == lengths.sum() / steps


def test_replay_of_the_bare_root_takes_a_step_per_token_and_of_nothing_none():
    table = RankTable(np.zeros((7, 2), np.uint8), np.array([7]))
    assert replay(from_paths([]), table).tokens_per_step == 1
    assert replay(from_paths([(0, 0)]), table).accepted == (1, 0, 2)
    assert replay(from_paths([(0,)]), RankTable(np.zeros((0, 2), np.uint8), np.array([], int))).tokens_per_step == 0


def test_scores_are_given_per_source_and_for_greedy_replies_alone(tmp_path):
    backbone, replies = tiny_backbone(), random_replies()
    states = hidden.hidden_states(backbone, replies, tmp_path, torch.float32)
    rows = objectives.output_rows(backbone.lm_head, None, torch.float32)
    scores = evaluate.evaluate(MedusaHeads(2, WIDTH), rows, states, replies)
    assert set(scores) == {"all", "self-synthesised", "written prompts", "all, greedy", "self-synthesised, greedy",
                           "written prompts, greedy"}
    assert scores["all"].tokens_per_step == {} and scores["all, greedy"].tokens_per_step["63"] >= 1
    assert scores["all"].replies == 12 and scores["all, greedy"].replies == 8
    shipped = evaluate.table_to_ship({name: score.accuracy for name, score in scores.items()})
    mean = np.mean([scores["self-synthesised, greedy"].accuracy, scores["written prompts, greedy"].accuracy], axis=0)
    assert np.allclose(shipped, mean) and builders.sparse(shipped, 7).nodes == 7
