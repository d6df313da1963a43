"""`tune` and `export`: what they print, write, read back and refuse."""

import json
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
from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.tuning import accuracy, latency, measure_latency
from medusa_viz.tuning import calibration as calibrations
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.calibration import calibrating, heads_fingerprint, known_of
from medusa_viz.tuning.formats import FORMATS, read
from medusa_viz.tuning.jobs import finish
from medusa_viz.tuning.published_trees import published

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
                           place="CPU · fp64", loaded=SimpleNamespace(source=str(heads)), heads=heads)
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
    assert cli.main(["tune", "--model", "tiny"]) == 2
    assert "No replies of tiny ship" in capsys.readouterr().err


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
    (engine.heads / accuracy.RANKS_NAME).write_bytes(ranks.read_bytes())
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
