"""The live knobs: how a change of one moves the others, and which tree they ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from medusa_viz.decoding.records import TEMPERATURES
from medusa_viz.decoding.settings import MAX_RANKS, SIZE_DETENTS, Acceptance, Walls
from medusa_viz.decoding.tree import Path, TreeShape, dense, dense_nodes, from_paths
from medusa_viz.models.presets import DEFAULT_TREE
from medusa_viz.tuning.builders import assumed_accuracy, sparse
from medusa_viz.tuning.specs import Facts, build, fitted, of_budget

if TYPE_CHECKING:
    from medusa_viz.decoding.decoder import Tree

MOST_NODES = SIZE_DETENTS[-1]  # of an explicit tree; the Tuner makes none with more nodes
SAMPLING_TEMPERATURE = 0.7  # what choosing another mode than greedy sets where the temperature was 0


class ActionError(ValueError):
    """An action that cannot be done now. `key` names its sentence in the text table."""

    def __init__(self, key: str, **values: object) -> None:
        super().__init__(key)
        self.key, self.values = key, values


@dataclass(frozen=True)
class Knobs:
    """All live knobs of a page. δ follows √ε until somebody moves it; an own tree stands until walls or size move, a
    dynamic one keeps to them until others are chosen as a whole."""

    walls: Walls = field(default_factory=Walls)
    acceptance: Acceptance = field(default_factory=Acceptance)
    delta_locked: bool = True
    own: tuple[Path, ...] | None = None
    """Paths of a tree that was given as such; the walls then are the narrowest that hold it."""
    dynamic: bool = False
    """The tree is rebuilt at each step within walls and size, by the heads' own probabilities there."""

    def changed(self, changes: dict[str, Any], heads: int) -> tuple[Knobs, str]:
        """The knobs after some were moved, and the key of a notice where moving one moved another.

        Raises ActionError for an unknown knob, SettingsError for a value out of bounds.
        """
        changes = dict(changes)
        locked = bool(changes.pop("delta_locked", self.delta_locked and "delta" not in changes))
        own = None if {"top_s", "size"} & changes.keys() else self.own
        walls = self._walls(changes, heads)
        acceptance, notice = self._acceptance(changes, locked)
        if changes:
            raise ActionError("unknown_knob", name=str(next(iter(changes)))[:40])
        return Knobs(walls, acceptance, locked, own, self.dynamic), notice

    def within(self, walls: Walls) -> Knobs:
        """The knobs with the tree that these walls and this size give, the same at each step."""
        return replace(self, walls=walls, own=None, dynamic=False)

    @property
    def nodes(self) -> int:
        """Most nodes of a tree that they ask for."""
        return min(self.walls.size, sum(dense_nodes(self.walls.top_s))) if self.own is None else len(self.own)

    def smaller(self, most: int) -> Knobs:
        """The knobs with trees of up to so many nodes; an own tree gives way to the best one inside its walls."""
        return replace(self, walls=replace(self.walls, size=min(self.walls.size, most)), own=None)

    def drafts_as(self, other: Knobs) -> bool:
        """Both ask for the same tree."""
        return (self.walls, self.own, self.dynamic) == (other.walls, other.own, other.dynamic)

    def fitted(self, heads: int) -> Knobs:
        """The same knobs for a model of that many heads: walls of further heads begin closed."""
        top_s = (self.walls.top_s + (0,) * heads)[:heads]
        own = self.own and tuple(path for path in self.own if len(path) <= heads)
        return replace(self, walls=replace(self.walls, top_s=top_s), own=own)

    def with_tree(self, paths: Sequence[Sequence[int]], accuracy: Sequence[Sequence[float]]) -> tuple[Knobs, str]:
        """The knobs with an explicit tree, and a note where not all of it can be drafted. A tree that walls and size
        give as well is theirs. Raises TreeError or ActionError."""
        heads = len(accuracy)
        if len(paths) > MOST_NODES:
            raise ActionError("own_nodes", most=MOST_NODES)
        built = fitted(from_paths(paths), heads)
        shape = built.shape
        if shape.nodes > MOST_NODES:
            raise ActionError("own_nodes", most=MOST_NODES)
        if max(shape.widths, default=0) > MAX_RANKS:
            raise ActionError("own_ranks", ranks=MAX_RANKS)
        walls = Walls((shape.widths + (0,) * heads)[:heads], shape.nodes)
        same = tree_for(walls, accuracy, heads).fingerprint == shape.fingerprint
        return replace(self.within(walls), own=None if same else shape.paths[1:]), " ".join(built.notes)

    def with_dynamic(self, nodes: int, facts: Facts) -> tuple[Knobs, str]:
        """The knobs with trees of up to `nodes` nodes that are rebuilt at each step, and a note where the heads'
        probabilities were never put right. Raises TreeError or SettingsError."""
        walls = Walls((MAX_RANKS,) * facts.heads, nodes)
        return replace(self.within(walls), dynamic=True), " ".join(of_budget("dynamic", facts, nodes).notes)

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


def started_on(knobs: Knobs, engine: Any, before: Any, most: int) -> tuple[Knobs, tuple[str, dict] | str]:
    """The knobs for a run on an engine that verifies up to `most` nodes, and a note; `before` is the engine of the last
    one, None for the first. Another backbone is begun with the tree that its makers draft with. Where they name none,
    the first run of all keeps the knobs as they are, and a later one begins with the page's own walls."""
    heads = engine.drafter.heads
    begun, note = knobs.fitted(heads), ""
    if before is None or before.backbone is not engine.backbone:
        if engine.tree not in ("", DEFAULT_TREE):
            accuracy = engine.accuracy or assumed_accuracy(heads)
            built = build(engine.tree, Facts(heads, accuracy))
            begun, note = knobs.with_tree(built.shape.paths[1:], accuracy)[0], " ".join(built.notes)
        elif before is not None:
            begun = knobs.within(Walls()).fitted(heads)
    return (begun, note) if begun.nodes <= most else (begun.smaller(most), ("start_cut", {"most": f"{most:,}"}))


def tree_of(knobs: Knobs, accuracy: Sequence[Sequence[float]], room: int, facts: Callable[[], Facts]) -> Tree:
    """The tree that the knobs ask for, no deeper than `room` further tokens; one that is rebuilt at each step is cut
    where it is made."""
    if knobs.dynamic:
        return of_budget("dynamic", facts(), knobs.walls.size, knobs.walls.top_s).tree
    return tree_for(knobs.walls, accuracy, room) if knobs.own is None else own_tree(knobs.own, room)


def tree_for(walls: Walls, accuracy: Sequence[Sequence[float]], room: int) -> TreeShape:
    """The tree that walls and size ask for, no deeper than `room` further tokens."""
    top_s = walls.top_s[: len(accuracy)]
    shape = dense(top_s) if walls.size >= sum(dense_nodes(top_s)) else sparse(accuracy, walls.size, top_s)
    return shape.trimmed(min(shape.height, room))


def own_tree(paths: Sequence[Path], room: int) -> TreeShape:
    """An explicit tree, no deeper than `room` further tokens."""
    shape = from_paths(paths)
    return shape.trimmed(min(shape.height, room))
