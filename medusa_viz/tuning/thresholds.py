"""The threshold study for typical acceptance: tokens per step against a quality proxy, over ε and over T.

The proxy is no judgement of quality. It is read off the text alone:
    surprise      mean of −log p − H over the new tokens, p and the entropy H from the backbone's softmax(logits / T) at
                  the same T: 0 on average for text that is drawn from it, below for text that plays safe, above for
                  text that the backbone finds odd
    distinct_3    share of 3-grams that are distinct within their text
    repeated_4    share of 4-grams that stood earlier in their text
Plain greedy and plain sampling at the same T are the marks to read it by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from medusa_viz.decoding.decoder import PLAIN, Tree
from medusa_viz.decoding.engine import Engine
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.models.backbone import Backbone
from medusa_viz.tuning.bench import Run, stepping
from medusa_viz.tuning.jobs import Job, Progress, within

TEMPERATURE = 0.7  # at which ε is varied
EPSILON = 0.09  # at which T is varied
CHUNK = 64  # rows of logits looked at once


@dataclass(frozen=True)
class Proxy:
    """The quality proxy of some texts."""

    surprise: float
    distinct_3: float
    repeated_4: float


@dataclass(frozen=True)
class Point:
    """One setting. kind: typical, or a mark to read it by: greedy, sampling (plain decoding both)."""

    kind: str
    temperature: float
    epsilon: float | None
    delta: float | None
    tokens: int
    tokens_per_step: float
    proxy: Proxy


@dataclass(frozen=True)
class Studied:
    """The points of a study, and how many were `asked` for: more where it was stopped."""

    points: tuple[Point, ...]
    asked: int


def studying(engine: Engine, tree: Tree, prompts: Sequence[Sequence[int]], epsilons: Sequence[float],
             temperatures: Sequence[float], max_new_tokens: int = 64) -> Job[Studied]:
    """Decode every prompt at every setting; a part is one step, or one text judged. ε runs at T = 0.7 with δ = √ε,
    T at ε = 0.09."""
    settings = _settings(epsilons, temperatures)
    found, decoded = Studied((), len(settings)), {}
    for done, (kind, heat, chosen) in enumerate(settings):
        now = Progress(done * len(prompts), len(settings) * len(prompts), kind, found if found.points else None)
        if chosen not in decoded:  # greedy text is the same at every T
            drafting = tree if kind == "typical" else PLAIN
            job = _decoding(engine, drafting, prompts, max_new_tokens, chosen)
            decoded[chosen] = yield from within(job, _behind(now))
        runs = decoded[chosen]
        judged = yield from within(judging(engine.backbone, prompts, [run.ids for run in runs], heat), _behind(now))
        found = replace(found, points=(*found.points, _point(kind, heat, chosen, runs, judged)))
        yield replace(now, done=now.done + len(prompts), so_far=found)
    return found


def _behind(now: Progress) -> Callable[[Progress], Progress]:
    """How a point's own parts count in the study."""
    return lambda part: replace(now, done=now.done + part.done)


def _decoding(engine: Engine, tree: Tree, prompts: Sequence[Sequence[int]], max_new_tokens: int, settings: Acceptance
              ) -> Job[list[Run]]:
    """All prompts at one setting, each with another draw."""
    runs = []
    for number, ids in enumerate(prompts):
        drawn = replace(settings, seed=number)
        runs.append((yield from within(stepping(engine.backbone, engine.drafter, tree, ids, max_new_tokens, drawn),
                                       lambda _, number=number: Progress(number, len(prompts)))))
    return runs


def _settings(epsilons: Sequence[float], temperatures: Sequence[float]) -> list[tuple[str, float, Acceptance]]:
    """(kind, T at which the text is judged, acceptance) of every point, each once."""
    asked = [(TEMPERATURE, epsilon) for epsilon in epsilons] + [(heat, EPSILON) for heat in temperatures]
    typical = [("typical", heat, Acceptance("typical", heat, epsilon, math.sqrt(epsilon)))
               for heat, epsilon in dict.fromkeys(asked)]
    marks = [mark for heat in dict.fromkeys(heat for heat, _ in asked)
             for mark in (("greedy", heat, Acceptance()), ("sampling", heat, Acceptance("rejection", heat)))]
    return marks + typical


def _point(kind: str, heat: float, settings: Acceptance, runs: Sequence[Run], judged: Proxy) -> Point:
    tokens, steps = sum(len(run.ids) for run in runs), sum(len(run.committed) for run in runs)
    typical = kind == "typical"
    return Point(kind, heat, settings.epsilon if typical else None, settings.delta if typical else None, tokens,
                 tokens / steps, judged)


def judging(backbone: Backbone, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], temperature: float
            ) -> Job[Proxy]:
    """The quality proxy of texts behind their prompts; a part is one text."""
    total = 0.0
    for ids, text in zip(prompts, texts):
        total += surprise(backbone, ids, text, temperature) if text else 0.0
        yield Progress(len(texts), len(texts))
    return Proxy(total / max(sum(map(len, texts)), 1), *repetition(texts))


def repetition(texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Shares of distinct 3-grams and of repeated 4-grams within texts: the surer a model, the more it repeats itself,
    and the better it is drafted."""
    threes, fours = ([grams(text, n) for text in texts] for n in (3, 4))
    return (_share(threes, lambda of_text: len(set(of_text))),
            _share(fours, lambda of_text: len(of_text) - len(set(of_text))))


def _share(of_texts: Sequence[list[tuple]], count: Callable[[list[tuple]], int]) -> float:
    return sum(map(count, of_texts)) / max(sum(map(len, of_texts)), 1)


def grams(text: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """All n-grams of a text, in order."""
    return [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]


@torch.inference_mode()
def surprise(backbone: Backbone, ids: Sequence[int], text: Sequence[int], temperature: float) -> float:
    """Sum of −log p − H over a text behind a prompt, in nats."""
    cache = backbone.new_cache(len(ids) + len(text))
    logits = backbone.prefill([*ids, *text[:-1]], cache, keep=len(text)).logits
    wanted, total = torch.tensor(text, device=logits.device)[:, None], 0.0
    for first in range(0, len(text), CHUNK):
        log_p = (logits[first : first + CHUNK].float() / temperature).log_softmax(-1)
        entropy = torch.special.entr(log_p.exp()).sum(-1)
        total += float((-log_p.gather(1, wanted[first : first + CHUNK])[:, 0] - entropy).sum())
    return total
