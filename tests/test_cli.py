"""The command line: one sentence and status 2 for what cannot be done, before any work is done for it."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_hub import serve
from safetensors.torch import load_file, save_file
from tiny import backbone, plain_greedy, random_drafter
from tiny_page import VOCAB, saved_heads, saved_model, token_file

from medusa_viz import cli
from medusa_viz.models.checkpoints import HeadsConfig, LoadedHeads, LoadReport
from medusa_viz.tuning.jobs import Progress

REPOSITORY = Path(__file__).resolve().parents[1]
ACCURACY = [[0.5, 0.2, 0.1]] * 3


class Ids(list):
    notice = ""


class Letters:
    def encode_prompt(self, text, raw=False):
        return Ids(1 + ord(char) % 60 for char in text)

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def text_bytes(self, ids, keep_special):
        return (f"{token} ".encode() for token in ids)

    def token_bytes(self, token):
        return f"{token} ".encode()


@pytest.fixture
def engine(monkeypatch):
    """A tiny engine in the place of the one the command would load."""
    of = backbone(dtype=torch.float64)
    drafter = random_drafter(of)
    loaded = LoadedHeads(drafter.module, HeadsConfig(accuracy=ACCURACY), LoadReport([], [], [], []), "tiny")
    made = SimpleNamespace(backbone=of, drafter=drafter, codec=Letters(), loaded=loaded, title="Tiny", tree="sparse:16",
                           accuracy=ACCURACY)
    monkeypatch.setattr(cli, "load_engine", lambda options: made)
    monkeypatch.setattr("medusa_viz.models.text.TextStream", lambda codec: SimpleNamespace(
        push=codec.decode, finish=lambda: ""))
    return made


def test_decode_writes_every_figure(engine, tmp_path, capsys):
    target = tmp_path / "made" / "here.json"
    assert cli.main(["decode", "--prompt", "abc", "--tree", "dense:2,2", "--max-new-tokens", "9",
                     "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert set(result) == {"text", "token_ids", "steps", "tokens", "tokens_per_step", "accepted_per_depth", "seconds",
                           "tokens_per_second", "equals_greedy", "tree_nodes", "finish_reason", "device", "dtype"}
    assert result["token_ids"] == plain_greedy(engine.backbone, Letters().encode_prompt("abc"), 9)
    assert (result["tokens"], result["tree_nodes"], result["finish_reason"]) == (9, 6, "length")
    assert result["equals_greedy"] is True and result["tokens_per_step"] == 9 / result["steps"]
    assert "tokens per step" in capsys.readouterr().err


def test_loading_says_what_was_used_of_the_heads_file(tmp_path, capsys):
    model, heads = saved_model(tmp_path / "base"), saved_heads(tmp_path / "heads")
    tensors = load_file(heads / "medusa_lm_head.safetensors") | {"odd": torch.zeros(1)}
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    assert cli.main(["decode", "--prompt", "x", "--model", str(model), "--heads", str(heads), "--device", "cpu",
                     "--max-new-tokens", "2"]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("heads of")]
    assert line == (f"heads of {heads}: medusa layout, 6 tensors used, 1 unused (odd), 0 missing; "
                    f"shared output matrix (the backbone's LM head), all {VOCAB} rows")


@pytest.mark.model
def test_the_default_heads_share_the_output_matrix_and_draft_from_a_part_of_it(model_folder, capsys):
    assert cli.main(["decode", "--prompt", "Hi", "--device", "cpu", "--max-new-tokens", "2"]) == 0
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("heads of")]
    assert "medusa layout, 17 tensors used, 0 unused, 0 missing; shared output matrix" in line
    assert line.endswith("16,384 of 49,152 rows")


@pytest.mark.parametrize("tree", ["plain", "chain", "chain:2", "dense:3,2,1", "sparse:7", "sparse:7@2,1"])
def test_every_tree_writes_the_same_text(engine, tree, tmp_path):
    target = tmp_path / "out.json"
    words = ["--prompt", "hello", "--tree", tree, "--max-new-tokens", "8", "--json", str(target)]
    assert cli.main(["decode", *words]) == 0
    assert json.loads(target.read_text())["token_ids"] == plain_greedy(
        engine.backbone, Letters().encode_prompt("hello"), 8)


@pytest.mark.parametrize(("words", "said"), [
    (["--prompt", " \n"], "prompt is empty"), (["--prompt", "x", "--tree", "dense:1,1,1,1"], "depth 4"),
    (["--prompt", "x", "--tree", "forest"], "forest"), (["--prompt", "x", "--tree", "none.json"], "cannot be read"),
    (["--prompt", "x", "--temperature", "9"], "temperature"),
    (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens"),
    (["--prompt", "x", "--json", "/proc/none/out.json"], "cannot be written"),
])
def test_what_cannot_be_done_is_one_sentence(engine, words, said, capsys):
    assert cli.main(["decode", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


@pytest.mark.parametrize(("words", "said"), [
    (["--tree", "forest"], "'forest' is no tree"), (["--tree", "dense:a"], "whole numbers"),
    (["--tree", "chain:1,2"], "is no tree"), (["--tree", "sparse:8#3"], "a seed after # with the random ones"),
    (["--tree", "published:none"], "No published tree"), (["--tree", "none.json"], "cannot be read"),
    (["--accept", "odd"], "--accept: invalid choice"), (["--odd"], "unrecognized arguments: --odd")])
def test_options_that_no_model_could_mend_are_refused_before_one_loads(words, said, capsys, monkeypatch):
    monkeypatch.setattr(cli, "load_engine", lambda options: pytest.fail("loaded"))
    assert cli.main(["decode", "--prompt", "x", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


def test_a_bar_counts_every_stretch_of_a_job_anew(capsys):
    def job():
        for total in (3, 5):
            for done in range(1, total + 1):
                yield Progress(done, total, f"of {total}")
        return "made"

    assert cli.shown(job()) == "made"
    assert "of 5: 100%" in (said := capsys.readouterr().err) and "5/5" in said


def test_a_tree_file_is_read_with_notes(engine, tmp_path, capsys):
    file = tmp_path / "tree.json"
    file.write_text("[[0,0,0,0],[1,0],0]")
    assert cli.main(["decode", "--prompt", "x", "--tree", str(file), "--max-new-tokens", "3"]) == 0
    error = capsys.readouterr().err
    assert "missing inner node" in error and "depth 4" in error and "5 nodes" in error


def test_training_refuses_with_status_2(tmp_path, capsys):
    assert cli.main(["train", "--data", str(tmp_path / "none.npz"), "--out", str(tmp_path / "heads")]) == 2
    assert "is no token file" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "said"), [
    (["--port", "99999"], "1 to 65535"), (["--host", "256.1.1.1", "--port", "0"], "cannot be served"),
    (["--max-sessions", "0"], "max_sessions is 0; it must be a whole number between 1 and 1000."),
    (["--max-nodes", "16385"], "max_nodes is 16385; it must be a whole number between 0 and 16384."),
    (["--max-nodes", "many"], "--max-nodes: invalid int value: 'many'")])
def test_the_page_says_where_it_cannot_be_served(words, said):
    command = [sys.executable, "app.py", *words]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and said in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize(("model", "said"), [
    ("nosuch", "nosuch is no folder here, no hub id (owner/name) and none of the models"),
    ("a/private", "a/private is not on the hub, or it is private"),
    ("vicuna-7b-v1.3", "lmsys/vicuna-7b-v1.3 is not on the hub, or it is private")])
def test_every_command_finds_models_in_the_same_way(tmp_path, monkeypatch, capsys, model, said):
    data, out = str(token_file(tmp_path / "data.npz")), str(tmp_path / "out")
    commands = (["train", "--data", data, "--out", out], ["distill", "--out", f"{out}.npz"],
                ["decode", "--prompt", "hi"])
    with serve(monkeypatch, tmp_path, {}):
        for command in commands:
            assert cli.main([*command, "--model", model]) == 2
            error = capsys.readouterr().err.strip().splitlines()[-1]
            assert said in error and "--heads" not in error


@pytest.mark.parametrize("command", [["train", "--data", "data.npz", "--out", "out"], ["distill", "--out", "out.npz"]])
def test_a_preset_with_an_adapter_is_no_backbone_to_train_on(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    token_file(tmp_path / "data.npz")
    assert cli.main([*command, "--model", "smollm2-135m-medusa2"]) == 2
    assert "name that, smollm2-135m." in capsys.readouterr().err


def test_heads_trained_on_a_hub_model_name_it(tmp_path, monkeypatch):
    data, out = token_file(tmp_path / "data.npz"), tmp_path / "out"
    small = ["--heads", "2", "--layers", "1", "--draft-vocabulary", "40", "--passes", "1", "--batch", "64"]
    with serve(monkeypatch, tmp_path, {"a/base": saved_model(tmp_path / "base")}):
        assert cli.main(["train", "--model", "a/base", "--data", str(data), "--out", str(out), "--cache",
                         str(tmp_path / "cache"), "--device", "cpu", *small]) == 0
    assert json.loads((out / "config.json").read_text())["base_model_name_or_path"] == "a/base"
