"""Measuring trees for real: a few of them and plain decoding, on the same prompts, taking turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.decoder import PLAIN, Tree
from medusa_viz.decoding.engine import Engine
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.models.backbone import Backbone
from medusa_viz.tuning.bench import GREEDY, WARM_UP_TOKENS, BenchError, Run, stepping, summary, turns
from medusa_viz.tuning.jobs import Job, Progress, within

PLAIN_NAME = "plain"


@dataclass(frozen=True)
class Measured:
    """What one tree did on this device just now. slowest and fastest: of the rounds, in tokens per second.

    equals_greedy: True, or where plain greedy would have differed first (see `bench`); None where the acceptance is
    not greedy, which changes the text.
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


def measuring(engine: Engine, trees: dict[str, Tree], prompts: Sequence[Sequence[int]], max_new_tokens: int = 64,
              rounds: int = 1, settings: Acceptance = GREEDY) -> Job[list[Measured]]:
    """Decode every prompt with every tree, and without one, `rounds` times; a part is one step. The result starts
    with plain decoding. Any acceptance can be measured; plain decoding then samples or not as it says."""
    backbone = engine.backbone
    limits = [min(max_new_tokens, backbone.context - len(ids)) for ids in prompts]
    if not prompts or min(limits) < 2:
        raise BenchError("Two new tokens at least are needed, since the first one comes from the prefill; a prompt or "
                         "the limit leaves room for fewer.")
    ways: dict[str, Tree] = {PLAIN_NAME: PLAIN} | trees
    runs: dict[str, list[list[Run]]] = {name: [[] for _ in prompts] for name in ways}
    warm_up = [(name, None) for name in ways]
    asked = [*warm_up, *turns(list(ways), len(prompts), rounds)]
    for done, (name, number) in enumerate(asked):
        place, counts = number or 0, number is not None
        limit = limits[place] if counts else min(limits[0], WARM_UP_TOKENS)
        run = yield from within(stepping(backbone, engine.drafter, ways[name], prompts[place], limit, settings),
                                lambda _, done=done, name=name: Progress(done, len(asked), name))
        if counts:
            runs[name][place].append(run)
    measured = []
    for name, of_way in runs.items():
        measured.append(_measured(name, ways[name].nodes, of_way, _differences(backbone, prompts, of_way, settings)))
        yield Progress(len(asked), len(asked), name)
    return measured


def _differences(backbone: Backbone, prompts: Sequence[Sequence[int]], runs: list[list[Run]], settings: Acceptance
                 ) -> list | None:
    """Per prompt where plain greedy would have differed first; None where the acceptance is not greedy."""
    if settings.rule != "greedy":
        return None
    return [equals_greedy(backbone, ids, tries[0].ids) for ids, tries in zip(prompts, runs)]


def _measured(name: str, nodes: int, runs: list[list[Run]], differences: list | None) -> Measured:
    figures = summary(runs, differences or [])
    slowest, fastest = figures["spread"]
    return Measured(name, nodes, sum(len(tries[0].ids) for tries in runs), figures["tokens_per_step"],
                    figures["ms_per_step"], figures["tokens_per_second"], slowest, fastest,
                    None if differences is None else figures["equals_greedy"])


def error_percent(predicted: float | None, measured: float) -> float | None:
    """By how much a prediction is off, in percent of what was measured."""
    return None if predicted is None or not measured else 100 * (predicted / measured - 1)
