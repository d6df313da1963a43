"""The table of what contributes: its lines, its ratios, and what it refuses. Nothing here asserts a time."""

import json
from types import SimpleNamespace

import pytest
from tiny import backbone, oracle_drafter, plain_greedy, prompt

from medusa_viz import cli
from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.tuning import contributions, contributions_command
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
    text = contributions_command.table(result)
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
    (["--max-new-tokens", "x"], "--max-new-tokens: x is no"), (["--prompts", "none.jsonl"], "cannot be read")])
def test_odd_options_are_refused_before_a_model_loads(words, said, capsys, monkeypatch):
    monkeypatch.setattr(cli, "load_engine", lambda options: pytest.fail("loaded"))
    assert cli.main(["contributions", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error
