"""The engine: backbone, heads, tokenizer and chat template of one name, checked against each other before weights are
read."""

import shutil
from dataclasses import replace

import pytest
import torch
from fake_hub import serve
from test_text import byte_level
from tiny import model, prompt, random_drafter

from medusa_viz.decoding import engine as engines
from medusa_viz.decoding.engine import EngineOptions
from medusa_viz.models import backbone as backbones
from medusa_viz.models import checkpoints, hub, sources
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.models.device import choose
from medusa_viz.models.published import PUBLISHED

VOCAB = 300  # the byte-level tokenizer has 260 ids


@pytest.fixture
def base(tmp_path):
    """Folder of a tiny backbone with a tokenizer that brings no chat template."""
    model(vocab_size=VOCAB).save_pretrained(tmp_path / "base")
    byte_level().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def module():
    return random_drafter(Backbone(model(vocab_size=VOCAB), choose("cpu")), own=True).module


@pytest.fixture
def heads(tmp_path, module):
    checkpoints.save(tmp_path / "heads", module, HeadsConfig("someone/base"), torch.float32)
    return tmp_path / "heads"


@pytest.fixture
def whole(tmp_path, base, module):
    """Folder of a Medusa-2 model."""
    checkpoints.save(tmp_path / "whole", module, HeadsConfig(), torch.float32, "medusa-2", base=base)
    return tmp_path / "whole"


def load(**options):
    return engines.load(EngineOptions(**{"device": "cpu", **{name: str(value) for name, value in options.items()}}))


def test_folders_of_backbone_and_heads(base, heads, module):
    engine = load(model=base, heads=heads)
    assert (engine.title, engine.drafter.heads, engine.tree) == ("base", 3, "sparse:16")
    assert engine.drafter.module.weight.equal(module.weight)
    assert engine.codec.encode_prompt("hi").notice  # no template: raw text, said so


def test_a_medusa_2_model_needs_no_heads_beside_it(whole, base, module, tmp_path, monkeypatch):
    engine = load(model=whole)
    assert engine.drafter.module.output.equal(module.output)
    with serve(monkeypatch, tmp_path, {"a/whole": whole}) as sent:
        remote = load(model="a/whole")
    assert len(sent) == len(set(sent)) and remote.title == "whole"
    ids = torch.tensor([prompt(0)])
    assert remote.backbone.model(ids).logits.equal(engine.backbone.model(ids).logits)


def test_a_published_name_brings_backbone_heads_template_and_tree(base, heads, tmp_path, monkeypatch):
    preset = replace(PUBLISHED["vicuna-7b-v1.3"], backbone="a/base", heads="a/heads")
    monkeypatch.setitem(sources.PUBLISHED, "vicuna-7b-v1.3", preset)
    with serve(monkeypatch, tmp_path, {"a/base": base, "a/heads": heads}):
        engine = load(model="vicuna-7b-v1.3")
    assert (engine.title, engine.drafter.heads, engine.tree) == (preset.title, 3, "published:vicuna_7b_stage1")
    ids = engine.codec.encode_prompt("hi")
    assert not ids.notice and "USER: hi ASSISTANT:" in engine.codec.decode(ids)
    assert ids.count(1) == 1 and ids[0] == 1  # the template brings BOS, once


@pytest.mark.parametrize("changed", [{"hidden_size": 32}, {"vocab_size": 500}])
def test_heads_that_do_not_fit_are_refused_before_weights_are_fetched(base, heads, tmp_path, monkeypatch, changed):
    shutil.rmtree(base)
    model(**{"vocab_size": VOCAB, **changed}).save_pretrained(base)
    with serve(monkeypatch, tmp_path, {"a/base": base, "a/heads": heads}) as sent:
        with pytest.raises(ValueError, match=r"belong to someone/base, which --model can name\.$"):
            load(model="a/base", heads="a/heads")
        assert hub.WHOLE[0] not in sent


def test_another_backbone_than_the_heads_were_trained_on_is_said(base, heads):
    assert not load(model=base, heads=heads).loaded.report.notices  # someone/base is this one's name too
    other = base.rename(base.with_name("other"))
    assert load(model=other, heads=heads).loaded.report.notices == [
        "the heads were trained on someone/base, and may draft worse on other"]


def test_a_gguf_file_is_refused_here_too(tmp_path):
    (tmp_path / "model.gguf").write_text("GGUF")
    with pytest.raises(ValueError, match="is a GGUF file"):
        load(model=tmp_path / "model.gguf")


@pytest.mark.parametrize(("model_name", "said"), [
    ("base", "holds no Medusa heads"), ("nowhere", "is no folder here"), ("vicuna", "python -m medusa_viz models")])
def test_what_is_not_there_is_one_sentence(base, model_name, said):
    with pytest.raises(ValueError) as error:
        load(model=base if model_name == "base" else model_name)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_heads_folder_brings_its_adapter(base, heads, tmp_path):
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(model(vocab_size=VOCAB), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    tuned.save_pretrained(heads)
    engine = load(model=base, heads=heads)
    ids = torch.tensor([prompt(0)])
    plain = backbones.load(base, choose("cpu"))
    assert "adapter" in engine.title
    assert not torch.allclose(engine.backbone.model(ids).logits, plain.model(ids).logits, atol=1e-3)
    assert torch.allclose(engine.backbone.model(ids).logits, tuned(ids).logits, atol=1e-3)
