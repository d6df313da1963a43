"""Tree formats: each text as its engine reads it, what it cannot say, and the way back."""

import contextlib
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tree import HOSTILE
from tiny import MC_SIM_7B_63, random_shape

from medusa_viz.decoding.tree import TreeError, dense, from_paths
from medusa_viz.tuning.formats import FORMATS, export, read, sglang_pool
from medusa_viz.tuning.published_trees import published

U = from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
N = from_paths([[0], [1], [0, 0]])
CHAIN = dense([1, 1, 1])
LISTS = ("tree", "medusa", "tensorrt", "tensorrt-leaves", "triton")


# --------------------------------------------------------------------------------------------------- field case A23


def test_a_uniform_tree_in_every_format():
    vllm = export(U, "vllm")
    assert json.loads(vllm.text) == {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]",
                                     "num_speculative_tokens": 6}
    assert vllm.exact and vllm.values["num_speculative_tokens"] == 6
    assert "removed" in " ".join(vllm.notes) and "a chain" in " ".join(vllm.notes)
    assert export(U, "triton").text == "{0}, {1}, {0, 0}, {0, 1}, {1, 0}, {1, 1}"
    tensorrt = export(U, "tensorrt")
    assert json.loads(tensorrt.text) == [list(path) for path in U.paths[1:]] and tensorrt.values == {"max_draft_len": 6}
    assert json.loads(export(U, "tensorrt-leaves").text) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    sglang = export(U, "sglang")
    assert sglang.values == {"speculative_num_steps": 2, "speculative_eagle_topk": 2,
                             "speculative_num_draft_tokens": 7}
    assert sglang.exact and "not with Medusa heads" in sglang.notes[0] and "pool of 6 nodes" in sglang.notes[1]
    assert sglang.text == ("--speculative-num-steps 2 --speculative-eagle-topk 2 --speculative-num-draft-tokens 7")


def test_an_uneven_tree_is_said_to_be_beyond_some_engines():
    vllm = export(N, "vllm")
    assert not vllm.expressible and vllm.text == "" and "cannot express" in vllm.notes[0]
    bits = 1 << np.arange(len(N.mask))  # as TensorRT-LLM packs it: bit j of a row is set where it sees row j
    assert (N.mask * bits).sum(1).tolist() == [1, 3, 5, 11]
    sglang = export(N, "sglang")
    assert not sglang.exact and sglang.notes[-1].startswith("approximate")
    assert not export(N, "tgi").exact and "chain of depth 2" in export(N, "tgi").notes[-1]


def test_a_chain_is_what_every_engine_can_say():
    assert export(CHAIN, "vllm").values == {"num_speculative_tokens": 3} and export(CHAIN, "vllm").exact
    assert "num_speculative_tokens 3" in export(CHAIN, "vllm").notes[0]
    assert list(export(CHAIN, "sglang").values.values()) == [3, 1, 4] and export(CHAIN, "sglang").exact
    assert export(CHAIN, "tgi").text == "--speculate 3" and export(CHAIN, "tgi").exact
    assert all(export(CHAIN, name).exact for name in FORMATS)


def test_sglang_draws_from_a_pool():
    assert [sglang_pool(5, 4), sglang_pool(3, 1), sglang_pool(3, 4)] == [68, 3, 36]
    deep = export(dense([2, 2, 2]), "sglang")  # 14 nodes, but the pool holds 10
    assert deep.values["speculative_num_draft_tokens"] == 11 and not deep.exact


def test_limits_are_told():
    wide = from_paths([[0], [12], [0, 0]])
    assert not export(wide, "medusa").exact and "rank 12" in export(wide, "medusa").notes[-1]
    assert export(N, "medusa").exact and "as many heads as the tree is deep (2)" in export(N, "medusa").notes[0]
    assert "temperature 0" in " ".join(export(N, "tensorrt").notes)
    assert "crash" in " ".join(export(dense([4]), "triton").notes)
    assert "crash" not in " ".join(export(N, "triton").notes)
    for name in ("tensorrt", "tensorrt-leaves", "triton", "vllm", "sglang", "tgi"):
        assert not export(dense([]), name).expressible and "plain decoding" in export(dense([]), name).notes[0]
    with pytest.raises(TreeError, match="'onnx' is no tree format; choose from tree, medusa"):
        export(N, "onnx")
    huge = from_paths([[1_000_000, 1_000_000, 1_000_000]])  # its dense hull would never end
    assert not export(huge, "vllm").expressible and not export(huge, "sglang").exact


# -------------------------------------------------------------------------------------------------------- the way back


@given(st.integers(0, 10**6))
def test_lists_read_back_as_the_same_tree(seed):
    shape = random_shape(random.Random(seed), 4, 12, 9)
    for name in LISTS:
        written = export(shape, name)
        if written.expressible:
            assert read(written.text).shape.fingerprint == shape.fingerprint, name
            assert read(f"\n {written.text}\n").notes == read(written.text).notes


@pytest.mark.parametrize("name", list(FORMATS))
def test_what_is_exact_reads_back(name):
    for shape in (U, CHAIN, dense([1]), dense([3]), dense([2, 2, 2]), published()["zephyr_stage2"]):
        written = export(shape, name)
        if written.expressible and written.exact:
            assert read(written.text).shape.fingerprint == shape.fingerprint


def test_formats_are_recognised_by_their_looks():
    for text, kind, shape in (
            ("[[0], (1,)]", "medusa", dense([2])), ("mc_sim_7b_63 = " + str(MC_SIM_7B_63), "medusa", None),
            ("{0, 0, 0}, {1, 0}", "triton", from_paths([[0, 0, 0], [1, 0]])), ("{0}", "triton", dense([1])),
            ('"[(0,), (0, 0)]"', "vllm", dense([1, 1])), ("'[(0,), (0, 0)]'", "vllm", dense([1, 1])),
            ('{"method": "medusa", "num_speculative_tokens": 3}', "vllm", CHAIN),
            ("--speculate 3", "tgi", CHAIN), ("--model x --speculate=3", "tgi", CHAIN),
            ("--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
             "--speculative-num-draft-tokens 4", "sglang", CHAIN)):
        found = read(text)
        assert found.formats == (kind,)
        assert found.shape.fingerprint == (shape.fingerprint if shape else "7e63acaa76293e94")


def test_what_was_read_is_said_and_both_where_two_formats_are_the_same_text():
    for shape in (U, N, CHAIN, dense([3])):
        assert export(shape, "medusa").text == export(shape, "tensorrt").text
        assert read(export(shape, "medusa").text).title == "Medusa list or TensorRT-LLM JSON, all nodes"
    assert read(export(U, "tensorrt-leaves").text).title == "TensorRT-LLM JSON, leaves only"
    for text in ("[(0,), (1,)]", "[0, [0, 0]]", "[[0], [0, 0], [1, 0]]", "tree = [[0]]"):
        assert read(text).title == "Medusa list", text
    assert read(export(U, "triton").text).title == "Triton string"


def test_a_file_is_called_json_only_where_its_text_is():
    for name, one in FORMATS.items():
        text = export(CHAIN, name).text
        with contextlib.suppress(ValueError):
            json.loads(text)
            text = ""
        assert one.ending == ("txt" if text else "json"), name


def test_settings_whose_count_is_not_the_trees_are_noted():
    assert read('{"speculative_token_tree": "[(0,)]", "num_speculative_tokens": 1}').notes == []
    assert read('{"speculative_token_tree": "[(0,)]"}').notes == []
    found = read('{"speculative_token_tree": "[(0,)]", "num_speculative_tokens": 9}')
    assert found.shape.nodes == 1 and found.notes == [
        "num_speculative_tokens says 9, but the tree has 1 node, and is taken"]


def test_leaves_are_closed_over_their_ancestors_and_it_is_said():
    found = read("[[0,0,0,0],[1,0]]")  # field case A03
    assert found.shape.depth_counts == (2, 2, 1, 1) and found.notes == ["4 missing inner nodes added"]
    assert read("{0,0,0,0}, {1,0}").shape.fingerprint == found.shape.fingerprint
    assert read(str([list(path) for path in found.shape.paths[1:]])).notes == []


def test_sloppy_text_is_put_in_order_and_it_is_said():
    found = read("[0, (0,0), [0]]")  # field case A04
    assert found.shape.paths[1:] == ((0,), (0, 0)) and len(found.notes) == 2
    assert read("[[0,1],[0],[1],[0,0]]").shape.fingerprint == read("[[0],[1],[0,0],[0,1]]").shape.fingerprint
    assert read("[[0],[1],[2],[3]]").shape.mask.sum() == 9 and read("[]").shape.nodes == 0


# ------------------------------------------------------------------------------------------------------------ bad text


HERE = [text for text in HOSTILE if text != "'[[0]]'"]  # vLLM's own form, quotes and all


@pytest.mark.parametrize("text", [*HERE, "{}", "{0}, {}", "{-1}", "{0.5}", "{0};{1}", '{"medusa_viz_tree": 1}', "--",
                                  '{"speculative_token_tree": "__import__(\'os\')"}', "--speculate 0", "--speculate -3",
                                  '{"speculative_token_tree": 7}', '{"num_speculative_tokens": true}', "{" * 100_000,
                                  '{"medusa_viz_tree": "x", "paths": []}', "--speculate 999999", "--help", "x = 3",
                                  '{"medusa_viz_tree": 1, "paths": [[]]}', '{"medusa_viz_tree": 1, "paths": [[true]]}',
                                  "--speculative-num-steps 3 --speculative-eagle-topk 4 "
                                  "--speculative-num-draft-tokens 8"], ids=lambda text: repr(text[:20]))
def test_bad_text_is_refused_in_one_short_sentence(text):
    with pytest.raises(TreeError) as refused:
        read(text)
    message = str(refused.value)
    assert len(message) < 250 and "\n" not in message and message.endswith(".")


@given(st.text(max_size=60) | st.text("[](){},0123456789-=. \n'\"*+_abx:#", max_size=60))
def test_no_text_does_anything_but_parse_or_be_refused(text):
    with contextlib.suppress(TreeError):
        assert read(text).shape.nodes >= 0


def test_text_is_never_evaluated(tmp_path):
    marker = tmp_path / "marker"
    for text in (f"x = [open({str(marker)!r}, 'w')]", f'"[open({str(marker)!r})]"',
                 json.dumps({"speculative_token_tree": f"[[__import__('pathlib').Path({str(marker)!r}).touch()]]"})):
        with pytest.raises(TreeError):
            read(text)
    assert not marker.exists()


def test_a_tree_file_vouches_for_itself():
    body = json.loads(export(U, "tree").text)
    assert (body["nodes"], body["depth_counts"], body["fingerprint"]) == (6, [2, 4], U.fingerprint)
    for change, said in (({"paths": body["paths"][:-1]}, "node count"), ({"depth_counts": [3, 3]}, "depth counts"),
                         ({"paths": [*body["paths"][:-1], [1, 2]]}, "fingerprint"), ({"medusa_viz_tree": 2}, "newer")):
        with pytest.raises(TreeError, match=said):
            read(json.dumps(body | change))
