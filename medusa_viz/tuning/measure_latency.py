"""Measuring step times on this device, with this model.

Rounds are interleaved: each runs every number of rows behind every prefix once, in turning order, so that whatever
else the machine does falls on all alike. The first round warms up and is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

from medusa_viz.decoding import decoder
from medusa_viz.decoding.engine import Engine
from medusa_viz.decoding.settings import MAX_RANKS, Acceptance
from medusa_viz.decoding.tree import dense
from medusa_viz.models.device import Placement, choose, settle
from medusa_viz.models.fetch import cache_root
from medusa_viz.tuning.bench import cpu_name
from medusa_viz.tuning.dynamic import dynamic
from medusa_viz.tuning.jobs import Job, Progress
from medusa_viz.tuning.latency import ROWS, Curve, Latency, Spread, cached, keep, newest

PREFIXES = (64, 1024)
ROUNDS = 7
REBUILT_NODES = 16
PARTS = ("heads", "redraft", "verify", "accept", "commit")


def about(engine: Engine) -> dict[str, Any]:
    """What a curve belongs to: model, device, dtype, threads, how its steps run and the like; no path, no host name.
    """
    backbone, drafter = engine.backbone, engine.drafter
    return {"model": engine.title, "heads": f"{drafter.heads} heads, {drafter.choices} rows",
            **_place(backbone.placement), "linears": re.split(r", | \(", backbone.linears)[0],
            "step": backbone.step.partition(" (")[0]}


def _place(placement: Placement) -> dict[str, Any]:
    return {"device": placement.device_name, "cpu": cpu_name(), "dtype": placement.dtype_name,
            "threads": placement.threads, "torch": torch.__version__}


def stored(engine: Engine, root: Path | None = None) -> Latency | None:
    """This device's curve from the user's cache, if it was measured before."""
    return cached(root or cache_root(), about(engine))


def stored_of(title: str, root: Path | None = None) -> Latency | None:
    """The newest curve of a model that is not loaded, on the device and in the dtype that it would get by itself."""
    return newest(root or cache_root(), {"model": title, **_place(choose())})


def measuring(engine: Engine, rows: Sequence[int] = ROWS, prefixes: Sequence[int] = PREFIXES, rounds: int = ROUNDS,
              root: Path | None = None) -> Job[Latency]:
    """Measure this device's curve and keep it in the user's cache; a part is one forward pass."""
    bench = _Bench(engine, rows, prefixes)
    times: dict[tuple[str, int, int], list[float]] = {}
    done, total = 0, (rounds + 1) * len(bench.cases)
    for turn in range(rounds + 1):
        shift = turn % len(bench.cases)
        for prefix, count in bench.cases[shift:] + bench.cases[:shift]:
            for part, ms in bench.run(prefix, count).items():
                if turn:
                    times.setdefault((part, prefix, count), []).append(ms)
            done += 1
            yield Progress(done, total, f"{count} rows behind {prefix} tokens")
    latency = bench.latency(times, rounds)
    keep(root or cache_root(), latency)
    return latency


class _Bench:
    """Trees of every number of rows, behind caches that are prefilled when they are first needed."""

    def __init__(self, engine: Engine, rows: Sequence[int], prefixes: Sequence[int]) -> None:
        self.engine, backbone = engine, engine.backbone
        self.rows = tuple(rows)
        most = backbone.context - 2  # a root and one level behind the prefix
        self.prefixes = sorted({min(prefix, most) for prefix in prefixes})
        self.states: dict[int, decoder.DecodingState] = {}
        self.plans = {count: self._plan(count) for count in rows}
        self.rebuilt = dynamic(engine.drafter.heads, REBUILT_NODES, choices=engine.drafter.choices)
        self.drafting = decoder.plan(dense([min(MAX_RANKS, engine.drafter.choices)]), backbone, engine.drafter)
        self.cases = [(prefix, count) for prefix in self.prefixes for count in rows]

    def _state(self, prefix: int) -> decoder.DecodingState:
        ids = [1 + (7 * place) % (self.engine.backbone.vocab_size - 1) for place in range(prefix)]
        return decoder.start(self.engine.backbone, ids, Acceptance(), room=max(self.rows))

    def _plan(self, count: int) -> decoder.Plan:
        """Rows below one root; what a step costs does not depend on how they hang together."""
        shape, device = dense([count - 1]), self.engine.backbone.device
        return decoder.Plan(shape, torch.as_tensor(shape.depth.astype("int64"), device=device),
                            self.engine.backbone.additive(torch.from_numpy(shape.mask)),
                            torch.arange(count - 1, device=device), count - 1)

    def run(self, prefix: int, count: int) -> dict[str, float]:
        """One step without its effect: milliseconds of each part."""
        if prefix not in self.states:
            self.states[prefix] = self._state(prefix)
        backbone, state, plan = self.engine.backbone, self.states[prefix], self.plans[count]
        tokens = torch.arange(count, device=backbone.device) % backbone.vocab_size
        candidates = decoder.Candidates(tokens, None)
        marks = [self._now()]
        decoder.propose(self.engine.drafter, state, self.drafting)
        marks.append(self._now())
        decoder.propose_anew(backbone, self.engine.drafter, state, self.rebuilt, self.rebuilt.height)
        marks.append(self._now())
        forward = decoder.verify(backbone, state, plan, candidates)
        marks.append(self._now())
        decoder.accept(forward, state, plan, candidates, Acceptance())
        marks.append(self._now())
        state.cache.commit([0, count - 1] if count > 1 else [0])
        marks.append(self._now())
        state.cache.truncate(prefix)
        return {part: (b - a) * 1e3 for part, a, b in zip(PARTS, marks, marks[1:])}

    def _now(self) -> float:
        settle(self.engine.backbone.device)
        return perf_counter()

    def latency(self, times: dict[tuple[str, int, int], list[float]], rounds: int) -> Latency:
        def gathered(part: str, count: int | None = None, prefix: int | None = None) -> Spread:
            return _spread([ms for (name, behind, rows), values in times.items() for ms in values
                            if name == part and count in (None, rows) and prefix in (None, behind)])

        curves = [Curve(prefix, [gathered("verify", count, prefix) for count in self.rows]) for prefix in self.prefixes]
        return Latency(about(self.engine) | {"date": date.today().isoformat(), "rounds": rounds}, self.rows, curves,
                       gathered("heads"), gathered("redraft"), *([gathered(part, count) for count in self.rows]
                                            for part in ("accept", "commit")))


def _spread(milliseconds: Sequence[float]) -> Spread:
    low, _, high = quantiles(milliseconds, n=4, method="inclusive") if len(milliseconds) > 1 else [milliseconds[0]] * 3
    return Spread(median(milliseconds), low, high)
