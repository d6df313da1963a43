"""Is it plain greedy's text? The check finds the first difference, tells ties from faults, and follows a run."""

import random

import pytest
import torch
from tiny import VOCAB, backbone, engine, fail_in_third_chunk, plain_greedy, plain_logits, prompt, random_drafter

from medusa_viz.decoding import check
from medusa_viz.decoding.check import GreedyCheck, equals_greedy
from medusa_viz.decoding.decoder import decode
from medusa_viz.decoding.live import LiveRun
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense
from medusa_viz.models.static import StaticStep


@pytest.fixture(scope="module")
def exact():
    """Double precision: an engine, a prompt, its greedy text."""
    of, ids = backbone(dtype=torch.float64), prompt(0)
    return engine(of, random_drafter(of)), ids, plain_greedy(of, ids, 40)


def test_the_check_finds_the_first_difference(exact):
    of, ids, text = exact[0].backbone, *exact[1:]
    rng = random.Random(0)
    for place in range(20):
        wrong = list(text[:25])
        wrong[place] = (wrong[place] + 1 + rng.randrange(VOCAB - 1)) % VOCAB
        after = plain_logits(of, [*ids, *wrong])[len(ids) - 1 + place].float()
        best = after.topk(2).values
        found = equals_greedy(of, ids, wrong)
        assert found.position == place and found.gap == pytest.approx(float(best[0] - best[1]), abs=1e-5)
        assert found.tie == (found.gap < (check.TIE_FP32 if of.placement.dtype == torch.float32 else 1e-9))
    assert equals_greedy(of, ids, text) is None and equals_greedy(of, ids, []) is None


def test_the_check_follows_a_growing_text(exact):
    of, ids, text = exact[0].backbone, *exact[1:]
    rng = random.Random(1)
    wrong = [*text[:17], (text[17] + 1) % VOCAB, *text[18:30]]
    for words, position in ((text[:30], None), (wrong, 17)):
        follower, place = GreedyCheck(of, ids), 0
        while place < len(words):
            size = rng.randint(0, 5)
            found = follower.push(words[place : place + size])
            place += size
            assert (found and found.position) == (position if position is not None and place > position else None)


@pytest.mark.parametrize("static", [False, True])
def test_a_plain_step_is_timed_without_a_trace(exact, static):
    of, ids, text = backbone(dtype=torch.float64), *exact[1:]
    of.static = StaticStep(of) if static else None
    follower = GreedyCheck(of, ids)
    follower.push(text[:10])
    length = follower.cache.length
    assert follower.plain_step() > 0 and follower.cache.length == length
    assert follower.push(text[10:30]) is None, "the text goes on as if nothing had been"
    full = GreedyCheck(of, prompt(0, of.context - 1))
    assert full.plain_step() is None, "there is no room for it"


@pytest.mark.parametrize("dtype, gap, tie", [(torch.float32, 5e-4, True), (torch.float32, 2e-3, False),
                                             (torch.bfloat16, 0.0, True), (torch.bfloat16, 0.125, True),
                                             (torch.bfloat16, 1.0, False)])
def test_near_ties_are_told_from_faults(dtype, gap, tie):
    """Field case A06: within a few units in the last place is rounding, more is a fault."""
    got_gap, got_tie = check._gap(torch.tensor([8.0, 8.0 - gap, 1.0]).to(dtype))
    assert got_tie == tie and got_gap == pytest.approx(gap, rel=0.01, abs=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_half_precision_is_greedy_or_its_difference_is_labelled(tied):
    of, ids = backbone(dtype=torch.bfloat16), prompt(0)
    if tied:  # two tokens that always have the same logit
        of.lm_head.weight[27] = of.lm_head.weight[43]
    labels = []
    for seed in range(6):
        drafter = random_drafter(of, 3, seed)
        steps = decode(of, drafter, ids, dense([3, 2, 1]), Acceptance(), 40, ())
        tokens = [token for step in steps for token in step.tokens]
        found = equals_greedy(of, ids, tokens)
        labels.append(found is None or found.tie)
    assert all(labels)


# -------------------------------------------------------------------------------------------------- beside a live run


def test_the_check_follows_a_growing_text_and_starts_over_after_going_back(exact, monkeypatch):
    eng, ids, text = exact
    run, rows = LiveRun(eng), []
    real = eng.backbone.prefill
    monkeypatch.setattr(eng.backbone, "prefill", lambda ids, *a, **k: rows.append(len(ids)) or real(ids, *a, **k))
    for length in (3, 3, 8, 20):
        assert run.check_greedy(ids, text[:length]) is None
    assert sum(rows) == len(ids) + 20  # nothing was run twice
    wrong = [*text[:5], (text[5] + 1) % VOCAB]
    assert run.check_greedy(ids, wrong).position == 5
    assert run.check_greedy(ids, [*wrong, 1, 2]).position == 5
    assert run.check_greedy(ids, text[:7]) is None
    assert run.check_greedy([*ids, text[0]], text[1:9]) is None
    assert run.check_greedy(ids, []) is None
    other = [(text[0] + 1) % VOCAB]
    assert run.check_greedy(ids, [*other, *text[1:3]]).position == 0
    longer_prompt = [*ids, *other]  # the same tokens, but the odd one belongs to the prompt
    after = plain_greedy(eng.backbone, longer_prompt, 3)
    assert run.check_greedy(longer_prompt, after) is None
    assert run.check_greedy(ids, [*other, *after]).position == 0


def test_a_check_that_failed_half_way_starts_over(exact, monkeypatch):
    eng, ids, text = exact
    run = LiveRun(eng)
    assert run.check_greedy(ids, text[:4]) is None
    fail_in_third_chunk(monkeypatch, eng.backbone)
    with pytest.raises(RuntimeError):
        run.check_greedy(ids, text[:12])
    monkeypatch.undo()
    assert run.check_greedy(ids, text[:12]) is None
    assert run.check_greedy(ids, [*text[:6], (text[6] + 1) % VOCAB, *text[7:9]]).position == 6
