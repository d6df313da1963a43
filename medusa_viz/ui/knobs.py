"""The live knobs: how a change of one moves the others, and which tree they ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from medusa_viz.decoding.records import TEMPERATURES
from medusa_viz.decoding.settings import Acceptance, Walls
from medusa_viz.decoding.tree import TreeShape, dense, dense_nodes
from medusa_viz.tuning.builders import sparse

SAMPLING_TEMPERATURE = 0.7  # what choosing another mode than greedy sets where the temperature was 0


class ActionError(ValueError):
    """An action that cannot be done now. `key` names its sentence in the text table."""

    def __init__(self, key: str, **values: object) -> None:
        super().__init__(key)
        self.key, self.values = key, values


@dataclass(frozen=True)
class Knobs:
    """All live knobs of a page. δ follows √ε until somebody moves it."""

    walls: Walls = field(default_factory=Walls)
    acceptance: Acceptance = field(default_factory=Acceptance)
    delta_locked: bool = True

    def changed(self, changes: dict[str, Any], heads: int) -> tuple[Knobs, str]:
        """The knobs after some were moved, and the key of a notice where moving one moved another.

        Raises ActionError for an unknown knob, SettingsError for a value out of bounds.
        """
        changes = dict(changes)
        locked = bool(changes.pop("delta_locked", self.delta_locked and "delta" not in changes))
        walls = self._walls(changes, heads)
        acceptance, notice = self._acceptance(changes, locked)
        if changes:
            raise ActionError("unknown_knob", name=str(next(iter(changes)))[:40])
        return Knobs(walls, acceptance, locked), notice

    def _walls(self, changes: dict[str, Any], heads: int) -> Walls:
        top_s = changes.pop("top_s", self.walls.top_s)
        if not isinstance(top_s, (list, tuple)):
            raise ActionError("top_s_list")
        return Walls(tuple(top_s)[:heads], changes.pop("size", self.walls.size))

    def _acceptance(self, changes: dict[str, Any], locked: bool) -> tuple[Acceptance, str]:
        names = ("mode", "temperature", "epsilon", "delta", "top_p", "seed")
        new = {name: changes.pop(name) for name in names if name in changes}
        wanted = replace(self.acceptance, **new)
        if wanted.temperature > 0:  # the page judges from records, which are exact on their grid of temperatures
            wanted = replace(wanted, temperature=min(TEMPERATURES, key=lambda t: abs(t - wanted.temperature)))
        if locked:
            wanted = replace(wanted, delta=round(math.sqrt(wanted.epsilon), 3))
        if "mode" in new:
            if wanted.mode == "greedy":
                return replace(wanted, temperature=0.0), ""
            if wanted.temperature == 0:
                return replace(wanted, temperature=SAMPLING_TEMPERATURE), "temperature_set"
        elif "temperature" in new:
            if wanted.temperature == 0:
                return replace(wanted, mode="greedy"), "mode_greedy" if self.acceptance.mode != "greedy" else ""
            if wanted.mode == "greedy":
                return replace(wanted, mode="typical"), "mode_typical"
        return wanted, ""


def tree_for(walls: Walls, accuracy: Sequence[Sequence[float]], room: int) -> TreeShape:
    """The tree that walls and size ask for, no deeper than `room` further tokens."""
    top_s = walls.top_s[: len(accuracy)]
    shape = dense(top_s) if walls.size >= sum(dense_nodes(top_s)) else sparse(accuracy, walls.size, top_s)
    return shape.trimmed(min(shape.height, max(room, 0)))
