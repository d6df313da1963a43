"""The view: everything visible on the Explorer as one plain dict, built from a snapshot. See design.md, section 2."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from medusa_viz.decoding import records
from medusa_viz.decoding.records import Step
from medusa_viz.decoding.reweigh import grid_column
from medusa_viz.decoding.tree import Path
from medusa_viz.figures import fold, layout, mask, numbers, tokens, tree
from medusa_viz.figures.palette import source
from medusa_viz.figures.texts import Texts
from medusa_viz.ui import empty, merits, panels, status
from medusa_viz.ui.knob_view import knobs
from medusa_viz.ui.sentences import Narrator
from medusa_viz.ui.snapshot import Snapshot


def build(snapshot: Snapshot, t: Texts, opened: Collection[Path] = ()) -> dict:
    """The view of a snapshot in one language. `opened` are paths whose children are drawn in spite of the fold."""
    shown = snapshot.steps[snapshot.index] if snapshot.steps else None
    view = {
        "lang": t.lang,
        "status": status.status(snapshot, t),
        "run": status.run(snapshot, shown, t),
        "steps": status.steps(snapshot),
        "merits": merits.merits(snapshot, t),
        "knobs": knobs(snapshot, shown, t),
        "equality": status.equality(snapshot, t),
        "phases": status.phases(shown),
    }
    if shown is None:
        return {**view, **empty.parts(snapshot, t)}
    return {**view, **_Shown(snapshot, shown, Narrator(shown, snapshot.texts, snapshot.walls.top_s, t), t, opened).parts()}
