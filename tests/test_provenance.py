"""What the page says of the heads' training and of how good they are: what was measured, and on what."""

import json
from pathlib import Path

import pytest

from medusa_viz.figures.texts import Texts
from medusa_viz.models.presets import heads_folder, shipped
from medusa_viz.ui.provenance import LONGEST, provenance
from medusa_viz.ui.snapshot import Heads

TABLE = [[0.4, 0.2], [0.2, 0.1]]
FROM_TABLE = "first guess right"
BY_TABLE = "0.400 · 0.200 (from the heads' accuracy table)"


def told(trained, accuracy=TABLE):
    rows = provenance(Heads("heads", trained, accuracy), Texts())["rows"]
    return {row["label"]: row["value"] for row in rows}


def test_only_what_was_measured_on_held_out_replies_is_called_held_out():
    found = told({"held_out_top1": [0.31, 0.0], "tokens_per_step": {"15": 1.7891}})
    assert found["held-out top-1"] == "0.310 · 0.000" and FROM_TABLE not in found
    assert found["tokens per step"] == "1.79, replayed with 15 nodes"
    found = told({"tokens_per_step": {"15": 1.7891}})
    assert found[FROM_TABLE] == BY_TABLE and "held-out top-1" not in found
    assert found["tokens per step"] == "1.79, replayed with 15 nodes"
    assert "expected of 15 nodes" in told({})["tokens per step"]
    found = told({"held_out_top1": [0.31]}, [])
    assert found["held-out top-1"] == "0.310" and "tokens per step" not in found


@pytest.mark.parametrize("shares", [None, [], "0.3", {"1": 0.3}, ["0.3"], [0.3, None], [1.5], [float("nan")], [True]])
def test_shares_that_are_none_are_not_shown(shares):
    found = told({"held_out_top1": shares})
    assert found[FROM_TABLE] == BY_TABLE and "held-out top-1" not in found
    assert FROM_TABLE not in told({"held_out_top1": shares}, []) and FROM_TABLE not in told({}, [[], []])


@pytest.mark.parametrize("preset", shipped(), ids=lambda preset: preset.name)
def test_no_fact_of_the_shipped_heads_is_cut(preset):
    config = json.loads((Path(heads_folder(preset)) / "config.json").read_text())
    trained = config["trained"]
    found = told(trained, config["accuracy"])
    assert found["held-out top-1"].split(" · ") == [f"{share:.3f}" for share in trained["held_out_top1"]]
    assert found["data"] == f"{trained['data']} · {trained['tokens']:,} reply tokens"
    assert all(len(str(trained.get(name, ""))) <= LONGEST for name in ("recipe", "init", "data"))
