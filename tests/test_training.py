"""What training learns from: labels, data, and the objective. Nothing is fetched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medusa_viz.models.heads import Drafter, MedusaHeads
from medusa_viz.training import data, objectives, teacher
from medusa_viz.training.heads_task import HeadsTask
from tests.tiny_training import CPU, HEADS, SETTINGS, VOCAB, WIDTH, replies_of, stub_material

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


@pytest.mark.parametrize(("changed", "said"), [
    ({"ids": [0, 1, -1, 3, 4, 5]}, "ids that are no token ids"), ({"ids": [0, 1, 2**32, 3, 4, 5]}, "no token ids"),
    ({"ids": [0, 1, 0.5, 3, 4, 5]}, "no token ids"), ({"kind": [0, 2]}, "names 2 kinds .* other numbers than 0 to 1"),
    ({"kind": [-1, 0]}, "other numbers than 0 to 1"), ({"kinds": ["x"]}, "other numbers than 0 to 0"),
    ({"reply_start": [1, 5]}, "reply of sequence 1 starts at its token 5, but it has 4"),
    ({"reply_start": [-1, 1]}, "reply of sequence 0 starts at its token -1")])
def test_numbers_that_point_nowhere_are_refused_in_one_sentence(tmp_path, changed, said):
    arrays = {"ids": np.arange(6, dtype=np.uint16), "offsets": [0, 2, 6], "reply_start": [1, 1], "kind": [0, 1],
              "kinds": ["x", "y"]}
    np.savez(tmp_path / "file.npz", **arrays)
    data.load([tmp_path / "file.npz"])
    np.savez(tmp_path / "file.npz", **arrays | changed)
    with pytest.raises(data.DataError, match=said):
        data.load([tmp_path / "file.npz"])


def test_ids_of_a_large_vocabulary_are_read(tmp_path):
    np.savez(tmp_path / "file.npz", ids=np.array([1, 128_000], np.uint32), offsets=[0, 2])
    assert data.load([tmp_path / "file.npz"]).ids.tolist() == [1, 128_000]


# -------------------------------------------------------------------------------------------------------- objective


def test_the_total_equals_its_parts_and_weights_count_from_one():
    material, _ = stub_material(np.tile(np.arange(10, 15), 8))
    module = MedusaHeads(HEADS, VOCAB)
    task = HeadsTask(material, SETTINGS, module)
    everything = np.arange(len(material.labels))
    terms = task.terms(everything, task.counts(everything))
    assert objectives.head_weights(HEADS) == pytest.approx([0.8, 0.64, 0.512, 0.4096])
    parts = sum(weight * loss.item() for weight, loss in zip(objectives.head_weights(HEADS), terms.heads))
    assert terms.total(1.0).item() == pytest.approx(parts, abs=1e-5)
    states, targets = material.states(material.labels.rows, CPU), material.targets(everything, HEADS, CPU)
    logits = Drafter(MedusaHeads(HEADS, VOCAB), _linear(material.rows.weight)).logits(states)
    for k in range(HEADS):
        there = targets.labels[:, k] >= 0
        plain = torch.nn.functional.cross_entropy(logits[k][there], targets.labels[there, k])
        assert terms.heads[k].item() == pytest.approx(plain.item(), abs=1e-5)


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
