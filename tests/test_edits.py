"""Hand edits, and what a bigger budget would add or a smaller one cut."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import MC_SIM_7B_63, random_shape

from medusa_viz.decoding.tree import TreeError, dense, from_paths
from medusa_viz.tuning.builders import assumed_accuracy, expected_tokens_per_step, sparse
from medusa_viz.tuning.edits import add_child, prune, slots
from medusa_viz.tuning.frontier import cut, frontier

A10 = [[0.6, 0.15, 0.05], [0.4, 0.10, 0.05]]
RATES = assumed_accuracy(4)


def test_pruning_takes_the_descendants_along():
    shape = from_paths(MC_SIM_7B_63)
    below = [path for path in shape.paths[1:] if path[:2] == (0, 0)]
    left = prune(shape, (0, 0))
    assert len(below) > 5 and left.nodes == 63 - len(below)
    assert set(left.paths) == set(shape.paths) - set(below) and shape.nodes == 63
    assert prune(prune(shape, (0,)), (1,)).row_of.keys() & {(0,), (1,), (0, 0), (1, 0)} == set()


def test_a_child_is_added_at_the_first_free_rank_or_the_one_asked_for():
    shape = from_paths([[0], [2], [0, 0]])
    assert add_child(shape, ()).paths[1:] == ((0,), (1,), (2,), (0, 0))
    assert (2, 0) in add_child(shape, (2,)).row_of and (0, 7) in add_child(shape, (0,), 7).row_of
    assert prune(add_child(shape, (0,), 7), (0, 7)).fingerprint == shape.fingerprint  # the way back


@pytest.mark.parametrize("edit, said", [
    (lambda shape: prune(shape, ()), "root stays"), (lambda shape: prune(shape, (9,)), r"no node \(9\)"),
    (lambda shape: add_child(shape, (4, 4)), r"no node \(4, 4\)"),
    (lambda shape: add_child(shape, (), 0), r"already has the node \(0\)"),
    (lambda shape: add_child(shape, (), -1), "whole numbers"),
])
def test_edits_that_cannot_be_done_are_one_sentence(edit, said):
    with pytest.raises(TreeError, match=said):
        edit(dense([2, 1]))


def test_slots_are_the_places_where_a_node_can_go():
    assert slots(dense([2, 1]), 2, 10) == [(2,), (0, 1), (1, 1)]
    assert slots(dense([2, 1]), 3, 2) == [(0, 1), (1, 1), (0, 0, 0), (1, 0, 0)]
    assert slots(dense([]), 4, 10) == [(0,)] and slots(dense([]), 0, 10) == []
    shape = dense([3, 2])
    for path in slots(shape, 4, 10):
        assert add_child(shape, path[:-1]).fingerprint == add_child(shape, path[:-1], path[-1]).fingerprint


# ------------------------------------------------------------------------------------------------------------ frontier


@given(st.integers(0, 30), st.integers(1, 8))
def test_the_frontier_is_what_the_next_budgets_add(budget, count):
    shape = sparse(RATES, budget)
    found = frontier(shape, RATES, lambda nodes: 10 + nodes**2, count)
    grown = shape
    for step, candidate in enumerate(found):
        larger = sparse(RATES, budget + step + 1)
        assert set(larger.paths) - set(grown.paths) == {candidate.path}
        assert candidate.gain == pytest.approx(expected_tokens_per_step(larger, RATES)
                                               - expected_tokens_per_step(grown, RATES))
        assert candidate.milliseconds == (larger.nodes) ** 2 - grown.nodes**2
        grown = larger
    assert len(found) == count


def test_the_frontier_of_any_shape_is_its_best_open_places():
    rng = random.Random(1)
    for _ in range(20):
        shape = random_shape(rng, 3, 3, 5)
        table = [[rng.random() / 4 for _ in range(4)] for _ in range(3)]
        first = frontier(shape, table, count=1)[0]
        gains = []
        for parent in shape.paths:
            for rank in range(4 if len(parent) < 3 else 0):
                if parent + (rank,) not in shape.row_of:
                    larger = add_child(shape, parent, rank)
                    gains.append(expected_tokens_per_step(larger, table) - expected_tokens_per_step(shape, table))
        assert first.gain == pytest.approx(max(gains)) and first.milliseconds is None


def test_a_full_table_has_no_frontier():
    assert frontier(dense([3, 3]), A10) == [] and frontier(dense([2]), []) == []
    assert [candidate.path for candidate in frontier(sparse(A10, 10), A10)] == [(2, 1), (2, 2)]


def test_what_a_budget_cuts():
    shape, whole = sparse(A10, 4), dense([3, 3])
    found = cut(shape, whole, A10, lambda nodes: 10.0 + nodes, 3)
    assert found.nodes == 8 and found.milliseconds == 8
    assert found.gain == pytest.approx(expected_tokens_per_step(whole, A10) - expected_tokens_per_step(shape, A10))
    assert [candidate.path for candidate in found.best] == [(1, 0), (2,), (0, 2)]
    assert cut(whole, whole, A10).nodes == 0 and cut(whole, whole, A10).best == []
