"""The backbone: tree logits against plain forwards of many architectures; what is refused, and how."""

import random
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny import EAGER_ONLY, KINDS, VOCAB, backbone, difference, model, plain_logits, prompt, random_shape
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from medusa_viz.decoding.tree import dense, from_paths
from medusa_viz.models import backbone as backbones
from medusa_viz.models import device
from medusa_viz.models.backbone import PREFILL_CHUNK, Backbone, BackboneError
from medusa_viz.models.device import DeviceError, Placement
from medusa_viz.models.packed import Trial

CPU = Placement(torch.device("cpu"), torch.float32, "test")
EVERY = [(kind, attention) for kind in KINDS for attention in ("sdpa", "eager") if (kind, attention) not in
         {(kind, "sdpa") for kind in EAGER_ONLY}]


def verify(of, shape, tokens, cache):
    return of.verify(torch.tensor(tokens), torch.as_tensor(shape.depth).long(),
                     of.additive(torch.from_numpy(shape.mask)), cache)


def path_difference(of, shape, tokens, prefix):
    """Largest difference, over all rows, of tree logits from a plain forward of the row's path."""
    cache = of.new_cache(4)
    of.prefill(prefix, cache)
    seen = verify(of, shape, tokens, cache)
    worst = 0.0
    for row in range(shape.nodes + 1):
        path = [*prefix, *(tokens[r] for r in shape.path_to(row))]
        worst = max(worst, difference(seen.logits[row], plain_logits(of, path)[-1]))
    return worst


@pytest.mark.parametrize("kind, attention", EVERY)
def test_tree_logits_equal_a_plain_forward_of_every_path(kind, attention):
    of, rng = backbone(kind, attention=attention), random.Random(0)
    of.check_trees()
    for length in (1, 11):  # shorter and longer than the sliding windows of 5
        shape = random_shape(rng, heads=5, paths=12)
        tokens = [rng.randrange(VOCAB) for _ in range(shape.nodes + 1)]
        assert path_difference(of, shape, tokens, prompt(length, length)) < 1e-5


@pytest.mark.parametrize("kind, tolerance", [("llama", 2e-6), ("gpt2", 1e-12), ("gpt_neox", 1e-12)])
def test_in_double_precision_they_agree_far_better(kind, tolerance):
    # Llama rounds to fp32 inside its norms and positions whatever the precision; the others do not.
    of, rng = backbone(kind, dtype=torch.float64), random.Random(1)
    shape = random_shape(rng, heads=5, paths=12)
    assert path_difference(of, shape, [rng.randrange(VOCAB) for _ in range(shape.nodes + 1)], prompt(3, 9)) < tolerance


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_sped_up_backbone_says_the_same(kind, monkeypatch):
    monkeypatch.setattr(Trial, "faster", True)  # pack whatever these small sizes gain
    of, plain, rng = backbone(kind), backbone(kind), random.Random(2)
    of.speed_up()
    shape = random_shape(rng, heads=5, paths=12)
    tokens, ids = [rng.randrange(VOCAB) for _ in range(shape.nodes + 1)], prompt(7, 11)
    cache = of.new_cache(4)
    of.prefill(ids, cache)
    seen = verify(of, shape, tokens, cache)
    for row in range(shape.nodes + 1):
        right = plain_logits(plain, [*ids, *(tokens[r] for r in shape.path_to(row))])[-1]
        assert difference(seen.logits[row], right) < 1e-5
    assert of.linears.startswith("packed") or kind == "gpt2"  # whose linears are of another class


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_field_case_a05(attention):
    of, shape = backbone(attention=attention), from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    for length in (5, 20):
        assert path_difference(of, shape, [7, 1, 2, 3, 4, 5], prompt(length, length)) < 1e-4


def test_the_test_would_see_a_mask_that_is_not_honoured():
    of, shape = backbone(), from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    tokens, cache = [7, 1, 2, 3, 4, 5], of.new_cache(32)
    of.prefill(prompt(0), cache)
    right = verify(of, shape, tokens, cache).logits
    depth = torch.as_tensor(shape.depth).long()
    causal = of.additive(torch.ones(6, 6, dtype=torch.bool).tril())
    rows = torch.arange(6)
    for wrong in (of.verify(torch.tensor(tokens), depth, causal, cache),
                  of.verify(torch.tensor(tokens), rows, of.additive(torch.from_numpy(shape.mask)), cache)):
        assert (wrong.logits[3:] - right[3:]).abs().max() > 0.05


def test_hidden_is_what_the_lm_head_reads():
    of = backbone("gemma2", tie_word_embeddings=True)  # soft-capped, so logits are not just a product
    cache, shape = of.new_cache(32), dense([2, 2])
    kept = of.prefill(prompt(0), cache, keep=3)
    seen = verify(of, shape, list(range(7)), cache)
    for forward in (kept, seen):
        capped = 20.0 * torch.tanh(of.lm_head(forward.hidden) / 20.0)
        assert difference(capped, forward.logits) < 1e-6
    with torch.no_grad():
        last = of.model(input_ids=torch.tensor([prompt(0)]), output_hidden_states=True).hidden_states[-1][0]
    assert difference(kept.hidden, last[-3:]) < 1e-5


# ----------------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("keep", [1, 5, 9, 23])
def test_prefill_in_chunks_equals_one_forward(monkeypatch, kind, keep):
    of, ids = backbone(kind), prompt(3, length=23)
    expected = plain_logits(of, ids)[-keep:]
    for chunk in (1, 4, 8, 22, 23, 512):
        monkeypatch.setattr(backbones, "PREFILL_CHUNK", chunk)
        cache = of.new_cache(3)
        forward = of.prefill(ids, cache, keep=keep)
        assert cache.length == 23 and forward.hidden.shape == (keep, of.hidden_size)
        assert difference(forward.logits, expected) < 1e-5
    monkeypatch.undo()
    cache = of.new_cache(3)  # split by the caller
    parts = [of.prefill(ids[first:last], cache, keep=last - first).logits for first, last in ((0, 7), (7, 8), (8, 23))]
    assert difference(torch.cat(parts)[-keep:], expected) < 1e-5


def test_a_prompt_longer_than_a_chunk():
    of = backbone(max_position_embeddings=PREFILL_CHUNK + 60)
    ids = prompt(0, length=PREFILL_CHUNK + 40)
    assert difference(of.prefill(ids, of.new_cache(1), keep=41).logits, plain_logits(of, ids)[-41:]) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_context_end(kind):
    sizes = {"n_positions": 20} if kind == "gpt2" else {"max_position_embeddings": 20}
    of, ids = backbone(kind, **sizes), prompt(0, length=20)
    assert of.context == 20
    assert difference(of.prefill(ids, of.new_cache(1)).logits[0], plain_logits(of, ids)[-1]) < 1e-5
    with pytest.raises(BackboneError, match=r"21 tokens.* 20"):
        of.prefill([*ids, 1], of.new_cache(1))
    cache = of.new_cache(1)
    of.prefill(ids, cache)
    with pytest.raises(BackboneError, match="21 tokens"):
        of.prefill([1], cache)
    with pytest.raises(BackboneError, match="no token"):
        of.prefill([], cache)
    assert cache.length == 20


# ------------------------------------------------------------------------------------------------------- half precision


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_half_precision_runs_on_cpu(kind, attention):
    of, exact, shape = backbone(kind, dtype=torch.bfloat16, attention=attention), backbone(kind), dense([2, 2])
    exact.model.load_state_dict({name: value.float() for name, value in of.model.state_dict().items()})
    of.check_trees()
    assert of.additive(torch.eye(2, dtype=torch.bool)).dtype == torch.bfloat16
    logits = []
    for each in (of, exact):
        cache = each.new_cache(4)
        each.prefill(prompt(0, 9), cache)
        logits.append(verify(each, shape, [1, 2, 3, 4, 5, 6, 7], cache).logits.float())
    assert logits[0].isfinite().all()
    assert difference(*logits) < 0.05


def test_masks_are_additive_so_that_eager_attention_honours_them():
    of = backbone(attention="eager")
    mask = of.additive(torch.tensor([[True, False], [True, True]]))
    assert mask.dtype == torch.float32
    assert mask.tolist() == [[0, torch.finfo(torch.float32).min], [0, 0]]


# ------------------------------------------------------------------------------------------------------------- end ids


@pytest.mark.parametrize("config, generation, ends", [
    (2, 2, {2}), (2, [2], {2}), (2, [7, 2], {2, 7}), (None, 2, {2}), (2, None, {2}), ([7, 2], None, {2, 7}),
    (None, None, set()), (5, [7, 2], {2, 7}), (0, 0, {0}), (3, 0, {0}),
])
def test_end_ids_of_field_case_a07(config, generation, ends):
    of = backbone(eos_token_id=config)
    of.model.generation_config = GenerationConfig(eos_token_id=generation)
    assert of.end_ids == ends
    of.model.generation_config = None
    assert of.end_ids == ({config} if isinstance(config, int) else set(config or []))


# ------------------------------------------------------------------------------------------------------------- refused


def refused(kind, **sizes):
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=VOCAB, **sizes))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    with pytest.raises(BackboneError) as error:
        Backbone(made, CPU, kind).check_trees()
    message = str(error.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 260
    return message


def test_models_without_attention_are_refused():
    state = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    assert "linear_attention layers" in refused("mamba", **state)
    mixed = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
             "linear_num_key_heads": 2, "linear_num_value_heads": 2, "num_experts": 2, "intermediate_size": 8,
             "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    assert "linear_attention layers" in refused("qwen3_next", **mixed)
    assert "key-value cache" in refused("rwkv", hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    assert "key-value cache" in refused("openai-gpt", n_embd=32, n_layer=2, n_head=2)


def test_models_without_position_ids_are_refused():
    # ALiBi counts rows: siblings would stand at different distances.
    assert "position ids" in refused("bloom", hidden_size=32, n_layer=2, n_head=2)
    assert "position ids" in refused("mpt", d_model=32, n_layers=2, n_heads=2)


def test_a_model_that_sees_the_future_is_refused():
    assert "mask" in refused("bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)


def test_an_encoder_decoder_is_refused(tmp_path):
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    made = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(BackboneError, match="encoder-decoder"):
        Backbone(made, CPU)
    made.save_pretrained(tmp_path)
    with pytest.raises(BackboneError, match="encoder-decoder"):
        backbones.load(tmp_path, CPU, "t5")


@pytest.mark.parametrize("break_it", ["mask ignored", "mask inverted", "positions ignored", "mask boolean"])
def test_a_model_that_does_not_honour_trees_is_refused(break_it):
    of = backbone(attention="eager")
    forward = of.model.model.forward

    def broken(*args, **kwargs):
        mask, rows = kwargs["attention_mask"], kwargs["input_ids"].shape[1]
        if mask is not None and break_it == "mask ignored":
            kwargs["attention_mask"] = torch.zeros_like(mask)
        if mask is not None and break_it == "mask inverted":
            kwargs["attention_mask"] = torch.where(mask == 0, torch.finfo(mask.dtype).min, 0.0)
        if mask is not None and break_it == "mask boolean":
            kwargs["attention_mask"] = mask == 0
        if mask is not None and break_it == "positions ignored":
            kwargs["position_ids"] = torch.arange(rows)[None] + mask.shape[-1] - rows
        return forward(*args, **kwargs)

    of.check_trees()
    of.model.model.forward = broken
    with pytest.raises(BackboneError, match="does not honour a tree mask"):
        of.check_trees()


def test_nan_logits_are_refused():
    of = backbone()
    of.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(BackboneError):
        of.check_trees()


def test_a_source_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    for source in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BackboneError) as error:
            backbones.load(source, CPU)
        assert "\n" not in str(error.value) and "could not be loaded" in str(error.value)


def test_load_reads_back_what_was_saved(tmp_path):
    model("llama tied", eos_token_id=2).save_pretrained(tmp_path)
    of = backbones.load(tmp_path, CPU, "tiny")
    assert (of.name, of.vocab_size, of.hidden_size, of.context, of.end_ids) == ("tiny", VOCAB, 64, 128, {2})
    assert not any(parameter.requires_grad for parameter in of.model.parameters()) and not of.model.training
    same = SimpleNamespace(model=model("llama tied"))
    assert difference(of.prefill(prompt(0), of.new_cache(9)).logits[0], plain_logits(same, prompt(0))[-1]) < 1e-5


def test_the_model_carries_no_trace_of_a_run():
    of = backbone()
    before = set(vars(of.model)), set(vars(of.lm_head))
    of.prefill(prompt(0), of.new_cache(9))
    assert (set(vars(of.model)), set(vars(of.lm_head))) == before
    assert not of.lm_head._forward_pre_hooks
    of.model.forward = lambda **_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        of.prefill(prompt(0), of.new_cache(9))
    assert not of.lm_head._forward_pre_hooks


# -------------------------------------------------------------------------------------------------------------- device


def test_device_and_dtype_are_chosen_with_a_reason():
    chosen = device.choose("cpu")
    assert (chosen.device.type, chosen.dtype, chosen.dtype_name) == ("cpu", torch.float32, "fp32")
    assert "exact" in chosen.reason and chosen.device_name.startswith("CPU")
    assert device.choose("cpu", "bf16").dtype == torch.bfloat16
    auto = device.choose()
    assert auto.device.type == ("cuda" if torch.cuda.is_available() else "cpu") and auto.reason


def test_zero_gpu_has_a_card_only_where_one_is_lent(monkeypatch):
    """There torch says everywhere that a card is available."""
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = device.choose()
    assert chosen.device.type == "cpu" and chosen.reason.startswith("ZeroGPU lends its card")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(device, "_device", torch.device)
    assert device.choose(dtype="fp32").device.type == "cuda"


@pytest.mark.parametrize("name, dtype", [("tpu9", "auto"), ("cpu", "fp8"), ("cuda:99", "auto"), ("meta", "auto"),
                                         ("", "auto")])
def test_devices_that_are_not_here_are_refused(name, dtype):
    with pytest.raises(DeviceError) as error:
        device.choose(name, dtype)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
