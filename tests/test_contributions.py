"""The table of what contributes: its lines, its ratios, and what it refuses. Nothing here asserts a time."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import backbone, oracle_drafter, plain_greedy, prompt
from tiny_page import saved_heads, saved_model

from medusa_viz import cli
from medusa_viz import contributions as command
from medusa_viz.models import checkpoints
from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.training import commands, shipped
from medusa_viz.tuning import contributions
from medusa_viz.tuning.bench import BenchError, Prompt

ACCURACY = [[0.5, 0.2, 0.1], [0.3, 0.1, 0.05], [0.2, 0.1, 0.05]]
PROMPTS = [Prompt("a"), Prompt("b")]


def engine(seed=0, perplexity=None):
    """A tiny engine whose heads know the greedy text of the first prompt."""
    of, ids = backbone(seed=seed), {text.text: prompt(number) for number, text in enumerate(PROMPTS)}
    trained = {"perplexity": perplexity} if perplexity else {}
    config = HeadsConfig(accuracy=ACCURACY, trained=trained)
    return SimpleNamespace(backbone=of, drafter=oracle_drafter(of, ids["a"], plain_greedy(of, ids["a"], 40)),
                           codec=SimpleNamespace(encode_prompt=lambda text: ids[text]), title="tiny", accuracy=ACCURACY,
                           loaded=SimpleNamespace(source="heads", config=config))


def test_every_line_adds_one_part_and_is_measured_against_plain_decoding():
    first, second = engine(), engine(1, {"before": 4.0, "after": 4.1})
    rows = contributions.rows(first, second, engine(2), [2, 2])
    assert [row.name for row in rows] == ["plain decoding", "heads, top-1 chain", "+ dense tree", "+ optimised tree",
                                          "+ Medusa-2 training", "direct joint training"]
    assert [row.shape.nodes for row in rows] == [0, 3, 6, 6, 6, 6]
    result = contributions.measure(rows, PROMPTS, 14, 1)
    plain = result["rows"][0]
    assert (plain["tokens_per_step"], plain["overhead"], plain["speedup"]) == (1, 1, 1)
    for row in result["rows"]:
        assert row["equals_greedy"] is True  # each with its own backbone
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
        assert row["overhead"] == pytest.approx(row["ms_per_step"] / plain["ms_per_step"])
    assert all(row["tokens_per_step"] > 1 for row in result["rows"][1:])
    text = command.table(result)
    assert "| + Medusa-2 training | 6 |" in text and "+2.5%" in text
    json.dumps(result)


def test_a_dense_tree_deeper_than_the_heads_and_heads_without_accuracies_are_refused():
    bare = engine()
    with pytest.raises(BenchError, match="depth 4, but the model has 3 heads"):
        contributions.rows(bare, None, None, [1, 1, 1, 1])
    bare.accuracy = []
    with pytest.raises(BenchError, match="bring no accuracy table"):
        contributions.rows(bare, None, None, [2, 3])


@pytest.mark.parametrize(("words", "said"), [
    (["--top-s", "2,x"], "must read like 2,3"), (["--rounds", "0"], "--rounds: 0 is no whole number of 1 or more"),
    (["--max-new-tokens", "x"], "--max-new-tokens: x is no"), (["--prompts", "none.jsonl"], "cannot be read"),
    (["--direct", "many"], "--direct is 'many'; it must be a number of reply tokens to train on, a folder of heads"),
    (["--direct", "0"], "--direct is '0'; it must be"), (["--direct", "30,000"], "--direct is '30,000'; it must be"),
    (["--model", "someone/else"], "No replies of someone/else to train on ship with the project: name with --direct")])
def test_odd_options_are_refused_before_a_model_loads(words, said, capsys, monkeypatch):
    monkeypatch.setattr(cli, "load_engine", lambda options: pytest.fail("loaded"))
    assert cli.main(["contributions", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


# -------------------------------------------------------------------------------------- heads trained for the last line


@pytest.fixture
def measured(tmp_path, monkeypatch, capsys):
    """measured(direct) -> exit status, lines of the table, what was said besides; with a tiny model for which a file of
    replies ships. `runs` holds what was trained."""
    monkeypatch.setenv("MEDUSA_VIZ_CACHE", str(tmp_path / "cache"))
    model, heads = saved_model(tmp_path / "tiny"), saved_heads(tmp_path / "heads")
    n, length = 80, 46
    np.savez(tmp_path / "train.npz", ids=np.random.default_rng(0).integers(0, 40, n * length).astype(np.uint16),
             offsets=np.arange(n + 1) * length, reply_start=np.full(n, 6), temperature=np.zeros(n), prompt=np.arange(n),
             split=np.zeros(n, np.uint8))
    monkeypatch.setattr(shipped, "training_file", lambda name: tmp_path / "train.npz" if name == str(model) else None)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abc"}\n')
    words = ["contributions", "--model", str(model), "--heads", str(heads), "--medusa2", "none", "--top-s", "2",
             "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "4", "--device", "cpu"]

    def run(direct):
        status = cli.main([*words, "--direct", direct])
        out, err = capsys.readouterr()
        assert not out or out.startswith("tiny, fp32 on CPU"), "nothing but the result goes to standard output"
        return status, out.splitlines(), err

    yield SimpleNamespace(run=run, runs=tmp_path / "cache" / "runs", heads=heads)


def test_the_heads_of_direct_training_are_trained_once_and_kept(measured):
    status, lines, said = measured.run("2000")
    assert status == 0 and "recipe direct on 2,000 reply tokens" in said and "step/s" in said
    assert any(line.startswith("| direct joint training | 2 |") and "%" in line for line in lines)
    folder, = (path for path in measured.runs.iterdir() if path.is_dir())
    loaded = checkpoints.load(folder)
    trained = loaded.config.trained
    assert trained["recipe"] == "direct" and 2000 <= trained["tokens"] < 2040 and loaded.adapter
    assert loaded.accuracy and trained["tokens_per_step"]["15"] >= 1, "one prompt in eight was held out"

    again = measured.run("2000")
    assert again[0] == 0 and f"are those trained before, in {folder}" in again[2]
    assert checkpoints.load(folder).written == loaded.written, "not trained anew"
    assert [line.split("|")[1:4] for line in again[1]] == [line.split("|")[1:4] for line in lines]

    assert any("direct joint training" in line for line in measured.run(str(folder))[1]), "a folder is that folder"
    status, lines, said = measured.run("none")
    assert status == 0 and not any("direct" in line for line in lines[:-1]) and "recipe direct" not in said
    assert measured.run("1000")[0] == 0
    assert len([path for path in measured.runs.iterdir() if path.is_dir()]) == 2, "other settings, other heads"


def test_direct_training_that_was_stopped_goes_on_when_the_command_is_repeated(measured, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(commands, "_watching", contextmanager(lambda folder: iter([SimpleNamespace(
            report=lambda *progress: None, stopped=lambda: True, bars=SimpleNamespace(close=lambda: None))])))
        status, lines, said = measured.run("2000")
    assert (status, lines) == (commands.EXIT_STOPPED, []) and "Stopped after step 1" in said
    status, lines, said = measured.run("2000")
    assert status == 0 and "Resumed at step 1" in said and any("direct joint training" in line for line in lines)


def test_data_that_cannot_be_trained_on_end_the_command_with_their_sentence(measured, monkeypatch, tmp_path):
    np.savez(tmp_path / "train.npz", ids=np.full(80, 5000, np.uint16), offsets=[0, 40, 80], reply_start=[6, 6],
             prompt=[1, 2], temperature=[0, 0])
    status, lines, said = measured.run("2000")
    assert (status, lines) == (2, []) and "the data belong to another model" in said
