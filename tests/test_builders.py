"""Builders by accuracy: published numbers, and optimality against every tree that exists."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import MC_SIM_7B_63

from medusa_viz.decoding.tree import dense, from_paths
from medusa_viz.tuning.builders import best_dense, expected_tokens_per_step, growth, node_values, sparse
from medusa_viz.tuning.sequoia import best_size, sequoia, solve

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
    assert expected_tokens_per_step(dense([1] * 5), accuracy) == pytest.approx(tokens, abs=0.01)


def test_the_published_tree_is_no_better_than_the_built_one():
    accuracy = per_rank("7b")
    published = from_paths(MC_SIM_7B_63)
    assert expected_tokens_per_step(published, accuracy) == pytest.approx(2.34, abs=0.01)  # ranks past 5 count as 0
    assert expected_tokens_per_step(published, accuracy) < expected_tokens_per_step(sparse(accuracy, 63), accuracy)


# --------------------------------------------------------------------------------------------------- dense and sequoia


@given(tables, st.integers(0, 40))
def test_the_best_dense_tree_is_the_best_of_all_dense_trees(accuracy, budget):
    shape = best_dense(accuracy, budget)
    shapes = [dense(top_s) for depth in range(len(accuracy) + 1)
              for top_s in itertools.product(*(range(1, len(row) + 1) for row in accuracy[:depth]))]
    best = max(expected_tokens_per_step(other, accuracy) for other in shapes if other.nodes <= budget)
    assert shape.nodes <= budget and expected_tokens_per_step(shape, accuracy) == pytest.approx(best)
    assert any(shape.fingerprint == other.fingerprint for other in shapes)


def test_dense_trees_stay_within_walls():
    assert best_dense(per_rank("7b"), 100, [2, 2, 1]).widths == (2, 2, 1)
    assert best_dense(per_rank("7b"), 100, [2, 0, 1]).widths == (2,)


@given(tables, st.integers(0, 40), st.lists(st.integers(0, 5), min_size=1, max_size=4) | st.none())
def test_sequoia_reaches_the_value_of_sparse(accuracy, budget, walls):
    """One surrogate, two ways: best-first growth and the dynamic program over sizes."""
    ours, other = sparse(accuracy, budget, walls), sequoia(accuracy, budget, walls)
    assert other.nodes <= budget
    assert expected_tokens_per_step(other, accuracy) == pytest.approx(expected_tokens_per_step(ours, accuracy))
    assert walls is None or all(rank < wall for path in other.paths for rank, wall in zip(path, walls))


@given(tables, st.integers(0, 12))
def test_sequoias_merge_of_gains_is_the_best_of_all_ways_to_share(accuracy, budget):
    """The recurrence as it is written, every m tried for every n."""
    below = [0.0] * (budget + 1)
    for row in reversed(accuracy):
        best = [0.0] * (budget + 1)
        for right in row:
            best = [max([best[n], *(best[n - m] + right * (1 + below[m - 1]) for m in range(1, n + 1))])
                    for n in range(budget + 1)]
        below = best
    assert solve(accuracy, budget).value == pytest.approx(below)


def test_sequoia_knows_every_size_at_once():
    accuracy = per_rank("7b")
    program = solve(accuracy, 63)
    for nodes in range(64):
        shape = program.shape(nodes)
        assert shape.nodes == nodes
        assert program.value[nodes] + 1 == pytest.approx(expected_tokens_per_step(sparse(accuracy, nodes), accuracy))
        assert expected_tokens_per_step(shape, accuracy) == pytest.approx(1 + program.value[nodes])


def test_measured_step_times_choose_sequoias_size_and_depth():
    accuracy = per_rank("7b")
    times = {nodes: 10 + 0.1 * nodes for nodes in range(64)}
    size = best_size(accuracy, times.__getitem__, 63)
    speeds = {nodes: expected_tokens_per_step(sparse(accuracy, nodes), accuracy) / times[nodes] for nodes in times}
    assert size.nodes == max(speeds, key=speeds.get) and 0 < size.nodes < 63
    assert size.tokens_per_second == pytest.approx(1e3 * speeds[size.nodes])
    assert size.depth == sparse(accuracy, size.nodes).height  # no deeper than it has to be
    steep = best_size(accuracy, lambda nodes: 10 + 10 * nodes, 63)
    assert (steep.nodes, steep.depth, steep.tokens_per_step) == (0, 0, 1.0)  # plain decoding is faster
    flat = best_size(accuracy, lambda nodes: 10.0, 63)
    assert flat.nodes == 63 and flat.depth == sparse(accuracy, 63).height


def test_growth_lists_the_nodes_as_best_first_adds_them():
    grown = growth(sparse(A10, 7), A10)
    assert [path for path, _ in grown] == [(0,), (0, 0), (1,), (0, 1), (1, 0), (2,), (0, 2)]
    assert [gain for _, gain in grown] == pytest.approx([.6, .24, .15, .06, .06, .05, .03])
    for n in range(1, 8):
        assert {path for path, _ in grown[:n]} == set(sparse(A10, n).paths[1:])
