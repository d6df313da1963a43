"""Which tree is fastest here: tokens per step against the price of a step, over builders and budgets.

Tokens per second = tokens per step / step time. Tokens per step are *expected* (products of accuracies), *replayed*
(exact on recorded text, each tree judged on replies that it was not built from) or *measured*; step times come from a
measured curve. Expected and replayed figures hold for greedy acceptance; above temperature 0 only measuring counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from medusa_viz.decoding.tree import TreeShape
from medusa_viz.tuning import specs
from medusa_viz.tuning.accuracy import Calibration, Halves, Rate, rate
from medusa_viz.tuning.builders import expected_tokens_per_step
from medusa_viz.tuning.jobs import Job, Progress
from medusa_viz.tuning.latency import Latency
from medusa_viz.tuning.published_trees import published
from medusa_viz.tuning.replay import replay_each, steps_per_reply

if TYPE_CHECKING:
    from medusa_viz.decoding.decoder import Tree

BUDGETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 20, 24, 31, 40, 48, 63, 96, 127, 255)
COMPARED = ("sparse", "best-dense", "sequoia", "joint", "dynamic")
NEAR = 0.01
MOST_REBUILT = 63  # nodes; replaying larger trees that are rebuilt at each step takes long
SCATTERED = ("random-dense", "random-sparse", "best-dense", "sparse")
SCATTER_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Option:
    """One tree with what is known of it; None where it is not known.

    nodes: of the tree (for trees rebuilt at each step: at most). milliseconds: of a step, by the curve.
    """

    spec: str
    nodes: int
    tree: Tree
    expected: float | None = None
    replayed: Rate | None = None
    milliseconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_step(self) -> float | None:
        """Replayed where that is known, else expected."""
        return self.replayed.tokens_per_step if self.replayed else self.expected

    @property
    def tokens_per_second(self) -> float | None:
        """Predicted for this device."""
        known = self.tokens_per_step is not None and self.milliseconds
        return 1e3 * self.tokens_per_step / self.milliseconds if known else None


@dataclass(frozen=True)
class Recommendation:
    """The fastest option, or None where plain decoding is faster; `gain` is its speed over plain decoding's."""

    best: Option | None
    plain_tokens_per_second: float
    gain: float

    @property
    def plain_is_faster(self) -> bool:
        return self.best is None


def recommend(options: Sequence[Option], plain_ms: float) -> Recommendation:
    """The option of most tokens per second, if that is more than plain decoding's. Of those within NEAR of it, which no
    prediction tells apart, one tree for all steps goes before trees rebuilt at each."""
    plain = 1e3 / plain_ms
    fast = [option for option in options if option.nodes and (option.tokens_per_second or 0) > plain]
    if not fast:
        return Recommendation(None, plain, 1.0)
    most = max(option.tokens_per_second for option in fast)
    near = [option for option in fast if option.tokens_per_second >= (1 - NEAR) * most]
    best = max(near, key=lambda option: (not specs.is_dynamic(option.tree), option.tokens_per_second, -option.nodes))
    return Recommendation(best, plain, best.tokens_per_second / plain)


def repriced(options: Sequence[Option], latency: Latency, batch: int = 1, curve: int = 0) -> list[Option]:
    """The options with step times of another curve, batch or prefix: the same heads, perhaps another best tree."""
    return [replace(option, milliseconds=latency.step_ms(option.nodes, batch, curve, specs.is_dynamic(option.tree)))
            for option in options]


class Survey:
    """Builds trees of any builder and budget, and says what is known of each before it runs."""

    def __init__(self, facts: specs.Facts, known: Calibration | None = None, latency: Latency | None = None,
                 batch: int = 1, curve: int = 0) -> None:
        self.facts, self.known, self.latency, self.batch, self.curve = facts, known, latency, batch, curve
        self._halves = Halves(known.table, known.fold, known.prompts) if known else None
        self._guides = [facts.on(guide) for guide in self._halves.guides] if self._halves else []

    def running(self, builders: Sequence[str] = COMPARED, budgets: Sequence[int] = BUDGETS) -> Job[list[Option]]:
        """Every builder at every budget, and `sequoia` at the size that it favours; a part is one tree. A builder that
        lacks a fact is left out."""
        pairs = [(name, budget) for name in builders if not specs.lacking(name, self.facts)
                 for budget in sorted({*budgets, *([self.favoured] if name == "sequoia" and self.favoured else [])})
                 if not (name == "dynamic" and budget > MOST_REBUILT)]
        options: list[Option] = []
        for done, (name, budget) in enumerate(pairs, start=1):
            options.append(self.of_budget(name, budget))
            yield Progress(done, len(pairs), f"{name}:{budget}")
        return options

    @cached_property
    def favoured(self) -> int:
        """Nodes of `sequoia` where it is told no number; 0 where plain decoding is faster or no step times are known.
        """
        if not (self.latency and self.facts.rates):
            return 0
        return specs.favoured(self.facts.rates, lambda nodes: self.latency.step_ms(nodes, self.batch, self.curve)).nodes

    def of_budget(self, name: str, budget: int, walls: Sequence[int] | None = None, seed: int = 0) -> Option:
        """A builder at a budget, each half's tree judged on the other half. Raises TreeError."""
        built = specs.of_budget(name, self.facts, budget, walls, seed)
        if self._halves and specs.BUILDERS[name].needs:
            def grow(place: int) -> TreeShape:
                return specs.of_budget(name, self._guides[place], budget, walls, seed).tree

            return self._option(f"{name}:{budget}", built, self._halves.judge(grow))
        return self.of_tree(f"{name}:{budget}", built)

    def of_tree(self, spec: str, built: specs.Built) -> Option:
        """A tree as it is, replayed on all replies: published, drawn at random, edited by hand, rebuilt each step."""
        return self._option(spec, built, self._replayed(built.tree) if self.known else None)

    def _replayed(self, tree: Tree) -> Rate | None:
        table, prompts = self.known.table, self.known.prompts
        if isinstance(tree, TreeShape):
            return rate(tree.nodes, table.lengths, steps_per_reply(tree, table), prompts)
        if self.known.p is None:
            return None
        _, steps = replay_each(tree.replayed(self.known.p.astype(float)), table, tree.height)
        return rate(tree.nodes, table.lengths, steps, prompts)

    def _option(self, spec: str, built: specs.Built, replayed: Rate | None) -> Option:
        tree, rates = built.tree, self.facts.rates
        expected = expected_tokens_per_step(tree, rates) if rates and isinstance(tree, TreeShape) else None
        ms = self.latency and self.latency.step_ms(tree.nodes, self.batch, self.curve, specs.is_dynamic(tree))
        return Option(spec, tree.nodes, tree, expected, replayed, ms, tuple(built.notes))


def publishing(survey: Survey) -> Job[list[Option]]:
    """The published trees at their own sizes, as far as these heads reach."""
    trees, found = published(), []
    for name, shape in trees.items():
        found.append(survey.of_tree(f"published:{name}", specs.fitted(shape, survey.facts.heads)))
        yield Progress(len(found), len(trees), name)
    return found


def scattering(survey: Survey, sizes: Sequence[int] = SCATTER_SIZES, draws: int = 4) -> Job[dict[str, list[Option]]]:
    """Dense, random and sparse trees of many sizes, as the tree study of the Medusa paper draws them (figure 4): by
    builder, `draws` random trees a size."""
    asked = [(name, size, seed) for name in SCATTERED for size in sizes
             for seed in range(draws if specs.BUILDERS[name].seeded else 1)]
    found: dict[str, list[Option]] = {name: [] for name in SCATTERED}
    for done, (name, size, seed) in enumerate(asked, start=1):
        found[name].append(survey.of_budget(name, size, seed=seed))
        yield Progress(done, len(asked), f"{name}:{size}")
    return found
