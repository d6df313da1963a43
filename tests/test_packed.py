"""Packed linears and attention without repeated keys: the same numbers, said in words, and never a trap."""

import copy
import pickle
import random
import re
from types import SimpleNamespace

import pytest
import torch
from tiny import (
    KINDS,
    VOCAB,
    backbone,
    difference,
    model,
    plain_greedy,
    plain_logits,
    prompt,
    random_drafter,
    random_shape,
)
from torch import nn
from torch.nn import functional as F

from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.models import attention, packed
from medusa_viz.models import backbone as backbones
from medusa_viz.models.device import Placement
from medusa_viz.models.heads import Drafter, MedusaHeads
from medusa_viz.models.packed import PackedLinear, PackedWeight, SharedProduct, Trial

CPU = Placement(torch.device("cpu"), torch.float32, "test")
FASTER = Trial((2.0, 3.0), 0.0)


@pytest.fixture
def win(monkeypatch):
    """Packing wins its trial, however busy this machine is."""
    monkeypatch.setattr(packed, "measure", lambda linears: FASTER)


def packed_backbone(kind="llama", **changes):
    of = backbone(kind, **changes)
    of.speed_up()
    return of


def packed_names(of):
    return {name for name, module in of.model.named_modules() if isinstance(module, PackedLinear)}


# -------------------------------------------------------------------------------------------------------- one product


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(), (1,), (7,), (2, 3), (1, 40)])
def test_a_packed_weight_computes_what_a_linear_does(rows, bias):
    linear, x = nn.Linear(24, 40, bias=bias), torch.randn(*rows, 24)
    product = PackedWeight(linear.weight, linear.bias)
    apart = torch.randn(4, 48)[:, :24]  # rows that do not lie next to each other
    with torch.no_grad():
        assert difference(product(x), linear(x)) < 1e-5
        assert difference(product(apart), linear(apart)) < 1e-5
    assert torch.equal(product.dense(), linear.weight)


def test_linears_of_one_input_are_one_product():
    linears = [nn.Linear(24, size) for size in (16, 8, 40)]
    shared, calls = SharedProduct(linears), []
    whole = shared._whole
    shared._whole = lambda x: calls.append(x) or whole(x)
    x, other = torch.randn(5, 24), torch.randn(5, 24)
    with torch.no_grad():
        for order in ((0, 1, 2), (2, 0, 1)):
            for place in order:
                assert difference(shared.part(place, x), linears[place](x)) < 1e-5
        assert len(calls) == 2 and shared._input is None  # nothing is held once everybody has its part
        assert difference(shared.part(0, x), linears[0](x)) < 1e-5
        assert difference(shared.part(1, other), linears[1](other)) < 1e-5  # another input: no part lies ready
        assert difference(shared.part(0, x), linears[0](x)) < 1e-5
        shared._whole = whole
        for place, linear in enumerate(linears):
            assert torch.equal(shared.dense(place), linear.weight)


def test_the_same_tensor_with_new_numbers_is_computed_again():
    linears = [nn.Linear(8, 8) for _ in range(2)]
    shared, x = SharedProduct(linears), torch.randn(3, 8)
    with torch.no_grad():
        shared.part(0, x)  # whoever should take the other part never comes
        x.fill_(2.0)
        assert difference(shared.part(0, x), linears[0](x)) < 1e-5
        assert difference(shared.part(1, x), linears[1](x)) < 1e-5


def test_gradients_copies_and_moves_are_refused_in_a_sentence(win):
    of = packed_backbone()
    with pytest.raises(RuntimeError, match="inference only"):
        of.lm_head(torch.randn(1, 64, requires_grad=True))
    with pytest.raises(RuntimeError, match="packed=False"):
        of.model.double()
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="inference only"):
            copying(of.model)


# ----------------------------------------------------------------------------------------------------- a whole model


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_packed_model_gives_the_same_logits(kind, win):
    plain, of = backbone(kind), packed_backbone(kind)
    assert of.linears == "packed oneDNN, 2.0x at 1 row and 3.0x at 8 rows"
    assert "lm_head" in packed_names(of) or kind == "gpt_neox"
    cache, other = of.new_cache(32), plain.new_cache(32)
    ids, depth = prompt(0), torch.tensor([0, 1, 1, 2, 2])
    block = plain.additive(torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0],
                                         [1, 0, 1, 0, 1]], dtype=torch.bool))
    seen, right = of.prefill(ids, cache, keep=6), plain.prefill(ids, other, keep=6)
    assert difference(seen.logits, right.logits) < 1e-5 and difference(seen.hidden, right.hidden) < 1e-5
    tokens = torch.tensor([3, 1, 4, 1, 5])
    seen, right = of.verify(tokens, depth, block, cache), plain.verify(tokens, depth, block, other)
    assert difference(seen.logits, right.logits) < 1e-5 and difference(seen.hidden, right.hidden) < 1e-5
    of.check_trees()


def test_llamas_projections_are_fused(win):
    of = packed_backbone()
    names = packed_names(of)
    assert len(names) == 2 * 7 + 1
    layer = of.model.model.layers[0]
    assert len({id(part._product.func.__self__) for part in (layer.self_attn.q_proj, layer.self_attn.k_proj,
                                                            layer.self_attn.v_proj)}) == 1
    assert layer.mlp.gate_proj._product.func.__self__ is layer.mlp.up_proj._product.func.__self__
    assert isinstance(layer.mlp.down_proj._product, PackedWeight)


def test_unequal_siblings_are_packed_one_by_one():
    odd = nn.Module()
    odd.gate_proj, odd.up_proj = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=True)
    packed.replace_linears(odd)
    assert all(isinstance(part._product, PackedWeight) for part in (odd.gate_proj, odd.up_proj))


@pytest.mark.parametrize("kind", ["llama", "llama tied", "qwen2"])
def test_weights_can_still_be_read_and_saved(kind, win, tmp_path):
    of, plain = packed_backbone(kind), model(kind)
    wanted = plain.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in of.model.state_dict().items()} == {
        name: tuple(tensor.shape) for name, tensor in wanted.items()}
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in of.model.state_dict().items())
    assert torch.equal(of.lm_head.weight, plain.lm_head.weight)
    of.model.save_pretrained(tmp_path)
    again = backbones.load(tmp_path, CPU, packed=False)
    assert difference(plain_logits(again, prompt(0)), plain_logits(SimpleNamespace(model=plain), prompt(0))) == 0


def test_what_packs_holds_no_weight_twice_but_a_tied_one(win):
    of = packed_backbone()
    assert sum(parameter.numel() for parameter in of.model.parameters()) == VOCAB * 64 + 5 * 64  # embeddings and norms
    tied = packed_backbone("llama tied")
    assert tied.lm_head.weight is tied.model.get_input_embeddings().weight
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in tied.model.parameters())


def test_the_hook_still_sees_what_the_lm_head_reads(win):
    of, plain = packed_backbone(), backbone()
    assert isinstance(of.lm_head, PackedLinear) and of.lm_head is of.model.get_output_embeddings()
    forward = of.prefill(prompt(0), of.new_cache(9))
    assert difference(forward.hidden, plain.prefill(prompt(0), plain.new_cache(9)).hidden) < 1e-5
    assert difference(F.linear(forward.hidden, of.lm_head.weight), forward.logits) < 1e-5
    assert not of.lm_head._forward_pre_hooks


# ------------------------------------------------------------------------------------------------------- heads, decode


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_ids", [None, [0, 3, 4, 9, 17, 40, 60]])
def test_heads_draft_the_same_from_a_packed_lm_head(own, draft_ids, layers, win):
    of, plain = packed_backbone(), backbone()
    drafters = [random_drafter(one, own=own, draft_ids=draft_ids, layers=layers) for one in (of, plain)]
    hidden = torch.randn(3, 64)
    assert difference(drafters[0].logits(hidden), drafters[1].logits(hidden)) < 1e-5
    tops = [drafter.top(hidden[:1], 5, with_p=True) for drafter in drafters]
    assert torch.equal(tops[0].ids, tops[1].ids) and difference(tops[0].p, tops[1].p) < 1e-4
    assert torch.equal(tops[0].logits, drafters[0].logits(hidden[:1])[:, 0])
    assert drafters[0].choices == len(draft_ids or range(VOCAB))


@pytest.mark.parametrize("draft_ids", [None, [0, 3, 4, 9, 17, 40, 60]])
def test_drafting_rows_know_their_ids(draft_ids):
    heads = MedusaHeads(1, 64, draft_ids=None if draft_ids is None else torch.tensor(draft_ids))
    drafter = Drafter(heads, backbone().lm_head)
    ids = draft_ids or list(range(VOCAB))
    assert drafter.draft_row.tolist() == [ids.index(token) if token in ids else -1 for token in range(VOCAB)]


@pytest.mark.parametrize("kind", ["llama", "llama tied", "mistral", "qwen3", "gemma2"])
def test_packing_changes_no_text(kind, win):
    plain, of = backbone(kind), packed_backbone(kind)
    drafter, rng = random_drafter(of), random.Random(1)
    for seed in range(3):
        text = plain_greedy(plain, prompt(seed), 24)
        for shape in (PLAIN, random_shape(rng), random_shape(rng)):
            steps = decode(of, drafter, prompt(seed), shape, Acceptance(), 24, ())
            assert [token for step in steps for token in step.tokens] == text


# ------------------------------------------------------------------------------------------------------ report, falls


def test_the_report_says_what_was_measured():
    of = packed_backbone()  # a real trial: on a busy machine either may win
    gains = r"\d+\.\dx at 1 row and \d+\.\dx at 8 rows"
    assert re.fullmatch(rf"packed oneDNN, {gains}|plain \(packed oneDNN is no faster here: {gains}\)", of.linears)
    assert bool(packed_names(of)) == of.linears.startswith("packed")


def test_a_loss_is_kept_out(monkeypatch):
    monkeypatch.setattr(packed, "measure", lambda linears: Trial((0.5, 1.5), 0.0))
    of = packed_backbone()
    assert of.linears == "plain (packed oneDNN is no faster here: 0.5x at 1 row and 1.5x at 8 rows)"
    assert not packed_names(of)
    monkeypatch.setattr(packed, "measure", lambda linears: Trial((0.9, 1.5), 0.0))
    assert packed_backbone().linears.startswith("packed")


@pytest.mark.parametrize("error", [0.01, float("nan")])
def test_wrong_products_are_kept_out(error, monkeypatch):
    monkeypatch.setattr(packed, "measure", lambda linears: Trial((2.0, 2.0), error))
    of = packed_backbone()
    assert of.linears.startswith("plain (packed oneDNN differs by ") and not packed_names(of)


def test_a_trial_finds_a_wrong_product(monkeypatch):
    linears = [nn.Linear(16, 16) for _ in range(3)]
    assert packed.measure(linears).error < 1e-5
    product = PackedWeight.__call__
    monkeypatch.setattr(PackedWeight, "__call__", lambda self, x: product(self, x) * 1.01)
    assert packed.measure(linears).error > packed.TOLERANCE
    monkeypatch.setattr(PackedWeight, "__call__", lambda self, x: product(self, x) * float("nan"))
    assert not packed.measure(linears).error <= packed.TOLERANCE


@pytest.mark.parametrize("missing", ["_reorder_linear_weight", "_linear_pointwise"])
def test_without_the_operators_linears_stay_plain(missing, monkeypatch):
    real = torch.ops.mkldnn
    some = SimpleNamespace(**{name: getattr(real, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
                              if name != missing})
    monkeypatch.setattr(torch.ops, "mkldnn", some)
    of = packed_backbone()
    assert of.linears == "plain (this torch has no packed oneDNN linears)" and not packed_names(of)
    assert difference(plain_logits(of, prompt(0)), plain_logits(backbone(), prompt(0))) < 1e-5


def test_without_onednn_linears_stay_plain(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packed_backbone().linears == "plain (this torch has no packed oneDNN linears)"


@pytest.mark.parametrize("kind", ["llama", "llama tied"])
@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_a_model_that_packing_breaks_gets_its_linears_back(kind, fault, win, monkeypatch):
    def broken(self, x):
        if fault == "raises":
            raise RuntimeError("could not create a primitive\nmore")
        return torch.zeros(*x.shape[:-1], self.out_features)

    monkeypatch.setattr(PackedWeight, "__call__", broken)
    of, plain = packed_backbone(kind), backbone(kind)
    assert of.linears == {"raises": "plain (packed oneDNN failed: could not create a primitive)",
                          "wrong": "plain (packed oneDNN changes this model's logits)"}[fault]
    assert not packed_names(of)
    assert torch.equal(plain_logits(of, prompt(0)), plain_logits(plain, prompt(0)))
    assert (of.lm_head.weight is of.model.get_input_embeddings().weight) == (kind == "llama tied")
    copy.deepcopy(of.model).requires_grad_(True)(input_ids=torch.tensor([prompt(0)])).logits.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_stay_plain(dtype, win):
    of = packed_backbone(dtype=dtype)
    assert of.linears == "plain (packing is for fp32 on a CPU)" and not packed_names(of)


def test_linears_that_compute_more_are_left_alone():
    class Adapted(nn.Linear):
        pass

    hooked, replaced = nn.Linear(8, 8), nn.Linear(8, 8)
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    replaced.forward = lambda x: x
    assert not any(packed.can_pack(module) for module in (Adapted(8, 8), hooked, replaced, nn.Embedding(8, 8)))
    assert packed.can_pack(nn.Linear(8, 8))


def test_load_packs_unless_told_otherwise(win, tmp_path):
    model().save_pretrained(tmp_path)
    assert packed_names(backbones.load(tmp_path, CPU))
    plain = backbones.load(tmp_path, CPU, packed=False)
    assert not packed_names(plain) and plain.linears == "plain"
    assert plain.model.config._attn_implementation == "sdpa"
    copy.deepcopy(plain.model).double()


# ----------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "cohere"])
def test_grouped_models_stop_repeating_keys(kind, monkeypatch):
    of, plain = backbone(kind), backbone(kind)
    assert attention.stop_repeating(of.model, of._probe)
    calls = []
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda query, key, *args, **kwargs: calls.append(
        (query.shape[1], key.shape[1])) or real(query, key, *args, **kwargs))
    forward = of.prefill(prompt(0), of.new_cache(9))
    assert calls == [(4, 2), (4, 2)]
    assert difference(forward.logits, plain.prefill(prompt(0), plain.new_cache(9)).logits) < 1e-5
    assert difference(plain_logits(of, prompt(0)), plain_logits(plain, prompt(0))) < 1e-5  # no mask of ours
    of.check_trees()


@pytest.mark.parametrize("made", [lambda: backbone(attention="eager"), lambda: backbone(num_key_value_heads=4),
                                  lambda: backbone("gpt2"), lambda: backbone("gemma2")])
def test_other_models_keep_their_attention(made):
    of = made()
    before = of.model.config._attn_implementation
    assert not attention.stop_repeating(of.model, of._probe)
    assert of.model.config._attn_implementation == before


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_attention_that_changes_the_logits_is_put_back(fault, monkeypatch):
    def broken(module, query, key, value, *args, **kwargs):
        if fault == "raises":
            raise RuntimeError("no such kernel")
        return torch.zeros_like(query.transpose(1, 2)), None

    of = backbone()
    monkeypatch.setitem(type(attention.AttentionInterface())._global_mapping, attention.UNREPEATED, broken)
    assert not attention.stop_repeating(of.model, of._probe)
    assert of.model.config._attn_implementation == "sdpa"
    of.check_trees()
