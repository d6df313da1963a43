"""What the tests of the Tuner page share: a server on a tiny model whose jobs take moments, and how to use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_page import saved_heads, saved_model, until

from medusa_viz.training import own_text
from medusa_viz.tuning import extents
from medusa_viz.ui import host as hosts
from medusa_viz.ui import tuner_plan

QUICK_ROWS = (1, 2, 4, 8)


def saved(root: Path) -> SimpleNamespace:
    """Folders of a model, of heads for it, and of others with one head more."""
    return SimpleNamespace(model=saved_model(root / "model"), heads=saved_heads(root / "heads"),
                           more=saved_heads(root / "more", 4, 1))


def serving(folders: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """act(action, token, **payload) -> view of the Tuner; everything small and quick."""
    from medusa_viz.tuning import measure_latency

    monkeypatch.setenv("MEDUSA_VIZ_CACHE", str(cache))
    measuring = measure_latency.measuring
    monkeypatch.setattr(measure_latency, "measuring", lambda engine: measuring(engine, QUICK_ROWS, (8, 16), 1))
    monkeypatch.setattr(own_text, "ANSWERED", 4)
    monkeypatch.setattr(own_text, "ANSWER_TOKENS", 12)
    monkeypatch.setitem(tuner_plan.MEASURE, "quick", (1, 6))
    monkeypatch.setitem(extents.STUDY, "quick", extents.Extent((0.01, 0.25), (0.7,), 1, 6))
    sessions = hosts.Sessions({"model": str(folders.model), "heads": str(folders.heads), "device": "cpu"})
    sessions._opening = None
    sessions.host.load()

    def act(action, token="one", **payload):
        return json.loads(sessions.pages.act(token, "tuner", action, payload))

    until(lambda: act("poll")["ready"], "what lies stored")
    yield SimpleNamespace(act=act, sessions=sessions, host=sessions.host, root=cache,
                          explorer=lambda action, **payload: json.loads(sessions.act("one", action, payload)))
    sessions.shutdown()


def done(page, action, token="one", **payload):
    """Run a job to its end; the view behind it. It may end before the view that began it is made."""
    view = page.act(action, token, **payload)
    assert not view["notice"] and (view["job"] or {"live": True})["live"], view
    view = first(page, lambda v: not (v["job"] or {}).get("live"), token)
    assert view["job"] is None, view["job"]
    return view


def first(page, true, token="one"):
    """The first look that shows it."""
    def look():
        view = page.act("poll", token)
        return view if true(view) else None

    return until(look, "the look")


def surveyed(page):
    return first(page, lambda view: not view["surveying"])


def part(view, name):
    return view["parts"][name]["body"]


def fact(view, key):
    return next((row["value"] for row in view["chosen"]["facts"] if row["key"] == key), None)
