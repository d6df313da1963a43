"""Merits: what the steps so far were worth. Every figure carries its definition; rates are shares from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_viz.decoding.metrics import measure
from medusa_viz.decoding.records import Step, Timings
from medusa_viz.figures import numbers
from medusa_viz.figures.texts import Texts
from medusa_viz.tuning.builders import expected_tokens_per_step
from medusa_viz.ui.snapshot import Snapshot

PARTS = ("propose", "verify", "accept", "commit")


def committed_steps(snapshot: Snapshot) -> list[Step]:
    """Steps committed up to the one shown. A pending step and one under other knobs are not among them."""
    end = snapshot.index + (not snapshot.pending and not snapshot.changed)
    return [step for step in snapshot.steps[:end] if step.verdict is not None]


def merits(snapshot: Snapshot, t: Texts) -> list[dict]:
    """Tiles: since the knobs last moved, and this run beside it; before a step is committed under the new knobs, of
    the run alone."""
    run = committed_steps(snapshot)
    steps = [step for step in run if step.index >= snapshot.knobs_since]
    is_run = not steps and bool(run)
    steps = run if is_run else steps
    heads = len(snapshot.steps[0].drafts.heads) if snapshot.steps else 0
    shown = measure([len(step.verdict.committed) for step in steps], heads)
    whole = measure([len(step.verdict.committed) for step in run], heads)
    n, rate = shown.steps, shown.tokens_per_step
    note = t("view.merit.since", n=n)
    if whole.steps > n:
        run_rate = numbers.ratio(whole.tokens_per_step, whole.steps)
        note = t("view.merit.since_and_run", n=n, run=run_rate, run_n=whole.steps)
    drafts = numbers.ratio(shown.drafts_per_step, n) if n else numbers.NONE
    tiles = [
        _tile("tokens_per_step", numbers.ratio(rate, n) if n else numbers.NONE, note, t),
        _tile("accepted_per_step", drafts, t("view.merit.since", n=n), t),
        _expected(snapshot, t),
        _depths(shown.accepted_per_depth, n, t),
        *_speed(steps, rate, snapshot.plain_ms, t),
    ]
    return [_of_run(tile, n, t) for tile in tiles] if is_run else tiles


def _tile(key: str, value: str, note: str, t: Texts, bars: list[dict] | None = None) -> dict:
    return {"key": key, "label": t(f"view.merit.{key}"), "value": value, "note": note,
            "hint": t(f"view.merit.{key}_hint"), "bars": bars or []}


def _of_run(tile: dict, n: int, t: Texts) -> dict:
    """A tile whose value is that of the run, since no step was committed under the knobs as they stand."""
    if tile["key"] == "expected":
        return tile
    return {**tile, "label": t("view.merit.of_run", label=tile["label"]), "note": t("view.merit.none_since"),
            "hint": f"{tile['hint']} {t('view.merit.run_steps', n=n)}"}


def _expected(snapshot: Snapshot, t: Texts) -> dict:
    """What the accuracy table promises for the tree shown; it knows no tree that follows the step."""
    if snapshot.dynamic:
        return _tile("expected", numbers.NONE, t("view.merit.expected_dynamic"), t)
    if not snapshot.steps or not snapshot.accuracy:
        return _tile("expected", numbers.NONE, "", t)
    shape = snapshot.steps[snapshot.index].shape
    expected = expected_tokens_per_step(shape, snapshot.accuracy)
    return _tile("expected", f"{expected:.2f}", t("view.merit.nodes", n=shape.nodes), t)


def _depths(shares: Sequence[float], n: int, t: Texts) -> dict:
    bars = [{"label": t("view.head", k=k), "value": round(share, 4), "text": f"{share:.2f}"}
            for k, share in enumerate(shares, start=1)] if n else []
    return _tile("depth", " ".join(bar["text"] for bar in bars) or numbers.NONE, t("view.merit.since", n=n), t, bars)


def _speed(steps: Sequence[Step], rate: float, plain_ms: float | None, t: Texts) -> list[dict]:
    """Latency of a step, and what it costs and gains against a plain one, measured on this device."""
    timed = [step.timings for step in steps if step.timings.verify is not None]
    if not timed:
        return [_tile(key, numbers.NONE, t("view.merit.since", n=0), t) for key in ("latency", "overhead", "speedup")]
    total = sum(timing.total for timing in timed) / len(timed)
    n = len(timed)
    latency = _tile("latency", t("view.ms", ms=numbers.milliseconds(total)), t("view.merit.mean", n=n), t,
                    _parts(timed, t))
    if not plain_ms:
        return [latency, *(_tile(key, numbers.NONE, t("view.merit.no_plain"), t) for key in ("overhead", "speedup"))]
    overhead = total / plain_ms
    note = t("view.merit.plain", ms=numbers.milliseconds(plain_ms))
    return [latency, _tile("overhead", f"{overhead:.2f}", note, t),
            _tile("speedup", numbers.ratio(rate / overhead, n), t("view.merit.since", n=n), t)]


def _parts(timed: Sequence[Timings], t: Texts) -> list[dict]:
    """Mean milliseconds of the four parts."""
    bars = []
    for part in PARTS:
        mean = sum(getattr(timing, part) or 0.0 for timing in timed) / len(timed)
        bars.append({"label": t(f"view.phase.{part}"), "value": round(mean, 3),
                     "text": t("view.ms", ms=numbers.milliseconds(mean))})
    return bars
