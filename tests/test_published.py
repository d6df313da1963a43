"""Published presets: sizes as transformers counts them, templates as their makers wrote prompts, what fits where."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_viz.models import layouts, memory, published
from medusa_viz.models.memory import Footprint
from medusa_viz.models.presets import PRESETS, REPOSITORY
from medusa_viz.models.published import PUBLISHED, fits

GB = 1e9


@pytest.mark.parametrize(("name", "parameters", "heads_file"), [
    ("vicuna-7b-v1.3", 6_738_415_616, 1.4785e9), ("vicuna-13b-v1.3", 13_015_864_320, 1.9006e9),
    ("vicuna-33b-v1.3", 32_528_943_616, 2.5730e9), ("zephyr-7b-beta", 7_241_732_096, None),
    ("mistral-7b-v0.2", 7_241_732_096, 0.887e9), ("llama-3.1-8b", 8_030_261_248, 0.101e9),
    ("tinyllama-1.1b", 1_100_048_384, 0.418e9)])
def test_parameters_are_those_of_the_models(name, parameters, heads_file):
    preset = PUBLISHED[name]
    counted = preset.sizes.footprint
    assert counted.linears + counted.rest == parameters
    if heads_file:  # the published file's size, in bf16
        assert preset.head_parameters * 2 == pytest.approx(heads_file, rel=1e-2)


@pytest.mark.parametrize(("size", "version", "tree"), [("7b", "v1.5", "vicuna_7b_stage2"),
                                                       ("13b", "v1.5", "vicuna_13b_stage2"),
                                                       ("33b", "v1.3", "vicuna_33b_stage2")])
def test_medusa_2_vicunas_are_listed_with_their_makers_trees(size, version, tree):
    repository = f"FasterDecoding/medusa-1.0-vicuna-{size}-{version}"
    [preset] = [preset for preset in PUBLISHED.values() if preset.backbone == repository]
    assert (preset.heads, preset.head_count, preset.tree) == (repository, 5, f"published:{tree}")
    assert preset.chat_template == PUBLISHED["vicuna-7b-v1.3"].chat_template
    counted = preset.sizes.footprint
    if size == "33b":  # the shards' size, in bf16
        assert 2 * (counted.linears + counted.rest + preset.head_parameters) == pytest.approx(67.64e9, rel=1e-3)


@pytest.mark.parametrize("name", ["vicuna-7b-v1.3", "mistral-7b-v0.2", "llama-3.1-8b", "tinyllama-1.1b"])
def test_transformers_counts_the_same(name):
    sizes = PUBLISHED[name].sizes
    config = AutoConfig.for_model("llama", num_hidden_layers=2, hidden_size=sizes.hidden, vocab_size=sizes.vocabulary,
                                  intermediate_size=sizes.intermediate, num_attention_heads=sizes.attention_heads,
                                  num_key_value_heads=sizes.key_heads)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    modules = made.model.layers.modules()
    linears = sum(module.weight.numel() for module in modules if isinstance(module, torch.nn.Linear))
    total = sum(parameter.numel() for parameter in made.parameters())
    two = published.Sizes(2, sizes.hidden, sizes.intermediate, sizes.vocabulary, sizes.attention_heads, sizes.key_heads)
    assert two.footprint == Footprint(linears, total - linears)


def test_names_layouts_and_trees_are_known():
    trees = json.loads((REPOSITORY / "assets" / "trees" / "published.json").read_text())["trees"]
    assert not set(PUBLISHED) & set(PRESETS)
    for name, preset in PUBLISHED.items():
        assert name == preset.name and "/" not in name and preset.layout in layouts.LAYOUTS and preset.licence
        assert preset.tree.removeprefix("published:") in trees
        assert (preset.layout == "medusa-2") == (preset.backbone == preset.heads)


def test_memory_shrinks_with_the_dtype():
    need = PUBLISHED["vicuna-7b-v1.3"].need
    heads, cache = 1_478_533_120, 2048 * 2 * 32 * 4096 * 2  # the published file's tensors; keys and values
    assert need("bf16") == 2 * 6_738_415_616 + heads + cache
    assert need("fp32") == 2 * need("bf16")
    assert [round(need(dtype) / GB, 1) for dtype in ("8bit", "4bit")] == [9.6, 6.4]


def test_what_fits_is_said_in_one_sentence_each():
    for device, free in (("cpu", int(8 * GB)), ("cuda", int(8 * GB)), ("cuda:0", int(200 * GB)), ("cpu", 0)):
        listed = fits(device, free)
        assert [fit.preset for fit in listed] == sorted(PUBLISHED.values(), key=lambda preset: preset.need("bf16"))
        for fit in listed:
            assert fit.sentence.endswith(".") and "\n" not in fit.sentence and fit.preset.title in fit.sentence
            assert (fit.dtype is None) == ("does not fit" in fit.sentence)
            assert fit.dtype is None or fit.preset.need(fit.dtype) <= free
    assert {fit.preset.name: fit.dtypes for fit in fits("cuda", int(12 * GB))}["vicuna-7b-v1.3"] == ["8bit", "4bit"]
    small = {fit.preset.name: fit.dtype for fit in fits("cuda", int(8 * GB))}
    assert (small["tinyllama-1.1b"], small["vicuna-7b-v1.3"], small["vicuna-33b-v1.3"]) == ("bf16", "4bit", None)
    assert {fit.preset.name: fit.dtype for fit in fits("cpu", int(8 * GB))}["tinyllama-1.1b"] == "fp32"
    assert all(fit.dtype == "bf16" for fit in fits("cuda", int(200 * GB)))


def test_free_memory_is_measured_and_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CONTROL_GROUP", tmp_path)
    assert memory.free("cpu") > 0
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory.free("cpu") == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free("cpu") > 3000
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (1000 * (card + 1), 9999))
    assert (memory.free("cuda"), memory.free("cuda:1")) == (3000, 2000)


def render(template, *messages, prompt=True):
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [{"role": role, "content": content} for role, content in messages]
    return render_jinja_template([turns], chat_template=template, bos_token="<s>", eos_token="</s>",
                                 add_generation_prompt=prompt)[0][0]


def test_vicunas_template_writes_vicunas_prompts():
    template = PUBLISHED["vicuna-7b-v1.3"].chat_template
    system = ("A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
              "detailed, and polite answers to the user's questions.")
    assert render(template, ("user", "Hello!")) == f"<s>{system} USER: Hello! ASSISTANT:"
    talk = [("user", "Hello!"), ("assistant", "Hi."), ("user", "How are you?")]
    assert render(template, *talk) == f"<s>{system} USER: Hello! ASSISTANT: Hi.</s>USER: How are you? ASSISTANT:"
    assert render(template, ("system", "Be brief."), ("user", "A")) == "<s>Be brief. USER: A ASSISTANT:"
    assert render(template, ("system", ""), ("user", "A")) == "<s>USER: A ASSISTANT:"
    assert render(template, *talk[:2], prompt=False).endswith("ASSISTANT: Hi.</s>")


def test_zephyrs_template_writes_zephyrs_prompts():
    template = PUBLISHED["zephyr-7b-beta"].chat_template
    assert render(template, ("system", "S"), ("user", "U")) == "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\n"


def test_presets_without_a_template_leave_the_tokenizers():
    assert PUBLISHED["llama-3.1-8b"].chat_template == ""
