"""The host: loads models in the background, and keeps one session per page."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from medusa_viz.decoding import records
from medusa_viz.decoding.settings import ServerLimits
from medusa_viz.figures.texts import Texts
from medusa_viz.ui import model_menu, running, view
from medusa_viz.ui.knobs import ActionError
from medusa_viz.ui.pages import Pages, attempt, sentence
from medusa_viz.ui.portrait import record, snapshot
from medusa_viz.ui.running import DEFAULTS, Model
from medusa_viz.ui.session import PASSIVE, ExplorerSession
from medusa_viz.ui.snapshot import Astray, ModelStatus
from medusa_viz.ui.train import TrainPage
from medusa_viz.ui.tuner import TunerPage
from medusa_viz.ui.written import written

log = logging.getLogger(__name__)
OPENING = Path(__file__).resolve().parents[2] / "assets" / "sessions" / "opening.json"
BEGINS = ("hello", "start")
"""Actions with which a page can come to a session anew, and miss nothing of an older one."""
PAGES = (TunerPage, TrainPage)
"""Pages beside the Explorer, in the order of the navigation."""


class Host:
    """What all sessions share: the model that the next Start runs on."""

    def __init__(self, options: dict[str, Any], locked: bool = False, limits: ServerLimits | None = None) -> None:
        self.options = {name: options.get(name, default) for name, default in DEFAULTS.items()}
        self.asked = self.options
        """What the server was started with."""
        self.locked = locked
        """Visitors can neither change what runs nor name files of the server."""
        self.limits = limits or ServerLimits()
        self.model: Model | None = None
        self.status = ModelStatus("loading", "import")
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()
        self._closed = False
        self._lock = threading.RLock()  # a word of a load may come while the collector runs inside it

    def load(self) -> None:
        """Load the first model; whatever fails becomes one sentence in the status."""
        self._load(self.options)

    def max_nodes(self, model: Model | None) -> int:
        """Nodes up to which a tree is verified on this model; before one runs, as on a CPU."""
        kind = model.engine.backbone.device.type if model else "cpu"
        return self.limits.max_nodes or running.MAX_NODES.get(kind, running.MAX_NODES["cpu"])

    @property
    def loading(self) -> bool:
        """A model is being loaded, the first one or another beside it."""
        return self.status.state == "loading" or self.status.coming is not None

    def needs_unlocked(self) -> None:
        """Raise where only the server's owner may do this."""
        if self.locked:
            raise ActionError("locked")

    def told(self, token: str) -> ModelStatus:
        """The status as a page may see it: heads that wait for their model are the business of who asked for them."""
        astray = self.status.astray
        return self.status if not astray or astray.by in ("", token) else replace(self.status, astray=None)

    def use(self, by: str = "", **options: Any) -> None:
        """Load another model or other heads in the background, for every Start after that, as the page of the token
        `by` asks. Runs that are under way keep what they began on."""
        self.needs_unlocked()
        with self._lock:
            if self.loading:
                raise ActionError("still_loading")
            coming = ModelStatus("loading", "load")
            self.status = replace(self.status, coming=coming, fault="", astray=None) if self.model else coming
        wanted = {**self.options, **options}
        threading.Thread(target=self._load, args=(wanted, by), name="switch", daemon=True).start()

    def close(self) -> None:
        """End all workers; torch must not outlive the interpreter."""
        with self._lock:
            self._closed, models = True, list(self._models)
        for model in models:
            model.worker.close()

    def start_on(self, model: Model, options: dict[str, Any] | None = None) -> None:
        """What runs from the next Start on."""
        with self._lock:
            self.options = {**self.options, **(options or {})}
            self.model = model
            self._models.add(model)
            self.status = ModelStatus("ready", title=model.title)
            closed = self._closed
        if closed:  # the server ended meanwhile
            model.worker.close()

    def _load(self, options: dict[str, Any], by: str = "") -> None:
        try:
            self.start_on(running.load(options, self._report, self.model), options)
        except (ValueError, RuntimeError, OSError) as error:
            log.exception("the model could not be loaded")
            self._failed(str(error), _astray(options, error, by))
        except Exception as error:  # the page must say so, whatever it was, rather than load for ever
            log.exception("the model could not be loaded")
            self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, sentence: str, astray: Astray | None = None) -> None:
        with self._lock:
            if self.model is None:
                self.status = ModelStatus("error", detail=sentence, astray=astray)
            else:
                self.status = replace(self.status, coming=None, fault=sentence, astray=astray)

    def _report(self, phase: str, fraction: float | None, detail: str) -> None:
        status = ModelStatus("loading", phase, fraction, detail)
        with self._lock:
            if self.loading:  # a word that comes when all is over says nothing
                self.status = status if self.model is None else replace(self.status, coming=status)


def _astray(options: dict[str, Any], error: Exception, by: str) -> Astray | None:
    """The heads that were asked for, where they belong to another model than the one beside them."""
    from medusa_viz.models.heads import OtherModelError

    is_so = options["heads"] and isinstance(error, OtherModelError)
    return Astray(options["heads"], error.base, by) if is_so else None


@dataclass
class _Visit:
    """One page's session, and who uses it."""

    session: ExplorerSession
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    """Requests that have it, or wait for it."""
    told: bool = False
    """The page knows that this session is new to it."""


class Sessions:
    """Sessions by token; each is used by one request at a time, the oldest idle one makes room for a new one."""

    def __init__(self, options: dict[str, Any], lang: str = "en", locked: bool = False,
                 limits: ServerLimits | None = None) -> None:
        self.host = Host(options, locked, limits)
        self.texts = Texts(lang)
        self.pages = Pages(PAGES, self.host, self.texts)
        self._sessions: OrderedDict[str, _Visit] = OrderedDict()
        self._lock = threading.Lock()
        self._opening = records.from_json(OPENING.read_text()) if OPENING.is_file() else None

    def load_in_background(self) -> None:
        threading.Thread(target=self.host.load, name="load", daemon=True).start()

    def act(self, token: str, action: str, payload: dict) -> str:
        """Do one action of one page; the view it leads to, as JSON. Never raises for what a person did. What was asked
        of a run that is gone is not done to the new one: the page is told first."""
        with self._visit(token, keep=action != "poll") as visit:
            session = visit.session
            if action in BEGINS:
                visit.told = True
            elif not visit.told:  # what the page does by itself, a person may not have seen the answer to
                session.notice, visit.told = ("dropped", {}), action not in PASSIVE
                action, payload = ("hello", {}) if visit.told else (action, payload)
            session.notice = attempt(action, lambda: session.act(action, payload)) or session.notice
            now = snapshot(session, session.news.of(self.host.told(token)), sentence(session.notice, self.texts))
            shown = view.packed(view.build(now, self.texts, session.opened))
            return orjson.dumps({"stamp": time.monotonic_ns(), **shown},
                                option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()

    def close(self, token: str) -> None:
        """Forget a page's session and give its memory back."""
        with self._lock:
            visit = self._sessions.pop(token, None)
        if visit is not None and visit.session.seat is not None:
            visit.session.seat.model.worker.cancel(token)
        self.pages.close(token)

    def shutdown(self) -> None:
        """The server ends: nothing that it started goes on."""
        self.pages.shutdown()
        self.host.close()

    def record(self, token: str) -> str:
        """A page's session as a JSON file; nothing of one that is gone."""
        return self._told(token, lambda session: records.to_json(record(session)))

    def written(self, token: str) -> str:
        """The text that a page's branch has committed so far; nothing of one that is gone."""
        return self._told(token, written)

    def models(self, token: str) -> str:
        """What the model menu offers a page, as JSON."""
        return orjson.dumps(model_menu.menu(self.host, token, self.texts)).decode()

    def session(self, token: str) -> ExplorerSession:
        """A page's session."""
        with self._visit(token, keep=False) as visit:
            return visit.session

    def waiting(self, token: str) -> int:
        """How many people the model serves before this page's next job."""
        visit = self._sessions.get(token)
        model = visit.session.model if visit is not None else self.host.model
        return model.worker.ahead_of(token) if model is not None else 0

    def _told(self, token: str, tell: Callable[[ExplorerSession], str]) -> str:
        with self._visit(token, keep=False) as visit:
            return tell(visit.session) if visit.told else ""

    @contextmanager
    def _visit(self, token: str, keep: bool) -> Iterator[_Visit]:
        """A page's session for one request at a time; one that is made now and not to be kept lasts for the request
        alone: the look of a page that was just closed must not bring its session back."""
        with self._lock:
            visit = self._sessions.get(token)
            new, gone = visit is None, None
            if new:
                visit = _Visit(ExplorerSession(self.host, token, self._opening))
            if keep:
                self._sessions[token] = visit
            if not new or keep:
                self._sessions.move_to_end(token)
            visit.users += 1
            if len(self._sessions) > self.host.limits.max_sessions:
                idle = next((other for other, one in self._sessions.items() if not one.users), None)
                gone = idle and self._sessions.pop(idle)
        del gone  # its memory, outside the lock of all
        try:
            with visit.lock:
                yield visit
        finally:
            with self._lock:
                visit.users -= 1
