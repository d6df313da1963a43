"""A running model: the engine, the one worker that does its torch work, and what was measured of it. Several may run
at once, since runs that began on one keep it; a model goes when nobody holds it any more."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from medusa_viz.decoding.preview import LatencyEstimate
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.models import memory
from medusa_viz.models.presets import DEFAULT_PRESET
from medusa_viz.models.worker import Worker
from medusa_viz.ui.knobs import ActionError

if TYPE_CHECKING:
    from medusa_viz.tuning.specs import Facts

DEFAULTS = {"model": DEFAULT_PRESET.name, "heads": "", "device": "auto", "dtype": "auto", "compile": False}
"""Options of a model where nobody names others."""
MAX_NODES = {"cpu": 256, "cuda": 1024}  # verified nodes where nobody sets another limit
PLACE = ("model", "device", "dtype", "compile")  # options that decide about the backbone; the rest is heads
RECENT = 5  # plain steps whose median counts

Report = Callable[[str, float | None, str], None]


@dataclass(eq=False)
class Model:
    """What sessions run on. Torch is imported by whoever loads it, after the page is up."""

    engine: Any
    worker: Worker
    live: Any
    """The module `decoding.live`."""
    options: dict[str, Any] = field(default_factory=dict)
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Milliseconds of the last plain steps: measured when the model was loaded, and among the steps of its sessions."""
    latency: LatencyEstimate = field(default_factory=LatencyEstimate)
    _facts: tuple[Any, Facts] | None = None

    def __post_init__(self) -> None:
        weakref.finalize(self, gc.collect).atexit = False  # modules hold each other in rings

    @property
    def names(self) -> tuple[str, str]:
        """Model and heads as a record names them."""
        return self.engine.title, Path(self.engine.loaded.source).name

    @property
    def title(self) -> str:
        return f"{self.engine.title} · {self.engine.place}"

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of a plain step, the median of the last ones; None until one was measured."""
        return median(self.plain) if self.plain else None

    def facts(self, token: str) -> Facts:
        """What builders may draw on, as for the command line; read on the worker when it is first asked for, and again
        once a calibration has renewed the engine."""
        from medusa_viz.tuning.calibration import facts_of, known_here

        engine = self.engine
        if self._facts is None or self._facts[0] is not engine:
            self._facts = engine, self.worker.submit(token, lambda: facts_of(engine, known_here(engine))).result()
        return self._facts[1]


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

    def time_plain(self) -> Any:
        """Queue the measurement of one plain step for this model, which nobody may have to wait for; its future."""
        def job(run: Any) -> None:
            ms = None if self.model.worker.others_wait(self.token) else run.plain_step()
            if ms is not None:
                self.model.plain.append(ms)

        return self.submit(job)

    def open(self, ids: Sequence[int], settings: Acceptance) -> Any:
        """Prefill tokens; the position behind them."""
        return self.work(lambda run: run.open(ids, settings))

    def look(self, position: Any, tree: Any, settings: Acceptance, room: int) -> Any:
        """Verify a tree (`decoder.Tree`) at a position; one that is made for this step is at most `room` deep."""
        look = self.work(lambda run: run.look(position, tree, settings, room))
        self.model.latency.add(look.shape.nodes + 1, look.timings.verify)
        return look


def newest_seat(model: Model | None, own: Seat | None, token: str) -> Seat:
    """A session's seat at the model that runs now: its own, unless the model was changed since. Raises
    ActionError where none runs yet."""
    if model is None:
        raise ActionError("not_ready")
    return own if own is not None and own.model is model else Seat(model, token)


def load(options: dict[str, Any], report: Report, beside: Model | None = None) -> Model:
    """A model as `options` (those of EngineOptions) name it. Where only the heads are others than those of the model
    that runs already, and none of the two changes the backbone, the backbone is shared and so is its worker."""
    from medusa_viz.decoding import engine as engines
    from medusa_viz.decoding import live

    engines.quiet_transformers()
    wanted = engines.EngineOptions(**options)
    if beside is not None and all(options[name] == beside.options.get(name) for name in PLACE):
        report("load", None, beside.engine.title)
        if (shared := _with_heads(beside, options, report)) is not None:
            return shared
    engine = engines.load(wanted, report)
    model = Model(engine, worker_of(engine), live, options)
    report("warm", None, engine.title)
    model.plain.append(engine.plain_ms())
    model.latency.add(1, model.plain_ms)
    return model


def worker_of(engine: Any) -> Worker:
    """A worker for an engine's backbone; its thread ends when the backbone goes."""
    worker = Worker(engine.title)
    weakref.finalize(engine.backbone, _end, worker).atexit = False
    return worker


def _end(worker: Worker) -> None:
    """Close the worker of a backbone that went, and give its memory back, from a thread of its own: whoever dropped
    the last reference may hold any lock."""
    def unload() -> None:
        worker.close()
        memory.give_back()

    threading.Thread(target=unload, name="unload", daemon=True).start()


def _with_heads(running: Model, options: dict[str, Any], report: Report) -> Model | None:
    """The running backbone with other heads; None where these or those change the backbone by an adapter."""
    from medusa_viz.decoding import engine as engines
    from medusa_viz.models.heads import Drafter

    backbone = running.engine.backbone
    if running.engine.loaded.adapter:
        return None
    _, loaded = engines.find(engines.EngineOptions(**options), backbone.placement, report)
    if loaded.adapter:
        return None
    drafter = running.worker.submit("", lambda: Drafter(loaded.module, backbone.lm_head)).result()
    engine = dataclasses.replace(running.engine, drafter=drafter, loaded=loaded)
    return Model(engine, running.worker, running.live, options, running.plain, running.latency)


def device_kind(options: dict[str, Any]) -> str:
    """`cpu`, `cuda` or another kind of device: the one that these options ask for."""
    from medusa_viz.models.device import choose

    return choose(options["device"]).device.type
