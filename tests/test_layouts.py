"""Published layouts of heads: each read from small files in exactly that layout, each written and read back equal."""

import json
import logging
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, backbone, difference, model, prompt, random_drafter

from medusa_viz.models import backbone as backbones
from medusa_viz.models import checkpoints, device, layouts
from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.models.heads import Drafter, HeadsError
from medusa_viz.models.tensors import TensorFile

HIDDEN = 8
DRAFT = [1, 5, 30]


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def published(heads=3, own=True, bias=True, linear="{h}.0.linear", output="{h}.1.weight", rows=VOCAB):
    """Heads under the names of one layout; heads differ by their number."""
    made = OrderedDict()
    for h in range(heads):
        made[f"{linear.format(h=h)}.weight"] = randn(HIDDEN, HIDDEN) + h
        if bias:
            made[f"{linear.format(h=h)}.bias"] = randn(HIDDEN) + h
        if own:
            made[output.format(h=h)] = randn(rows, HIDDEN) + h
    return made


def filed(folder, made, name="medusa_lm_head.safetensors", config=None):
    folder.mkdir(exist_ok=True, parents=True)
    (torch.save if name.endswith((".pt", ".bin")) else save_file)(made, folder / name)
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def load(folder, **sizes):
    return checkpoints.load(folder, **{"hidden_size": HIDDEN, "vocab_size": VOCAB, **sizes})


def refusal(folder, **sizes):
    with pytest.raises(HeadsError) as error:
        load(folder, **sizes)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(left, right):
    assert (left.output is None) == (right.output is None)
    names = ["weight", "bias"] + ["output"] * (left.output is not None)
    assert all((getattr(left, name) == getattr(right, name)).all() for name in names)
    assert (left.draft_ids is None and right.draft_ids is None) or left.draft_ids.equal(right.draft_ids)


# --------------------------------------------------------------------------------------------- each published layout


VLLM = {"linear": "blocks.{h}.layers.0", "output": "lm_heads.{h}.weight"}
TENSORRT = {"linear": "medusa_heads.{h}.medusa_layers.0.linear", "output": "medusa_heads.{h}.lm_head.weight"}
V13 = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1,
       "transformers_version": "4.31.0"}


@pytest.mark.parametrize(("layout", "name", "names", "config"), [
    ("medusa-pt", "medusa_lm_head.pt", {}, V13),  # B1
    ("medusa", "medusa_lm_head.safetensors", {}, {"medusa_num_heads": 3}),  # B3
    ("medusa", "medusa_lm_head.safetensors", {"own": False}, {"medusa_num_heads": 3, "version": "2"}),  # B4
    ("medusa-2", "pytorch_model.bin",
     {"linear": "medusa_head.{h}.0.linear", "output": "medusa_head.{h}.1.weight"}, {}),  # B2
    ("vllm-no-bias", "model.safetensors", {**VLLM, "bias": False}, {"model_type": "medusa", "num_heads": 3}),  # B5
    ("vllm", "model.safetensors",
     {"linear": "medusa_heads.blocks.{h}.layers.0", "output": "medusa_heads.lm_heads.{h}.weight"},
     {"num_heads": 3, "medusa_fc_bias": True}),
    ("tensorrt-llm", "rank0.safetensors", TENSORRT, {"num_medusa_heads": 3, "num_medusa_layers": 1}),  # B6
])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_of_every_layout_are_read(tmp_path, layout, name, names, config, dtype):
    made = OrderedDict((key, tensor.to(dtype)) for key, tensor in published(**names).items())
    loaded = load(filed(tmp_path, made, name, config))
    expected = published(bias=names.get("bias", True), own=names.get("own", True))
    for h in range(3):
        assert (loaded.module.weight[0, h] == expected[f"{h}.0.linear.weight"].to(dtype)).all()
        bias = expected[f"{h}.0.linear.bias"].to(dtype) if names.get("bias", True) else torch.zeros(HIDDEN)
        assert (loaded.module.bias[0, h] == bias).all()
        if names.get("own", True):
            assert (loaded.module.output[h] == expected[f"{h}.1.weight"].to(dtype)).all()
    assert loaded.module.heads == 3 and (loaded.module.output is None) == (names.get("own") is False)
    assert sorted(loaded.report.used) == sorted(made) and loaded.report.unused == loaded.report.missing == []
    assert loaded.report.tensors == f"{layout} layout, {len(made)} tensors used, 0 unused, 0 missing"
    assert loaded.dtype == dtype and all("config says 2 heads" in notice for notice in loaded.report.notices)
    assert len(loaded.report.notices) == (config is V13)


@pytest.mark.parametrize("rows", [len(DRAFT), VOCAB])
def test_a_token_map_in_any_order_is_a_draft_vocabulary(tmp_path, rows):
    ids = [30, 1, 5]
    made = {**published(**VLLM, rows=rows), "token_map": torch.tensor(ids)}
    config = {"truncated_vocab_size": 3, "vocab_size": VOCAB}
    module = load(filed(tmp_path, made, "model.safetensors", config)).module
    assert module.draft_ids.tolist() == DRAFT
    for h in range(3):
        for place, token in enumerate(DRAFT):
            row = token if rows == VOCAB else ids.index(token)
            assert (module.output[h, place] == made[f"lm_heads.{h}.weight"][row]).all()


def test_the_backbones_own_matrix_in_a_vllm_file_is_no_matrix_of_the_heads(tmp_path):
    made = {**published(**VLLM, own=False), "lm_heads.0.weight": randn(VOCAB, HIDDEN)}
    folder = filed(tmp_path, made, "model.safetensors", {"original_lm_head": True})
    loaded = load(folder)
    assert loaded.module.output is None and "copy of the backbone's" in loaded.report.notices[0]
    assert len(loaded.report.notices) == 1
    assert "head 1, 2" in refusal(filed(tmp_path, made, "model.safetensors"))  # nothing says that it stands for all


# ------------------------------------------------------------------------------------------------ writing, reading back


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_ids", [None, DRAFT])
@pytest.mark.parametrize("layers", [1, 2])
def test_what_is_written_is_read_back_equal(tmp_path, layout, own, draft_ids, layers):
    of = backbone()
    module = random_drafter(of, own=own, draft_ids=draft_ids, layers=layers).module
    config = HeadsConfig("some/base", 3, layers, of.hidden_size, VOCAB, [[0.5], [0.25], [0.125]])
    of.model.save_pretrained(tmp_path / "base")
    if layout == "tensorrt-llm" and own and draft_ids:
        with pytest.raises(HeadsError, match="no draft vocabulary"):
            checkpoints.save(tmp_path / "heads", module, config, torch.float32, layout)
        return
    checkpoints.save(tmp_path / "heads", module, config, torch.float32, layout, of.lm_head.weight, tmp_path / "base")
    loaded = load(tmp_path / "heads", hidden_size=of.hidden_size)
    if layout == "vllm-no-bias":
        assert "no biases" in layouts.losses(module, layout)[0]
        module.bias.zero_()
    if layout == "tensorrt-llm" and not own:  # here every head gets the backbone's matrix, and the draft ids are lost
        assert ("whole vocabulary" in " ".join(layouts.losses(module, layout))) == bool(draft_ids)
        assert (loaded.module.output == of.lm_head.weight).all() and loaded.module.draft_ids is None
    else:
        same(loaded.module, module)
        assert layouts.losses(module, layout) == []
    hidden = of.prefill(prompt(0), of.new_cache(8)).hidden
    if loaded.module.draft_ids is not None or draft_ids is None:
        assert difference(Drafter(loaded.module, of.lm_head).logits(hidden),
                          Drafter(module, of.lm_head).logits(hidden)) <= 1e-5
    assert loaded.config.accuracy == config.accuracy and loaded.config.medusa_num_heads == 3
    assert loaded.report.layout == layout
    assert loaded.report.unused == [] or "copy" in loaded.report.notices[0]


def test_what_a_layout_needs_is_asked_for(tmp_path):
    module = random_drafter(backbone()).module
    for layout in ("vllm", "tensorrt-llm", "medusa-2"):
        with pytest.raises(HeadsError, match="--model"):
            checkpoints.save(tmp_path, module, HeadsConfig(), torch.float32, layout)


def test_vllm_finds_its_own_fields(tmp_path):
    module = random_drafter(backbone(), own=True, draft_ids=DRAFT).module
    checkpoints.save(tmp_path, module, HeadsConfig("b", 3, 1, 64, VOCAB), torch.float32, "vllm")
    config = json.loads((tmp_path / "config.json").read_text())
    assert [name for name in config if "num" in name and "heads" in name] == ["num_heads"]
    assert [name for name in config if "num" in name and "layers" in name] == ["num_hidden_layers"]
    assert (config["num_heads"], config["medusa_fc_bias"], config["original_lm_head"]) == (3, True, False)
    assert (config["truncated_vocab_size"], config["vocab_size"], config["hidden_size"]) == (3, VOCAB, 64)
    assert load_file(tmp_path / "model.safetensors")["token_map"].dtype == torch.int64


# ------------------------------------------------------------------------------- heads inside a full model (case A16)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_heads_and_backbone_of_one_repository(tmp_path, kind, caplog):
    of = model()
    of.save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    module = random_drafter(backbone(), own=True).module
    heads = layouts.tensors_of(module, "medusa-2", torch.float32)
    last = sorted(set(index.values()))[-1]
    assert len(set(index.values())) > 1
    for name in set(index.values()):
        tensors = load_file(tmp_path / name) | (heads if name == last else {})
        if kind == "bin":
            (tmp_path / name).unlink()
            torch.save(tensors, tmp_path / name.replace("safetensors", "bin"))
        else:
            save_file(tensors, tmp_path / name, {"format": "pt"})
    index = {key: file.replace("safetensors", kind) for key, file in (index | dict.fromkeys(heads, last)).items()}
    (tmp_path / "model.safetensors.index.json").unlink()
    stem = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    (tmp_path / f"{stem}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))

    loaded = load(tmp_path, hidden_size=of.config.hidden_size)
    same(loaded.module, module)
    assert loaded.report.unused == [] == loaded.report.notices
    with caplog.at_level(logging.INFO):
        again = backbones.load(tmp_path, device.choose("cpu"), packed=False)
    assert not caplog.records
    assert all(tensor.equal(of.state_dict()[name]) for name, tensor in again.model.state_dict().items())


def test_a_shard_that_is_missing_is_named(tmp_path):
    folder = filed(tmp_path, published(linear="medusa_head.{h}.0.linear", own=False), "model-1.safetensors")
    index = dict.fromkeys(TensorFile(tmp_path / "model-1.safetensors").shapes, "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert "model-2.safetensors" in refusal(folder)


# ------------------------------------------------------------------------------------------------ .pt files (case A18)


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path):
    marker = tmp_path / "marker"
    for form in (True, False):  # torch's zip form and its older plain one
        folder = tmp_path / str(form)
        folder.mkdir()
        torch.save({"0.0.linear.weight": Hostile(marker)}, folder / "medusa_lm_head.pt",
                   _use_new_zipfile_serialization=form)
        assert "could run a program" in refusal(folder)
    assert not marker.exists()


def test_pickles_load_wrapped_and_in_the_older_form(tmp_path):
    plain = load(filed(tmp_path / "plain", published(), "medusa_lm_head.pt")).module
    same(load(filed(tmp_path / "wrapped", {"state_dict": published(), "epoch": 3}, "medusa_lm_head.pt")).module, plain)
    torch.save(published(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    same(load(tmp_path / "old.pt").module, plain)


def test_safetensors_come_before_a_pickle(tmp_path):
    filed(tmp_path, {"0.0.linear.weight": Hostile(tmp_path / "marker")}, "medusa_lm_head.pt")
    assert load(filed(tmp_path, published())).module.heads == 3


@pytest.mark.parametrize("data", [b"hello", b"", b"\x80\x02", b"PK\x03\x04", b"\x80\x04\x95zz"])
def test_what_is_no_pickle_of_tensors_is_refused(tmp_path, data):
    (tmp_path / "medusa_lm_head.pt").write_bytes(data)
    assert "medusa_lm_head.pt" in refusal(tmp_path)


def test_a_pickle_cut_off_is_refused(tmp_path):
    path = filed(tmp_path, published(), "medusa_lm_head.pt") / "medusa_lm_head.pt"
    data = path.read_bytes()
    for share in (0.1, 0.5, 0.99):
        path.write_bytes(data[: int(len(data) * share)])
        assert "read" in refusal(tmp_path)


@pytest.mark.parametrize("data", [[1, 2], {"a": 3}, torch.ones(2)])
def test_a_pickle_of_something_else_holds_no_heads(tmp_path, data):
    assert "none" in refusal(filed(tmp_path, data, "medusa_lm_head.pt"))


# ------------------------------------------------------------------------------------------- sizes and names (case A17)


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_sizes_are_compared_before_numbers_are_read(tmp_path, name, monkeypatch):
    monkeypatch.setattr(TensorFile, "read", lambda *_: pytest.fail("read"))
    folder = filed(tmp_path, published(), name, V13)
    message = refusal(folder, hidden_size=6)
    assert "[8, 8]" in message and "[6, 6]" in message and "lmsys/vicuna-7b-v1.3" in message
    assert "[61, 8]" in refusal(folder, vocab_size=99)


@pytest.mark.parametrize(("named", "shown"), [
    ("N/A", ""), ("", ""), (None, ""), ("/home/u/model", ""), ("./out", ""), ("C:\\models\\x", ""), ("a/b/c", ""),
    ("lmsys/vicuna-7b-v1.3", "lmsys/vicuna-7b-v1.3"), ("SmolLM2", "SmolLM2")])
def test_the_name_of_the_backbone_is_advice(tmp_path, named, shown):
    folder = filed(tmp_path, published(), config={"base_model_name_or_path": named})
    assert load(folder).base == shown
    assert (shown or "does not name") in refusal(folder, hidden_size=6)


def test_without_a_backbone_the_files_own_sizes_hold(tmp_path):
    loaded = checkpoints.load(filed(tmp_path, published()))
    assert (loaded.module.hidden_size, loaded.module.output.shape[1], loaded.report.notices) == (HIDDEN, VOCAB, [])
