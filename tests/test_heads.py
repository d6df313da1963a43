"""Heads: where they start, what they read, and which vocabulary they draft from."""

import pytest
import torch
from tiny import VOCAB, backbone, difference, plain_logits, prompt, random_drafter
from torch.nn import functional as F

from medusa_viz.models.heads import Drafter, MedusaHeads

DRAFT = [0, 3, 4, 9, 17, 40, 60]


def next_state(of, ids=None):
    forward = of.prefill(ids or prompt(0), of.new_cache(16))
    return forward.hidden, forward.logits


@pytest.mark.parametrize("kind", ["llama", "llama tied", "gpt2", "phi3"])
@pytest.mark.parametrize("layers", [1, 2])
def test_zero_heads_equal_the_lm_head_exactly(kind, layers):
    of = backbone(kind)  # field cases A13 and A19: true of the state behind the final norm only
    hidden, logits = next_state(of)
    assert (Drafter(MedusaHeads(1, of.hidden_size, layers), of.lm_head).logits(hidden)[0] == logits).all()
    assert (MedusaHeads(3, of.hidden_size, layers).features(hidden.clone()) == hidden).all()
    own = of.lm_head.weight.detach().expand(3, -1, -1).clone()
    for heads in (MedusaHeads(3, of.hidden_size, layers), MedusaHeads(3, of.hidden_size, layers, output=own)):
        drafted = Drafter(heads, of.lm_head).logits(hidden)
        assert drafted.shape == (3, 1, VOCAB)
        assert difference(drafted[:, 0], logits.expand(3, -1)) < 1e-6  # a product of three rows sums in another order
    with torch.no_grad():
        before_norm = of.model(input_ids=torch.tensor([prompt(0)]), output_hidden_states=True).hidden_states[-2][0, -1:]
    assert difference(Drafter(MedusaHeads(1, of.hidden_size), of.lm_head).logits(before_norm)[0], logits) > 0.1


def test_an_lm_head_with_a_bias_keeps_it():
    of = backbone("phi3")
    of.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB), requires_grad=False)
    hidden, logits = next_state(of)
    assert (Drafter(MedusaHeads(1, of.hidden_size), of.lm_head).logits(hidden)[0] == logits).all()
    some = Drafter(MedusaHeads(2, of.hidden_size, draft_ids=torch.tensor(DRAFT)), of.lm_head).logits(hidden)
    assert difference(some[1], logits[:, DRAFT]) < 1e-6


@pytest.mark.parametrize(("own", "draft_ids", "said"), [  # field case A13
    (False, None, f"shared output matrix (the backbone's LM head), all {VOCAB} rows"),
    (False, DRAFT, f"shared output matrix (the backbone's LM head), 7 of {VOCAB} rows"),
    (True, None, f"own output matrix per head, all {VOCAB} rows"),
    (True, DRAFT, f"own output matrix per head, 7 of {VOCAB} rows")])
def test_what_the_heads_draft_from_is_told(own, draft_ids, said):
    assert random_drafter(backbone(), own=own, draft_ids=draft_ids).drafts_from == said


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_ids", [None, DRAFT])
def test_logits_equal_the_formula_head_by_head(layers, own, draft_ids):
    of = backbone()
    drafter = random_drafter(of, heads=4, own=own, draft_ids=draft_ids, layers=layers)
    hidden, module = torch.randn(5, of.hidden_size), drafter.module
    got = drafter.logits(hidden)
    rows = draft_ids or list(range(VOCAB))
    for k in range(4):
        for row in range(5):
            x = hidden[row]
            for layer in range(layers):
                x = x + F.silu(module.weight[layer, k] @ x + module.bias[layer, k])
            matrix = module.output[k] if own else of.lm_head.weight[rows]
            assert difference(got[k, row], matrix @ x) < 1e-5
    assert drafter.choices == len(rows)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_ids", [None, DRAFT])
def test_top_tokens_are_ids_of_the_whole_vocabulary(own, draft_ids):
    of = backbone()
    drafter = random_drafter(of, own=own, draft_ids=draft_ids)
    hidden, _ = next_state(of)
    p = drafter.logits(hidden)[:, 0].softmax(-1)
    ids = draft_ids or list(range(VOCAB))
    for width in (1, 3, 7, 500):
        top = drafter.top(hidden, width, with_p=True)
        wanted = min(width, len(ids))
        assert top.ids.shape == top.p.shape == (3, wanted)
        for k in range(3):
            order = sorted(range(len(ids)), key=lambda row: -float(p[k, row]))[:wanted]
            assert top.ids[k].tolist() == [ids[row] for row in order]
            assert top.p[k].tolist() == pytest.approx([float(p[k, row]) for row in order], abs=1e-6)
        assert drafter.top(hidden, width).p.shape == (3, 0)
        assert (drafter.top(hidden, width).ids == top.ids).all()


def test_heads_are_cast_to_the_backbones_precision():
    of = backbone(dtype=torch.bfloat16)
    for own in (False, True):
        drafter = random_drafter(of, own=own)
        hidden, _ = next_state(of)
        assert drafter.module.weight.dtype == torch.bfloat16
        assert drafter.logits(hidden).dtype == torch.bfloat16
        top = drafter.top(hidden, 5, with_p=True)
        assert top.ids.max() < VOCAB and top.p.dtype == torch.float32 and (top.p.sum(-1) <= 1 + 1e-5).all()


def test_heads_read_the_last_committed_token_only():
    of = backbone()
    drafter = random_drafter(of)
    one, _ = next_state(of, prompt(1))
    cache = of.new_cache(16)
    of.prefill(prompt(1)[:3], cache)
    two = of.prefill(prompt(1)[3:], cache).hidden
    assert (drafter.top(one, 4).ids == drafter.top(two, 4).ids).all()
    assert plain_logits(of, prompt(1)).shape == (6, VOCAB)
