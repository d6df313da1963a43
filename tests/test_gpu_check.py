"""The GPU check runs small on a CPU, with torch and transformers alone, and writes what it promises."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_viz.models import checkpoints
from medusa_viz.models.presets import DEFAULT_PRESET, heads_folder

SCRIPT = Path(__file__).parent / "gpu" / "check.py"
ABSENT = ("gradio", "plotly", "gguf", "accelerate", "peft", "psutil", "orjson", "PIL", "bitsandbytes", "httpx2")
"""Packages that the machine with the card may lack."""
LACKING = f"""
import builtins, runpy, sys
for name in {ABSENT[:-1]!r}: sys.modules[name] = None
real = builtins.__import__
def lacking(name, *args, **named):  # of an older huggingface_hub, but the one here imports it
    if name == {ABSENT[-1]!r} and args and args[0]["__name__"].startswith("medusa_viz"):
        raise ImportError(name)
    return real(name, *args, **named)
builtins.__import__ = lacking
"""


def run(*arguments, rc=0):
    without = LACKING + f"sys.argv = [{str(SCRIPT)!r}, *{[str(one) for one in arguments]!r}]\n" \
              f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=300, cwd="/",
                          env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == rc, done.stderr
    return done


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("check")
    printed = run("--small", "--out", out).stdout
    assert (out / "check.md").read_text().strip() == printed.strip()
    return json.loads((out / "check.json").read_text()), printed


def test_the_small_check_measures_everything(result):
    found, _ = result
    assert {"date", "device", "torch", "transformers", "cuda", "model", "dtype", "step", "tree_nodes", "acceptance",
            "sizes", "equality", "latency", "plain", "medusa", "speedup", "share", "synchronisations", "bandwidth",
            "peak_memory_gb", "goals"} == set(found)
    assert [(row["prefix"], row["nodes"], row["rows"]) for row in found["latency"]] == [
        (prefix, nodes, rows) for prefix in (32, 96) for nodes, rows in ((0, 1), (3, 4), (15, 16), (63, 64))]
    assert all(row["static_ms"] > 0 and row["eager_ms"] > 0 for row in found["latency"])
    assert found["step"].startswith("static buffers") and found["device"].startswith("CPU")
    assert found["synchronisations"] is None and found["cuda"] is None  # no card, so no number
    assert set(found["goals"]) == {"outside_share", "bandwidth_share", "step_63_over_plain"}
    for part in ("plain", "medusa"):
        assert found[part]["tokens_per_second"] == pytest.approx(
            1e3 * found[part]["tokens_per_step"] / found[part]["ms_per_step"])
    share = found["share"]
    assert 0 <= share["outside_share"] < 1 and share["step_ms"] > 0 and found["peak_memory_gb"] > 0


def test_its_texts_are_plain_greedys(result):
    equality = result[0]["equality"]
    assert equality["right"] and equality["faults"] == 0 and equality["logits_error"] < 1e-5
    assert equality["texts"] == [True] * 9


def test_drawn_acceptance_is_labelled_and_follows_its_table(result):
    found, printed = result
    assert found["acceptance"]["simulated"] and "Vicuna 7B" in found["acceptance"]["source"]
    assert "(simulated acceptance)" in printed
    assert found["plain"]["tokens_per_step"] == 1
    assert 1.6 < found["medusa"]["tokens_per_step"] < 3.2  # 2.4 by the table; fifty steps or so


@pytest.mark.parametrize("dtype", ["8bit", "4bit"])
def test_no_precision_is_taken_that_would_not_be_measured(dtype, tmp_path):
    assert "invalid choice" in run("--small", "--dtype", dtype, "--out", tmp_path, rc=2).stderr


def test_without_the_code_that_it_measures_it_says_so(tmp_path):
    alone = tmp_path / "check.py"  # sent to a machine by itself
    alone.write_text(SCRIPT.read_text())
    done = subprocess.run([sys.executable, str(alone), "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("check.py: medusa_viz was not found") and done.stderr.count("\n") == 1
    shown = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0 and "inside a checkout of Medusa-Viz" in shown.stdout


@pytest.mark.model
def test_the_default_heads_are_measured_by_the_table_that_every_command_builds_trees_by(model_folder):
    check = runpy.run_path(str(SCRIPT))
    subject = check["default"](check["parse"](["--model", str(model_folder), "--device", "cpu"]))
    loaded = checkpoints.with_ranks(checkpoints.load(heads_folder(DEFAULT_PRESET)), DEFAULT_PRESET.title, "fp32")
    assert subject.accuracy == loaded.ranked and loaded.ranked != loaded.config.accuracy


def test_wrong_parts_are_refused_in_one_sentence(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(b"GGUF")
    done = run("--model", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "out", rc=2)
    assert done.stderr.strip().splitlines()[-1].startswith("check.py: The parts make a file with sha256")
