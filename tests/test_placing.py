"""Where weights go: sizes before loading, what fits, quantised backbones, layers on several devices."""

import shutil
from contextlib import nullcontext

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file
from tiny import (
    KINDS,
    VOCAB,
    difference,
    engine,
    greedy_step,
    model,
    plain_greedy,
    plain_logits,
    prompt,
    random_drafter,
)
from transformers import PreTrainedModel
from transformers.utils import logging

from medusa_viz.decoding.live import LiveRun
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import from_paths
from medusa_viz.models import backbone as backbones
from medusa_viz.models import device, memory, placing, sources
from medusa_viz.models.backbone import Backbone, BackboneError
from medusa_viz.models.device import DeviceError, Placement
from medusa_viz.models.fetch import silent
from medusa_viz.models.memory import Footprint

CPU = device.choose("cpu")
CUDA, CUDA_1 = (Placement(torch.device(name), torch.bfloat16, "test") for name in ("cuda", "cuda:1"))
TREE = from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


def greedy(of, ids, tokens):
    """Greedy Medusa decoding with random heads."""
    drafter = random_drafter(of)
    run = LiveRun(engine(of, drafter))
    position, text = run.open(ids, Acceptance()), []
    while len(text) < tokens:
        _, more, position = greedy_step(run, position, TREE)
        text += more
    return text[:tokens], drafter


def test_loading_draws_no_bar_of_transformers_and_leaves_its_settings(tmp_path, capsys):
    model().save_pretrained(tmp_path)
    logging.enable_progress_bar()
    placing.load_model(tmp_path, CPU, "tiny")
    assert "Loading" not in capsys.readouterr().err and logging.is_progress_bar_enabled()


# -------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gpt_oss", "gpt2")])
def test_sizes_are_known_from_the_config_alone(tmp_path, kind):
    made = model(kind)
    made.config.save_pretrained(tmp_path)  # no weights at all
    sizes = placing.outline(tmp_path)
    head = made.get_output_embeddings()
    assert (sizes.vocab_size, sizes.hidden_size) == tuple(head.weight.shape)
    assert sizes.footprint.linears + sizes.footprint.rest == sum(p.numel() for p in made.parameters())
    assert 0 < sizes.footprint.linears < sum(p.numel() for p in made.parameters()) - head.weight.numel() + 1


def test_a_model_whose_files_lack_a_weight_is_refused(tmp_path):
    model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / "model.safetensors",
              {"format": "pt"})
    with pytest.raises(BackboneError, match=f"lacks 1 of its weights, the first is {lost}"):
        backbones.load(tmp_path, CPU)


def test_what_does_not_fit_is_refused_before_any_weight_is_read(tmp_path, monkeypatch):
    model().config.save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "free", lambda device: 200_000)
    with pytest.raises(BackboneError) as error:
        backbones.load(tmp_path, CPU, "tiny")
    assert "tiny needs 0.0 GB in fp32" in str(error.value) and "--dtype bf16 would take" in str(error.value)
    big = Footprint(6_000_000_000, 500_000_000)
    monkeypatch.setattr(memory, "free", lambda device: int(8e9))
    with pytest.raises(BackboneError, match=r"needs 13.0 GB in bf16, and 8.0 GB of GPU memory are free: --dtype 8bit "):
        placing.check_fit(big, CUDA, "big")
    placing.check_fit(big, Placement(CUDA.device, torch.bfloat16, "", "8bit"), "big")
    monkeypatch.setattr(memory, "free", lambda device: int(1e9))
    with pytest.raises(BackboneError, match=r"memory are free\.$"):
        placing.check_fit(big, CUDA, "big")


def test_heads_and_a_cache_need_room_too(tmp_path, monkeypatch):
    made = model()
    made.save_pretrained(tmp_path)
    weights, cache = sum(p.numel() for p in made.parameters()), 128 * 2 * 2 * 2 * 16  # its context, two layers
    assert placing.outline(tmp_path).footprint.bytes("fp32") == 4 * (weights + cache)
    seen = []
    monkeypatch.setattr(placing, "check_fit", lambda footprint, placement, name: seen.append(footprint.bytes("bf16")))
    monkeypatch.setattr(placing, "device_map", lambda footprint, placement: seen.append(footprint.bytes("bf16")))
    backbones.load(tmp_path, CPU, heads=1000)  # on a CPU heads are there already, and no longer free
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: model)
    placing.load_model(tmp_path, CUDA, "tiny", heads=1000)
    assert seen == [2 * (weights + cache)] * 2 + [2 * (weights + cache + 1000)] * 2


def test_parts_that_found_no_room_on_the_cards_are_named():
    made, places = model(), {"model.embed_tokens": 0, "model.layers.0": 1, "model.layers.1": "cpu", "lm_head": "disk"}
    assert placing.spilled(made, CUDA) == ""
    made.hf_device_map = places
    assert placing.spilled(made, CUDA) == ("2 of 4 parts of the backbone found no room on the cards and lie in the "
                                           "machine's memory and on the disk: every step waits for them")
    made.hf_device_map = {"": "cpu"}
    assert placing.spilled(made, CPU) == ""


# ---------------------------------------------------------------------------------------------------- several devices


def test_one_card_or_all(monkeypatch):
    footprint = Footprint(6_000_000_000, 500_000_000)  # 13 GB in bf16
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(memory, "free", lambda device: {"cuda:0": int(10e9), "cuda": int(20e9)}[device])
    assert placing.device_map(footprint, CUDA) == "auto"
    assert placing.device_map(footprint, Placement(CUDA.device, torch.bfloat16, "", "8bit")) == {"": "cuda:0"}
    assert placing.device_map(footprint, CUDA_1) == {"": "cuda:1"}
    assert placing.device_map(footprint, CPU) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert placing.device_map(footprint, CUDA) == {"": "cuda"}


@pytest.mark.parametrize("kind", ["llama", "llama tied", "gemma3_text"])
def test_layers_elsewhere_change_nothing(tmp_path, kind):
    """accelerate's hooks move states from layer to layer, here to and from the disk: no second device is needed."""
    plain = Backbone(model(kind), CPU, "plain")
    moved = model(kind)
    layers = {f"model.layers.{number}": "disk" for number in range(2)}
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **layers}
    spread = Backbone(dispatch_model(moved, places, main_device="cpu", offload_dir=str(tmp_path)), CPU, "spread")
    assert next(spread.model.model.layers[0].parameters()).device.type == "meta"
    spread.check_trees()
    ids = prompt(0)
    text, drafter = greedy(spread, ids, 12)
    assert text == plain_greedy(plain, ids, 12)
    assert drafter.module.weight.device == spread.lm_head.weight.device
    spread.speed_up()
    assert difference(plain_logits(spread, ids), plain_logits(plain, ids)) == 0


# ---------------------------------------------------------------------------------------------------------- quantised


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_a_quantised_backbone_decodes(tmp_path, bits):
    model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    dtype = {"8bit": torch.float16, "4bit": torch.bfloat16}[bits]
    of = backbones.load(tmp_path, Placement(torch.device("cpu"), dtype, "test", bits), "tiny")
    kinds = {type(module).__name__ for module in of.model.model.layers.modules()}
    assert {"8bit": "Linear8bitLt", "4bit": "Linear4bit"}[bits] in kinds
    assert of.lm_head.weight.dtype == dtype and of.placement.dtype_name == bits
    text, drafter = greedy(of, prompt(0), 12)
    assert text[0] == plain_greedy(of, prompt(0), 1)[0]
    assert drafter.module.weight.dtype == dtype and of.linears.startswith("plain")
    with torch.no_grad():
        kept = plain_logits(of, prompt(1))[-1].float()
    right = plain_logits(Backbone(model(hidden_size=64, intermediate_size=128), CPU), prompt(1))[-1]
    assert 0.7 < float(torch.corrcoef(torch.stack([kept, right]))[0, 1]) < 0.99999  # the same model, rounded


def test_quantisers_say_what_they_do():
    four = placing.quantiser(Placement(torch.device("cuda"), torch.bfloat16, "", "4bit"))
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_compute_dtype) == (True, "nf4", torch.bfloat16)
    assert placing.quantiser(Placement(torch.device("cuda"), torch.bfloat16, "", "8bit")).load_in_8bit
    assert placing.quantiser(CUDA) is None


def card(monkeypatch, has_bf16):
    """A card, as far as choosing a dtype asks for one."""
    monkeypatch.setattr(device, "_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_card_computes_in_bf16_unless_it_would_emulate_it(has_bf16, monkeypatch):
    card(monkeypatch, has_bf16)
    right = "bf16" if has_bf16 else "fp16"
    chosen = device.choose("cuda")
    assert chosen.dtype_name == right and ("emulate" in chosen.reason) is not has_bf16 and right in chosen.reason
    assert device.choose("cuda", "4bit").dtype == device.DTYPES[right]
    assert device.choose("cuda", "bf16").dtype == torch.bfloat16  # as asked


@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_what_a_quantised_backbone_needs_is_one_sentence(bits, monkeypatch):
    with pytest.raises(DeviceError, match="needs a CUDA card; on cpu choose fp32 or bf16"):
        device.choose("cpu", bits)
    card(monkeypatch, has_bf16=True)
    chosen, right = device.choose("cuda", bits), {"8bit": "fp16", "4bit": "bf16"}[bits]  # 8-bit linears take fp16 alone
    assert (chosen.dtype, chosen.quantised, chosen.dtype_name) == (device.DTYPES[right], bits, bits)
    assert chosen.reason == f"{bits} as asked, computing in {right}"
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"pip install bitsandbytes==\d"):
        device.choose("cuda", bits)


def test_an_adapter_on_a_quantised_backbone_is_refused(tmp_path):
    placement = Placement(torch.device("cpu"), torch.bfloat16, "", "8bit")
    with pytest.raises(BackboneError, match="cannot be merged into 8bit"):
        backbones.load(tmp_path, placement, "tiny", adapter=tmp_path)


# ------------------------------------------------------------------------------------------------------- from the hub


def test_a_backbone_comes_from_the_hub(tmp_path, monkeypatch):
    from fake_hub import serve

    model().save_pretrained(tmp_path / "repository", max_shard_size="60KB")
    with serve(monkeypatch, tmp_path, {"a/model": tmp_path / "repository"}) as sent:
        source = sources.ready("a/model", silent)
        assert source.repository == "a/model" and backbones.load(source.folder, CPU).vocab_size == VOCAB
        shards = {path.name for path in (tmp_path / "repository").glob("*.safetensors")}
        assert len(shards) > 1 and shards <= set(sent)
    shutil.rmtree(tmp_path / "repository")
    with serve(monkeypatch, tmp_path, {"a/model": 401}), pytest.raises(ValueError, match="private"):
        sources.ready("a/other", silent)
