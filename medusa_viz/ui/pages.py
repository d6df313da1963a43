"""Further pages beside the Explorer: what each does on the server, and the one call that reaches them all.

A page is a subclass of `Page`, listed in `host.PAGES`; the page's scripts and styles carry its name. It never raises
for what a person did: whatever fails becomes one sentence in its view.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import orjson

from medusa_viz.figures.texts import Texts
from medusa_viz.ui.knobs import ActionError

log = logging.getLogger(__name__)
MAX_DESKS = 64  # visitors of further pages whose state is kept
PASSIVE = ("hello", "poll")  # what a page asks by itself, not the person

Notice = tuple[str, dict] | str


class Page:
    """One page. An action `x` is the method `do_x(token, **payload)`; what it leads to is `view(token)`.

    One visitor's calls come one at a time; those of several visitors come at once. `host` has the running model.
    """

    name = ""

    def __init__(self, host: Any, t: Texts) -> None:
        self.host, self.t = host, t

    def do_hello(self, token: str) -> None:
        """Show what there is."""

    def do_poll(self, token: str) -> None:
        """Show what is new."""

    def view(self, token: str) -> dict:
        """What the page shows to one visitor. `poll` is after how many milliseconds it should look again (0: never)."""
        raise NotImplementedError

    def close(self, token: str) -> None:
        """A visitor's tab was closed."""

    def shutdown(self) -> None:
        """The server ends."""


@dataclass
class _Desk:
    """One visitor at one page."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    notice: str = ""
    users: int = 0
    """Requests that have it, or wait for it."""


class Pages:
    """All further pages by name."""

    def __init__(self, kinds: Iterable[type[Page]], host: Any, t: Texts) -> None:
        self._pages = {kind.name: kind(host, t) for kind in kinds}
        self._t = t
        self._desks: OrderedDict[tuple[str, str], _Desk] = OrderedDict()
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Page:
        return self._pages[name]

    def act(self, token: str, name: str, action: str, payload: dict) -> str:
        """Do one action of a page; the view it leads to, as JSON, with `notice`: one sentence or nothing."""
        page = self._pages.get(name)
        if page is None:
            return self._json({"notice": self._t("session.unknown_page", name=name[:40]), "poll": 0})
        desk = self._desk(token, name)
        try:
            with desk.lock:
                notice = attempt(action, lambda: self._do(page, token, action, payload))
                if notice or action not in PASSIVE:
                    desk.notice = sentence(notice, self._t)
                return self._json({"notice": desk.notice, **page.view(token)})
        finally:
            with self._lock:
                desk.users -= 1
                closed = self._desks.get((name, token)) is not desk
            if closed:  # while this ran, which may have begun things anew
                page.close(token)

    def close(self, token: str) -> None:
        """A tab was closed."""
        with self._lock:
            for key in [key for key in self._desks if key[1] == token]:
                del self._desks[key]
        for page in self._pages.values():
            page.close(token)

    def shutdown(self) -> None:
        """The server ends."""
        for page in self._pages.values():
            page.shutdown()

    @staticmethod
    def _do(page: Page, token: str, action: str, payload: dict) -> None:
        method = getattr(page, f"do_{action}", None)
        if method is None:
            raise ActionError("unknown_action", name=action[:40])
        method(token, **payload)

    @staticmethod
    def _json(view: dict) -> str:
        return orjson.dumps({"stamp": time.monotonic_ns(), **view},
                            option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY).decode()

    def _desk(self, token: str, name: str) -> _Desk:
        with self._lock:
            desk = self._desks.setdefault((name, token), _Desk())
            desk.users += 1
            self._desks.move_to_end((name, token))
            idle = [key for key, other in self._desks.items() if not other.users]
            forgotten = idle[: max(0, len(self._desks) - MAX_DESKS)]
            for key in forgotten:
                del self._desks[key]
        for old_name, old_token in forgotten:
            self._pages[old_name].close(old_token)
        return desk


def attempt(action: str, do: Callable[[], object]) -> Notice | None:
    """Do what a person asked for; None, or why it could not be done: a key of the text table with its values, or a
    sentence."""
    try:
        do()
    except ActionError as error:
        return error.key, error.values
    except CancelledError:
        log.info("the page of a running %s was closed", action)
    except ValueError as error:
        if str(error).endswith("."):  # ours are sentences; Python's own, of a value that is no number, are not
            return str(error)
        log.warning("a page sent an odd payload for %s: %s", action, error)
        return "odd_payload", {"name": action[:40]}
    except (TypeError, AttributeError, OverflowError, RecursionError) as error:
        log.warning("a page sent an odd payload for %s: %s", action, error)
        return "odd_payload", {"name": action[:40]}
    except RuntimeError as error:  # a model's own fault, such as memory that ran out
        return str(error)
    except Exception:
        log.exception("action %s failed", action)
        return "failed", {"name": action[:40]}
    return None


def sentence(notice: Notice | None, t: Texts) -> str:
    """A notice in words."""
    if not notice:
        return ""
    return notice if isinstance(notice, str) else t(f"session.{notice[0]}", **notice[1])
