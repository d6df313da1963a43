"""What the page shows at one moment, as plain data: the seam between a live session and its drawing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from medusa_viz.decoding.records import Step
from medusa_viz.decoding.settings import Acceptance, Walls
from medusa_viz.figures import fold, layout, mask
from medusa_viz.ui.running import DEFAULTS


@dataclass(frozen=True)
class Astray:
    """Heads that belong to another model than the one that they were to run on."""

    heads: str
    model: str
    """Theirs, where their config names it."""
    by: str = ""
    """Token of the page that asked for them; empty where the server was started with them."""


@dataclass(frozen=True)
class ModelStatus:
    """Where the model is. state: `loading`, `ready` or `error`."""

    state: str
    phase: str = ""
    """Text key suffix of the loading phase: `import`, `fetch`, `hub`, `convert`, `load`, `warm`."""
    fraction: float | None = None
    detail: str = ""
    """One sentence: what is going on, or what went wrong and what to do."""
    title: str = ""
    """`SmolLM2-135M-Instruct · CPU, 2 threads · fp32` once known."""
    coming: ModelStatus | None = None
    """Another model that loads while this one runs."""
    fault: str = ""
    """One sentence: why another model, asked for last, could not be loaded."""
    astray: Astray | None = None
    """Heads, asked for last, that wait for their model to be named."""


@dataclass(frozen=True)
class Heads:
    """Where heads come from, as their own file says: free-form facts, and the accuracy of each rank; and how they and
    their backbone were loaded, in words."""

    source: str
    trained: dict[str, object]
    accuracy: list[list[float]]
    place: str = ""
    """Device and dtype."""
    reason: str = ""
    """Why these."""
    linears: str = ""
    step: str = ""
    notices: tuple[str, ...] = ()
    """What loading the heads came upon."""
    tensors: str = ""
    """Layout, and which tensors of their file were used."""
    drafts_from: str = ""
    """Whose output matrices, and how many of their rows."""


@dataclass(frozen=True)
class BranchTab:
    name: str
    steps: int
    fork: int


@dataclass(frozen=True)
class Equality:
    """Teacher-forced comparison with plain greedy. equal is None while it is not known or not expected."""

    equal: bool | None
    note: str
    """Text key suffix: `off`, `nothing`, `not_expected`, `waiting`, `equal`, `tie`, `fault`."""
    position: int | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Pinned:
    """The step pinned as A, with its knobs; shown only on its own prefix."""

    step: Step
    walls: Walls
    acceptance: Acceptance
    here: bool
    """The step on screen has the same prefix, so the two can be compared."""
    dynamic: bool = False


@dataclass(frozen=True)
class Screen:
    """What the page has room for: pixels of its figures, and nodes from which a tree is folded."""

    tree: tuple[int, int] = layout.ROOM
    mask: tuple[int, int] = mask.ROOM
    fold: int = fold.FOLD_ABOVE

    @property
    def lines(self) -> int:
        """Lines that a folded tree may take."""
        return max(8, min(fold.MOST_LINES, (self.tree[1] - layout.HEADERS) // layout.LEAST_LINE))


def screen_of(tree: list[int], mask: list[int], fold: int) -> Screen:
    """A screen as a page reports it, kept within what can be drawn."""
    def room(pixels: list[int]) -> tuple[int, int]:
        width, height = (min(max(int(side), 120), 4000) for side in pixels)
        return width, height

    return Screen(room(tree), room(mask), min(max(int(fold), 8), 64))


@dataclass(frozen=True)
class Snapshot:
    """Everything a view is built from. Steps are those of the current branch; the last may be pending."""

    model: ModelStatus
    recorded: bool
    """The opening recording rather than a live run."""
    title: str
    prompt: str
    prompt_ids: list[int]
    accuracy: list[list[float]]
    texts: dict[int, str]
    kinds: dict[int, str]
    steps: list[Step]
    """Each with the verdict it was committed with; the shown step has the one that the knobs give now."""
    index: int
    """The step shown, 0-based."""
    pending: bool
    """The shown step is the uncommitted tip."""
    changed: bool
    """A knob was moved on a committed step: Step would branch here."""
    finished: str | None
    """`end`, `length`, `context` once the run is over."""
    walls: Walls
    acceptance: Acceptance
    delta_locked: bool
    """δ follows √ε."""
    branch: str
    branches: list[BranchTab]
    notice: str = ""
    """One sentence for the status line: an error, or the place in the queue."""
    equality: Equality = field(default_factory=lambda: Equality(None, "waiting"))
    plain_ms: float | None = None
    """Measured milliseconds of a plain step on this device; None until measured."""
    knobs_since: int = 0
    """First step since the knobs last moved."""
    verified_nodes: int | None = None
    """Nodes of the tree that was verified at the step shown, which may be wider than the one drawn."""
    plain_due: bool = False
    """A plain step is to be measured once the page stands still."""
    pinned: Pinned | None = None
    check_on: bool = True
    """The comparison with plain greedy runs."""
    max_nodes: int = 1 << 20
    """Nodes up to which a tree is verified here."""
    screen: Screen = field(default_factory=Screen)
    heads: Heads | None = None
    """None while no model runs."""
    own_tree: bool = False
    """The tree was given as such; walls and size only enclose it."""
    dynamic: bool = False
    """The tree is rebuilt at each step within walls and size."""
    renewed: bool = False
    """Another model runs by now; this session uses it from its next Start."""
    foreign: bool = False
    """A recording is shown that the model which runs did not make, so it cannot go on with it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the running model was loaded with, as the command line names it; nothing of a recording."""
    on_start: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    """The same of the model that the next Start runs on."""
    locked: bool = False
    """Visitors are told no files of the server."""
