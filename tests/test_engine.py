"""The engine: backbone, heads, tokenizer and chat template of one name, checked against each other before weights are
read."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_hub import serve
from test_text import byte_level
from tiny import model, prompt, random_drafter

from medusa_viz import cli
from medusa_viz.decoding import engine as engines
from medusa_viz.decoding.engine import EngineOptions
from medusa_viz.decoding.settings import Walls
from medusa_viz.models import backbone as backbones
from medusa_viz.models import beside, checkpoints, hub, sources
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.beside import RANKS_NAME, heads_fingerprint
from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.models.device import choose
from medusa_viz.models.presets import PRESETS, heads_folder
from medusa_viz.models.published import PUBLISHED
from medusa_viz.tuning import accuracy, calibration, contributions, formats, recommend
from medusa_viz.tuning.builders import sparse
from medusa_viz.ui import knobs

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


def test_heads_that_name_no_model_are_taken_and_asked_for_theirs(base, heads):  # field case A17
    config = json.loads((heads / "config.json").read_text())
    (heads / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "N/A"}))
    engine = load(model=base, heads=heads)
    assert engine.drafter.heads == 3 and engine.loaded.report.notices == [
        "the heads do not say which model they were trained on: name that one if it is another than base"]


def ranked(folder, module, **about):
    """A rank table beside heads; its accuracies are others than those of the config."""
    ranks = np.random.default_rng(0).choice([0, 3, 1, 1, 2, 200], (400, module.heads)).astype(np.uint8)
    table = accuracy.RankTable(ranks, np.full(8, 50))
    known = accuracy.Calibration(table, np.arange(8), np.arange(8) % 2 == 0,
                                 about={"heads_fingerprint": heads_fingerprint(module), **about})
    accuracy.save(folder / RANKS_NAME, known, accuracy.accuracy(table))
    return accuracy.shares(table)


def test_one_spec_is_one_tree_everywhere(base, heads, module, capsys):
    """By the rank table beside the heads where that is theirs, else by their config."""
    config = [[0.5, 0.3] + [0.01] * 8] * 3
    checkpoints.save(heads, module, HeadsConfig("someone/base", accuracy=config), torch.float32)

    def trees():
        engine = load(model=base, heads=heads)
        known = calibration.known_here(engine)
        facts = calibration.facts_of(engine, known)
        assert cli.main(["export", "--tree", "sparse:9", "--heads", str(heads)]) == 0
        yield formats.read(capsys.readouterr().out).shape
        yield cli.tree_from("sparse:9", engine)  # decode, bench
        yield recommend.Survey(facts, known).of_budget("sparse", 9).tree  # tune
        yield contributions._optimised(engine, 9)
        yield knobs.tree_for(Walls((10, 10, 10), 9), engine.accuracy, 9)  # the Explorer

    assert {shape.fingerprint for shape in trees()} == {sparse(config, 9).fingerprint}
    rates = ranked(heads, module)
    assert {shape.fingerprint for shape in trees()} == {sparse(rates, 9).fingerprint} != {sparse(config, 9).fingerprint}


def test_a_rank_table_is_of_its_heads_on_their_own_backbone(base, heads, module):
    rates = ranked(heads, module, model="someone/Base", dtype="fp32")
    engine = load(model=base, heads=heads)
    assert engine.accuracy == rates and calibration.known_here(engine) is not None
    assert beside.is_of({"heads_fingerprint": heads_fingerprint(module)}, module, "base", "4bit")  # it does not say
    for about in ({"model": "other"}, {"dtype": "4bit"}, {"heads_fingerprint": "0"}):
        ranked(heads, module, **about)
        engine = load(model=base, heads=heads)
        assert engine.accuracy == [] and calibration.known_here(engine) is None
    ranked(heads, module, dtype="bf16")  # rounding alone makes no other text
    assert load(model=base, heads=heads).accuracy == rates
    (heads / RANKS_NAME).write_bytes((heads / RANKS_NAME).read_bytes()[:500])
    engine = load(model=base, heads=heads)
    assert engine.accuracy == [] and calibration.known_here(engine) is None
    assert f"The rank table {heads / RANKS_NAME} cannot be read" in engine.loaded.report.notices[-1]


def test_accuracies_of_the_shipped_rank_tables_are_those_that_trees_are_built_by():
    for preset in PRESETS.values():
        loaded = checkpoints.with_ranks(checkpoints.load(heads_folder(preset)))
        known = calibration.known_of(loaded.source, loaded.module)
        assert loaded.accuracy == accuracy.shares(known.table), preset.name


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
