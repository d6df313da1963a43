"""The host: loads the model in the background, owns the worker, keeps one session per page."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import orjson

from medusa_viz.decoding import records
from medusa_viz.decoding.preview import LatencyEstimate
from medusa_viz.figures.texts import Texts
from medusa_viz.models.worker import Worker
from medusa_viz.ui import view
from medusa_viz.ui.knobs import ActionError
from medusa_viz.ui.session import PASSIVE, ExplorerSession
from medusa_viz.ui.snapshot import ModelStatus
from medusa_viz.ui.written import written

log = logging.getLogger(__name__)
OPENING = Path(__file__).resolve().parents[2] / "assets" / "sessions" / "opening.json"
MAX_NODES = {"cpu": 256, "cuda": 1024}  # verified nodes; larger trees stay drawings
MAX_SESSIONS = 16


class Host:
    """What all sessions share. Torch is imported on the loading thread, after the page is up."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self.engine: Any = None
        self.worker: Worker | None = None
        self.latency = LatencyEstimate()
        self.plain_ms: float | None = None
        self.max_nodes = MAX_NODES["cpu"]
        self.status = ModelStatus("loading", "import")
        self._live: Any = None

    def load(self) -> None:
        """Load the model; whatever fails becomes one sentence in the status."""
        try:
            from medusa_viz.decoding import engine as engines
            from medusa_viz.decoding import live

            engines.quiet_transformers()
            engine = engines.load(engines.EngineOptions(**self.options), self._report)
            self._report("warm", None, engine.title)
            self.plain_ms = engine.plain_ms()
            self.latency.add(1, self.plain_ms)
            self.max_nodes = MAX_NODES.get(engine.backbone.device.type, MAX_NODES["cpu"])
            self._live, self.worker, self.engine = live, Worker(engine.title), engine
            self.status = ModelStatus("ready", title=f"{engine.title} · {engine.place}")
        except (ValueError, RuntimeError, OSError) as error:
            log.exception("the model could not be loaded")
            self.status = ModelStatus("error", detail=str(error))
        except Exception as error:  # the page must say so, whatever it was, rather than load for ever
            log.exception("the model could not be loaded")
            self.status = ModelStatus("error", detail=f"{type(error).__name__}: {error}")

    def new_run(self) -> Any:
        """A session's model side. Call on the worker."""
        return self._live.LiveRun(self.engine)

    def close(self) -> None:
        """End the worker; torch must not outlive the interpreter."""
        if self.worker:
            self.worker.close()

    def _report(self, phase: str, fraction: float | None, detail: str) -> None:
        self.status = ModelStatus("loading", phase, fraction, detail)


class Sessions:
    """Sessions by token; each is used by one request at a time, the oldest idle one makes room for a new one."""

    def __init__(self, options: dict[str, str], lang: str = "en") -> None:
        self.host = Host(options)
        self.texts = Texts(lang)
        self._sessions: OrderedDict[str, ExplorerSession] = OrderedDict()
        self._locks: dict[str, threading.Lock] = {}
        self._dropped: set[str] = set()
        self._lock = threading.Lock()
        self._opening = records.from_json(OPENING.read_text()) if OPENING.is_file() else None

    def load_in_background(self) -> None:
        threading.Thread(target=self.host.load, name="load", daemon=True).start()

    def act(self, token: str, action: str, payload: dict) -> str:
        """Do one action of one page; the view it leads to, as JSON. Never raises for what a person did."""
        session, lock = self._session(token)
        with lock:
            try:
                session.act(action, payload)
            except ActionError as error:
                session.notice = (error.key, error.values)
            except (ValueError, RuntimeError) as error:
                session.notice = str(error)
            except CancelledError:
                log.info("the page of a running %s was closed", action)
            except TypeError as error:
                log.warning("a page sent an odd payload for %s: %s", action, error)
                session.notice = ("odd_payload", {"name": action[:40]})
            except Exception:
                log.exception("action %s failed", action)
                session.notice = ("failed", {"name": action[:40]})
            if token in self._dropped:  # its owner's page is older than this session, and learns why
                session.notice = ("dropped", {})
                if action not in PASSIVE:  # a look that nobody asked for may pass unread
                    self._dropped.discard(token)
            snapshot = session.snapshot(self.host.status, self._sentence(session))
            shown = view.packed(view.build(snapshot, self.texts, session.opened))
            return orjson.dumps({"stamp": time.monotonic_ns(), **shown},
                                option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()

    def close(self, token: str) -> None:
        """Forget a page's session and give its memory back."""
        with self._lock:
            self._sessions.pop(token, None)
            self._locks.pop(token, None)
            self._dropped.discard(token)
        if self.host.worker:
            self.host.worker.cancel(token)

    def record(self, token: str) -> str:
        """A page's session as a JSON file."""
        session, lock = self._session(token)
        with lock:
            return records.to_json(session.record())

    def written(self, token: str) -> str:
        """The text that a page's branch has committed so far."""
        session, lock = self._session(token)
        with lock:
            return written(session)

    def session(self, token: str) -> ExplorerSession:
        """A page's session."""
        return self._session(token)[0]

    def waiting(self, token: str) -> int:
        """How many people the model serves before this page's next job."""
        return self.host.worker.ahead_of(token) if self.host.worker else 0

    def _sentence(self, session: ExplorerSession) -> str:
        notice = session.notice
        return notice if isinstance(notice, str) else self.texts(f"session.{notice[0]}", **notice[1])

    def _session(self, token: str) -> tuple[ExplorerSession, threading.Lock]:
        with self._lock:
            if token not in self._sessions:
                self._sessions[token] = ExplorerSession(self.host, token, self._opening)
                self._locks[token] = threading.Lock()
                idle = [other for other in self._sessions if other != token and not self._locks[other].locked()]
                if len(self._sessions) > MAX_SESSIONS and idle:
                    self._sessions.pop(idle[0])
                    self._locks.pop(idle[0])
                    self._dropped.add(idle[0])
            self._sessions.move_to_end(token)
            return self._sessions[token], self._locks.setdefault(token, threading.Lock())
