"""How long building, replaying, reweighing and drawing take: `python -m tests.measure`. Prints, asserts nothing."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from medusa_viz.decoding.reweigh import judge, subtree
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense
from medusa_viz.figures.texts import Texts
from medusa_viz.tuning.accuracy import shares
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.replay import RankTable, replay
from medusa_viz.tuning.specs import BUILDERS, Facts, of_budget
from medusa_viz.ui import view
from tests.synthetic import ACCURACY, make_snapshot, make_step

POSITIONS, REPLIES, HEADS, NODES = 20_000, 100, 4, 63
ROUNDS = 9


def timed(work: Callable[[], object]) -> str:
    """Median milliseconds."""
    times = []
    for _ in range(ROUNDS):
        begun = perf_counter()
        work()
        times.append((perf_counter() - begun) * 1e3)
    return f"{median(times):8.1f} ms"


def main() -> None:
    rng = np.random.default_rng(0)
    ranks = rng.geometric(0.3, (POSITIONS, HEADS)).clip(1, 255).astype(np.uint8) - 1
    table = RankTable(ranks, np.full(REPLIES, POSITIONS // REPLIES))
    rates = shares(table)
    shape = sparse(rates, NODES)
    print(f"replay, {POSITIONS:,} positions, {NODES} nodes {timed(lambda: replay(shape, table))}")
    facts = Facts(HEADS, rates, table, None, (1.0,) * HEADS)
    for name in BUILDERS:
        print(f"{name:>14}:{NODES} {timed(lambda name=name: of_budget(name, facts, NODES))}"
              f"   :4680 {timed(lambda name=name: of_budget(name, facts, 4680))}")
    p = rng.dirichlet(np.ones(12), HEADS)[:, :10]
    trees = of_budget("dynamic", facts, NODES).tree
    print(f"dynamic, one step's tree of {NODES} nodes {timed(lambda: trees.of(-np.sort(-p)))}")
    for shape in (sparse(ACCURACY, NODES), dense([8, 8, 8, 8])):
        step = make_step(shape)
        print(f"{shape.nodes:5,} nodes: judged anew {timed(lambda step=step: judge(step, Acceptance('typical', 0.7)))}"
              f"   smaller {timed(lambda step=step, shape=shape: subtree(step, shape.trimmed(shape.height - 1)))}"
              f"   view {timed(lambda step=step: view.build(make_snapshot([step]), Texts()))}")


if __name__ == "__main__":
    main()
