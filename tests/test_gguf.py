"""Backbones out of GGUF files: the weights of the model that they were written from, and what their users are told."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny import difference, model, plain_greedy, random_drafter

from medusa_viz.decoding import engine as engines
from medusa_viz.decoding.decoder import decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense
from medusa_viz.models import backbone as backbones
from medusa_viz.models import checkpoints, gguf_files, memory, placing, sources
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.models.device import Placement, choose
from medusa_viz.models.text import BYTE_OF_CHAR

CPU = choose("cpu")
TOKENS = ["<s>", "</s>", *BYTE_OF_CHAR, "ab"]
SIZES = {"vocab_size": len(TOKENS), "tie_word_embeddings": True, "eos_token_id": 1}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Queries and keys as GGUF keeps them: the halves that are rotated together lie side by side."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def written(made, file: Path, kind=gguf.GGMLQuantizationType.F32, template: str = "") -> Path:
    """A tiny Llama with a byte-level tokenizer as a GGUF file."""
    config, writer = made.config, gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if template:
        writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in made.named_parameters():
        numbers, part = tensor.detach().numpy(), name.split(".")[-2]
        numbers = permuted(numbers, heads[part]) if part in heads else numbers
        own = kind if numbers.ndim > 1 and numbers.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(numbers, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def made():
    return model(**SIZES)


@pytest.fixture
def file(tmp_path, made):
    return written(made, tmp_path / "tiny.Q8_0.gguf")


@pytest.mark.parametrize("by_folder", [False, True])
def test_a_gguf_file_runs_as_the_model_that_it_was_written_from(file, made, by_folder):
    source = file.parent if by_folder else file
    loaded, right = backbones.load(source, CPU, packed=False), Backbone(made, CPU)
    ids = [9, 8, 7, 30, 31, 5]
    got, wanted = (one.prefill(ids, one.new_cache(len(ids))) for one in (loaded, right))
    assert difference(got.logits, wanted.logits) < 1e-5
    assert loaded.end_ids == {1} and loaded.context == 128
    assert placing.outline(source).footprint.bytes("fp32") == placing.outline(file).footprint.bytes("fp32")
    codec = sources.codec(sources.find(str(source), lambda *_: None))
    assert codec.encode_prompt("ab c", raw=True)[-1] == TOKENS.index("c")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_quantised_weights_are_unpacked(tmp_path, made, dtype):
    file = written(made, tmp_path / "small.gguf", gguf.GGMLQuantizationType.Q8_0)
    assert file.stat().st_size < 0.5 * placing.outline(file).footprint.bytes("fp32")
    loaded = backbones.load(file, choose("cpu", dtype), packed=False)
    ids = [9, 8, 7, 30, 31, 5]
    right = Backbone(made, CPU).prefill(ids, Backbone(made, CPU).new_cache(len(ids)))
    got = loaded.prefill(ids, loaded.new_cache(len(ids)))
    assert 0 < difference(got.logits.float(), right.logits) < 0.1
    loaded.model.save_pretrained(tmp_path / "saved")
    assert not hasattr(backbones.load(tmp_path / "saved", CPU).model.config, "quantization_config")


def test_heads_draft_for_it_and_the_notice_says_what_it_takes(tmp_path, file, made):
    module = random_drafter(Backbone(made, CPU), own=True).module
    checkpoints.save(tmp_path / "heads", module, HeadsConfig("tiny"), torch.float32)
    told = []
    engine = engines.load(engines.EngineOptions(model=str(file), heads=str(tmp_path / "heads"), device="cpu"),
                          lambda *told_: told.append(told_))
    said = engine.loaded.report.notices[0]
    size = placing.outline(file).footprint
    assert f"takes {(size.linears + size.rest) * 4 / 1e9:.1f} GB once its weights are unpacked into fp32" in said
    assert [phase for phase, _, _ in told].count("unpack") == 1 and said in [detail for _, _, detail in told]
    ids = engine.codec.encode_prompt("abc", raw=True)
    steps = decode(engine.backbone, engine.drafter, ids, dense((2, 2)), Acceptance(), 12, end_ids=())
    text = [token for step in steps for token in step.tokens]
    assert text == plain_greedy(engine.backbone, ids, 12)


def test_what_cannot_be_unpacked_is_one_sentence(tmp_path, file, made, monkeypatch):
    with pytest.raises(ValueError, match="cannot be stored in 8bit: choose fp32 or bf16"):
        placing.load_model(file, Placement(torch.device("cpu"), torch.float32, "", "8bit"), "tiny")
    with pytest.raises(ValueError, match="is not read by itself: name the original model"):
        sources.lm_head(file)
    sizes = placing.outline(file).footprint
    monkeypatch.setattr(memory, "free", lambda device: int(sizes.bytes("bf16")) + 1)
    with pytest.raises(ValueError, match=r"takes 0\.0 GB while its weights are unpacked into fp32, and 0\.0 GB of mem"):
        backbones.load(file, choose("cpu", "bf16"))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="holds no Medusa heads: name some with --heads"):
        engines.load(engines.EngineOptions(model=str(file), device="cpu"))
    written(made, tmp_path / "other.gguf")
    with pytest.raises(gguf_files.GgufError, match=r"holds 2 GGUF files, other\.gguf and others: name the one to run"):
        placing.outline(tmp_path)
    file.write_text("no such thing")
    with pytest.raises(backbones.BackboneError) as error:
        backbones.load(file, CPU)
    assert "could not be loaded" in str(error.value) and "\n" not in str(error.value)
