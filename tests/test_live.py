"""Live runs: steps seen one by one equal `decode`, from anywhere and in any order."""

import random
from dataclasses import replace

import pytest
import torch
from tiny import (
    backbone,
    engine,
    fail_in_third_chunk,
    greedy_rows,
    greedy_step,
    oracle_drafter,
    plain_greedy,
    plain_logits,
    prompt,
    random_shape,
)

from medusa_viz.decoding import decoder, observe
from medusa_viz.decoding.live import LiveRun
from medusa_viz.decoding.preview import LatencyEstimate, unverified
from medusa_viz.decoding.records import Step
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense, from_paths
from medusa_viz.models.backbone import BackboneError

GREEDY = Acceptance()


@pytest.fixture(scope="module")
def exact():
    """Double precision: an engine whose heads often know the greedy text, a prompt, the text."""
    of, ids = backbone(dtype=torch.float64), prompt(0)
    text, rng = plain_greedy(of, ids, 60), random.Random(0)
    ranks = {(place, k): rng.choices([0, 1, 2, 7], [6, 2, 1, 1])[0] for place in range(60) for k in range(1, 5)}
    return engine(of, oracle_drafter(of, ids, text, heads=4, rank=lambda place, k: ranks[place, k])), ids, text


def assert_same(position, other, tolerance=1e-6):
    assert (position.ids, position.root) == (other.ids, other.root)
    assert float((position.hidden - other.hidden).abs().max()) < tolerance
    assert position.root_p == pytest.approx(other.root_p, abs=tolerance)


def fresh_position(eng, ids):
    return LiveRun(eng).open(ids, GREEDY)


def assert_as_fresh(run, position):
    """Position and cache are those of a run that did nothing but open there."""
    other = LiveRun(run.engine)
    right = other.open(position.ids, GREEDY)
    assert_same(position, right)
    got, wanted = (each.look(at, dense([2, 1]), GREEDY).verification for each, at in ((run, position), (other, right)))
    assert got.logit == pytest.approx(wanted.logit, abs=1e-4) and got.rank == wanted.rank


# --------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("shape", [dense([]), dense([1] * 4), dense([3, 2, 2, 1]), from_paths([[7, 0], [2, 9, 1]])],
                         ids=["plain", "chain", "dense", "odd ranks"])
def test_advancing_step_by_step_equals_decode(exact, shape):
    eng, ids, text = exact
    run = LiveRun(eng)
    position, blocks = run.open(ids, GREEDY), []
    for _ in range(12):
        _, tokens, position = greedy_step(run, position, shape)
        blocks.append(tokens)
        assert position.ids == run.ids and run.cache.length == len(position.ids)
    steps = decoder.decode(eng.backbone, eng.drafter, ids, shape, GREEDY, 1000, ())
    assert blocks == [next(steps).tokens for _ in range(12)]
    written = [token for block in blocks for token in block]
    assert written == text[: len(written)]
    assert_as_fresh(run, position)


def test_a_committed_part_of_a_path_leaves_the_rest_out_of_the_cache(exact):
    eng, ids, text = exact
    run = LiveRun(eng)
    look = run.look(run.open(ids, GREEDY), dense([3, 3, 3, 2]), GREEDY)
    rows = greedy_rows(look)
    assert len(rows) > 2
    position, ms = run.advance(look, rows[:2], text[:2], text[2])  # as after an end token or a limit
    assert run.cache.length == len(ids) + 2 and ms >= 0
    assert position.ids == (*ids, *text[:2])
    assert_as_fresh(run, position)


def test_probability_of_the_next_root(exact):
    eng, ids, _ = exact
    run = LiveRun(eng)
    position = run.open(ids, GREEDY)
    p = plain_logits(eng.backbone, ids)[-1].softmax(-1)
    assert position.root_p == pytest.approx(float(p[position.root]), abs=1e-5)
    for commit_late in (False, True):
        look = run.look(position, dense([2]), GREEDY)
        if commit_late:
            run.open(prompt(9), GREEDY)
        after = plain_logits(eng.backbone, [*ids, position.root])[-1].softmax(-1)
        for token in (int(after.argmax()), int(after.argmin())):  # among the ten that a look holds, and not
            there, _ = run.advance(look, [0], [position.root], token)
            assert there.root == token and there.root_p == pytest.approx(float(after[token]), abs=1e-6)


# --------------------------------------------------------------------------------------------------- back and branches


def test_going_back_and_forth_equals_a_fresh_run(exact):
    eng, ids, text = exact
    rng, run = random.Random(0), LiveRun(eng)
    known = [(run.open(ids, GREEDY), None)]
    for _ in range(60):
        position, _ = known[rng.randrange(len(known))]  # any position ever seen, in any order
        shape = random_shape(rng, heads=4)
        look, tokens, after = greedy_step(run, position, shape)
        plain = LiveRun(eng)
        right = plain.look(plain.open(position.ids, GREEDY), shape, GREEDY)
        assert look.drafts.token == right.drafts.token
        assert look.verification.rank == right.verification.rank
        assert look.verification.logit == pytest.approx(right.verification.logit, abs=1e-4)
        place = len(position.ids) - len(ids)
        assert tokens == text[place : place + len(tokens)]
        assert_same(after, fresh_position(eng, after.ids))
        if len(after.ids) < len(ids) + 45:
            known.append((after, look))


def test_an_old_look_can_be_committed_later(exact):
    eng, ids, _ = exact
    run = LiveRun(eng)
    looks, position = [], run.open(ids, GREEDY)
    for _ in range(6):
        look, tokens, position = greedy_step(run, position, dense([3, 2, 2]))
        looks.append((look, greedy_rows(look), tokens, position))
    for look, rows, tokens, right in [*looks, *looks[::-1], looks[2], looks[2]]:
        again, _ = run.advance(look, rows, tokens, right.root)
        assert_same(again, right)
        assert run.ids == right.ids and run.cache.length == len(right.ids)
        assert_as_fresh(run, again)


def test_a_look_whose_tokens_are_in_the_cache_already_still_gives_a_hidden_state(exact):
    # Commit, look at the next step, go back and accept the same path under another knob.
    eng, ids, _ = exact
    run = LiveRun(eng)
    look, tokens, position = greedy_step(run, run.open(ids, GREEDY), dense([2, 2]))
    run.look(position, dense([2]), GREEDY)
    again, _ = run.advance(look, greedy_rows(look), tokens, position.root)
    assert_same(again, position)
    assert run.look(again, dense([2, 2]), GREEDY).verification.rank == run.look(position, dense([2, 2]),
                                                                                 GREEDY).verification.rank


def test_branching_writes_what_a_fresh_run_of_that_branch_writes(exact):
    eng, ids, _ = exact
    run = LiveRun(eng)
    look = run.look(run.open(ids, GREEDY), dense([3, 2]), GREEDY)
    for row in (1, 2, 3):  # a node that greedy acceptance may reject
        token = look.drafts.token[row]
        position, _ = run.advance(look, [0, row], [look.drafts.token[0], token], look.verification.top[row].ids[0])
        text = plain_greedy(eng.backbone, position.ids, 12)
        written = []
        while len(written) < 8:
            _, tokens, position = greedy_step(run, position, dense([2, 1]))
            written += tokens
        assert written == text[: len(written)]


@pytest.mark.parametrize("held, wanted, run_rows", [
    ([1, 2, 3, 4], [1, 2, 3, 4], 0), ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], 2), ([1, 2, 3, 4], [1, 2], 1),
    ([1, 2, 3, 4], [1, 2, 9], 1), ([1, 2, 3, 4], [9, 2, 3, 4], 4), ([1], [2], 1), ([], [4, 5], 2),
])
def test_only_what_is_not_shared_is_run(exact, monkeypatch, held, wanted, run_rows):
    eng, _, _ = exact
    run, rows = LiveRun(eng), []
    if held:
        run.open(held, GREEDY)
    real = eng.backbone._forward
    monkeypatch.setattr(eng.backbone, "_forward",
                        lambda tokens, *a, **k: rows.append(len(tokens)) or real(tokens, *a, **k))
    forward = run._align(tuple(wanted))
    assert sum(rows) == run_rows and run.ids == tuple(wanted) and run.cache.length == len(wanted)
    assert (forward is None) == (held == wanted)
    if forward is not None:
        assert float((forward.logits[0] - plain_logits(eng.backbone, wanted)[-1]).abs().max()) < 1e-5
    monkeypatch.undo()
    right = plain_logits(eng.backbone, [*wanted, 7])[-1]
    got = eng.backbone.prefill([7], run.cache).logits[0]
    assert float((got - right).abs().max()) < 1e-5


def test_failures_leave_the_run_usable(exact, monkeypatch):
    eng, ids, _ = exact
    run = LiveRun(eng)
    position = run.open(ids, GREEDY)
    right = run.look(position, dense([2]), GREEDY)
    look = run.look(position, dense([3, 3, 3, 2]), GREEDY)
    rows = greedy_rows(look)
    assert len(rows) > 2
    tokens, root = [look.drafts.token[row] for row in rows], look.verification.top[rows[-1]].ids[0]
    real = observe.verification

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(observe, "verification", fail)
    with pytest.raises(RuntimeError):
        run.look(position, dense([10, 2]), GREEDY)  # has overwritten the rows of the look before it
    monkeypatch.setattr(observe, "verification", real)
    after, _ = run.advance(look, rows, tokens, root)
    assert_as_fresh(run, after)

    fail_in_third_chunk(monkeypatch, eng.backbone)
    with pytest.raises(RuntimeError):
        run.look(replace(after, ids=(*after.ids, 1, 2, 3, 4, 5, 6, 7, 8)), dense([2]), GREEDY)
    monkeypatch.undo()
    assert_as_fresh(run, after)
    again = run.look(position, dense([2]), GREEDY)
    assert again.verification.logit == pytest.approx(right.verification.logit, abs=1e-5)
    with pytest.raises(BackboneError):
        run.open([1] * 1000, GREEDY)
    assert_same(run.open(ids, GREEDY), position)


# -------------------------------------------------------------------------------------------------------- two visitors


def test_two_runs_in_turn_equal_each_alone(exact):
    """Field case A27: different prompts, trees and modes on one backbone, 60 tokens each, step by step in turn."""
    eng, _, _ = exact
    plans = [(prompt(21), dense([3, 2, 1]), GREEDY), (prompt(22), dense([2, 2]), Acceptance("rejection", 0.9, seed=3)),
             (prompt(23), dense([1] * 4), GREEDY)]

    def stepper(ids, shape, settings):
        run = LiveRun(eng)
        position = run.open(ids, settings)
        while True:
            look = run.look(position, shape, settings)
            if settings.rule == "rejection":
                walk, look = run.walk(look, shape, range(shape.nodes + 1), settings)
                rows, root = walk.rows, walk.next_root
            else:
                rows = greedy_rows(look)
                root = look.verification.top[rows[-1]].ids[0]
            tokens = [look.drafts.token[row] for row in rows]
            position, _ = run.advance(look, rows, tokens, root)
            yield tokens

    def take(steppers):
        texts = [[] for _ in steppers]
        while min(map(len, texts)) < 60:
            for text, one in zip(texts, steppers):
                if len(text) < 60:
                    text += next(one)
        return [text[:60] for text in texts]

    together = take([stepper(*plan) for plan in plans])
    alone = [take([stepper(*plan)])[0] for plan in plans]
    assert together == alone
    for text, (ids, _, settings) in zip(together, plans):
        steps = decoder.decode(eng.backbone, None, ids, dense([]), settings, 60, ())
        assert text == [token for step in steps for token in step.tokens]


# ------------------------------------------------------------------------------------------------------- sampling walks


def test_a_walk_draws_what_decode_draws_and_can_be_asked_again(exact):
    eng, ids, _ = exact
    for seed in range(10):
        settings = Acceptance("rejection", 0.7, seed=seed)
        run = LiveRun(eng)
        position = run.open(ids, settings)
        shape = dense([4, 3, 2])
        look = run.look(position, shape, settings)
        walk, same = run.walk(look, shape, range(shape.nodes + 1), settings)
        assert same is look
        first = next(decoder.decode(eng.backbone, eng.drafter, ids, shape, settings, 50, ()))
        assert [look.drafts.token[row] for row in walk.rows] == first.tokens
        opened = LiveRun(eng).open([*ids, *first.tokens], settings)
        assert opened.root == walk.next_root  # a draw depends on its place alone, however one got there
        run.look(run.open(prompt(5), settings), dense([2]), settings)  # its logits are gone now
        again, fresh = run.walk(look, shape, range(shape.nodes + 1), settings)
        assert fresh is not look and again == walk
        smaller = dense([4, 3])
        part, _ = run.walk(fresh, smaller, smaller.rows_in(shape).tolist(), settings)
        inside = [row for row in walk.rows if shape.depth[row] <= 2]
        assert [smaller.paths[row] for row in part.rows] == [shape.paths[row] for row in inside]


def test_checking_does_not_disturb_the_run(exact):
    eng, ids, text = exact
    run = LiveRun(eng)
    look = run.look(run.open(ids, GREEDY), dense([3, 2]), GREEDY)
    run.check_greedy(ids, text[:9])
    rows = greedy_rows(look)
    tokens = [look.drafts.token[row] for row in rows]
    position, _ = run.advance(look, rows, tokens, look.verification.top[rows[-1]].ids[0])
    assert_as_fresh(run, position)


# ------------------------------------------------------------------------------------------------------------- previews


def test_a_preview_drafts_what_a_look_drafts(exact):
    eng, ids, _ = exact
    run, rng = LiveRun(eng), random.Random(0)
    position = run.open(ids, GREEDY)
    look = run.look(position, dense([1]), GREEDY)
    step = Step(0, "A", len(ids), look.drafts, look.verification, None, look.timings)
    for _ in range(20):
        shape = random_shape(rng, heads=4, width=10, paths=12)
        drawn, right = unverified(step, shape, 12.5), run.look(position, shape, GREEDY).drafts
        assert drawn.verification is None and drawn.verdict is None and drawn.estimate_ms == 12.5
        assert (drawn.drafts.parent, drawn.drafts.rank, drawn.drafts.token) == (right.parent, right.rank, right.token)
        assert drawn.drafts.head_p == pytest.approx(right.head_p) and drawn.drafts.path_p == pytest.approx(right.path_p)
        assert drawn.drafts.heads == right.heads and drawn.shape.fingerprint == shape.fingerprint


def test_latency_is_interpolated_between_what_was_seen():
    latency = LatencyEstimate()
    assert latency.of(5) is None
    latency.add(8, 80)
    assert latency.of(8) == 80 and latency.of(16) == 160 and latency.of(1) == 80
    latency.add(16, 100)
    assert latency.of(12) == 90 and latency.of(32) == 200 and latency.of(1) == 80
    latency.add(16, 200)
    assert latency.of(16) == 150
