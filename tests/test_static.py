"""The static step: fixed buffers, padded rows and full-buffer masks say what the eager step says, token for token."""

import gc
import random
from types import SimpleNamespace

import pytest
import torch
from tiny import (
    EAGER_ONLY,
    KINDS,
    backbone,
    difference,
    engine,
    greedy_step,
    mixed_ranks,
    oracle_drafter,
    plain_greedy,
    prompt,
    random_drafter,
    random_shape,
)

from medusa_viz.decoding import decoder
from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.live import LiveRun
from medusa_viz.decoding.settings import SIZE_DETENTS, Acceptance
from medusa_viz.decoding.tree import dense
from medusa_viz.models import slab, static
from medusa_viz.models.slab import StaticCache
from medusa_viz.models.static import ROOM, Inputs, StaticStep, full_mask, padded
from medusa_viz.ui.running import MAX_NODES

GREEDY = Acceptance()
EVERY = [(kind, "eager" if kind in EAGER_ONLY else "sdpa") for kind in KINDS] + [("llama", "eager")]


def static_backbone(kind="llama", **arguments):
    of = backbone(kind, **arguments)
    of.static = StaticStep(of)
    return of


@pytest.fixture
def small_blocks(monkeypatch):
    """Slabs as small as the tiny models' texts, so that they grow and are reused."""
    monkeypatch.setattr(slab, "BLOCK", 8)
    monkeypatch.setattr(static, "ROOM", 0)


def inputs_of(of, shape, rng):
    tokens = torch.tensor([rng.randrange(of.vocab_size) for _ in range(shape.nodes + 1)])
    return tokens, torch.as_tensor(shape.depth).long(), of.additive(torch.from_numpy(shape.mask))


def compare(of, rounds, seed=0, heads=5, paths=14):
    """Random trees, commits, truncations and prefills on a static and an eager cache; the largest differences."""
    rng, worst = random.Random(seed), 0.0
    caches = of.new_cache(8), type(of).new_cache(SimpleNamespace(static=None, config=of.config), 8)
    assert isinstance(caches[0], StaticCache) and not isinstance(caches[1], StaticCache)
    for cache in caches:
        of.prefill(prompt(seed), cache)
    for _ in range(rounds):
        shape = random_shape(rng, heads, paths=rng.randint(0, paths))
        inputs = inputs_of(of, shape, rng)
        seen, right = (of.verify(*inputs, cache) for cache in caches)
        assert seen.logits.shape == right.logits.shape and seen.hidden.shape == right.hidden.shape
        worst = max(worst, difference(seen.logits, right.logits), difference(seen.hidden, right.hidden))
        rows = shape.path_to(rng.randrange(shape.nodes + 1))
        index = torch.tensor([*rows, 0, 0])
        for cache in caches:
            cache.commit(rows, index if rng.random() < 0.5 else None)
        if rng.random() < 0.25:
            keep, more = rng.randint(1, caches[0].length), prompt(rng.random(), rng.randint(1, 9))
            for cache in caches:
                cache.truncate(keep)
                last = of.prefill(more, cache)
            assert difference(last.logits, of.prefill(more[-1:], shortened(caches[0])).logits) < 1e-5
        if caches[0].length > 90:
            for cache in caches:
                cache.truncate(rng.randint(1, 8))
        assert caches[0].length == caches[1].length
    return worst, caches


def shortened(cache):
    cache.truncate(cache.length - 1)
    return cache


# ----------------------------------------------------------------------------------------------- equals the eager step


@pytest.mark.parametrize("kind, attention", EVERY)
def test_logits_and_hidden_states_equal_the_eager_steps(kind, attention, small_blocks):
    worst, caches = compare(static_backbone(kind, attention=attention), rounds=20)
    assert worst < 1e-5
    for layer, right in zip(*(cache.layers for cache in caches)):
        for name in ("keys", "values"):
            held, wanted = (getattr(one, name)[:, :, : caches[0].length] for one in (layer, right))
            assert difference(held, wanted) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_random_trees_write_what_plain_greedy_writes(kind, small_blocks):
    of, ids, rng = static_backbone(kind, dtype=torch.float64), prompt(0), random.Random(kind)
    text, lengths = plain_greedy(of, ids, 60), []
    for seed in range(4):
        drafter = oracle_drafter(of, ids, text, heads=4, rank=mixed_ranks(seed)) if seed else random_drafter(of, 4)
        state, written = decoder.start(of, ids, GREEDY), []
        while len(written) < 55:
            plan = decoder.plan(random_shape(rng, 4, 3, paths=8), of, drafter)
            candidates = decoder.propose(drafter, state, plan)
            forward = decoder.verify(of, state, plan, candidates)
            accepted = decoder.accept(forward, state, plan, candidates, GREEDY)
            decoder.commit(state, forward, accepted)
            written += accepted.tokens
            lengths.append(len(accepted.tokens))
        assert written == text[: len(written)]
    assert {1, 2, 3, 4} <= set(lengths)


@pytest.mark.parametrize("settings", [GREEDY, Acceptance("typical", 1.5, epsilon=0.05, delta=0.8),
                                      Acceptance("rejection", 0.8, seed=3)], ids=lambda one: one.rule)
def test_whole_runs_equal_eager_ones(settings, small_blocks):
    of, ids = backbone(dtype=torch.float64), prompt(2)
    text = plain_greedy(of, ids, 60)
    drafter = oracle_drafter(of, ids, text, heads=4, rank=mixed_ranks(2))
    for shape in (PLAIN, dense([1] * 4), dense([3, 2, 2, 1])):
        runs = []
        for step in (None, StaticStep(of)):
            of.static = step
            runs.append([(step.tokens, step.nodes, step.finish)
                         for step in decode(of, drafter, ids, shape, settings, 40, {text[37]})])
        assert runs[0] == runs[1] and runs[0]
        of.static = None


def test_live_runs_go_back_and_branch(small_blocks):
    of, ids = backbone(dtype=torch.float64), prompt(0)
    eng = engine(of, oracle_drafter(of, ids, plain_greedy(of, ids, 60), heads=4, rank=mixed_ranks(1)))
    texts = []
    for step in (None, StaticStep(of)):
        of.static = step
        rng, run, tokens = random.Random(5), LiveRun(eng), []
        positions = [run.open(ids, GREEDY)]
        for _ in range(25):
            look, committed, position = greedy_step(run, rng.choice(positions[-4:]), random_shape(rng, 4, 3, paths=8))
            walk, _ = run.walk(look, look.shape, range(look.shape.nodes + 1), Acceptance("rejection", 0.7, seed=1))
            positions.append(position)
            tokens.append((committed, walk.rows, walk.next_root, look.verification.rank))
            if len(position.ids) > 80:
                positions = [run.open(ids, GREEDY)]
        texts.append(tokens)
    assert texts[0] == texts[1]


def test_sessions_side_by_side_share_nothing(small_blocks):
    of = static_backbone(dtype=torch.float64)
    runs, right = [], []
    for seed in range(4):
        ids = prompt(seed)
        right.append(plain_greedy(of, ids, 30))
        drafter = oracle_drafter(of, ids, plain_greedy(of, ids, 40), heads=3, rank=mixed_ranks(seed))
        runs.append(decode(of, drafter, ids, dense([2, 2, 1]), GREEDY, 30, ()))
    texts = [[] for _ in runs]
    while any(len(text) < 30 for text in texts):
        for text, run in zip(texts, runs):
            text += next(run, SimpleNamespace(tokens=[])).tokens
    assert texts == right


@pytest.mark.parametrize("tied", [True, False])
def test_half_precision_is_greedy_or_its_difference_is_labelled(tied):
    """Field case A06."""
    of, ids = static_backbone(dtype=torch.bfloat16), prompt(0)
    if tied:  # two tokens that always have the same logit
        of.lm_head.weight[27] = of.lm_head.weight[43]
    for seed in range(4):
        for shape in (PLAIN, dense([3, 2, 1])):
            steps = decode(of, random_drafter(of, 3, seed), ids, shape, GREEDY, 40, ())
            found = equals_greedy(of, ids, [token for step in steps for token in step.tokens])
            assert found is None or found.tie


# ------------------------------------------------------------------------------------------------- shapes, masks, slabs


def test_rows_are_padded_to_few_sizes():
    assert [padded(rows) for rows in (1, 2, 3, 5, 16, 17, 64, 65, 73, 289, 1025)] == [
        1, 2, 4, 8, 16, 24, 64, 72, 80, 320, 1088]
    sizes = [padded(rows) for rows in range(1, MAX_NODES["cuda"] + 2)]
    assert all(0 <= size - rows < ROOM and padded(size) == size for rows, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes) and len(set(sizes)) < 40
    for nodes in SIZE_DETENTS[SIZE_DETENTS.index(8) :]:  # a tree and its root: a quarter more at most, or seven rows
        assert padded(nodes + 1) <= max(1.25 * (nodes + 1), nodes + 8), nodes


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_full_mask_is_the_eager_one_with_everything_else_closed(kind):
    of, rng = backbone(kind), random.Random(0)
    window = of.config.sliding_window if kind == "mistral" else None
    closed = torch.finfo(torch.float32).min
    for _ in range(30):
        shape, prefix = random_shape(rng, 4, paths=9), rng.randint(0, 20)
        rows, capacity = shape.nodes + 1, 64
        inputs, (tokens, depth, block) = Inputs.of_size(padded(rows), of.device), inputs_of(of, shape, rng)
        left = dense([padded(rows) - 1] if rows > 1 else [])
        inputs.fill(*inputs_of(of, left, rng), 3)  # what an earlier tree left behind
        inputs.fill(tokens, depth, block, prefix)
        assert torch.equal(inputs.tokens, torch.cat([tokens, tokens[:1].expand(padded(rows) - rows)]))
        got = full_mask(inputs.depth, inputs.sees, inputs.length, capacity, window, torch.float32)[0, 0]
        right = of._mask(depth, block, prefix, of.layer_kinds[0])[0, 0]
        assert torch.equal(got[:rows, : prefix + rows], right)
        assert (got[:rows, prefix + rows :] == closed).all()
        pads = got[rows:, prefix:]
        alone = torch.arange(capacity - prefix)[None] == torch.arange(rows, padded(rows))[:, None]
        assert torch.equal(pads == 0, alone) and (inputs.depth[rows:] == 0).all()


def test_what_lies_behind_the_rows_is_zero_even_after_rubbish(small_blocks):
    rng, of = random.Random(1), static_backbone()
    cache, large, small = of.new_cache(60), dense([4, 3]), dense([2])
    of.prefill(prompt(1), cache)
    inputs = inputs_of(of, small, rng)
    clean = of.verify(*inputs, cache).logits
    of.verify(*inputs_of(of, large, rng), cache)
    with torch.inference_mode():
        for store in cache.slab.stores:  # as a row that overflowed in half precision leaves behind
            store[:, :, :, cache.length : cache.length + large.nodes + 1] = float("nan")
    torch.testing.assert_close(of.verify(*inputs, cache).logits, clean, atol=0, rtol=0)
    for store in cache.slab.stores:
        assert not store[:, :, :, cache.length + padded(3) :].any()
    with torch.inference_mode():
        for store in cache.slab.stores:
            store[:, :, :, : cache.slab.written] = float("nan")
    used = cache.slab
    del cache
    gc.collect()
    again = of.new_cache(60)
    assert again.slab is used and not any(store.any() for store in used.stores)


def test_slabs_are_reused_and_few_are_kept(small_blocks):
    of = static_backbone()
    pool = of.static._slabs
    caches = [of.new_cache(30) for _ in range(5)]
    assert len({id(cache.slab) for cache in caches}) == 5
    kept = {id(caches[3].slab), id(caches[4].slab)}
    while caches:
        caches.pop(0)
    assert len(pool._free) == slab.KEPT == 2 and {id(one) for one in pool._free} == kept
    assert of.new_cache(200).capacity == 200 and len(pool._free) == 2  # none of the free ones is large enough
    small = of.new_cache(9)
    assert small.capacity == 16 and len(pool._free) == 2  # nor is a far too large one taken
    assert id(of.new_cache(25).slab) in kept


def test_growth_doubles_keeps_the_prefix_and_gives_the_old_slab_back(small_blocks):
    of, ids = static_backbone(), prompt(2, length=40)
    cache, seen = of.new_cache(8), []
    for token in ids:
        of.prefill([token], cache)
        seen.append(cache.capacity)
    assert sorted(set(seen)) == [8, 16, 32, 64]
    fresh = of.new_cache(64)
    of.prefill(ids, fresh)
    for layer, right in zip(cache.layers, fresh.layers):
        assert difference(layer.keys[:, :, :40], right.keys[:, :, :40]) < 1e-5
        assert difference(layer.values[:, :, :40], right.values[:, :, :40]) < 1e-5
    assert cache.bytes == sum(store.nbytes for store in cache.slab.stores) == 2 * 2 * 2 * 64 * 16 * 4


def test_layers_of_different_shapes_get_stores_of_their_own():
    like = [torch.zeros(1, *shape) for shape in ((4, 0, 16), (4, 0, 8), (2, 0, 16), (2, 0, 8), (4, 0, 16), (4, 0, 8))]
    made = slab.Slab(like, 6)
    assert sorted(tuple(store.shape) for store in made.stores) == [
        (1, 1, 2, 6, 8), (1, 1, 2, 6, 16), (2, 1, 4, 6, 8), (2, 1, 4, 6, 16)]
    for (keys, values), wanted in zip(made.layers, (4, 2, 4)):
        assert keys.shape == (1, wanted, 6, 16) and values.shape == (1, wanted, 6, 8)
        keys.fill_(1)
        assert not values.any()
    assert [tuple(store.shape[:3]) for store in static_backbone().new_cache(8).slab.stores] == [(4, 1, 2)]
