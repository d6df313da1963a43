"""Measuring trees for real: a few of them and plain decoding, on the same prompts, taking turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.decoder import PLAIN, Tree
from medusa_viz.decoding.engine import Engine
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.tuning.bench import GREEDY, WARM_UP_TOKENS, Run, limits_of, stepping, summary, turns
from medusa_viz.tuning.jobs import Job, Progress, within

PLAIN_NAME = "plain"


@dataclass(frozen=True)
class Measured:
    """What one tree did on this device just now. slowest and fastest: of the rounds, in tokens per second.

    equals_greedy: True, or where plain greedy would have differed first (see `bench`); None where the acceptance is
    not greedy, which changes the text. It covers the first `prompts` of those `asked` for: fewer where the measuring
    was stopped.
    """

    name: str
    nodes: int
    tokens: int
    tokens_per_step: float
    ms_per_step: float
    tokens_per_second: float
    slowest: float
    fastest: float
    equals_greedy: bool | dict | None
    prompts: int
    asked: int


def measuring(engine: Engine, trees: dict[str, Tree], prompts: Sequence[Sequence[int]], max_new_tokens: int = 64,
              rounds: int = 1, settings: Acceptance = GREEDY) -> Job[list[Measured]]:
    """Decode every prompt with every tree, and without one, `rounds` times; a part is one step. The result starts
    with plain decoding; so far it covers the prompts that all have decoded, the same ones for each. Any acceptance can
    be measured; plain decoding then samples or not as it says."""
    backbone = engine.backbone
    limits = limits_of(prompts, backbone.context, max_new_tokens)
    ways: dict[str, Tree] = {PLAIN_NAME: PLAIN} | trees
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in prompts] for name in ways}
    differences: dict[str, list] = {name: [] for name in ways}
    found: list[Measured] | None = None
    warm_up = [(name, None) for name in ways]
    asked = [*warm_up, *turns(list(ways), len(prompts), rounds)]
    for done, (name, number) in enumerate(asked):
        place, counts = number or 0, number is not None
        limit = limits[place] if counts else min(limits[0], WARM_UP_TOKENS)
        now = Progress(done, len(asked), name, found)
        run = yield from within(stepping(backbone, engine.drafter, ways[name], prompts[place], limit, settings),
                                lambda _, now=now: now)
        if counts:
            runs[name][place].append(run)
            if settings.rule == "greedy" and len(runs[name][place]) == 1:
                differences[name].append(equals_greedy(backbone, prompts[place], run.ids))
            if (done + 1) % len(ways) == 0:  # all took their turn on this prompt
                found = [_measured(name, ways[name].nodes, runs[name], differences[name]) for name in ways]
        yield Progress(done + 1, len(asked), name, found)
    return found


def _measured(name: str, nodes: int, runs: list[list[Run]], differences: list) -> Measured:
    """`differences` from greedy decoding, one per prompt; none where the acceptance is not greedy."""
    done = [tries for tries in runs if tries]
    figures = summary(done, differences)
    slowest, fastest = figures["spread"]
    return Measured(name, nodes, sum(len(tries[0].ids) for tries in done), figures["tokens_per_step"],
                    figures["ms_per_step"], figures["tokens_per_second"], slowest, fastest,
                    figures["equals_greedy"] if differences else None, len(done), len(runs))


def error_percent(predicted: float | None, measured: float) -> float | None:
    """By how much a prediction is off, in percent of what was measured."""
    return None if predicted is None or not measured else 100 * (predicted / measured - 1)
