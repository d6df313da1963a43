"""Tree shapes: every derived array against an obvious slow one, and hostile or sloppy tree text."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import MC_SIM_7B_63

from medusa_viz.decoding.tree import (
    MAX_RANK,
    MAX_TREE_DEPTH,
    MAX_TREE_TEXT,
    TreeError,
    dense,
    dense_nodes,
    from_paths,
    parse_paths,
)

ranks = st.integers(0, 4)
paths = st.lists(st.lists(ranks, min_size=1, max_size=5).map(tuple), max_size=12)


def closed(given_paths):
    """All prefixes, the empty one included, by depth, then path."""
    prefixes = {tuple(path[:n]) for path in given_paths for n in range(len(path) + 1)} | {()}
    return sorted(prefixes, key=lambda path: (len(path), path))


@given(paths)
def test_arrays_equal_a_slow_reference(given_paths):
    shape, order = from_paths(given_paths), closed(given_paths)
    assert list(shape.paths) == order
    assert shape.nodes == len(order) - 1
    assert shape.parent.tolist() == [-1] + [order.index(path[:-1]) for path in order[1:]]
    assert shape.rank.tolist() == [-1] + [path[-1] for path in order[1:]]
    assert shape.depth.tolist() == [len(path) for path in order]
    assert shape.height == max(map(len, order))
    assert shape.mask.tolist() == [[row[: len(seen)] == seen for seen in order] for row in order]
    levels = range(1, shape.height + 1)
    assert shape.widths == tuple(1 + max(path[k - 1] for path in order if len(path) >= k) for k in levels)
    assert shape.depth_counts == tuple(sum(len(path) == k for path in order) for k in levels)
    has_child = [any(path == other[:-1] for other in order if other) for path in order]
    assert shape.is_parent.tolist() == has_child
    assert shape.leaves == (len(order) - sum(has_child) if shape.nodes else 0)
    for row, path in enumerate(order):
        assert [order[seen] for seen in shape.path_to(row)] == [path[:n] for n in range(len(path) + 1)]
        assert shape.row_of[path] == row


@given(paths, st.randoms(use_true_random=False))
def test_order_and_repetition_of_the_list_do_not_matter(given_paths, rng):
    shuffled = given_paths + [path for path in given_paths if rng.random() < 0.5]
    rng.shuffle(shuffled)
    one, other = from_paths(given_paths), from_paths(shuffled)
    assert one.fingerprint == other.fingerprint
    assert (one.mask == other.mask).all() and (one.parent == other.parent).all() and (one.rank == other.rank).all()


@given(paths, paths)
def test_rows_in_finds_a_smaller_tree_inside_a_larger_one(some, more):
    smaller, larger = from_paths(some), from_paths(some + more)
    rows = smaller.rows_in(larger)
    assert [larger.paths[row] for row in rows] == list(smaller.paths)
    back = larger.rows_in(smaller)
    assert (back is not None) == (larger.nodes == smaller.nodes)
    other = from_paths(more)
    rows = other.rows_in(smaller)
    assert (rows is not None) == (set(other.paths) <= set(smaller.paths))
    assert rows is None or [smaller.paths[row] for row in rows] == list(other.paths)


@given(paths, st.integers(0, 6))
def test_trimmed_keeps_what_so_many_heads_can_draft(given_paths, depth):
    trimmed = from_paths(given_paths).trimmed(depth)
    assert list(trimmed.paths) == [path for path in closed(given_paths) if len(path) <= depth]
    assert trimmed.fingerprint == from_paths([path[:depth] for path in given_paths]).fingerprint


@given(st.lists(st.integers(0, 4), max_size=4))
def test_dense_is_the_product_of_the_first_ranks(top_s):
    widths = top_s[: top_s.index(0)] if 0 in top_s else top_s
    leaves = [()]
    for s in widths:
        leaves = [(*path, rank) for path in leaves for rank in range(s)]
    shape, same = dense(top_s), from_paths(leaves)
    for name in ("parent", "rank", "depth"):
        assert (getattr(shape, name) == getattr(same, name)).all()
        assert getattr(shape, name).dtype == np.int32
    assert list(shape.depth_counts) == dense_nodes(top_s)
    assert shape.widths == tuple(widths)


def test_the_densest_tree_of_the_page():
    shape = dense([8] * 4)
    assert (shape.nodes, shape.leaves) == (4680, 4096)
    assert shape.depth_counts == (8, 64, 512, 4096) == tuple(dense_nodes([8] * 4))
    # Every row sees itself and each of its ancestors: depth + 1 ones a row.
    assert int(shape.mask.sum()) == 1 + 8 * 2 + 64 * 3 + 512 * 4 + 4096 * 5


def test_top_2_and_top_3_of_two_heads_make_8_nodes():
    assert dense([2, 3]).nodes == 8 and dense([2, 3]).leaves == 6  # Medusa paper, figure 2


def test_mask_and_positions_of_field_case_a05():
    shape = from_paths([[0], [1], [0, 0], [0, 1], [1, 0]])
    rows = ["".join(map(str, row)) for row in shape.mask.astype(int)]
    assert rows == ["100000", "110000", "101000", "110100", "110010", "101001"]
    assert shape.mask.sum() == 14
    assert shape.depth.tolist() == [0, 1, 1, 2, 2, 2]


def test_the_published_63_node_tree():
    shape = from_paths(MC_SIM_7B_63)
    assert (shape.nodes, shape.leaves, shape.height) == (63, 42, 4)
    assert shape.depth_counts == (10, 28, 23, 2) and shape.widths == (10, 10, 10, 2)
    assert shape.mask.sum() == 207
    assert shape.fingerprint == "7e63acaa76293e94"
    trimmed = shape.trimmed(3)  # field case A01: on a model with three heads
    assert trimmed.nodes == 61 and trimmed.depth_counts == (10, 28, 23)


def test_the_bare_root():
    for shape in (from_paths([]), dense([]), dense([0, 3]), from_paths([[1, 2]]).trimmed(0)):
        assert (shape.nodes, shape.height, shape.leaves, shape.widths, shape.depth_counts) == (0, 0, 0, (), ())
        assert shape.mask.tolist() == [[True]] and shape.paths == ((),)


# ------------------------------------------------------------------------------------------------------- tree text


def test_a_list_of_leaves_only_is_closed_over_its_ancestors():
    shape, notes = parse_paths("[[0,0,0,0],[1,0]]")  # field case A03
    assert shape.paths[1:] == ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 0, 0, 0))
    assert shape.depth_counts == (2, 2, 1, 1)
    assert notes == ["4 missing inner nodes added"]
    full, notes = parse_paths(str([list(path) for path in shape.paths[1:]]))
    assert full.fingerprint == shape.fingerprint and notes == []


def test_bare_numbers_and_duplicates_are_taken_and_noted():
    shape, notes = parse_paths("[0, (0,0), [0]]")  # field case A04
    assert shape.paths[1:] == ((0,), (0, 0))
    assert notes == ["1 bare number read as one-rank path", "1 duplicate dropped"]


def test_a_tree_of_depth_one():
    shape, notes = parse_paths("[[0],[1],[2],[3]]")
    assert shape.nodes == 4 and shape.mask.shape == (5, 5) and shape.mask.sum() == 9 and notes == []


@pytest.mark.parametrize("text", ["[]", "()", " [ ] \n"])
def test_an_empty_list_is_plain_decoding(text):
    shape, notes = parse_paths(text)
    assert shape.nodes == 0 and notes == []


def test_a_rank_past_every_other_keeps_its_own_width():
    shape, _ = parse_paths("[[0],[12],[0,0]]")  # field case A02
    assert shape.widths == (13, 1)


HOSTILE = ["[[-1]]", "[[0.5]]", '[["0"]]', "[[]]", '{"a":1}', "__import__('os')", "", " ", "0", "'[[0]]'", "None",
           "[True]", "[[False]]", "[None]", "[[[0]]]", "[{0}]", "[b'0']", "[[0]", "[[0]]]", "[[0] for _ in 'ab']",
           "[[0]] * 1000000000", "(lambda: [[0]])()", "[[1e3]]", "[[1j]]", "f'{1}'", "\x00", "\ud800", "\ufeff[",
           "open('/etc/passwd').read()", "[[99999999999]]", f"[[{MAX_RANK + 1}]]", "[[0x" + "f" * 5000 + "]]",
           "[[-0x" + "f" * 5000 + "]]", "[{0x" + "f" * 5000 + "}]", "[" + "9" * 5000 + "]", "[" * 100_000,
           "-" * 100_000 + "1", "1" + "+1" * 100_000, "[[" + "0," * (MAX_TREE_DEPTH + 1) + "]]",
           "[[" + "0," * 100_000 + "-1]]", "[]" + " " * MAX_TREE_TEXT]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:12]))
def test_hostile_text_is_refused_in_one_short_sentence(text):
    with pytest.raises(TreeError) as refused:
        parse_paths(text)
    message = str(refused.value)
    assert len(message) < 200 and "\n" not in message and message.endswith(".")


@given(st.text(max_size=60) | st.text("[](){},0123456789-. \n'\"*+_abx:#", max_size=60))
def test_no_text_does_anything_but_parse_or_be_refused(text):
    try:
        shape, notes = parse_paths(text)
    except TreeError:
        return
    assert shape.nodes >= 0 and all(isinstance(note, str) for note in notes)


def test_text_is_never_evaluated(tmp_path):
    marker = tmp_path / "marker"
    for text in (f"[open({str(marker)!r}, 'w')]", f"[[__import__('pathlib').Path({str(marker)!r}).touch()]]",
                 f"[[0]] if open({str(marker)!r}, 'w') else []"):
        with pytest.raises(TreeError):
            parse_paths(text)
    assert not marker.exists()


def test_json_and_python_spellings_read_the_same():
    rng = random.Random(0)
    for _ in range(50):
        tree = [[rng.randrange(5) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 8))]
        spelled = [str(tree), str(list(map(tuple, tree))), str(tuple(map(tuple, tree))), str(tree).replace(" ", "")]
        assert len({parse_paths(text)[0].fingerprint for text in spelled}) == 1
