"""Batch writing: many texts side by side equal one at a time; sampling and loops follow their rules."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import EAGER_ONLY, KINDS, VOCAB, backbone, plain_greedy, plain_logits, plain_text, prompt
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import repeat_kv

from medusa_viz.decoding.batch import TOP_P, Draw, Request, Writer, draw, shared_prefix, write_all
from medusa_viz.decoding.loops import kept_length
from medusa_viz.models.rows import BLOCK, GROUPED, RowBackbone, RowCache, grouped_attention
from medusa_viz.training.prompts import TurnFrame

END = frozenset([0, 5])
FRAME = TurnFrame((1, 2, 3), (4, 6, 7))


def requests(count: int, seed: int = 0, temperature: float = 0.0, limit: int = 40, shared: tuple[int, ...] = (1, 2, 3),
             ) -> list[Request]:
    rng = random.Random(seed)
    return [Request(n, (*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))),
                    (Draw(rng.randint(1, limit), END, temperature),)) for n in range(count)]


# ---------------------------------------------------------------------------------------------------- side by side


@pytest.mark.parametrize("rows", [1, 3, 7, 64])
def test_continuous_batching_writes_what_greedy_decoding_writes_one_by_one(rows):
    of = backbone()
    asked = requests(24)
    for request, text in zip(asked, write_all(of, asked, rows)):
        single = plain_text(of, request.ids, request.draws[0].limit, END)
        assert text.ids == [*request.ids, *single] and text.starts == [len(request.ids)]
        assert text.finishes == ["end" if single[-1] in END else "length"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama"])
def test_every_kind_of_model_writes_its_own_greedy_text(kind):
    of = backbone(kind)
    asked = [Request(n, tuple(prompt(n, 4 + 3 * n)), (Draw(12, END),)) for n in range(3)]
    for request, text in zip(asked, write_all(of, asked, 2)):
        assert text.ids[len(request.ids) :] == plain_greedy(of, request.ids, 12, END)


def test_texts_longer_than_a_block_of_the_cache_and_empty_prefixes_work():
    of = backbone()
    asked = [Request(0, (9,), (Draw(BLOCK + 10, frozenset()),)), Request(1, (7, 8), (Draw(3, frozenset()),)),
             Request(2, tuple(prompt(3, BLOCK + 5)), (Draw(20, frozenset()),))]
    assert shared_prefix([request.ids for request in asked]) == []
    for request, text in zip(asked, write_all(of, asked, 2)):
        assert text.ids[len(request.ids) :] == plain_greedy(of, request.ids, request.draws[0].limit)


def test_the_shared_model_is_left_as_it_was_and_its_weights_are_shared():
    of = backbone()
    before = of.model.config._attn_implementation
    rows = RowBackbone(of)
    assert rows.attention == "grouped attention" and rows.model.config._attn_implementation == GROUPED
    assert of.model.config._attn_implementation == before and of.config is not rows.config
    assert {p.data_ptr() for p in of.model.parameters()} == {p.data_ptr() for p in rows.model.parameters()}
    ids = prompt(1)
    assert torch.allclose(of.prefill(ids, of.new_cache(9)).logits[0], plain_logits(of, ids)[-1], atol=1e-4)


def test_models_whose_attention_is_more_than_products_and_softmax_keep_their_own():
    for kind in EAGER_ONLY:
        for dtype in (torch.float32, torch.bfloat16):
            assert RowBackbone(backbone(kind, dtype=dtype)).attention.startswith("eager attention (grouped attention")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_reason_against_grouped_attention(dtype):
    assert RowBackbone(backbone(dtype=dtype)).attention == "grouped attention"


class OtherCard(torch.Tensor):
    """A tensor on another card than plain ones, until it is moved."""


class TwoCards(TorchFunctionMode):
    """New tensors of token ids lie on another card than weights and layers, and index nothing there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("__getitem__", "__setitem__") and not isinstance(args[0], OtherCard):
            keys = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(key, OtherCard) for key in keys), "indices lie on another device"
        made = function(*args, **(kwargs or {}))
        if function is torch.tensor:
            return made.as_subclass(OtherCard)
        return made.as_subclass(torch.Tensor) if function is torch.Tensor.to else made


def test_rows_of_layers_on_several_cards():
    of = RowBackbone(backbone())
    keys, hidden = torch.randn(2, 2, 1, 4), torch.randn(2, 1, of.hidden_size)
    head = of.lm_head

    class Split:
        def get_output_embeddings(self):
            return head

        def __call__(self, **arguments):
            cache.layers[0].update(keys, 2 * keys)
            return SimpleNamespace(logits=head(hidden))

    cache = RowCache(2, 8, of.new_cache(1), 1)
    of.model = Split()
    with TwoCards():
        logits = of.advance([5, 6], [0, 3], cache, [1])
    assert torch.equal(logits, head(hidden[[1]])[:, -1])
    layer = cache.layers[0]
    assert torch.equal(layer.keys[1, :, 3], keys[1, :, 0]) and torch.equal(layer.values[0, :, 0], 2 * keys[0, :, 0])


def test_packed_linears_are_shared_not_copied():
    of = backbone()
    from medusa_viz.models import packed

    if not packed.has_operators():
        pytest.skip("this torch has no packed oneDNN linears")
    plain = write_all(of, requests(6), 4)
    packed.replace_linears(of.model)
    assert [text.ids for text in write_all(of, requests(6), 4)] == [text.ids for text in plain]


@pytest.mark.parametrize("length", [1, 5])
def test_grouped_attention_equals_repeated_keys(length):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, length, 8), torch.randn(3, 2, 11, 8), torch.randn(3, 2, 11, 8)
    mask = torch.where(torch.rand(3, 1, length, 11) < 0.4, torch.finfo(torch.float32).min, 0.0)
    mask[..., 0] = 0
    right = F.scaled_dot_product_attention(query, repeat_kv(key, 3), repeat_kv(value, 3), mask, scale=0.3)
    mixed, _ = grouped_attention(None, query, key, value, mask, scaling=0.3)
    assert torch.allclose(mixed, right.transpose(1, 2), atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours_or_on_how_many_there_are():
    of = RowBackbone(backbone())
    seen = []
    for rows, place in ((8, 0), (8, 5), (12, 11)):
        cache = of.new_row_cache([1, 2, 3], rows, 30)
        rng = random.Random(place)
        for position, token in enumerate((9, 8, 7), start=3):
            fed = [rng.randrange(VOCAB) for _ in range(rows)]
            fed[place] = token
            logits = of.advance(fed, [position] * rows, cache, list(range(rows)))
        seen.append(logits[place])
    right = plain_logits(of, [1, 2, 3, 9, 8, 7])[-1]
    for logits in seen:
        assert torch.allclose(logits, right, atol=1e-4) and torch.allclose(logits, seen[0], atol=1e-6)


def test_a_request_that_does_not_start_with_the_prefix_is_refused():
    with pytest.raises(ValueError, match="shared prefix"):
        list(Writer(backbone(), [1, 2], 2).run(iter([Request(0, (1, 3), (Draw(3, END),))]).__next__))


# --------------------------------------------------------------------------------------------------------- sampling


def test_drawn_tokens_follow_the_truncated_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -9.0]])
    uniforms = np.random.default_rng(0).random(4000)
    drawn = draw(logits.expand(4000, -1), [0.7] * 4000, uniforms.tolist())
    p = (logits[0] / 0.7).softmax(0).double().numpy()
    kept = p * (np.cumsum(p) - p < TOP_P)
    shares = np.bincount(drawn, minlength=5) / 4000
    assert np.abs(shares - kept / kept.sum()).max() < 0.02 and shares[kept == 0].sum() == 0
    assert draw(logits, [0.0], [0.99]) == [0] and draw(logits, [0.7], [0.0]) == [0]


def test_samples_depend_on_seed_and_number_alone():
    of = backbone()
    asked = requests(12, temperature=1.0)
    texts = {text.number: text.ids for text in write_all(of, asked, 5, seed=3)}
    assert {text.number: text.ids for text in write_all(of, asked, 5, seed=3)} == texts
    shuffled = asked[::-1]
    assert {text.number: text.ids for text in write_all(of, shuffled, 2, seed=3)} == texts
    assert {text.number: text.ids for text in write_all(of, asked, 5, seed=4)} != texts


# ------------------------------------------------------------------------------------------------------------ loops


@pytest.mark.parametrize(("ids", "kept"), [
    ([1, 2, 3] + [7] * 24, 4),  # one token over and over
    ([1, 2, 3] + [7] * 23, None),  # too short a span to be a loop
    ([9, 9] + [4, 5, 6] * 8, 2 + 3),
    ([1] + list(range(10, 40)) * 3, 1 + 30),  # a long period needs three rounds
    (list(range(10, 40)) * 2 + list(range(10, 39)), None),
    (list(range(200)), None),
    ([7] * 24 + list(range(30)), 1),  # found when it happens: what comes after it is not read
])
def test_loops_are_found_and_cut_after_their_first_round(ids, kept):
    assert kept_length(ids) == kept


def test_the_loop_rule_equals_a_plain_search():
    def plain(ids):
        for end in range(1, len(ids) + 1):
            for period in range(1, 65):
                span = period
                while span < end and ids[end - 1 - span] == ids[end - 1 - span + period]:
                    span += 1
                if span > period and span >= max(3 * period, 24):
                    return end - span + period
        return None

    rng = random.Random(0)
    for _ in range(60):
        start, period = ([rng.randrange(4) for _ in range(rng.randint(*length))] for length in ((0, 30), (1, 9)))
        text = start + period * rng.randint(1, 12)
        assert kept_length(text) == plain(text)


def test_a_looping_text_ends_and_is_cut():
    of = backbone("llama tied")
    with torch.no_grad():  # a model that repeats its last token for ever
        for parameter in of.model.model.layers.parameters():
            parameter.zero_()
        of.model.lm_head.weight.copy_(torch.linalg.qr(torch.randn(64, 64))[0][:VOCAB])
    text, = write_all(of, [Request(0, (8, 9), (Draw(80, END, watch_loops=True),))], 1)
    assert text.ids == [8, 9, 9] and text.finishes == ["loop"]
