"""Reweighing equals judging the full logits anew, at every mode, temperature and sub-tree."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from synthetic import make_logits, make_step

from medusa_viz.decoding import records, reweigh
from medusa_viz.decoding.records import TEMPERATURES
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense, from_paths

SHAPES = [dense([]), dense([1, 1, 1]), dense([2, 3]), dense([4, 3, 2, 2]),
          from_paths([[0], [2, 1], [2, 4, 0], [5, 0, 0]])]
paths = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=25)


def brute_force(shape, tokens, logits, acceptance):
    """Accepted rows, p and entropy from the full logits, in float64 torch, one path at a time."""
    temperature = 1.0 if acceptance.rule == "greedy" else acceptance.temperature
    log_p = torch.log_softmax(torch.as_tensor(logits) / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    best = (0, 0.0, [0])
    for row in range(shape.nodes + 1):
        path = shape.path_to(row)
        total = 0.0
        for parent, child in pairwise(path):
            p = float(log_p[parent, tokens[child]].exp())
            bound = min(acceptance.epsilon, acceptance.delta * float(torch.exp(-entropy[parent])))
            passes = int(logits[parent].argmax()) == tokens[child] if acceptance.rule == "greedy" else p > bound
            if not passes:
                break
            total += float(log_p[parent, tokens[child]])
        else:
            if (len(path), total) > (len(best[2]), best[1]):
                best = (row, total, path)
    p = [float(log_p[shape.parent[row], tokens[row]].exp()) for row in range(1, shape.nodes + 1)]
    return best[2], p, [float(entropy[shape.parent[row]]) for row in range(1, shape.nodes + 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.nodes} nodes")
@pytest.mark.parametrize("acceptance", [Acceptance(), Acceptance("typical", 0.0)] + [
    Acceptance("typical", t, 0.09, 0.3) for t in TEMPERATURES], ids=lambda a: f"{a.mode} {a.temperature}")
def test_judging_from_the_record_equals_judging_the_logits(shape, acceptance):
    for seed in range(3):
        step = make_step(shape, seed, acceptance)
        _, tokens, logits = make_logits(shape, seed)
        rows, p, entropy = brute_force(shape, tokens, logits, acceptance)
        assert step.verdict.accepted == rows
        assert step.verdict.p[1:] == pytest.approx(p, abs=1e-9)
        assert step.verdict.entropy[1:] == pytest.approx(entropy, abs=1e-9)
        assert step.verdict.committed == [int(tokens[row]) for row in rows]
        assert step.verdict.next_root == int(logits[rows[-1]].argmax())


def test_threshold_is_the_papers_rule():
    step = make_step(dense([3, 2]), 5, Acceptance("typical", 0.7, 0.09, 0.3))
    for entropy, threshold in list(zip(step.verdict.entropy, step.verdict.threshold, strict=True))[1:]:
        assert threshold == pytest.approx(min(0.09, 0.3 * np.exp(-entropy)))


def test_a_temperature_between_grid_points_uses_the_nearest():
    assert TEMPERATURES[reweigh.grid_column(0.74)] == 0.7
    assert TEMPERATURES[reweigh.grid_column(1e-6)] == 0.1
    assert TEMPERATURES[reweigh.grid_column(2.0)] == 2.0


def test_end_token_cuts_and_finishes():
    step = make_step(dense([2, 2, 2]), 4, agree=1.0)
    assert len(step.verdict.accepted) > 1
    end = step.verdict.committed[0]
    verdict = reweigh.judge(step, Acceptance(), {end})
    assert verdict.committed == [end] and verdict.finish == "end"
    assert [verdict.verdict[row] for row in verdict.accepted[1:]] == [records.CUT] * (len(verdict.accepted) - 1)
    assert reweigh.judge(step, Acceptance(), {-1}).finish is None


def test_rejection_needs_a_walk_and_an_unverified_step_cannot_be_judged():
    step = make_step(dense([2, 2]), 0, Acceptance("rejection", 1.0))
    with pytest.raises(reweigh.ReweighError, match="full distribution"):
        reweigh.judge(step, Acceptance("rejection", 1.0))
    assert reweigh.judge(step, Acceptance("rejection", 0.0)).settings.rule == "greedy"
    with pytest.raises(reweigh.ReweighError, match="not verified"):
        reweigh.judge(make_step(dense([2]), verified=False), Acceptance())


def test_a_walk_marks_what_it_never_looked_at():
    step = make_step(dense([2, 2]), 3, Acceptance("rejection", 1.0))
    accepted = set(step.verdict.accepted)
    for row in range(1, step.shape.nodes + 1):
        seen = step.shape.parent[row] in accepted
        assert (step.verdict.verdict[row] == records.UNSEEN) == (not seen)


@hypothesis_settings(max_examples=60, deadline=None)
@given(paths, paths, st.integers(0, 1000), st.sampled_from([Acceptance(), Acceptance("typical", 0.8)]))
def test_a_subtree_is_judged_as_if_it_had_been_verified_alone(inner, extra, seed, acceptance):
    small, large = from_paths(inner), from_paths(inner + extra)
    whole = make_step(large, seed, acceptance)
    cut, rows = reweigh.subtree(whole, small)
    verdict = reweigh.judge(cut, acceptance)
    _, tokens, logits = make_logits(large, seed)
    expected, p, _ = brute_force(small, tokens[rows], logits[rows], acceptance)
    assert verdict.accepted == expected
    assert verdict.p[1:] == pytest.approx(p, abs=1e-9)
    assert cut.shape.paths == small.paths and cut.verdict is None and cut.reused == "subtree"
    assert [cut.verification.top[row] for row in range(len(rows))] == [whole.verification.top[row] for row in rows]


def test_a_tree_with_new_nodes_is_no_subtree():
    step = make_step(dense([2, 2]), 0)
    assert reweigh.subtree(step, dense([3])) is None
    assert reweigh.subtree(replace(step, verification=None), dense([1])) is None
    same, rows = reweigh.subtree(step, dense([2, 2]))
    assert rows.tolist() == list(range(7)) and same.drafts == step.drafts
