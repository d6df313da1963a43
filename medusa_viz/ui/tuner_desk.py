"""One visitor's desk at the Tuner: the chosen tree and what came before it, settings, the job under way, results."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from medusa_viz.decoding.tree import Path, TreeError, TreeShape, dense, from_paths
from medusa_viz.tuning import edits, recommend, specs
from medusa_viz.tuning.latency import Latency
from medusa_viz.tuning.published_trees import published
from medusa_viz.tuning.recommend import Option, Recommendation, Survey
from medusa_viz.ui.knobs import MOST_NODES, ActionError
from medusa_viz.ui.tuner_study import Study
from medusa_viz.ui.tuner_task import Task

MOST_UNDO = 100
MOST_PATH_TEXT = 200  # characters; a path has one rank per head
FIRST = 16
PLAIN, PUBLISHED, CHAIN, OWN = "plain", "published", "chain", "own"


@dataclass(frozen=True, eq=False)
class Chosen:
    """The tree on the desk. kind: a builder's name, `chain`, `published` or `own`; name: of a published tree."""

    kind: str
    budget: int
    option: Option
    survey: Survey
    """What the option was judged by."""
    name: str = ""
    seed: int = 0

    @property
    def shape(self) -> TreeShape | None:
        """None for trees rebuilt at each step."""
        return self.option.tree if isinstance(self.option.tree, TreeShape) else None

    @property
    def key(self) -> str:
        """Names the tree among measured ones."""
        return self.option.spec if self.kind not in (OWN, PUBLISHED) else f"{self.kind}:{self.shape.fingerprint}"


@dataclass(eq=False)
class Measured:
    """A tree decoded for real, beside what was predicted when that began."""

    run: Any
    kind: str
    option: Option | None
    second: float | None
    """Predicted tokens per second on this device."""
    gain: float | None
    """Tokens per second over those of plain decoding in the same run."""

    @property
    def whole(self) -> bool:
        """All prompts that were asked for were decoded."""
        return self.run.prompts == self.run.asked


@dataclass(frozen=True, eq=False)
class Swept:
    """A threshold study: `of` which tree at which extent, the tree's title, and what came of it."""

    of: tuple[str, str]
    title: str
    found: Any


@dataclass(eq=False)
class Desk:
    """Everything that one visitor has at one study."""

    study: Study
    chosen: Chosen
    touched: bool = False
    """The person chose the tree; until then the recommended one is shown."""
    undone: list[Chosen] = field(default_factory=list)
    redone: list[Chosen] = field(default_factory=list)
    loaded: Latency | None = None
    elsewhere: bool = False
    """The loaded step times count, not this device's own."""
    batch: int = 1
    curve: int = 0
    grown: int | None = None
    editing: bool = False
    cutting: bool = False
    opened: frozenset[Path] = frozenset()
    room: tuple[int, int] = (620, 360)
    task: Task | None = None
    measured: dict[tuple[str, float], Measured] = field(default_factory=dict)
    swept: Swept | None = None
    proxy: str = "surprise"
    format: str = "tree"
    imported: list[str] = field(default_factory=list)
    give: dict | None = None
    """Sent once: a tree for the Explorer, or a file."""
    mark: str = field(default_factory=lambda: secrets.token_hex(4))
    count: Iterator[int] = field(default_factory=count)
    parts: dict[str, tuple[tuple, str, Any]] = field(default_factory=dict)
    """Parts of the view as they were made last: from what, their key, and what is sent."""
    _state: tuple | None = None
    _made: dict[tuple[str, int], Any] = field(default_factory=dict)

    # ---- step times -------------------------------------------------------------------------------------------

    @property
    def latency(self) -> Latency | None:
        """The step times that count."""
        return self.loaded if self.elsewhere and self.loaded else self.study.latency

    @property
    def place(self) -> int:
        """Which of its curves counts."""
        return min(self.curve, len(self.latency.curves) - 1) if self.latency else 0

    @property
    def step_ms(self) -> Callable[[int], float] | None:
        """Milliseconds of a step with so many nodes, at this batch and prefix."""
        latency, place = self.latency, self.place
        return (lambda nodes: latency.step_ms(nodes, self.batch, place)) if latency else None

    def priced(self, options: Sequence[Option]) -> list[Option]:
        """Options with step times, where there are some."""
        if not self.latency:
            return list(options)
        return recommend.repriced(options, self.latency, self.batch, self.place)

    def surveyed(self) -> dict[str, list[Option]]:
        """What the survey found, with step times."""
        return self._known("options", self._surveyed, self.batch)

    def _surveyed(self) -> dict[str, list[Option]]:
        found, sized = dict(self.study.options), self.favoured()
        if sized and all(option.spec != sized.spec for option in found.get("sequoia", [sized])):
            found["sequoia"] = sorted([*found["sequoia"], sized], key=lambda option: option.nodes)
        return {name: self.priced(options) for name, options in found.items()}

    def favoured(self, batch: int | None = None) -> Option | None:
        """Sequoia's tree of the size that step times favour; None where none are known, or they favour plain decoding.
        """
        batch = batch or self.batch
        return self._known("favoured", lambda: self._favoured(batch), batch)

    def _favoured(self, batch: int) -> Option | None:
        rates, latency = self.study.facts.rates, self.latency
        if not (rates and latency):
            return None
        nodes = specs.favoured(rates, lambda nodes: latency.step_ms(nodes, batch, self.place)).nodes
        return build(self.study, "sequoia", nodes).option if nodes else None

    def advice(self, batch: int | None = None) -> Recommendation | None:
        """None while there are no step times or no trees to choose from."""
        batch = batch or self.batch
        return self._known("advice", lambda: self._advice(self.study.all_options, batch), batch)

    def _advice(self, options: Sequence[Option], batch: int) -> Recommendation | None:
        latency = self.latency
        if not latency or not any(option.tokens_per_step for option in options):
            return None
        sized = self.favoured(batch)
        options = [*options, sized] if sized else options
        return recommend.recommend(recommend.repriced(options, latency, batch, self.place),
                                   latency.step_ms(0, batch, self.place))

    def _known(self, name: str, make: Callable[[], Any], batch: int) -> Any:
        """What `make` gives, made anew only where survey, step times or prefix changed."""
        state = self.study.options, self.latency, self.place
        if self._state is None or any(a is not b for a, b in zip(self._state, state, strict=True)):
            self._state, self._made = state, {}
        made = self._made  # `make` may come here too, and find a newer survey
        if (name, batch) not in made:
            made[name, batch] = make()
        return made[name, batch]

    # ---- what was decoded for real ----------------------------------------------------------------------------

    def take_measured(self, found: dict[tuple[str, float], Measured]) -> None:
        """The newest counts; but one that was stopped gives way to one of more text."""
        kept = {key: old for key, old in self.measured.items()
                if key in found and not found[key].whole and old.run.tokens > found[key].run.tokens}
        self.measured = {**self.measured, **found, **kept}

    def take_swept(self, swept: Swept) -> None:
        """The newest study counts; but one that was stopped gives way to a fuller one of the same."""
        old = self.swept
        if old is None or old.of != swept.of or len(swept.found.points) >= len(old.found.points):
            self.swept = swept

    # ---- the chosen tree --------------------------------------------------------------------------------------

    def choose(self, chosen: Chosen) -> None:
        """Put another tree on the desk; moving a budget up and down is one change."""
        old = self.chosen
        moved = chosen.kind == old.kind not in (OWN, PUBLISHED) and self.undone and self.touched
        if not moved:
            self.undone = [*self.undone, old][-MOST_UNDO:]
        self._show(chosen)
        self.redone, self.touched = [], True

    def follow(self) -> None:
        """Until the person chooses, the fastest tree of one shape is the chosen one. A new calibration judges it anew.
        """
        study = self.study
        if self.chosen.survey is not study.survey:
            if not self.touched and study.facts.rates and self.chosen.kind == CHAIN:
                self._show(build(study, "sparse", FIRST))
            self.chosen = judged(study, self.chosen)
        if self.touched or not study.settled:
            return
        fixed = [option for option in self.study.all_options if isinstance(option.tree, TreeShape)]
        advice = self._known("fixed", lambda: self._advice(fixed, self.batch), self.batch)
        best = advice.best if advice else None
        if best is not None and best.spec != self.chosen.option.spec:
            kind, _, budget = best.spec.partition(":")
            self._show(build(study, kind, int(budget)))

    def undo(self) -> None:
        if not self.undone:
            raise ActionError("tuner_no_undo")
        self.redone.append(self.chosen)
        self._show(self.undone.pop())

    def redo(self) -> None:
        if not self.redone:
            raise ActionError("tuner_no_redo")
        self.undone.append(self.chosen)
        self._show(self.redone.pop())

    def edit(self, change: Callable[..., TreeShape], *values: Any) -> None:
        """An edit by hand."""
        shape = self.chosen.shape
        if shape is None:
            raise ActionError("tuner_dynamic")
        edited = change(shape, *values)
        if edited.height > self.study.heads or max(edited.widths, default=0) > self.study.ranks:
            raise ActionError("tuner_no_place")
        self.choose(own(self.study, edited))

    def _show(self, chosen: Chosen) -> None:
        self.chosen, self.grown, self.opened, self.imported = chosen, None, frozenset(), []


def begin(study: Study) -> Desk:
    """A new visitor's desk."""
    kind = "sparse" if study.facts.rates else CHAIN
    return Desk(study, build(study, kind, FIRST if study.facts.rates else study.heads))


def build(study: Study, kind: str, budget: int, name: str = "", seed: int = 0) -> Chosen:
    """A tree of a builder, a chain, or a published one. Raises TreeError or ActionError."""
    if kind == PUBLISHED:
        if name not in published():
            raise ActionError("tuner_no_published", name=str(name)[:60])
        built = specs.fitted(published()[name], study.heads)
        option = study.survey.of_tree(f"published:{name}", built)
        return Chosen(PUBLISHED, built.shape.nodes, option, study.survey, name)
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget <= MOST_NODES:
        raise ActionError("tuner_budget", budget=str(budget)[:20], most=f"{MOST_NODES:,}")
    if kind == CHAIN:
        length = min(budget, study.heads)
        option = study.survey.of_tree(f"chain:{length}", specs.Built(dense([1] * length)))
        return Chosen(CHAIN, length, option, study.survey)
    if kind not in specs.BUILDERS:
        raise ActionError("tuner_no_builder", name=str(kind)[:40])
    known = next((option for option in study.options.get(kind, ()) if option.spec == f"{kind}:{budget}"), None)
    if known is None and kind == "dynamic" and budget:  # replaying it takes seconds: the survey does that
        built = specs.of_budget(kind, study.facts, budget)
        known = Option(f"{kind}:{budget}", built.tree.nodes, built.tree, notes=tuple(built.notes))
    return Chosen(kind, budget, known or study.survey.of_budget(kind, budget, seed=seed), study.survey, seed=seed)


def judged(study: Study, chosen: Chosen) -> Chosen:
    """The same choice by what is known now."""
    if chosen.kind == OWN:
        built = specs.Built(chosen.shape, list(chosen.option.notes))
        return replace(chosen, option=study.survey.of_tree(OWN, built), survey=study.survey)
    return build(study, chosen.kind, chosen.budget, chosen.name, chosen.seed)


def own(study: Study, shape: TreeShape, notes: Sequence[str] = ()) -> Chosen:
    """A tree given as such, as far as the heads reach."""
    built = specs.fitted(shape, study.heads)
    built = replace(built, notes=[*notes, *built.notes])
    if max(built.shape.widths, default=0) > study.ranks:
        raise TreeError(f"The tree takes rank {max(built.shape.widths) - 1} of a head; these heads draft ranks 0 to "
                        f"{study.ranks - 1}.")
    if built.shape.nodes > MOST_NODES:
        raise TreeError(f"The tree has {built.shape.nodes:,} nodes; {MOST_NODES:,} are the most that are shown here.")
    return Chosen(OWN, built.shape.nodes, study.survey.of_tree(OWN, built), study.survey)


def path_of(text: object, study: Study) -> Path:
    """The ranks in `0.2.1`. Raises ActionError."""
    if not isinstance(text, str) or len(text) > MOST_PATH_TEXT:
        raise ActionError("tuner_no_place")
    try:
        path = tuple(int(rank) for rank in text.split(".") if rank)
    except ValueError:
        raise ActionError("tuner_no_place") from None
    if len(path) > study.heads or any(not 0 <= rank < study.ranks for rank in path):
        raise ActionError("tuner_no_place")
    return path


def with_path(shape: TreeShape, path: Path) -> TreeShape:
    """The shape with a node and what leads to it."""
    if path in shape.row_of:
        return edits.add_child(shape, path)
    return from_paths([*shape.paths[1:], path])
