"""`tune` and `export`: what they print, write, read back and refuse."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_replies import greedy_replies
from test_latency import curve_of
from tiny import backbone, plain_greedy, prompt, random_drafter

from medusa_viz import cli
from medusa_viz.decoding.tree import dense
from medusa_viz.models import checkpoints
from medusa_viz.models.beside import RANKS_NAME, heads_fingerprint
from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.training import own_text
from medusa_viz.tuning import accuracy, extents, latency, measure_latency, tune_report
from medusa_viz.tuning import calibration as calibrations
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.calibration import calibrating, known_of
from medusa_viz.tuning.formats import FORMATS, read
from medusa_viz.tuning.jobs import finish
from medusa_viz.tuning.published_trees import published
from medusa_viz.tuning.specs import Facts, build
from medusa_viz.ui import tuner_work

ACCURACY = [[0.5, 0.2, 0.1], [0.3, 0.2, 0.1], [0.2, 0.1, 0.05]]


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """A tiny engine in the place of the one the command would load; its cache is the test's own."""
    of = backbone(dtype=torch.float64)
    drafter = random_drafter(of, 3)
    heads = tmp_path / "heads"
    checkpoints.save(heads, drafter.module, HeadsConfig(accuracy=ACCURACY), torch.float32)
    codec = SimpleNamespace(encode_prompt=lambda text, raw=False: prompt(len(text)))
    made = SimpleNamespace(backbone=of, drafter=drafter, codec=codec, title="Tiny", accuracy=ACCURACY,
                           place="CPU · fp64", loaded=SimpleNamespace(source=str(heads), adapter=None), heads=heads)
    monkeypatch.setattr(cli, "load_engine", lambda options: made)
    monkeypatch.setattr(measure_latency, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(measure_latency.measuring, "__defaults__", ((1, 2, 4, 8), (8,), 1, None))
    return made


def replies():
    of = backbone(dtype=torch.float64)
    return greedy_replies([(prompt(seed), plain_greedy(of, prompt(seed), 20)) for seed in range(6)], [0, 1] * 3)


@pytest.fixture
def ranks(engine, tmp_path):
    """A rank table as `calibrate` writes it."""
    known = finish(calibrating(engine, replies(), {"heads": "heads"}))
    accuracy.save(tmp_path / "ranks.npz", known, accuracy.accuracy(known.table, known.prompts))
    return tmp_path / "ranks.npz"


def prompts_file(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "bcd"}\n')
    return tmp_path / "p.jsonl"


def test_tune_prints_table_and_recommendation_and_measures(engine, ranks, tmp_path, capsys):
    out = tmp_path / "made" / "tune.json"
    words = ["tune", "--ranks", ranks, "--measure", "--prompts", prompts_file(tmp_path), "--max-new-tokens", 8,
             "--json", out, "--save-latency", tmp_path / "curve.json"]
    assert cli.main(list(map(str, words))) == 0
    shown, result = capsys.readouterr().out, json.loads(out.read_text())
    for name in ("sparse", "best-dense", "sequoia", "joint", "dynamic"):
        assert f"{name}  " in shown and {option["spec"] for option in result["builders"]} >= {f"{name}:3", f"{name}:63"}
    assert "step times: CPU" in shown and "off by" in shown and "by batch" in shown
    assert "plain decoding" in shown and "for temperatures above 0 only measuring counts" in shown
    assert "equals greedy" in shown and "%" in shown
    names = [run["name"] for run in result["measured"]]
    assert names[:7] == ["plain", *(f"{name}:{n}" for name in ("best-dense", "sparse") for n in (3, 7, 15))]
    assert all(run["equals_greedy"] is True for run in result["measured"])
    assert latency.load(tmp_path / "curve.json").recorded and str(tmp_path) not in out.read_text()


def test_the_threshold_study_of_the_page_as_a_command(engine, ranks, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(extents.STUDY, "quick", extents.Extent((0.01, 0.25), (0.7,), 2, 8))
    out = tmp_path / "tune.json"
    assert cli.main(["tune", "--ranks", str(ranks), "--thresholds", "quick", "--json", str(out)]) == 0
    said, result = capsys.readouterr(), json.loads(out.read_text())
    study, best = result["thresholds"], result["recommended"]
    assert study["tree"] == (best["spec"] if best else "sparse:16") and "threshold study: 100%" in said.err
    facts = calibrations.facts_of(engine, accuracy.load(ranks))
    asked = tuner_work.studying(engine, build(study["tree"], facts).tree, (0.01, 0.25), (0.7,), 2, 8)  # the page's job
    points = json.loads(json.dumps([asdict(point) for point in finish(asked).points]))
    assert study["points"] == points and len(points) == 5
    table = said.out[said.out.index("typical acceptance with") :].splitlines()[3:]
    assert [line.split()[-4] for line in table if line] == [f"{point['tokens_per_step']:.3f}" for point in points]
    assert any("typical" in line and " 0.25 " in line for line in table) and "plain sampling" in said.out
    assert "the threshold study of typical acceptance" in said.err
    assert cli.main(["tune", "--thresholds", "long"]) == 2
    assert "invalid choice: 'long'" in capsys.readouterr().err


def test_tune_takes_measured_step_times_from_the_cache(engine, ranks, monkeypatch, capsys):
    assert cli.main(["tune", "--ranks", str(ranks)]) == 0
    monkeypatch.setattr(measure_latency._Bench, "run", lambda *_: pytest.fail("measured again"))
    assert cli.main(["tune", "--ranks", str(ranks)]) == 0
    with pytest.raises(pytest.fail.Exception):
        cli.main(["tune", "--ranks", str(ranks), "--measure-latency"])


def test_another_devices_curve_gives_another_advice(engine, ranks, tmp_path, capsys):
    def advice(step, *more):
        path = tmp_path / "curve.json"
        path.write_text(latency.to_json(curve_of(step, (1, 2, 4, 8, 16, 32, 64, 128, 256), heads=0.01)))
        assert cli.main(["tune", "--ranks", str(ranks), "--latency", str(path), *more]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if "faster" in line or "recommended" in line)

    assert advice(lambda rows: 10.0).startswith("recommended on H200: ")
    assert advice(lambda rows: 10.0 * rows).startswith("plain decoding is faster on H200")
    assert "at batch 32" in advice(lambda rows: 10 + rows, "--batch", "32")


def test_tune_ranks_replies_where_no_table_is_at_hand(engine, tmp_path, capsys, monkeypatch):
    made = replies()
    arrays = {name: getattr(made, name) for name in ("ids", "offsets", "reply_start", "split", "kind", "temperature")}
    np.savez(tmp_path / "r.npz", kinds=np.array(made.kinds), **arrays)
    read, calibrate = [], calibrations.calibrating
    monkeypatch.setattr(calibrations, "calibrating", lambda engine, replies, about: read.append(replies) or calibrate(
        engine, replies, about))
    assert cli.main(["tune", "--replies", str(tmp_path / "r.npz")]) == 0
    assert read[0].ids.tolist() == made.select(made.split == 0).ids.tolist()  # the held-out half is for judging
    said = capsys.readouterr().err
    assert "to do: ranking 3 greedy replies under the heads, measuring this device's step times, replaying" in said
    assert "ranking: 100%" in said and "step times: 100%" in said and "replaying: 100%" in said
    np.savez(tmp_path / "warm.npz", kinds=np.array(made.kinds), **arrays | {"temperature": np.ones(6)})
    assert cli.main(["tune", "--replies", str(tmp_path / "warm.npz")]) == 2
    assert "no greedy reply" in capsys.readouterr().err


def test_heads_are_judged_on_text_that_their_own_backbone_writes(engine, tmp_path, capsys, monkeypatch):
    """What ships is the original backbone's, which an adapter changes."""
    monkeypatch.setattr(own_text, "ANSWERED", 3)
    monkeypatch.setattr(own_text, "ANSWER_TOKENS", 9)
    engine.codec.encode_prompt = lambda text, raw=False: prompt(len(text) % 7)
    assert own_text.shipped(engine, "smollm2-135m") == own_text.shipped_file("smollm2-135m-medusa2") is not None
    engine.loaded.adapter = engine.heads
    assert own_text.shipped(engine, "smollm2-135m") is own_text.shipped_file("tiny") is None
    target = tmp_path / "tune.json"
    assert cli.main(["tune", "--model", "smollm2-135m", "--json", str(target)]) == 0
    said = capsys.readouterr().err
    assert "to do: writing greedy replies, ranking them under the heads, " in said and "writing replies: 100%" in said
    assert json.loads(target.read_text())["calibration"]["replies"] == "replies written now"
    assert "original backbone" not in said


def test_figures_of_the_original_backbones_text_are_said_to_be_that(engine, ranks, capsys):
    known = accuracy.load(ranks)
    other = replace(known, about=known.about | {"own_text": False, "split": "all"})
    accuracy.save(engine.heads / RANKS_NAME, other, accuracy.accuracy(other.table))
    assert cli.main(["tune"]) == 0
    assert "note: replayed figures are of text that the original backbone wrote" in capsys.readouterr().err
    assert cli.main(["tune", "--ranks", str(ranks)]) == 0
    assert "original backbone" not in capsys.readouterr().err
    assert cli.main(["tune", "--ranks", str(engine.heads / RANKS_NAME)]) == 0
    assert "ranks held-out replies too" in capsys.readouterr().err


def test_what_is_measured_is_held_against_predictions_for_one_text(engine, ranks, tmp_path, capsys, monkeypatch):
    taken, show, target = [], tune_report.measured, tmp_path / "tune.json"
    monkeypatch.setattr(tune_report, "measured", lambda runs, predicted, elsewhere: taken.append(predicted) or show(
        runs, predicted, elsewhere))
    monkeypatch.setattr(measure_latency.measuring, "__defaults__", ((1, 2, 4, 8, 64), (8, 30), 1, None))
    words = ["tune", "--ranks", ranks, "--measure", "--prompts", prompts_file(tmp_path), "--max-new-tokens", 4,
             "--batch", 4, "--prefix", "long", "--json", target]
    assert cli.main(list(map(str, words))) == 0
    curve, result, shown = measure_latency.stored(engine), json.loads(target.read_text()), capsys.readouterr().out
    assert {option.spec: option.milliseconds for option in taken[0]}["sparse:7"] == curve.step_ms(7)
    there = next(option for option in result["builders"] if option["spec"] == "sparse:7")
    assert there["step_ms"] == curve.step_ms(7, 4, 1) and result["batch"] == 4
    assert there["tokens_per_second"] == pytest.approx(
        4e3 * there["replayed"]["tokens_per_step"] / there["step_ms"])
    assert result["plain_tokens_per_second"] == pytest.approx(4e3 / curve.step_ms(0, 4, 1))
    assert f" {there['tokens_per_second']:.1f}/s" in shown and "of all 4 texts" in shown  # as the advice counts them


@pytest.mark.parametrize(("words", "said"), [
    (["--ranks", "none.npz"], "is not there; `calibrate` writes"), (["--latency", "none.json"], "cannot be read"),
    (["--ranks", __file__], "is no rank table"), (["--replies", "none.npz"], "is no token file"),
    (["--batch", "0"], "--batch: 0 is no whole number of 1 or more"),
    (["--measure", "--prompts", "none.jsonl"], "cannot be read"),
])
def test_tune_refuses_in_one_sentence_before_it_loads_a_model(engine, words, said, capsys, monkeypatch):
    monkeypatch.setattr(cli, "load_engine", lambda options: pytest.fail("loaded"))
    assert cli.main(["tune", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


def test_a_table_of_other_heads_is_refused_or_noted(engine, ranks, tmp_path, capsys):
    known = accuracy.load(ranks)
    other = accuracy.Calibration(known.table, known.prompts, known.fold, about={"heads_fingerprint": "other"})
    accuracy.save(tmp_path / "other.npz", other, accuracy.accuracy(other.table))
    assert cli.main(["export", "--tree", "joint:5", "--ranks", str(tmp_path / "other.npz"), "--heads",
                     str(engine.heads)]) == 0
    assert cli.main(["tune", "--ranks", str(tmp_path / "other.npz")]) == 0
    assert "made with other heads" in capsys.readouterr().err
    narrow = accuracy.Calibration(accuracy.RankTable(known.table.ranks[:, :2], known.table.lengths), known.prompts,
                                  known.fold)
    accuracy.save(tmp_path / "narrow.npz", narrow, accuracy.accuracy(narrow.table))
    assert cli.main(["tune", "--ranks", str(tmp_path / "narrow.npz")]) == 2
    assert "ranks 2 heads, but there are 3" in capsys.readouterr().err


def test_a_rank_table_beside_the_heads_is_theirs_only_while_they_stay(engine, ranks):
    source, module = engine.loaded.source, engine.drafter.module
    assert known_of(source, module) is None
    (engine.heads / RANKS_NAME).write_bytes(ranks.read_bytes())
    assert known_of(source, module).about["heads_fingerprint"] == heads_fingerprint(module)
    assert known_of(str(engine.heads / checkpoints.WEIGHTS_NAME), module) is not None
    tree = cli.tree_from("joint:6", engine)
    assert tree.nodes == 6
    with torch.no_grad():
        module.weight += 1
    assert known_of(source, module) is None


# -------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("name", list(FORMATS))
def test_export_writes_what_it_reads_back(name, tmp_path, capsys):
    file = tmp_path / "tree.txt"
    for shape, spec in ((dense([1, 1, 1]), "chain:3"), (dense([2, 2]), "dense:2,2")):
        assert cli.main(["export", "--tree", spec, "--format", name, "--out", str(file)]) == 0
        said = capsys.readouterr()
        assert said.out == "" and f"{shape.nodes} nodes" in said.err
        if "approximate" not in said.err:
            assert read(file.read_text()).shape.fingerprint == shape.fingerprint
            assert cli.main(["export", "--tree", str(file), "--format", "medusa"]) == 0
            assert read(capsys.readouterr().out).shape.fingerprint == shape.fingerprint


def test_export_sizes_a_tree_by_stored_step_times(engine, ranks, capsys, monkeypatch):
    words = ["export", "--tree", "sequoia", "--model", "Tiny", "--heads", str(engine.heads)]
    monkeypatch.setattr(measure_latency, "choose", lambda: engine.backbone.placement)
    assert cli.main(words) == 2
    assert "needs step times measured on this device: run `tune` first" in capsys.readouterr().err
    assert cli.main(["tune", "--ranks", str(ranks)]) == 0
    assert "without a number, step times favour" in capsys.readouterr().out
    assert cli.main(words) == 0
    said = capsys.readouterr()
    wanted = build("sequoia", Facts(3, ACCURACY, step_ms=measure_latency.stored(engine).step_ms)).shape
    assert read(said.out).shape.fingerprint == wanted.fingerprint and f"favour {wanted.nodes} nodes" in said.err
    assert cli.main([*words, "--device", "cpu"]) == 2  # it runs no model
    assert "unrecognized arguments: --device" in capsys.readouterr().err


def test_export_builds_from_the_heads_file_without_a_backbone(engine, capsys, monkeypatch):
    monkeypatch.setattr(cli, "load_engine", lambda options: pytest.fail("loaded"))
    assert cli.main(["export", "--tree", "sparse:5", "--heads", str(engine.heads), "--format", "triton"]) == 0
    assert read(capsys.readouterr().out).shape.fingerprint == sparse(ACCURACY, 5).fingerprint
    assert cli.main(["export", "--tree", "published:zephyr_stage2"]) == 0
    assert read(capsys.readouterr().out).shape.fingerprint == published()["zephyr_stage2"].fingerprint


@pytest.mark.parametrize(("words", "said"), [
    (["--tree", "sparse:7", "--format", "vllm"], "cannot be expressed"),
    (["--tree", "dynamic:7"], "another one at each"), (["--tree", "none.json"], "cannot be read"),
    (["--tree", "joint:7"], "rank table"), (["--tree", "forest"], "forest"),
    (["--tree", "sparse:7", "--model", "unknown"], "name them with --heads"),
])
def test_export_refuses_in_one_sentence(engine, words, said, capsys):
    assert cli.main(["export", *words, *(["--heads", str(engine.heads)] if "--model" not in words else [])]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert len(error) == 1 and said in error[0]


def test_decode_and_bench_take_trees_of_every_kind(engine, tmp_path, capsys, monkeypatch):
    (tmp_path / "tree.txt").write_text("{0, 0, 0, 0}, {1}")
    for spec, nodes in (("dynamic:5", 5), ("published:mc_sim_7b_63", 61), (str(tmp_path / "tree.txt"), 4),
                        ("random-sparse:9#3", 9)):
        assert cli.tree_from(spec, engine).nodes == nodes
    assert "no temperatures were fitted" in capsys.readouterr().err
    target = tmp_path / "bench.json"
    assert cli.main(["bench", "--tree", "dynamic:5", "--methods", "plain,medusa", "--rounds", "1", "--max-new-tokens",
                     "6", "--prompts", str(prompts_file(tmp_path)), "--json", str(target)]) == 0
    result = json.loads(target.read_text())
    assert result["tree"] == "another at each step" and result["tree_nodes"] == 5
    assert result["methods"]["medusa"]["equals_greedy"] is True
