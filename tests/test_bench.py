"""The benchmark: what it counts, what it refuses, and that its result says what ran. Nothing here asserts a time."""

import argparse
import json
from types import SimpleNamespace

import pytest
import torch
from tiny import VOCAB, backbone, model, oracle_drafter, plain_greedy, prompt

from medusa_viz import cli
from medusa_viz.decoding.check import Difference
from medusa_viz.decoding.decoder import PLAIN
from medusa_viz.decoding.tree import dense
from medusa_viz.tuning import bench, bench_command
from medusa_viz.tuning.bench import BenchError, Prompt, Run

METHOD_KEYS = {"tokens_per_second", "ms_per_token", "ms_per_step", "tokens_per_step", "prefill_ms", "equals_greedy",
               "spread"}
PROMPTS = [Prompt("a", "writing"), Prompt("b"), Prompt("c", "maths")]


@pytest.fixture(scope="module")
def engine():
    """A tiny engine whose heads know the greedy text of the first prompt."""
    of, ids = backbone(), {text.text: prompt(seed) for seed, text in enumerate(PROMPTS)}
    drafter = oracle_drafter(of, ids["a"], plain_greedy(of, ids["a"], 40))
    codec = SimpleNamespace(encode_prompt=lambda text: ids[text])
    loaded = SimpleNamespace(source="/somewhere/private/heads-7", adapter=None)
    return SimpleNamespace(backbone=of, drafter=drafter, codec=codec, loaded=loaded, title="tiny")


def run_bench(engine, names=bench.METHODS, shape=None, tokens=12, rounds=2, **changes):
    shape = dense([1, 1, 1]) if shape is None else shape
    return bench.bench(engine, model(**changes), PROMPTS, names, shape, tokens, rounds)


# -------------------------------------------------------------------------------------------------------------- result


def test_the_result_holds_every_figure(engine):
    result = run_bench(engine)
    assert list(result["methods"]) == list(bench.METHODS)
    for figures in result["methods"].values():
        assert figures.keys() == METHOD_KEYS
        assert figures["tokens_per_second"] > 0 and figures["prefill_ms"] > 0
        assert figures["ms_per_token"] == pytest.approx(1e3 / figures["tokens_per_second"])
        assert figures["spread"] == sorted(figures["spread"])
        assert figures["equals_greedy"] is True
    assert result["ratios"].keys() == {"plain/transformers", "medusa/plain", "medusa/transformers"}
    for name, ratio in result["ratios"].items():
        a, b = (result["methods"][method]["tokens_per_second"] for method in name.split("/"))
        assert ratio == pytest.approx(a / b)
    assert (result["device"], result["dtype"], result["model"], result["prompts"]) == (
        engine.backbone.placement.device_name, "fp32", "tiny", 3)
    assert result["threads"] == torch.get_num_threads() and result["bandwidth_gb_s"] > 0
    assert result["kinds"] == ["maths", "writing"] and result["tree_nodes"] == 3
    assert result["linears"] == "plain" and result["step_gb"] == bench.linear_bytes(engine.backbone.model) / 1e9
    text = json.dumps(result)
    assert result["heads"] == "heads-7" and "private" not in text and "/work" not in text


def test_every_step_and_token_is_counted(engine):
    result = run_bench(engine, tokens=13)["methods"]
    assert result["plain"]["tokens_per_step"] == result["transformers"]["tokens_per_step"] == 1
    of, ids = engine.backbone, prompt(0)
    medusa = bench.own_decoder(of, engine.drafter, dense([1, 1, 1]))(ids, 13)
    plain = bench.own_decoder(of, None, PLAIN)(ids, 13)
    whole = bench.generate(model(), ())(ids, 13)
    assert medusa.ids == plain.ids == whole.ids == plain_greedy(of, ids, 13)
    assert medusa.committed == [4, 4, 4, 1] and medusa.forwards == 3  # the last token needs none
    assert plain.committed == whole.committed == [1] * 13 and plain.forwards == whole.forwards == 12
    for run in (medusa, plain, whole):
        assert run.prefill_ms > 0 and run.decode_ms > 0


def test_some_methods_give_their_ratios_only(engine):
    result = run_bench(engine, ["plain", "medusa"])
    assert list(result["methods"]) == ["plain", "medusa"] and list(result["ratios"]) == ["medusa/plain"]
    assert bench.bench(engine, None, PROMPTS, ["medusa"], PLAIN, 4, 1)["ratios"] == {}


def test_an_end_token_stops_every_method_alike(engine):
    of, ids = engine.backbone, prompt(0)
    end = plain_greedy(of, ids, 6)[-1]
    text = plain_greedy(of, ids, 20, {end})
    assert bench.generate(model(), {end})(ids, 20).ids == text
    of.model.generation_config.eos_token_id = end
    try:
        assert bench.own_decoder(of, None, PLAIN)(ids, 20).ids == text
    finally:
        of.model.generation_config.eos_token_id = None


def test_generate_is_greedy_whatever_the_model_came_with():
    made = model()
    made.generation_config.update(do_sample=True, temperature=3.0, repetition_penalty=5.0, num_beams=3)
    assert bench.generate(made, ())(prompt(0), 16).ids == plain_greedy(backbone(), prompt(0), 16)


def test_runs_take_turns_after_a_warm_up():
    calls = []

    def method(name):
        return lambda ids, limit: calls.append((name, ids, limit)) or name

    names = {name: method(name) for name in "abc"}
    yielded = list(bench.run_all(names, [[1], [2]], [40, 5], rounds=3))
    assert calls[:3] == [("a", [1], 8), ("b", [1], 8), ("c", [1], 8)]
    assert [call[:2] for call in calls[3:]] == [(name, [number + 1]) for name, number, _ in yielded]
    assert [limit for _, ids, limit in calls[3:] if ids == [2]] == [5] * 9
    for turn in range(6):
        group = yielded[3 * turn : 3 * turn + 3]
        assert sorted(name for name, _, _ in group) == ["a", "b", "c"]
        assert {number for _, number, _ in group} == {turn % 2}
    assert {yielded[3 * turn][0] for turn in range(6)} == {"a", "b", "c"}  # nobody always goes first


def test_the_summary_is_arithmetic():
    def run(tokens, committed, forwards, prefill, decode):
        return Run(list(range(tokens)), committed, forwards, prefill, decode)

    runs = [[run(5, [3, 2], 1, 10, 40), run(5, [3, 2], 1, 12, 60), run(5, [3, 2], 1, 30, 44)],
            [run(3, [1, 1, 1], 2, 5, 20), run(3, [1, 1, 1], 2, 5, 20), run(3, [1, 1, 1], 2, 5, 40)]]
    figures = bench.summary(runs, [None, None])
    assert figures["ms_per_token"] == pytest.approx((44 + 20) / (4 + 2))
    assert figures["tokens_per_second"] == pytest.approx(6 / 0.064)
    assert figures["ms_per_step"] == pytest.approx(64 / 3)
    assert figures["tokens_per_step"] == 8 / 5
    assert figures["prefill_ms"] == (12 + 5) / 2
    assert figures["spread"] == pytest.approx([6 / 0.084, 6 / 0.060])
    assert figures["equals_greedy"] is True


def test_a_difference_is_told_with_its_prompt_faults_first():
    tie, fault = Difference(3, 1e-5, True), Difference(7, 0.5, False)
    assert bench._equality([None, tie]) == {"prompt": 1, "position": 3, "gap": 1e-5, "tie": True,
                                            "differing_prompts": 1}
    both = bench._equality([tie, fault, None])
    assert both["prompt"] == 1 and both["differing_prompts"] == 2
    assert "a rounding tie" in bench_command._equal(bench._equality([tie]))
    assert "prompt 2" in bench_command._equal(bench._equality([tie, fault]))


def test_wrong_text_is_no_equal_text(engine, monkeypatch):
    real = bench.own_decoder

    def wrong(of, drafter, shape):
        def run(ids, limit):
            made = real(of, drafter, shape)(ids, limit)
            return Run([(token + 1) % VOCAB for token in made.ids], made.committed, made.forwards, 1.0, 1.0)
        return run

    monkeypatch.setattr(bench, "own_decoder", wrong)
    equality = run_bench(engine, ["plain"])["methods"]["plain"]["equals_greedy"]
    assert equality["prompt"] == 0 and equality["position"] == 0 and equality["differing_prompts"] == 3


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("text, said", [
    ("", "holds no prompt"),
    ("\n \n", "holds no prompt"),
    ('{"prompt": "a"}\nplain text\n', "Line 2"),
    ('{"kind": "writing"}', "Line 1"),
    ('{"prompt": 3}', "Line 1"),
    ('{"prompt": "  "}', "Line 1"),
    ('{"prompt": "a", "kind": 7}', "Line 1"),
    ('"a"', "Line 1"),
    ("[1, 2]", "Line 1"),
])
def test_a_bad_prompts_file_is_one_sentence(text, said, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError) as error:
        bench.read_prompts(path)
    assert said in str(error.value) and "\n" not in str(error.value) and str(error.value).endswith(".")


def test_a_prompts_file_that_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    for path in (tmp_path / "none", tmp_path, tmp_path / "latin.jsonl"):
        with pytest.raises(BenchError, match="cannot be read"):
            bench.read_prompts(path)


def test_methods_are_checked():
    assert bench.parse_methods("medusa, plain,medusa") == ["medusa", "plain"]
    for text in ("", ",", "fast", "plain,fast"):
        with pytest.raises(BenchError, match="choose from plain, medusa, transformers"):
            bench.parse_methods(text)


def test_a_prompt_without_room_is_refused(engine):
    with pytest.raises(BenchError, match="Two new tokens"):
        run_bench(engine, tokens=1)


@pytest.mark.parametrize("arguments, said", [
    (["--methods", "fast"], "'fast' is no method"),
    (["--prompts", "nowhere.jsonl"], "cannot be read"),
    (["--rounds", "0"], "--rounds: 0 is no whole number of 1 or more"),
    (["--max-new-tokens", "-1"], "--max-new-tokens: -1 is no whole number"),
    (["--rounds", "2.5"], "--rounds: 2.5 is no whole number"), (["--tree", "forest"], "'forest' is no tree"),
    (["--tree", "none.txt"], "none.txt cannot be read"), (["--device"], "--device: expected one argument"),
])
def test_the_command_refuses_before_it_loads_a_model(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(cli, "load_engine", lambda options: pytest.fail("loaded"))
    assert cli.main(["bench", *arguments]) == 2
    said_all = capsys.readouterr().err
    assert said in said_all and said_all.count("\n") == 1


# ------------------------------------------------------------------------------------------------------------- command


def test_the_command_writes_json_and_a_table(engine, tmp_path, capsys, monkeypatch):
    from medusa_viz.models import backbone as backbones

    model().save_pretrained(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": p.text, "kind": p.kind}) for p in PROMPTS))
    monkeypatch.setattr(cli, "load_engine", lambda options: engine)
    monkeypatch.setattr(cli, "tree_from", lambda spec, of: dense([1, 1]))
    loads, real = [], backbones.load
    monkeypatch.setattr(backbones, "load", lambda *args, **kwargs: loads.append(kwargs) or real(*args, **kwargs))
    out = tmp_path / "out.json"
    assert cli.main(["bench", "--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "p.jsonl"),
                     "--rounds", "1", "--max-new-tokens", "6", "--json", str(out)]) == 0
    result, printed = json.loads(out.read_text()), capsys.readouterr()
    assert loads == [{"packed": False, "adapter": None}]  # transformers gets no help from us
    assert result["methods"].keys() == set(bench.METHODS) and result["rounds"] == 1 and result["max_new_tokens"] == 6
    assert result["tree_nodes"] == 2 and str(tmp_path) not in out.read_text()
    for name in bench.METHODS:
        assert name in printed.out
    assert "tokens/s" in printed.out and "plain/transformers" in printed.out and "linears: plain" in printed.out
    assert "9/9" in printed.err


def test_the_prompts_that_ship_are_eight_kinds():
    prompts = bench.read_prompts(bench_command.PROMPTS)
    assert [p.kind for p in prompts] == ["writing", "roleplay", "reasoning", "maths", "coding", "extraction", "science",
                                         "humanities"]


@pytest.mark.model
def test_the_prompts_that_ship_have_at_most_200_tokens(model_folder):
    from transformers import AutoTokenizer

    from medusa_viz.models.text import TextCodec

    codec = TextCodec(AutoTokenizer.from_pretrained(model_folder))
    lengths = [len(codec.encode_prompt(p.text)) for p in bench.read_prompts(bench_command.PROMPTS)]
    assert max(lengths) <= 200 and min(lengths) >= 50


def test_options_have_defaults():
    parser = argparse.ArgumentParser()
    bench_command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["bench"])
    assert options.max_new_tokens == 96 and bench.parse_methods(options.methods) == list(bench.METHODS)
    assert options.run is bench_command.run
