"""Builders: published numbers, and optimality against every tree that exists."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import MC_SIM_7B_63

from medusa_viz.decoding.tree import TreeError, dense, from_paths
from medusa_viz.tuning.builders import build, expected_tokens_per_step, node_values, sparse

A10 = [[0.6, 0.15, 0.05], [0.4, 0.10, 0.05]]
# medusa_acc.csv of the Medusa repository: cumulative top-1 to top-5 accuracy of heads 1 to 5.
TOP_K = {
    "7b": [[.5604, .6717, .7271, .7599, .7799], [.3164, .4236, .4851, .5282, .5625],
           [.2010, .2879, .3475, .3834, .4169], [.1474, .2250, .2737, .3109, .3397],
           [.1175, .1866, .2346, .2721, .2998]],
    "13b": [[.5939, .7053, .7578, .7925, .8161], [.3397, .4400, .5068, .5465, .5803],
            [.2161, .3085, .3612, .4030, .4364], [.1500, .2317, .2878, .3234, .3541],
            [.1223, .1957, .2434, .2791, .3070]],
    "33b": [[.6046, .7162, .7649, .7983, .8223], [.3558, .4690, .5287, .5692, .5961],
            [.2246, .3197, .3785, .4210, .4462], [.1596, .2488, .3073, .3480, .3755],
            [.1370, .2067, .2621, .2984, .3258]],
}


def per_rank(model):
    return [[right - before for before, right in zip([0, *row], row)] for row in TOP_K[model]]


def best_value(accuracy, budget, walls):
    """The largest sum of node values over every ancestor-closed tree of at most `budget` nodes: by trying them all."""
    paths = [path for depth in range(1, len(walls) + 1)
             for path in itertools.product(*(range(s) for s in walls[:depth]))]
    place = {path: i for i, path in enumerate(paths)}
    value = {path: 1.0 for path in [()]}
    for path in paths:
        value[path] = value[path[:-1]] * accuracy[len(path) - 1][path[-1]]
    best = 0.0
    for chosen in range(1 << len(paths)):
        if chosen.bit_count() > budget:
            continue
        inside = [path for path in paths if chosen >> place[path] & 1]
        if all(len(path) == 1 or chosen >> place[path[:-1]] & 1 for path in inside):
            best = max(best, sum(value[path] for path in inside))
    return best


def test_growth_of_field_case_a10():
    order = [sparse(A10, n) for n in range(1, 13)]
    grown = [set(after.paths) - set(before.paths) for before, after in zip([from_paths([]), *order], order)]
    assert [path for new in grown[:3] for path in new] == [(0,), (0, 0), (1,)]
    assert grown[3] == {(0, 1)} and grown[4] == {(1, 0)}  # both worth .06: the smaller path first
    assert grown[5] == {(2,)} and grown[6] == {(0, 2)}
    values = dict(zip(order[-1].paths, node_values(order[-1], A10)))
    expected = {(0,): .6, (0, 0): .24, (1,): .15, (0, 1): .06, (1, 0): .06, (2,): .05, (0, 2): .03}
    assert {path: pytest.approx(values[path]) for path in expected} == expected
    sums = [expected_tokens_per_step(shape, A10) - 1 for shape in order[:6]]
    assert sums == pytest.approx([.60, .84, .99, 1.05, 1.11, 1.16])


def test_a_tie_goes_to_the_shallower_node():
    assert sparse([[0.5, 0.25], [0.5]], 2).paths[1:] == ((0,), (1,))  # (0, 0) is worth .25 as well


def test_budgets_beyond_the_table_take_all_of_it():
    for budget in (12, 13, 10_000):
        assert sparse(A10, budget).fingerprint == dense([3, 3]).fingerprint
    assert sparse(A10, 0).nodes == 0
    assert sparse([], 5).nodes == 0 and sparse([[]], 5).nodes == 0


def test_all_zero_tables_build_a_tree_of_no_gain():
    for budget in range(12):
        shape = sparse([[0.0] * 3, [0.0] * 2], budget)
        assert shape.nodes == min(budget, 9) and expected_tokens_per_step(shape, [[0.0] * 3, [0.0] * 2]) == 1
    half = sparse([[0.5, 0.2], [0.0, 0.0], [0.9]], 4)  # a head without hits stops nothing
    assert half.nodes == 4 and {(0,), (1,)} <= set(half.paths)


@pytest.mark.parametrize("walls, table", [((2, 2, 2), (2, 2, 2)), ((3, 3), (3, 3)), ((1, 3, 1), (4, 3, 2)),
                                          ((4, 2), (4, 4)), ((2, 2), (2, 2, 3)), ((3, 0, 2), (3, 2, 2))])
def test_optimal_among_all_trees(walls, table):
    rng = random.Random(str(walls))
    reach = walls[: walls.index(0)] if 0 in walls else walls
    for trial in range(4):
        # Not sorted: a table measured on few positions need not fall with the rank. Coarse: many ties and zeros.
        accuracy = [[rng.choice([0, 0.1, 0.2, 0.3, 0.5]) if trial % 2 else rng.random() / s for _ in range(s)]
                    for s in table]
        for budget in range(1, 9 if trial else 15):
            shape = sparse(accuracy, budget, walls)
            assert shape.nodes <= budget
            assert all(path[k] < walls[k] for path in shape.paths for k in range(len(path)))
            assert expected_tokens_per_step(shape, accuracy) - 1 == pytest.approx(best_value(accuracy, budget, reach))


tables = st.lists(st.lists(st.sampled_from([0, .05, .1, .3, .6]), min_size=1, max_size=4), min_size=1, max_size=3)


@given(tables, st.integers(0, 40), st.lists(st.integers(0, 5), min_size=1, max_size=4) | st.none())
def test_growth_is_stable_and_nested(accuracy, budget, walls):
    shape, larger = sparse(accuracy, budget, walls), sparse(accuracy, budget + 1, walls)
    assert sparse(accuracy, budget, walls).fingerprint == shape.fingerprint
    assert shape.rows_in(larger) is not None  # each budget adds to the one before, so a slider only grows the tree
    assert shape.nodes == budget or larger.nodes == shape.nodes
    values, order = node_values(larger, accuracy), []
    for path in set(larger.paths) - {()}:
        order.append((-values[larger.row_of[path]], len(path), path))
    if larger.nodes == budget + 1:
        left_out = set(larger.paths) - set(shape.paths)
        assert left_out == {max(order)[2]}  # least value, then deepest, then largest path


def test_no_walls_and_empty_walls_differ():
    assert sparse(A10, 5, None).nodes == 5
    assert sparse(A10, 5, ()).nodes == 0


@pytest.mark.parametrize("model, nodes, tokens", [("7b", 1, 1.56), ("7b", 3, 1.85), ("7b", 7, 2.04), ("7b", 15, 2.21),
                                                  ("7b", 31, 2.32), ("7b", 63, 2.38), ("7b", 127, 2.43),
                                                  ("7b", 255, 2.45), ("13b", 63, 2.48), ("33b", 63, 2.52)])
def test_tokens_per_step_that_the_published_accuracies_imply(model, nodes, tokens):
    accuracy = per_rank(model)
    shape = sparse(accuracy, nodes)
    assert shape.nodes == nodes
    assert expected_tokens_per_step(shape, accuracy) == pytest.approx(tokens, abs=0.01)


@pytest.mark.parametrize("model, tokens", [("7b", 1.78), ("13b", 1.85), ("33b", 1.88)])
def test_the_published_chain(model, tokens):
    accuracy = per_rank(model)
    assert expected_tokens_per_step(build("chain", 5, accuracy), accuracy) == pytest.approx(tokens, abs=0.01)


def test_the_published_tree_is_no_better_than_the_built_one():
    accuracy = per_rank("7b")
    published = from_paths(MC_SIM_7B_63)
    assert expected_tokens_per_step(published, accuracy) == pytest.approx(2.34, abs=0.01)  # ranks past 5 count as 0
    assert expected_tokens_per_step(published, accuracy) < expected_tokens_per_step(sparse(accuracy, 63), accuracy)


def test_specs():
    assert build("plain", 3, A10).nodes == 0
    assert build("chain", 3, A10).fingerprint == dense([1, 1, 1]).fingerprint
    assert build("chain:2", 3, A10).nodes == 2
    assert build("dense:3,2,1", 3, A10).depth_counts == (3, 6, 6)
    assert build("sparse:4", 2, A10).fingerprint == sparse(A10, 4).fingerprint
    assert build("sparse:0", 2, []).nodes == 0
    assert build("sparse:9", 1, A10).height == 1  # a table of more heads than there are


@pytest.mark.parametrize("spec", ["", "plain:1", "chain:4", "chain:1,2", "dense", "dense:", "dense:1,1,1,1", "dense:-1",
                                  "dense:a", "sparse", "sparse:1,2", "sparse:-3", "sparse:1.5", "dense:999999999,99999",
                                  "tree", "sparse:1" + "0" * 5000])
def test_specs_that_name_no_tree(spec):
    with pytest.raises(TreeError):
        build(spec, 3, A10)


def test_a_sparse_tree_needs_accuracies():
    with pytest.raises(TreeError, match="accuracies"):
        build("sparse:16", 3, [])
