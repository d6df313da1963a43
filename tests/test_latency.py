"""Step times: the fit, files and cache, and that measuring measures every case and leaves nothing behind."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny import backbone, random_drafter

from medusa_viz.tuning import latency, measure_latency
from medusa_viz.tuning.jobs import Cancelled, finish
from medusa_viz.tuning.latency import Curve, Latency, LatencyError, Spread, fit

ROWS = (1, 2, 4, 8, 16, 32)


def curve_of(step, rows=ROWS, heads=1.0) -> Latency:
    """A latency whose forward pass takes step(rows) milliseconds."""
    spread = [Spread(step(count), step(count) * 0.9, step(count) * 1.1) for count in rows]
    nothing = [Spread(0.0, 0.0, 0.0)] * len(rows)
    about = {"device": "H200", "date": "2026-11-29", "model": "tiny"}
    return Latency(about, tuple(rows), [Curve(64, spread), Curve(1024, spread)], Spread(heads, heads, heads),
                   Spread(heads + 1, heads, heads), nothing, nothing)


def test_a_line_with_bends_at_measured_rows_is_fitted_exactly():
    def step(rows):
        return 10 + 0.1 * rows + 2 * max(rows - 8, 0)

    found = fit(ROWS, [step(rows) for rows in ROWS], knots=1)
    assert found.knots == (8,) and found.max_error < 1e-9 and found.rows_to == 32
    for rows in (1, 3, 8, 12, 20, 32, 40):
        assert found(rows) == pytest.approx(step(rows))


def test_the_fits_error_is_what_it_misses():
    times = [10.0, 11.0, 30.0, 12.0, 13.0, 14.0]
    found = fit(ROWS, times, knots=1)
    off = [abs(found(rows) / ms - 1) for rows, ms in zip(ROWS, times)]
    assert found.max_error == pytest.approx(max(off)) and found.mean_error == pytest.approx(sum(off) / 6)
    assert found.mean_error > 0.05
    assert fit((1, 2, 4), [5.0, 6.0, 8.0]).max_error < 1e-9  # few points leave no room for bends


def test_a_step_is_forward_heads_accept_and_commit():
    curve = replace(curve_of(lambda rows: 10 + rows, heads=2.0), accept=[Spread(0.1 * rows, 0, 0) for rows in ROWS],
                    commit=[Spread(0.5, 0, 0)] * 6)
    assert curve.step_ms(0) == pytest.approx(11 + 0.1 + 0.5)  # a plain step runs no heads
    assert curve.step_ms(7) == pytest.approx(18 + 2 + 0.8 + 0.5)
    assert curve.step_ms(7, rebuilt=True) == pytest.approx(18 + 3 + 0.8 + 0.5)
    assert curve.step_ms(4) == pytest.approx(15 + 2 + 0.5 + 0.5)  # between the rows measured
    for batch in latency.BATCHES:
        assert curve.step_ms(7, batch) - curve.step_ms(7) == pytest.approx(8 * (batch - 1))


# --------------------------------------------------------------------------------------------------------------- files


def test_a_curve_reads_back_as_recorded(tmp_path):
    curve = curve_of(lambda rows: 10 + rows)
    path = tmp_path / "h200.json"
    path.write_text(latency.to_json(curve))
    found = latency.load(path)
    assert found == curve and found.recorded and found.title == "H200, recorded on 2026-11-29"
    assert curve.title == "H200, measured on 2026-11-29"
    assert found.step_ms(5) == curve.step_ms(5)


@pytest.mark.parametrize("change", [{"medusa_viz_latency": 2}, {"rows": [1, 2]}, {"rows": [4, 2, 1, 8, 16, 32]},
                                    {"curves": []}, {"heads": {"median": 1}}, {"about": 7}, {"accept": None},
                                    {"commit": [{"median": "x", "low": 0, "high": 0}] * 6},
                                    {"accept": [{"median": float("nan"), "low": 0, "high": 0}] * 6}])
def test_what_is_no_curve_is_one_sentence(tmp_path, change):
    body = json.loads(latency.to_json(curve_of(lambda rows: 10 + rows))) | change
    path = tmp_path / "c.json"
    for text in (json.dumps(body), "[]", "no json", ""):
        path.write_text(text)
        with pytest.raises(LatencyError) as error:
            latency.load(path)
        assert "\n" not in str(error.value) and str(error.value).endswith(".")
    with pytest.raises(LatencyError, match="cannot be read"):
        latency.load(tmp_path / "none.json")


def test_the_cache_is_by_model_device_dtype_and_threads(tmp_path):
    about = {"model": "m", "heads": "4 heads", "device": "CPU", "cpu": "x", "dtype": "fp32", "threads": 2,
             "linears": "plain", "torch": "2"}
    kept = replace(curve_of(lambda rows: 10 + rows), about=about)
    latency.keep(tmp_path, kept)
    found = latency.cached(tmp_path, about)
    assert found == kept and not found.recorded
    for name in latency.KEY_FIELDS:
        assert latency.cached(tmp_path, about | {name: "other"}) is None
    latency.cache_file(tmp_path, about).write_text("half a fi")
    assert latency.cached(tmp_path, about) is None


# ----------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture(scope="module")
def engine():
    of = backbone()
    return SimpleNamespace(backbone=of, drafter=random_drafter(of, 3), title="tiny")


def test_every_case_is_measured_in_every_round_after_a_warm_up(engine, tmp_path, monkeypatch):
    asked, real = [], measure_latency._Bench.run
    monkeypatch.setattr(measure_latency._Bench, "run",
                        lambda self, prefix, count: asked.append((prefix, count)) or real(self, prefix, count))
    heard = []
    found = finish(measure_latency.measuring(engine, (1, 2, 8), (5, 40), rounds=3, root=tmp_path), heard.append)
    cases = {(prefix, count) for prefix in (5, 40) for count in (1, 2, 8)}
    rounds = [asked[place : place + 6] for place in range(0, 24, 6)]
    assert all(set(turn) == cases for turn in rounds) and len({turn[0] for turn in rounds}) > 1
    assert [progress.done for progress in heard] == list(range(1, 25)) and heard[-1].total == 24
    assert found.rows == (1, 2, 8) and [curve.prefix for curve in found.curves] == [5, 40]
    for spread in (*found.curves[0].verify, *found.curves[1].verify, found.heads, found.redraft, *found.accept):
        assert 0 < spread.low <= spread.median <= spread.high
    assert found.about["rounds"] == 3 and found.about["dtype"] == "fp32" and "/" not in found.about["device"]
    assert measure_latency.stored(engine, tmp_path) == found
    assert measure_latency.stored(SimpleNamespace(**vars(engine) | {"title": "other"}), tmp_path) is None


def test_another_way_to_run_a_step_is_measured_anew(engine, tmp_path, monkeypatch):
    found = finish(measure_latency.measuring(engine, (1, 2, 4), (5,), rounds=1, root=tmp_path))
    of = engine.backbone
    for words in ("plain (packed oneDNN is no faster here: 0.9x at 1 row)", "plain"):
        monkeypatch.setattr(of, "linears", words)
        assert measure_latency.stored(engine, tmp_path) == found
    monkeypatch.setattr(of, "linears", "packed oneDNN, 1.4x at 1 row and 1.3x at 8 rows")
    assert measure_latency.stored(engine, tmp_path) is None
    monkeypatch.setattr(of, "linears", "plain")
    monkeypatch.setattr(of, "static", SimpleNamespace(words="static buffers, CUDA graphs of compiled kernels"))
    assert measure_latency.stored(engine, tmp_path) is None


def test_the_newest_curve_of_a_model_is_found_without_the_model(engine, tmp_path):
    assert measure_latency.stored_of("tiny", tmp_path) is None
    found = finish(measure_latency.measuring(engine, (1, 2, 4), (5,), rounds=1, root=tmp_path))
    assert measure_latency.stored_of("tiny", tmp_path) == found and measure_latency.stored_of("x", tmp_path) is None
    (tmp_path / "latency" / "half.json").write_text("half a fi")
    assert measure_latency.stored_of("tiny", tmp_path) == found


def test_a_long_prefix_is_cut_to_the_context(engine, tmp_path):
    found = finish(measure_latency.measuring(engine, (1, 2, 4), (9, 9999), rounds=1, root=tmp_path))
    assert [curve.prefix for curve in found.curves] == [9, engine.backbone.context - 2]


def test_measuring_can_be_stopped_and_keeps_nothing(engine, tmp_path):
    calls = []
    with pytest.raises(Cancelled):
        finish(measure_latency.measuring(engine, (1, 2, 4), (5,), rounds=5, root=tmp_path), calls.append,
               lambda: len(calls) >= 4)
    assert len(calls) == 4 and not list(tmp_path.rglob("*.json"))
