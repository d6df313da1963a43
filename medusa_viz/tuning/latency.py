"""Step times: what a step costs by the rows that it runs, as measured on a device, and a fit for the rows between.

A step of a tree with n nodes runs n + 1 rows; a batch of b texts with one tree each runs b·(n + 1). The curve holds
measured medians with their spread; `Latency.step_ms` reads a piecewise-linear fit of them, whose error is stated.
Curves are JSON: this device's is cached, another's can be loaded. `measure_latency` takes them; nothing here runs a
model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 1
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
BATCHES = (1, 4, 8, 32)
KNOTS = 3  # bends of the fit, at measured rows
KEY_FIELDS = ("model", "heads", "device", "cpu", "dtype", "threads", "torch", "linears", "step")


class LatencyError(ValueError):
    """A curve that cannot be read; the message is one sentence."""


@dataclass(frozen=True)
class Spread:
    """Milliseconds over the rounds: the median and the middle half."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """Forward passes behind a prefix of so many tokens, one Spread for each of the latency's rows."""

    prefix: int
    verify: list[Spread]


@dataclass(frozen=True)
class Fit:
    """Milliseconds by rows: straight pieces that meet at the knots (rows). `mean_error` and `max_error` are shares of
    the measured medians."""

    knots: tuple[int, ...]
    coefficients: tuple[float, ...]
    mean_error: float
    max_error: float
    rows_to: int
    """Most rows measured; beyond them the last piece is drawn on."""

    def __call__(self, rows: float) -> float:
        return max(float(_basis(np.array([float(rows)]), self.knots)[0] @ self.coefficients), 0.0)


@dataclass(frozen=True)
class Latency:
    """All that was measured on one device with one model. `about` says what, where and when.

    rows: of every curve. curves: short prefix first. heads: drafting, of no use to a plain step; redraft: drafting with
    a tree rebuilt for the step. accept, commit: per rows, like a curve.
    """

    about: dict[str, Any]
    rows: tuple[int, ...]
    curves: list[Curve]
    heads: Spread
    redraft: Spread
    accept: list[Spread]
    commit: list[Spread]
    recorded: bool = field(default=False, compare=False)
    """Loaded from a file instead of measured here."""

    @property
    def title(self) -> str:
        """Device and, for a loaded curve, that it was recorded."""
        device, date = self.about.get("device", "unnamed device"), self.about.get("date", "an unknown day")
        return f"{device}, recorded on {date}" if self.recorded else f"{device}, measured on {date}"

    @cached_property
    def fits(self) -> list[Fit]:
        """The fit of each curve."""
        return [fit(self.rows, [spread.median for spread in curve.verify]) for curve in self.curves]

    def step_ms(self, nodes: int, batch: int = 1, curve: int = 0, rebuilt: bool = False) -> float:
        """Milliseconds of a step with a tree of `nodes` nodes for each of `batch` texts, by the fit of a curve (0: the
        short prefix). A plain step (0 nodes) runs no heads; `rebuilt` trees are made anew at each step. Heads, accept
        and commit are taken as measured for one text."""
        rows = nodes + 1
        drafting = (self.redraft if rebuilt else self.heads).median if nodes else 0.0
        return self.fits[curve](batch * rows) + drafting + _between(self.rows, self.accept, rows) + _between(
            self.rows, self.commit, rows)


def _between(rows: Sequence[int], spreads: Sequence[Spread], row: int) -> float:
    return float(np.interp(row, rows, [spread.median for spread in spreads]))


def fit(rows: Sequence[int], milliseconds: Sequence[float], knots: int = KNOTS) -> Fit:
    """The piecewise-linear fit of least squared relative error, its bends at measured rows: all choices are tried."""
    x, y = np.asarray(rows, float), np.asarray(milliseconds, float)
    bends = min(knots, max(len(x) - 3, 0))
    best: tuple[float, tuple[int, ...], np.ndarray] | None = None
    for inner in combinations(rows[1:-1], bends):
        basis = _basis(x, inner) / y[:, None]
        coefficients = np.linalg.lstsq(basis, np.ones(len(y)), rcond=None)[0]
        error = float(((basis @ coefficients - 1) ** 2).sum())
        if best is None or error < best[0] - 1e-12:
            best = error, inner, coefficients
    _, inner, coefficients = best
    off = np.abs(_basis(x, inner) @ coefficients / y - 1)
    return Fit(tuple(inner), tuple(coefficients.tolist()), float(off.mean()), float(off.max()), int(rows[-1]))


def _basis(x: np.ndarray, knots: Sequence[int]) -> np.ndarray:
    """[points, 2 + knots]: 1, x, and what of x lies beyond each knot."""
    return np.stack([np.ones_like(x), x, *(np.maximum(x - knot, 0) for knot in knots)], axis=1)


# --------------------------------------------------------------------------------------------------------------- files


def to_json(latency: Latency) -> str:
    """The curve as a JSON file holds it."""
    body = asdict(latency)
    del body["recorded"]
    return json.dumps({"medusa_viz_latency": VERSION} | body, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str, name: str, recorded: bool = True) -> Latency:
    """A curve out of JSON; `name` stands in the message where it is none. Raises LatencyError."""
    try:
        body = json.loads(text)
        version = body["medusa_viz_latency"]
        if version > VERSION:
            raise LatencyError(f"{name} is a latency curve of a newer version ({version}); this one reads {VERSION}.")
        rows = tuple(int(row) for row in body["rows"])
        curves = [Curve(int(curve["prefix"]), _spreads(curve["verify"], rows)) for curve in body["curves"]]
        found = Latency(dict(body["about"]), rows, curves, Spread(**body["heads"]), Spread(**body["redraft"]),
                        _spreads(body["accept"], rows), _spreads(body["commit"], rows), recorded)
    except LatencyError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LatencyError(f"{name} is no latency curve that `tune` wrote.") from error
    if not curves or len(rows) < 3 or list(rows) != sorted(set(rows)) or rows[0] < 1:
        raise LatencyError(f"{name} is no latency curve: its rows must rise, three of them at least.")
    return found


def _spreads(entries: list[dict], rows: Sequence[int]) -> list[Spread]:
    spreads = [Spread(float(entry["median"]), float(entry["low"]), float(entry["high"])) for entry in entries]
    if len(spreads) != len(rows) or not all(np.isfinite(spread.median) and spread.median >= 0 for spread in spreads):
        raise ValueError("spreads do not fit the rows")
    return spreads


def load(path: Path) -> Latency:
    """A curve recorded on another device. Raises LatencyError in one sentence."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LatencyError(f"The latency curve {path} cannot be read ({error}).") from error
    return from_json(text, path.name)


def cache_file(root: Path, about: dict[str, Any]) -> Path:
    """Where the curve of this model, device, dtype, threads and way to run a step lies in a cache folder."""
    key = json.dumps([about.get(name) for name in KEY_FIELDS])
    return root / "latency" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def cached(root: Path, about: dict[str, Any]) -> Latency | None:
    """The curve measured earlier under the same circumstances, or None."""
    try:
        found = from_json(cache_file(root, about).read_text("utf-8"), "the cache", recorded=False)
    except (OSError, ValueError):
        return None
    return found if all(found.about.get(name) == about.get(name) for name in KEY_FIELDS) else None


def newest(root: Path, wanted: dict[str, Any]) -> Latency | None:
    """The curve kept last of those whose `about` agrees with `wanted`, or None."""
    files = [path for path in (root / "latency").glob("*.json") if path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            found = from_json(path.read_text("utf-8"), "the cache", recorded=False)
        except (OSError, ValueError):
            continue
        if all(found.about.get(name) == value for name, value in wanted.items()):
            return found
    return None


def keep(root: Path, latency: Latency) -> Path:
    """Write a curve into a cache folder."""
    target = cache_file(root, latency.about)
    target.parent.mkdir(parents=True, exist_ok=True)
    waiting = target.with_suffix(".tmp")
    waiting.write_text(to_json(latency), "utf-8")
    waiting.replace(target)
    return target
