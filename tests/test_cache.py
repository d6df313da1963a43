"""The tree cache: after any commits, truncations and growth it equals a fresh prefill of the committed tokens."""

import random

import pytest
import torch
from tiny import backbone, difference, plain_logits, prompt, random_shape

from medusa_viz.models.cache import TreeCache


def tree_inputs(of, shape, rng):
    tokens = torch.tensor([rng.randrange(of.vocab_size) for _ in range(shape.nodes + 1)])
    return tokens, torch.as_tensor(shape.depth).long(), of.additive(torch.from_numpy(shape.mask))


def assert_holds(of, cache, ids):
    """Keys and values are those of a fresh prefill, all of the buffers finite."""
    fresh = of.new_cache(len(ids))
    of.prefill(ids, fresh)
    assert cache.length == fresh.length == len(ids)
    for layer, right in zip(cache.layers, fresh.layers):
        for name in ("keys", "values"):
            buffer = getattr(layer, name)
            assert buffer.isfinite().all()
            assert difference(buffer[:, :, : len(ids)], getattr(right, name)[:, :, : len(ids)]) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_neox", "deepseek_v3"])
def test_cache_after_commits_equals_a_fresh_prefill(kind):
    rng, of = random.Random(kind), backbone(kind)
    ids, cache = prompt(1), of.new_cache(7)
    of.prefill(ids, cache)
    for _ in range(12):
        shape = random_shape(rng, heads=4)
        tokens, depth, block = tree_inputs(of, shape, rng)
        of.verify(tokens, depth, block, cache)
        rows = shape.path_to(rng.randrange(shape.nodes + 1))
        cache.commit(rows)
        ids += tokens[rows].tolist()
        assert_holds(of, cache, ids)
        if rng.random() < 0.3:
            keep = rng.randint(1, len(ids))
            cache.truncate(keep)
            ids = ids[:keep]
            assert_holds(of, cache, ids)


def test_verifying_commits_nothing():
    rng, of = random.Random(0), backbone()
    cache, shape = of.new_cache(4), random_shape(rng)
    of.prefill(prompt(1), cache)
    inputs = tree_inputs(of, shape, rng)
    first = of.verify(*inputs, cache).logits
    assert cache.length == len(prompt(1))
    of.verify(*tree_inputs(of, random_shape(rng, paths=9), rng), cache)  # other rows in between leave no trace
    torch.testing.assert_close(of.verify(*inputs, cache).logits, first, atol=0, rtol=0)


def test_capacity_grows_by_doubling_and_keeps_the_prefix():
    of, ids = backbone(), prompt(2, length=40)
    cache, seen = of.new_cache(8), []
    for token in ids:
        of.prefill([token], cache)
        seen.append(cache.capacity)
    assert sorted(set(seen)) == [8, 16, 32, 64]
    assert_holds(of, cache, ids)
    cache.reserve(500)
    assert cache.capacity == 540  # more than double is needed at once
    assert cache.layers[0].keys.shape[2] == 540 and cache.bytes == 2 * 2 * 2 * 540 * 16 * 4
    assert_holds(of, cache, ids)


@pytest.fixture
def empty_is_nan(monkeypatch):
    """Memory that nobody wrote to holds NaN, not whatever lay there."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **_: self.new_full(size, float("nan")))
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


def test_room_behind_the_prefix_is_zero(empty_is_nan):
    of, cache = backbone(), backbone().new_cache(20)
    of.prefill(prompt(1), cache)
    for rows, capacity in ((10, 20), (50, 56)):  # as first made; grown
        cache.reserve(rows)
        for layer in cache.layers:
            for buffer in (layer.keys, layer.values):
                assert buffer.shape[2] == capacity and not buffer[:, :, 6:].any()


def test_rubbish_in_scratch_rows_does_not_reach_real_ones():
    rng, of = random.Random(1), backbone()
    cache, shape = of.new_cache(64), random_shape(rng, paths=9)
    of.prefill(prompt(1), cache)
    inputs = tree_inputs(of, shape, rng)
    clean = of.verify(*inputs, cache)
    with torch.inference_mode():
        for layer in cache.layers:  # as a failed or half-precision forward may leave behind
            layer.keys[:, :, cache.length :] = float("nan")
            layer.values[:, :, cache.length :] = float("nan")
    dirty = of.verify(*inputs, cache)
    assert dirty.logits.isfinite().all()
    torch.testing.assert_close(dirty.logits, clean.logits, atol=0, rtol=0)
    assert difference(of.prefill([3, 4], cache).logits[0], plain_logits(of, [*prompt(1), 3, 4])[-1]) < 1e-5


def test_commit_takes_rows_in_order_and_truncate_never_grows():
    cache = TreeCache(1, 8)
    keys = torch.arange(6.0).reshape(1, 1, 6, 1)
    cache.update(keys, -keys, 0)
    cache.commit([0, 2, 5])
    assert cache.layers[0].keys[0, 0, :3, 0].tolist() == [0, 2, 5] and cache.length == 3
    cache.update(10 + keys[:, :, :3], keys[:, :, :3], 0)
    cache.commit([0, 1])
    assert cache.layers[0].keys[0, 0, :5, 0].tolist() == [0, 2, 5, 10, 11]
    cache.truncate(99)
    assert cache.length == 5 == cache.get_seq_length()
    cache.truncate(2)
    assert cache.length == 2
    cache.update(20 + keys[:, :, :2], keys[:, :, :2], 0)
    cache.commit([1])
    assert cache.layers[0].keys[0, 0, :3, 0].tolist() == [0, 2, 21]
