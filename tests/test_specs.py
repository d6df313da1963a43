"""Specs: every builder by name, what they refuse, what they say."""

import numpy as np
import pytest

from medusa_viz.decoding.tree import TreeError, TreeShape, dense
from medusa_viz.tuning.builders import assumed_accuracy, sparse
from medusa_viz.tuning.joint import joint
from medusa_viz.tuning.published_trees import published
from medusa_viz.tuning.replay import NOT_RANKED, RankTable
from medusa_viz.tuning.specs import BUILDERS, Facts, Spec, build, fitted, is_dynamic, lacking, of_budget, parse

A10 = [[0.6, 0.15, 0.05], [0.4, 0.10, 0.05]]
THREE = Facts(3, A10)


def table(seed=0, replies=40, heads=4, length=50) -> RankTable:
    """Ranks of heads that are right and wrong together."""
    rng = np.random.default_rng(seed)
    easy = rng.random(replies * length) < 0.5
    ranks = np.where(easy[:, None], rng.choice([0, 0, 0, 1], (len(easy), heads)), rng.choice(9, (len(easy), heads)))
    return RankTable(ranks.astype(np.uint8), np.full(replies, length))


ALL = Facts(4, assumed_accuracy(4), table(), lambda nodes: 10 + 0.2 * nodes, (1.0,) * 4, 10)


def test_specs_of_fixed_trees():
    assert build("plain", THREE).shape.nodes == 0
    assert build("chain", THREE).shape.fingerprint == dense([1, 1, 1]).fingerprint
    assert build("chain:2", THREE).shape.nodes == 2
    assert build("dense:3,2,1", THREE).shape.depth_counts == (3, 6, 6)
    assert build("sparse:4", Facts(2, A10)).shape.fingerprint == sparse(A10, 4).fingerprint
    assert build("sparse:9@2,1", Facts(2, A10)).shape.fingerprint == sparse(A10, 9, (2, 1)).fingerprint
    assert build("sparse:0", Facts(2)).shape.nodes == 0
    assert build("sparse:9", Facts(1, A10)).shape.height == 1  # a table of more heads than there are


@pytest.mark.parametrize("spec", ["", "plain:1", "chain:4", "chain:1,2", "dense", "dense:", "dense:1,1,1,1", "dense:-1",
                                  "dense:a", "sparse", "sparse:1,2", "sparse:-3", "sparse:1.5", "dense:999999999,99999",
                                  "tree", "sparse:1" + "0" * 5000, "sparse:99999999", "sparse:4@", "sparse:4@2,,1",
                                  "dense:2@2", "plain@1", "chain:2#1", "sparse:4#1", "random-sparse:4#", "joint:4",
                                  "published:none", "published:mc_sim_7b_63@3", "sequoia", "SPARSE:4", "sparse:٤",
                                  "sparse:4\n", " sparse:4"])
def test_specs_that_name_no_tree(spec):
    with pytest.raises(TreeError) as refused:
        build(spec, THREE)
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)


def test_a_spec_is_taken_apart_before_heads_are_known():
    assert parse("chain:9") == Spec("chain", numbers=(9,))
    assert parse("joint:16@4,3") == Spec("joint", numbers=(16,), walls=(4, 3))
    assert parse("random-sparse:16#7") == Spec("random-sparse", numbers=(16,), seed=7)
    assert parse("published:zephyr_stage2") == Spec("published", "zephyr_stage2")
    assert parse("sequoia") == Spec("sequoia")
    for spec in ("forest", "dense:a", "chain:1,2", "sparse", "dense:2@2", "published:none"):
        with pytest.raises(TreeError):
            parse(spec)


def test_surplus_walls_are_refused():
    with pytest.raises(TreeError, match="walls for 4 heads, but the model has 3"):
        build("sparse:4@2,2,2,2", THREE)


def test_a_budget_beyond_the_table_is_said():
    built = build("sparse:500", Facts(2, A10))
    assert built.shape.nodes == 12 and built.notes == ["the table of accuracies can hold 12 nodes, of 500 asked for"]
    assert build("sparse:9@2,1", Facts(2, A10)).notes == ["the walls can hold 4 nodes, of 9 asked for"]
    assert build("sparse:12", Facts(2, A10)).notes == []


@pytest.mark.parametrize("name", ["sparse", "best-dense", "sequoia", "joint"])
def test_accuracies_that_are_all_zero_are_said(name):
    """Field case A10: no exception, at most the budget, and a note."""
    never = RankTable(np.full((50, 4), NOT_RANKED, np.uint8), np.array([50]))
    for facts in (Facts(4, [[0.0] * 10] * 4, never), Facts(4, (), never)):
        built = of_budget(name, facts, 15)
        assert built.shape.nodes <= 15 and len(built.notes) == 1
        assert built.notes[0].startswith("no node has a positive gain: by these accuracies")
        assert of_budget(name, facts, 0).notes == []
    later = [[0.5, 0.1], [0.0, 0.0]]  # a head that is never right ends the gains, not the tree
    assert "no node" not in " ".join(of_budget(name, Facts(2, later, table(heads=2)), 4).notes)
    assert of_budget(name, Facts(2, [[0.0, 0.5]], table(heads=2)), 4, walls=(1, 1)).notes[0].startswith("no node has")
    assert "no node" not in of_budget(name, Facts(2, later, table(heads=2)), 4, walls=(0, 1)).notes[0]


@pytest.mark.parametrize("name", list(BUILDERS))
@pytest.mark.parametrize("budget", [0, 1, 7, 63, 4680])
def test_every_builder_keeps_every_budget(name, budget):
    tree = build(f"{name}:{budget}", ALL).tree
    assert tree.nodes <= budget and tree.height <= 4
    if isinstance(tree, TreeShape):
        assert all(path[:-1] in tree.row_of for path in tree.paths[1:])
        assert tree.nodes >= 0.7 * budget
    walled = build(f"{name}:{budget}@3,2", ALL).tree
    assert walled.height <= 2 and max(walled.widths if isinstance(walled, TreeShape) else walled.walls, default=0) <= 3


def test_random_trees_follow_their_seed():
    for name in ("random-dense", "random-sparse"):
        trees = [build(f"{name}:40#{seed}", ALL).shape.fingerprint for seed in (0, 0, 1, 2, 3)]
        assert trees[0] == trees[1] and len(set(trees)) >= 3
        assert build(f"{name}:40", ALL).shape.fingerprint == trees[0]
    assert build("random-sparse:40#5", ALL).shape.nodes == 40
    shape = build("random-dense:40#5", ALL).shape
    assert shape.fingerprint == dense(shape.widths).fingerprint


def test_what_is_missing_is_named():
    bare = Facts(3)
    for spec, said in (("sparse:16", "accuracies"), ("joint:16", "rank table"), ("sequoia:16", "accuracies"),
                       ("best-dense:16", "accuracies")):
        with pytest.raises(TreeError, match=said):
            build(spec, bare)
        assert said in lacking(spec.partition(":")[0], bare)
    with pytest.raises(TreeError, match="needs step times measured on this device: run `tune` first"):
        build("sequoia", THREE)
    assert not any(lacking(name, ALL) for name in BUILDERS)
    assert "no temperatures" in build("dynamic:5", THREE).notes[0] and build("dynamic:5", ALL).notes == []


def test_sequoia_takes_the_size_that_step_times_favour():
    built = build("sequoia", ALL)
    assert 0 < built.shape.nodes < 63 and f"favour {built.shape.nodes} nodes" in built.notes[0]
    walled = build("sequoia@2,1", ALL)  # the size is weighed within the walls too
    assert 0 < walled.shape.nodes <= 4 and max(walled.shape.widths) <= 2
    assert walled.notes == [f"measured step times favour {walled.shape.nodes} nodes to depth {walled.shape.height}"]


def test_a_dynamic_tree_is_no_shape():
    built = build("dynamic:8", ALL)
    assert is_dynamic(built.tree)
    with pytest.raises(TreeError, match="another one at each step"):
        _ = built.shape
    assert not is_dynamic(build("dynamic:0", ALL).tree)


# ----------------------------------------------------------------------------------------------------------- published


def test_the_nine_published_trees():
    """Names, nodes by depth, leaves, widths, ones in the mask, fingerprints as published."""
    rows = """
        mc_sim_7b_63 10/28/23/2 42 10,10,10,2 207 7e63acaa76293e94
        vicuna_7b_stage2 10/23/23/7 42 10,10,9,4 217 0c5a284e812ae126
        vicuna_7b_stage1_ablation 10/21/25/7 42 10,10,10,4 219 5fdf3d81f5f73037
        vicuna_7b_stage1 10/32/20/1 44 10,10,9,1 202 ff4bbdd31724dfb3
        vicuna_13b_stage2 10/19/25/9 42 10,10,10,4 223 f8d56c05f6889af0
        vicuna_13b_stage1 10/29/23/1 44 10,10,10,1 205 460a17cc4908c242
        vicuna_33b_stage2 10/24/24/5 43 10,10,10,3 214 0d8977dca014312c
        vicuna_33b_stage1 10/34/19 46 10,10,9 199 c103f91c3f869f85
        zephyr_stage2 10/27/23/3 44 10,10,10,2 209 9bcf79a2d0dc3341"""
    wanted = [line.split() for line in rows.strip().splitlines()]
    found = [[name, "/".join(map(str, shape.depth_counts)), str(shape.leaves), ",".join(map(str, shape.widths)),
              str(int(shape.mask.sum())), shape.fingerprint] for name, shape in published().items()]
    assert found == wanted and all(shape.nodes == 63 for shape in published().values())


def test_a_published_tree_is_trimmed_to_the_heads():
    built = build("published:mc_sim_7b_63", THREE)  # field case A01
    assert built.shape.depth_counts == (10, 28, 23)
    assert built.notes == ["the tree has depth 4, the model 3 heads: 2 nodes below depth 3 are left out"]
    assert build("published:mc_sim_7b_63", ALL).shape.nodes == 63
    assert fitted(dense([1, 1]), 1).notes[0].endswith("1 node below depth 1 is left out")


# --------------------------------------------------------------------------------------------------------------- joint


def test_joint_takes_the_paths_that_occurred_whole():
    """Head 2 is right with rank 1 exactly where head 1 is, which no product of accuracies can know."""
    right = np.tile([True, False], 500)
    ranks = np.where(right[:, None], [[0, 1]], [[2, 0]]).astype(np.uint8)
    facts = RankTable(ranks, np.array([1000]))
    rates = [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0]]
    assert set(joint(facts, rates, 4, weight=1).paths[1:]) == {(0,), (2,), (0, 1), (2, 0)}
    assert (0, 1) not in sparse(rates, 3).row_of  # four paths of depth 2 are all worth 0.25


def test_joint_falls_back_on_the_product():
    rates = assumed_accuracy(3)
    nothing = RankTable(np.zeros((0, 3), np.uint8), np.zeros(0, np.int64))
    assert joint(nothing, rates, 40).fingerprint == sparse(rates, 40).fingerprint
    assert joint(table(heads=3), rates, 40, weight=1e12).fingerprint == sparse(rates, 40).fingerprint


def test_positions_past_a_replys_end_count_for_no_path():
    short = RankTable(np.array([[0, NOT_RANKED], [NOT_RANKED, NOT_RANKED]] * 50, np.uint8), np.full(50, 2))
    shape = joint(short, [[1.0], [0.3]], 2, weight=10)
    assert shape.paths[1:] == ((0,), (0, 0))  # head 2 had no position: its own accuracy stands


def test_halves_know_only_their_own_table():
    other = THREE.on(table(3, heads=3))
    assert other.rates != THREE.rates and len(other.rates) == 3 and other.table is not None
    assert of_budget("joint", other, 5).shape.nodes == 5
