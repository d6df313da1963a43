"""Every builder by name, and trees from short specs: `kind:budget`, `kind:budget@walls`, `kind:budget#seed`.

Explorer, Tuner, command line and tests all build through here. A builder is told a budget of nodes, optional walls
(top-s per head) and a seed, and draws on `Facts` for what it needs to know of the heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from medusa_viz.decoding.settings import MAX_RANKS
from medusa_viz.decoding.tree import MAX_NODES, TreeError, TreeShape, dense, dense_nodes
from medusa_viz.tuning import random_trees
from medusa_viz.tuning.accuracy import shares
from medusa_viz.tuning.builders import Accuracy, best_dense, sparse
from medusa_viz.tuning.dynamic import DynamicTrees, dynamic
from medusa_viz.tuning.joint import joint
from medusa_viz.tuning.published_trees import published
from medusa_viz.tuning.replay import RankTable
from medusa_viz.tuning.sequoia import Size, best_size, sequoia, walled

if TYPE_CHECKING:
    from medusa_viz.decoding.decoder import Tree

EXAMPLES = "plain, chain:3, dense:3,2,1, sparse:16, joint:16, dynamic:16 or published:mc_sim_7b_63"
AUTO_BUDGET = 256  # most nodes that `sequoia` without a budget weighs


@dataclass(frozen=True, eq=False)
class Facts:
    """What builders may draw on; each takes what it needs and says what is missing.

    accuracy: a_k(i) by head; table: ranks on recorded replies; step_ms: measured milliseconds of a step with so many
    nodes; temperatures: per head, those that make its probabilities right; choices: tokens a head can draft.
    """

    heads: int
    accuracy: Accuracy = ()
    table: RankTable | None = None
    step_ms: Callable[[int], float] | None = None
    temperatures: tuple[float, ...] = ()
    choices: int = MAX_RANKS

    @cached_property
    def rates(self) -> list[list[float]]:
        """The accuracies in force, one row per head: the given ones, else those of the rank table."""
        rows = self.accuracy if len(self.accuracy) else shares(self.table) if self.table is not None else []
        return [list(row) for row in rows[: self.heads]]

    def on(self, table: RankTable) -> Facts:
        """The same heads as another rank table knows them, and by it alone."""
        return replace(self, accuracy=shares(table), table=table)


@dataclass(frozen=True)
class Request:
    """What a builder is asked for. `walls` holds top-s per head, or None."""

    facts: Facts
    budget: int
    walls: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def random_walls(self) -> list[int]:
        """Ranks per head that a random tree may take."""
        walls = self.walls or (MAX_RANKS,) * self.facts.heads
        return [min(wall, self.facts.choices) for wall in walls]


@dataclass(frozen=True)
class Builder:
    """One way to fill a budget. `needs` names fields of Facts; `seeded` builders give another tree for each seed."""

    name: str
    help: str
    make: Callable[[Request], Tree]
    needs: tuple[str, ...] = ()
    seeded: bool = False


def _joint(request: Request) -> TreeShape:
    return joint(request.facts.table, request.facts.rates, request.budget, request.walls)


def _dynamic(request: Request) -> Tree:
    if not request.budget:
        return dense([])
    facts = request.facts
    return dynamic(facts.heads, request.budget, request.walls, facts.temperatures, facts.choices)


BUILDERS: dict[str, Builder] = {builder.name: builder for builder in (
    Builder("best-dense", "the dense tree (top-s of each head) of most expected tokens per step",
            lambda r: best_dense(r.facts.rates, r.budget, r.walls), ("accuracy",)),
    Builder("random-dense", "a dense tree of random top-s",
            lambda r: random_trees.random_product(r.random_walls, r.budget, r.seed), seeded=True),
    Builder("random-sparse", "random nodes, each below one already chosen",
            lambda r: random_trees.random_subset(r.random_walls, r.budget, r.seed), seeded=True),
    Builder("sparse", "the nodes of the largest products of accuracies, best first",
            lambda r: sparse(r.facts.rates, r.budget, r.walls), ("accuracy",)),
    Builder("sequoia", "Sequoia's dynamic program over size and depth",
            lambda r: sequoia(r.facts.rates, r.budget, r.walls), ("accuracy",)),
    Builder("joint", "the rank paths that occurred whole most often on recorded replies", _joint, ("table",)),
    Builder("dynamic", "rebuilt at each step from that step's own head probabilities", _dynamic),
)}
"""Builders of a budget, by name."""

LACKING = {
    "accuracy": "needs the heads' accuracies, and their file holds none; name another one, such as chain or "
                "dense:3,2,1",
    "table": "needs a rank table of these heads, which `calibrate` writes",
    "step_ms": "needs step times measured on this device: run `tune` first, or name a number of nodes",
}


@dataclass(frozen=True)
class Built:
    """A tree, and what a person should know of how it came about."""

    tree: Tree
    notes: list[str] = field(default_factory=list)

    @property
    def shape(self) -> TreeShape:
        """The one shape of all steps. Raises TreeError for trees rebuilt at each step."""
        if isinstance(self.tree, TreeShape):
            return self.tree
        raise TreeError("A dynamic tree is another one at each step; this needs one shape for all steps.")


_SPEC = re.compile(r"([a-z-]+)(?::([a-z0-9_,]+))?(?:@([0-9,]+))?(?:#([0-9]+))?", re.ASCII)


@dataclass(frozen=True)
class Spec:
    """A spec taken apart. `name` is a published tree's; `walls` holds top-s per head, or None."""

    kind: str
    name: str = ""
    numbers: tuple[int, ...] = ()
    walls: tuple[int, ...] | None = None
    seed: int = 0


def parse(spec: str) -> Spec:
    """What a spec says, before any heads are known: `plain`, `chain`, `chain:3`, `dense:3,2,1`, `published:NAME`, or a
    builder of BUILDERS with a budget of nodes, walls and a seed: `sparse:16`, `joint:16@4,3,2,2`, `random-sparse:16#7`.
    Raises TreeError."""
    found = _SPEC.fullmatch(spec)
    if not found:
        raise TreeError(f"{spec!r:.60} is no tree: use {EXAMPLES}, or a file of paths.")
    kind, argument, within, seed = (part or "" for part in found.groups())
    if kind == "published" and not (within or seed):
        if argument not in published():
            raise TreeError(f"No published tree is called '{argument}'; there are {', '.join(published())}.")
        return Spec(kind, argument)
    numbers, walls = _numbers(spec, argument), _numbers(spec, within)
    builder = BUILDERS.get(kind)
    if (within or seed) and not (builder and (builder.seeded or not seed)):
        raise TreeError(f"'{spec}' is no tree: walls after @ go with {', '.join(BUILDERS)}, a seed after # with the "
                        "random ones.")
    counts = {"plain": (0,), "chain": (0, 1), "sequoia": (0, 1)}.get(kind, (1,) if builder else ())
    if not (len(numbers) in counts or (kind == "dense" and numbers)):
        raise TreeError(f"'{spec}' is no tree: use {EXAMPLES}, or a file of paths.")
    return Spec(kind, "", numbers, walls or None, int(seed or 0))


def build(spec: str, facts: Facts) -> Built:
    """The tree of a spec for these heads. Raises TreeError."""
    said = parse(spec)
    if said.kind == "published":
        return fitted(published()[said.name], facts.heads)
    if said.kind == "plain":
        return Built(dense([]))
    if said.kind == "chain":
        return Built(dense([1] * _depth(said.numbers[0] if said.numbers else facts.heads, facts, spec)))
    if said.kind == "dense":
        return _dense(said.numbers, facts, spec)
    if len(said.walls or ()) > facts.heads:
        raise TreeError(f"The tree {spec} has walls for {len(said.walls)} heads, but the model has {facts.heads}.")
    if not said.numbers:
        return _sized(facts, said.walls)
    return of_budget(said.kind, facts, said.numbers[0], said.walls, said.seed)


def of_budget(name: str, facts: Facts, budget: int, walls: Sequence[int] | None = None, seed: int = 0) -> Built:
    """What one builder makes of a budget. Raises TreeError where a fact that it needs is missing."""
    builder = BUILDERS[name]
    if budget > MAX_NODES:
        raise TreeError(f"A {name} tree of so many nodes cannot be verified at once; {MAX_NODES:,} are the limit.")
    _need(f"{name}:{budget}", builder.needs if budget else (), facts)
    tree = builder.make(Request(facts, budget, None if walls is None else tuple(walls), seed)) if budget else dense([])
    notes = [f"{name} found {tree.nodes:,} nodes worth adding, of {budget:,} asked for"] if tree.nodes < budget else []
    if notes and name == "sparse":
        notes = [f"the {'walls' if walls else 'table of accuracies'} can hold {tree.nodes:,} nodes, of {budget:,} "
                 "asked for"]
    elif notes and name in ("best-dense", "random-dense"):
        notes = [f"a dense tree of {tree.nodes:,} nodes comes closest to {budget:,}"]
    if budget and builder.needs and any(not any(row) for row in walled(facts.rates, walls)[:1]):
        notes = ["no node has a positive gain: by these accuracies no draft is ever right, and every tree is as good "
                 "as none"]
    if name == "dynamic" and budget and not facts.temperatures:
        notes.append("no temperatures were fitted for these heads; their probabilities are taken as they are")
    return Built(tree, notes)


def _sized(facts: Facts, walls: tuple[int, ...] | None) -> Built:
    _need("sequoia", ("accuracy", "step_ms"), facts)
    size = favoured(facts.rates, facts.step_ms, walls)
    tree = sequoia(facts.rates[: size.depth], size.nodes, walls)
    return Built(tree, [f"measured step times favour {tree.nodes} nodes to depth {tree.height}"])


def favoured(rates: Accuracy, step_ms: Callable[[int], float], walls: Sequence[int] | None = None) -> Size:
    """The size that step times favour for `sequoia`, among trees within walls of top-s."""
    return best_size(walled(rates, walls), step_ms, AUTO_BUDGET)


def lacking(name: str, facts: Facts) -> str:
    """Why a builder cannot build from these facts, as a sentence's end; empty where it can."""
    return _lacking(BUILDERS[name].needs, facts)


def _lacking(needs: Sequence[str], facts: Facts) -> str:
    have = {"accuracy": bool(facts.rates), "table": facts.table is not None, "step_ms": facts.step_ms is not None}
    return next((LACKING[need] for need in needs if not have[need]), "")


def _need(spec: str, needs: Sequence[str], facts: Facts) -> None:
    if why := _lacking(needs, facts):
        raise TreeError(f"The tree {spec} {why}.")


def fitted(shape: TreeShape, heads: int) -> Built:
    """The part of a shape that so many heads can draft, and a note where that is not all of it."""
    if shape.height <= heads:
        return Built(shape)
    fits = shape.trimmed(heads)
    lost = shape.nodes - fits.nodes
    return Built(fits, [f"the tree has depth {shape.height}, the model {heads} heads: {lost:,} "
                        f"node{'s' * (lost > 1)} below depth {heads} {'are' if lost > 1 else 'is'} left out"])


def _dense(top_s: Sequence[int], facts: Facts, spec: str) -> Built:
    _depth(len(top_s), facts, spec)
    if sum(dense_nodes(top_s)) > MAX_NODES:
        raise TreeError(f"The tree {spec} has {sum(dense_nodes(top_s)):,} nodes; {MAX_NODES:,} are the limit.")
    return Built(dense(top_s))


def _numbers(spec: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise TreeError(f"'{spec:.60}' is no tree: after the colon stand whole numbers, as in dense:3,2,1.") from None


def _depth(wanted: int, facts: Facts, spec: str) -> int:
    if wanted > facts.heads:
        raise TreeError(f"The tree {spec} has depth {wanted}, but the model has {facts.heads} heads.")
    return wanted


def is_dynamic(tree: Tree) -> bool:
    """The tree is rebuilt at each step."""
    return isinstance(tree, DynamicTrees)
