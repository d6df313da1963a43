"""Heads on disk: published layouts and prefixes, and every way a file can disagree with its config or the backbone."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny import VOCAB, backbone, difference, prompt, random_drafter

from medusa_viz.models import checkpoints
from medusa_viz.models.checkpoints import CONFIG_NAME, WEIGHTS_NAME, HeadsConfig
from medusa_viz.models.heads import Drafter, HeadsError, OtherModelError

HIDDEN = 8


def tensors(heads=range(3), layers=1, own=(), rows=VOCAB, hidden=HIDDEN, prefix="", seed=0):
    """Tensors in the published residual-block layout; heads in `own` have an output matrix."""
    torch.manual_seed(seed)
    made = {}
    for h in heads:
        for layer in range(layers):
            made[f"{prefix}{h}.{layer}.linear.weight"] = torch.randn(hidden, hidden)
            made[f"{prefix}{h}.{layer}.linear.bias"] = torch.randn(hidden)
        if h in own:
            made[f"{prefix}{h}.{layers}.weight"] = torch.randn(rows, hidden)
    return made


def written(folder, made, config=None):
    folder.mkdir(exist_ok=True)
    save_file(made, folder / WEIGHTS_NAME)
    if config is not None:
        (folder / CONFIG_NAME).write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def refusal(folder, hidden=HIDDEN, vocab=VOCAB):
    with pytest.raises(HeadsError) as error:
        checkpoints.load(folder, hidden, vocab)
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


# ------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_ids", [None, [1, 5, 30]])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_saved_heads_draft_the_same(tmp_path, own, draft_ids, layers, dtype):
    of = backbone()
    drafter = random_drafter(of, own=own, draft_ids=draft_ids, layers=layers)
    config = HeadsConfig("base", 3, layers, of.hidden_size, VOCAB, [[0.5, 0.25], [0.25, 0.125], [0.125, 0.0]], {"é": 1})
    path = checkpoints.save(tmp_path / "new" / "heads", drafter.module, config, dtype)
    for source in (path, path.parent, str(path.parent)):
        loaded = checkpoints.load(source, of.hidden_size, VOCAB)
        assert loaded.config == config and loaded.source == str(source)
        assert loaded.report.notices == loaded.report.unused == loaded.report.missing == []
        assert len(loaded.report.used) == 3 * (2 * layers + own) + (draft_ids is not None)
        hidden = of.prefill(prompt(0), of.new_cache(8)).hidden
        again = Drafter(loaded.module, of.lm_head).logits(hidden)
        assert difference(again, drafter.logits(hidden)) <= (0 if dtype == torch.float32 else 2e-2)


def test_each_head_and_layer_lands_in_its_place(tmp_path):
    made = tensors(range(3), layers=2, own=(0, 1, 2))
    module = checkpoints.load(written(tmp_path, made), HIDDEN, VOCAB).module
    for h in range(3):
        for layer in range(2):
            assert (module.weight[layer, h] == made[f"{h}.{layer}.linear.weight"]).all()
            assert (module.bias[layer, h] == made[f"{h}.{layer}.linear.bias"]).all()
        assert (module.output[h] == made[f"{h}.2.weight"]).all()


def test_more_than_ten_heads_are_not_sorted_as_text(tmp_path):
    made = tensors(range(12))
    module = checkpoints.load(written(tmp_path, made), HIDDEN, VOCAB).module
    assert module.heads == 12 and (module.weight[0, 11] == made["11.0.linear.weight"]).all()


# --------------------------------------------------------------------------------------------- counts (field case A12)


@pytest.mark.parametrize("said, stored", [(2, 5), (4, 3)])
def test_the_file_is_right_about_the_number_of_heads_and_says_so(tmp_path, said, stored):
    loaded = checkpoints.load(written(tmp_path, tensors(range(stored)), {"medusa_num_heads": said}), HIDDEN, VOCAB)
    assert loaded.module.heads == stored
    assert loaded.report.notices == [f"the config says {said} heads, the file holds {stored}: {stored} are used"]
    assert (loaded.module.weight.abs().amax((0, 2, 3)) > 0).all()  # no head was invented


def test_a_config_that_does_not_count_is_no_fault(tmp_path):
    loaded = checkpoints.load(written(tmp_path, tensors(), {"base_model_name_or_path": "N/A"}), HIDDEN, VOCAB)
    assert loaded.module.heads == 3 and loaded.report.notices == []
    assert loaded.config.base_model_name_or_path == "N/A"


def test_no_config_at_all_is_said(tmp_path):
    loaded = checkpoints.load(written(tmp_path, tensors()), HIDDEN, VOCAB)
    assert loaded.module.heads == 3 and len(loaded.report.notices) == 1 and "config.json" in loaded.report.notices[0]


def test_a_gap_in_the_heads_is_refused(tmp_path):
    assert "head 2 of 4" in refusal(written(tmp_path, tensors((0, 1, 3))))


@pytest.mark.parametrize("lost", ["1.0.linear.weight", "2.0.linear.bias", "0.0.linear.bias"])
def test_a_missing_tensor_is_named(tmp_path, lost):
    made = tensors()
    del made[lost]
    assert lost in refusal(written(tmp_path, made))


def test_layers_are_counted_too(tmp_path):
    loaded = checkpoints.load(written(tmp_path, tensors(layers=2), {"medusa_num_layers": 1}), HIDDEN, VOCAB)
    assert loaded.module.layers == 2 and "2 are used" in loaded.report.notices[0]


@pytest.mark.parametrize("text", ["{", "[1]", "3", "[" * 100_000, '{"accuracy": 3}', '{"accuracy": [[2.0]]}',
                                  '{"accuracy": [["x"]]}', '{"accuracy": [0.5]}', "\xff"])
def test_a_broken_config_is_refused_by_name(tmp_path, text):
    assert CONFIG_NAME in refusal(written(tmp_path, tensors(), text))


def test_accuracies_of_heads_that_are_not_there_are_left_out(tmp_path):
    loaded = checkpoints.load(written(tmp_path, tensors(), {"accuracy": [[.5], [.4], [.3], [.2]]}), HIDDEN, VOCAB)
    assert loaded.config.accuracy == [[.5], [.4], [.3]] and "4 rows" in loaded.report.notices[0]


# ----------------------------------------------------------------------------------------- output matrices (A13, A17)


@pytest.mark.parametrize("own, odd", [((0, 2), "head 1 "), ((1,), "head 0, 2 ")])
def test_output_matrices_in_some_heads_only_are_refused(tmp_path, own, odd):
    assert odd in refusal(written(tmp_path, tensors(own=own)))


@pytest.mark.parametrize("name, shape, named", [
    ("1.1.weight", (VOCAB, HIDDEN + 1), "1.1.weight"), ("1.1.weight", (VOCAB - 1, HIDDEN), "1.1.weight"),
    ("2.0.linear.weight", (HIDDEN, HIDDEN + 1), "2.0.linear.weight"),
    ("0.0.linear.bias", (HIDDEN + 1,), "0.0.linear.bias"),
    ("0.0.linear.bias", (), "0.0.linear.bias"),
])
def test_a_misshapen_tensor_is_named(tmp_path, name, shape, named):
    made = tensors(own=(0, 1, 2))
    made[name] = torch.zeros(shape)
    message = refusal(written(tmp_path, made))
    assert named in message and str(list(shape)) in message


def test_output_matrices_at_an_odd_place_are_not_read_as_shared(tmp_path):
    made = tensors()
    made |= {f"{h}.3.weight": torch.randn(VOCAB, HIDDEN) for h in range(3)}
    assert "output matrix" in refusal(written(tmp_path, made))


def test_heads_of_another_size_name_both_sizes(tmp_path):
    message = refusal(written(tmp_path, tensors(hidden=16)), hidden=8)
    assert "16" in message and "8" in message


@pytest.mark.parametrize(("base", "asked"), [
    ("N/A", ""), ("/home/u/model", ""), ("", ""), (None, ""), ("lmsys/vicuna-7b-v1.3", "lmsys/vicuna-7b-v1.3")])
def test_heads_of_another_model_ask_for_theirs(tmp_path, base, asked):
    folder = written(tmp_path, tensors(hidden=16), {} if base is None else {"base_model_name_or_path": base})
    with pytest.raises(OtherModelError) as error:
        checkpoints.load(folder, HIDDEN, VOCAB)
    assert error.value.base == asked
    assert str(error.value).endswith(f"belong to {asked}, which --model can name." if asked else
                                     "which their config does not name: name it with --model.")


def test_a_padded_vocabulary_is_cut_and_said(tmp_path):
    made = tensors(own=(0, 1, 2), rows=VOCAB + 128)
    loaded = checkpoints.load(written(tmp_path, made, {}), HIDDEN, VOCAB)
    assert loaded.module.output.shape == (3, VOCAB, HIDDEN)
    assert (loaded.module.output[2] == made["2.1.weight"][:VOCAB]).all()
    assert "128 rows more" in loaded.report.notices[0]


@pytest.mark.parametrize("rows", [32, VOCAB - 1, VOCAB + 5000])
def test_another_vocabulary_is_refused(tmp_path, rows):
    message = refusal(written(tmp_path, tensors(own=(0, 1, 2), rows=rows)))
    assert str(rows) in message and str(VOCAB) in message


@pytest.mark.parametrize("ids", [[], [2, 2], [-1, 4], [5, VOCAB], [[1, 2]]])
def test_a_draft_vocabulary_lists_different_ids_of_the_vocabulary(tmp_path, ids):
    made = tensors() | {"draft_vocabulary": torch.tensor(ids, dtype=torch.int32)}
    assert "draft vocabulary" in refusal(written(tmp_path, made))


# ------------------------------------------------------------------------------------------------ keys (field case A15)


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads.", "model.medusa_head.", "module.",
                                    "module.model.medusa_head."])
def test_every_known_prefix_loads_the_same_heads(tmp_path, prefix):
    plain = checkpoints.load(written(tmp_path / "plain", tensors(own=(0, 1, 2)), {}), HIDDEN, VOCAB)
    loaded = checkpoints.load(written(tmp_path / "other", tensors(own=(0, 1, 2), prefix=prefix), {}), HIDDEN, VOCAB)
    for name in ("weight", "bias", "output"):
        assert (getattr(loaded.module, name) == getattr(plain.module, name)).all()
    assert loaded.report.notices == loaded.report.unused == loaded.report.missing == []
    assert set(loaded.report.used) == set(tensors(own=(0, 1, 2), prefix=prefix))


def test_heads_in_a_file_of_another_name_are_no_full_model(tmp_path):
    save_file(tensors() | {"odd": torch.zeros(2)}, tmp_path / "my.safetensors")
    report = checkpoints.load(tmp_path / "my.safetensors", HIDDEN, VOCAB).report
    assert (report.layout, report.unused) == ("medusa", ["odd"])


def test_an_unknown_prefix_is_refused_with_the_first_keys(tmp_path):
    message = refusal(written(tmp_path, tensors(prefix="foo.")))
    assert "foo.0.0.linear.bias, foo.0.0.linear.weight" in message


def test_tensors_that_are_no_heads_are_reported(tmp_path):
    made = tensors() | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN), "model.layers.0.weight": torch.zeros(2)}
    loaded = checkpoints.load(written(tmp_path, made, {}), HIDDEN, VOCAB)
    assert loaded.report.unused == ["lm_head.weight", "model.layers.0.weight"]
    assert loaded.report.tensors == ("medusa layout, 6 tensors used, 2 unused (lm_head.weight, model.layers.0.weight), "
                                     "0 missing")
    assert loaded.report.notices == []


def test_a_report_names_the_first_few_tensors_and_counts_the_rest():
    names = [f"{name}.weight" for name in ("a", "b", "c" * 80, "d", "e")]
    assert checkpoints.LoadReport(["x"] * 1500, names, names[:1], [], "vllm").tensors == (
        f"vllm layout, 1,500 tensors used, 5 unused (a.weight, b.weight, {'c' * 60} and 2 more), 1 missing (a.weight)")


def test_a_head_stored_twice_is_refused(tmp_path):
    message = refusal(written(tmp_path, tensors() | tensors((1,), prefix="module.", seed=1)))
    assert "twice" in message and "module.1.0.linear" in message


# ------------------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_an_error(tmp_path, share):
    path = written(tmp_path, tensors(own=(0, 1, 2))) / WEIGHTS_NAME
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert "cannot be read" in refusal(tmp_path)


def test_what_is_no_heads_file_is_refused(tmp_path):
    assert WEIGHTS_NAME in refusal(tmp_path)
    assert "missing" in refusal(tmp_path / "missing")
    (tmp_path / "notes.txt").write_text("hello")
    assert "cannot be read" in refusal(tmp_path / "notes.txt")
    assert "none" in refusal(written(tmp_path / "empty", {}))


@pytest.mark.parametrize("name", ["1.0.linear.weight", "0.0.linear.bias", "2.1.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(tmp_path, name, value):
    made = tensors(own=(0, 1, 2))
    made[name].view(-1)[3] = value
    assert name in refusal(written(tmp_path, made)) and "NaN" in refusal(tmp_path)


@pytest.mark.parametrize("stored, runs, said", [
    (torch.float32, torch.bfloat16, True), (torch.float32, torch.float16, True), (torch.float16, torch.bfloat16, True),
    (torch.bfloat16, torch.float16, True), (torch.float16, torch.float32, False),
    (torch.bfloat16, torch.bfloat16, False),
])
def test_a_cast_that_loses_precision_is_said(tmp_path, stored, runs, said):
    made = {name: tensor.to(stored) for name, tensor in tensors().items()}  # field case A19
    loaded = checkpoints.load(written(tmp_path, made, {}), HIDDEN, VOCAB, runs)
    assert len(loaded.report.notices) == said
    assert all(str(stored)[6:] in notice and str(runs)[6:] in notice for notice in loaded.report.notices)
