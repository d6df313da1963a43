"""What contributes to Medusa's speed: one part after another added, on the same prompts, as in the paper's Table 3.

Plain decoding; heads without a tree (a chain of every head's best token); a dense tree; an optimised tree of as many
nodes; a backbone trained together with the heads; and, to show why that takes two stages, one trained directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.decoder import PLAIN
from medusa_viz.decoding.engine import Engine
from medusa_viz.decoding.tree import TreeShape, dense
from medusa_viz.tuning.bench import BenchError, Prompt, Run, facts, limits_of, own_decoder, run_all, summary
from medusa_viz.tuning.builders import sparse


@dataclass(frozen=True)
class Row:
    """One line of the table: what decodes, and with which tree."""

    name: str
    engine: Engine
    shape: TreeShape


def rows(medusa1: Engine, medusa2: Engine | None, direct: Engine | None, top_s: Sequence[int]) -> list[Row]:
    """The lines in order, each of which adds one part. `top_s` is the dense tree's; the optimised trees get as many
    nodes, chosen by the accuracy table of the heads that use them."""
    if len(top_s) > medusa1.drafter.heads:
        raise BenchError(f"The dense tree has depth {len(top_s)}, but the model has {medusa1.drafter.heads} heads.")
    square = dense(top_s)
    found = [Row("plain decoding", medusa1, PLAIN),
             Row("heads, top-1 chain", medusa1, dense([1] * medusa1.drafter.heads)),
             Row("+ dense tree", medusa1, square),
             Row("+ optimised tree", medusa1, _optimised(medusa1, square.nodes))]
    if medusa2:
        found.append(Row("+ Medusa-2 training", medusa2, _optimised(medusa2, square.nodes)))
    if direct:
        found.append(Row("direct joint training", direct, _optimised(direct, square.nodes)))
    return found


def _optimised(engine: Engine, nodes: int) -> TreeShape:
    if not engine.accuracy:
        raise BenchError(f"The heads {engine.loaded.source} bring no accuracy table to choose a tree by.")
    return sparse(engine.accuracy, nodes)


def measure(chosen: Sequence[Row], prompts: Sequence[Prompt], max_new_tokens: int, rounds: int,
            progress: Callable[[], None] = lambda: None) -> dict:
    """Decode every prompt with every row in turn, and return the table as JSON holds it."""
    first = chosen[0].engine
    ids = [first.codec.encode_prompt(prompt.text) for prompt in prompts]
    limits = limits_of(ids, first.backbone.context, max_new_tokens)
    methods = {row.name: own_decoder(row.engine.backbone, row.engine.drafter if row.shape.nodes else None, row.shape)
               for row in chosen}
    runs: dict[str, list[list[Run]]] = {row.name: [[] for _ in ids] for row in chosen}
    for name, number, run in run_all(methods, ids, limits, rounds):
        runs[name][number].append(run)
        progress()
    table = []
    for row in chosen:
        differences = [equals_greedy(row.engine.backbone, of_prompt, of_runs[0].ids)
                       for of_prompt, of_runs in zip(ids, runs[row.name])]
        figures = summary(runs[row.name], differences)
        plain = table[0] if table else figures
        table.append({"name": row.name, "nodes": row.shape.nodes, **figures,
                      "overhead": figures["ms_per_step"] / plain["ms_per_step"],
                      "speedup": figures["tokens_per_second"] / plain["tokens_per_second"],
                      "perplexity": row.engine.loaded.config.trained.get("perplexity")})
    return facts(first, prompts, chosen[-1].shape) | {"max_new_tokens": max_new_tokens, "rounds": rounds,
                                                      "rows": table}
