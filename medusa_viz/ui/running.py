"""A running model: the engine, the one worker that does its torch work, and what was measured of it. Several may run
at once, since runs that began on one keep it; a model goes when nobody holds it any more."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_viz.decoding.preview import LatencyEstimate
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import TreeShape
from medusa_viz.models.worker import Worker

MAX_NODES = {"cpu": 256, "cuda": 1024}  # verified nodes; larger trees stay drawings
PLACE = ("model", "device", "dtype")  # options that decide about the backbone; the rest is heads

Report = Callable[[str, float | None, str], None]


@dataclass(eq=False)
class Model:
    """What sessions run on. Torch is imported by whoever loads it, after the page is up."""

    engine: Any
    worker: Worker
    live: Any
    """The module `decoding.live`."""
    options: dict[str, str] = field(default_factory=dict)
    plain_ms: float | None = None
    latency: LatencyEstimate = field(default_factory=LatencyEstimate)

    def __post_init__(self) -> None:
        weakref.finalize(self, gc.collect).atexit = False  # modules hold each other in rings

    @property
    def title(self) -> str:
        return f"{self.engine.title} · {self.engine.place}"

    @property
    def max_nodes(self) -> int:
        return MAX_NODES.get(self.engine.backbone.device.type, MAX_NODES["cpu"])


class Seat:
    """One session's place at a model: its cache there, and its turn in the queue."""

    def __init__(self, model: Model, token: str) -> None:
        self.model, self.token = model, token
        self._run: Any = None

    def work(self, job: Callable[[Any], Any]) -> Any:
        """What a job, called with this session's live run, returns."""
        return self.submit(job).result()

    def submit(self, job: Callable[[Any], Any]) -> Any:
        """Queue a job; its future."""
        def on_worker() -> Any:
            self._run = self._run or self.model.live.LiveRun(self.model.engine)
            return job(self._run)

        return self.model.worker.submit(self.token, on_worker)

    def open(self, ids: Sequence[int], settings: Acceptance) -> Any:
        """Prefill tokens; the position behind them."""
        return self.work(lambda run: run.open(ids, settings))

    def look(self, position: Any, shape: TreeShape, settings: Acceptance) -> Any:
        """Verify a tree at a position."""
        look = self.work(lambda run: run.look(position, shape, settings))
        self.model.latency.add(shape.nodes + 1, look.timings.verify)
        return look


def load(options: dict[str, str], report: Report, beside: Model | None = None) -> Model:
    """A model as `options` (those of EngineOptions) name it. Where only the heads are others than those of the model
    that runs already, and none of the two changes the backbone, the backbone is shared and so is its worker."""
    from medusa_viz.decoding import engine as engines
    from medusa_viz.decoding import live

    engines.quiet_transformers()
    wanted = engines.EngineOptions(**options)
    if beside is not None and _same_backbone(beside, options):
        report("load", None, beside.engine.title)
        return _with_heads(beside, options)
    engine = engines.load(wanted, report)
    model = Model(engine, worker_of(engine), live, options)
    report("warm", None, engine.title)
    model.plain_ms = engine.plain_ms()
    model.latency.add(1, model.plain_ms)
    return model


def worker_of(engine: Any) -> Worker:
    """A worker for an engine's backbone; its thread ends when the backbone goes."""
    worker = Worker(engine.title)
    weakref.finalize(engine.backbone, _end, worker).atexit = False
    return worker


def _end(worker: Worker) -> None:
    """Close a worker from a thread of its own: whoever dropped the last reference may hold any lock."""
    threading.Thread(target=worker.close, name="unload", daemon=True).start()


def _heads_of(options: dict[str, str]) -> str:
    """Where the heads lie: an empty name means those that ship with the preset."""
    from medusa_viz.models.presets import PRESETS, heads_folder

    preset = PRESETS.get(options["model"])
    return options["heads"] or (str(heads_folder(preset)) if preset else "")


def _same_backbone(running: Model, options: dict[str, str]) -> bool:
    from medusa_viz.models.adapter import is_adapter

    return (all(options[name] == running.options.get(name) for name in PLACE) and bool(_heads_of(options))
            and not is_adapter(_heads_of(options)) and not is_adapter(_heads_of(running.options)))


def _with_heads(running: Model, options: dict[str, str]) -> Model:
    from medusa_viz.models import checkpoints
    from medusa_viz.models.heads import Drafter

    backbone = running.engine.backbone
    loaded = checkpoints.load(_heads_of(options), backbone.hidden_size, backbone.vocab_size, backbone.placement.dtype)
    drafter = running.worker.submit("", lambda: Drafter(loaded.module, backbone.lm_head)).result()
    engine = dataclasses.replace(running.engine, drafter=drafter, loaded=loaded)
    return Model(engine, running.worker, running.live, options, running.plain_ms, running.latency)
