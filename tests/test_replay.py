"""Replay: from the ranks alone, the very steps that decoding takes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from made_replies import greedy_replies
from tiny import backbone, oracle_drafter, plain_greedy, prompt, random_drafter, random_shape

from medusa_viz.decoding.decoder import decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.ranking import rank_replies
from medusa_viz.tuning.replay import NOT_RANKED, RankTable, accepted_lengths, replay, scorable, subset, walk

GREEDY = Acceptance()


def committed(of, drafter, ids, shape, tokens, ends=()):
    return [len(step.tokens) for step in decode(of, drafter, ids, shape, GREEDY, tokens, ends)]


def replayed(shape, table) -> list[int]:
    """Tokens of each step."""
    accepted, ends = accepted_lengths(shape, table.ranks), np.cumsum(table.lengths)
    return [int(min(accepted[row], ends[ends > row][0] - row - 1)) + 1 for row in walk(accepted, table.lengths)]


@pytest.mark.parametrize("own", [False, True])
def test_replay_equals_decoding_step_for_step(own):
    of = backbone(dtype=torch.float64)
    rng = random.Random(own)
    texts = [(prompt(seed), plain_greedy(of, prompt(seed), 36)) for seed in range(3)]
    drafters = [random_drafter(of, 3, 7, own, draft_ids=None if own else range(0, 61, 2))]
    drafters += [oracle_drafter(of, *texts[0], rank=lambda place, k: (place * k) % 4)]
    longest = 0
    for drafter in drafters:
        table = rank_replies(of, drafter, greedy_replies(texts))
        for shape in [dense([]), dense([1, 1, 1]), *(random_shape(rng, 3, 5, 12) for _ in range(12))]:
            steps = [committed(of, drafter, ids, shape, 36) for ids, _ in texts]
            assert [count for of_text in steps for count in of_text] == replayed(shape, table)
            found = replay(shape, table)
            assert (found.steps, found.tokens) == (sum(map(len, steps)), 3 * 36)
            longest = max(longest, *(max(of_text) for of_text in steps))
    assert longest == 4


def test_replay_ends_where_an_end_token_ends_the_text():
    of = backbone(dtype=torch.float64)
    ids = prompt(3)
    whole = plain_greedy(of, ids, 30)
    drafter = oracle_drafter(of, ids, whole)
    for end in dict.fromkeys(whole[2:25]):
        text = whole[: whole.index(end) + 1]
        table = rank_replies(of, drafter, greedy_replies([(ids, text)]))
        for shape in (dense([1, 1, 1]), dense([2])):
            assert committed(of, drafter, ids, shape, 30, {end}) == replayed(shape, table)


def test_the_shares_of_steps_that_reach_a_depth_sum_to_the_accepted_drafts():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 40, 30)
    table = RankTable(rng.choice([0, 0, 1, 2, NOT_RANKED], (lengths.sum(), 4)).astype(np.uint8), lengths)
    table.ranks[~scorable(table)] = NOT_RANKED
    found = replay(sparse([[0.5, 0.2, 0.1]] * 4, 40), table)
    counts = replayed(sparse([[0.5, 0.2, 0.1]] * 4, 40), table)
    assert len(found.reached) == 4 and list(found.reached) == sorted(found.reached, reverse=True)
    for m, share in enumerate(found.reached, start=1):
        assert share == pytest.approx(np.mean([count > m for count in counts]))
    assert 1 + sum(found.reached) == pytest.approx(found.tokens_per_step) == pytest.approx(np.mean(counts))
    assert replay(dense([]), table).reached == ()


def test_an_empty_table_takes_no_step():
    nothing = RankTable(np.zeros((0, 3), np.uint8), np.zeros(2, np.int64))
    found = replay(dense([2, 1]), nothing)
    assert (found.steps, found.tokens, found.tokens_per_step) == (0, 0, 0.0) and found.reached == (0.0, 0.0)
    assert not len(subset(nothing, np.array([True, False])).ranks)
