"""Is it plain greedy's text? A teacher-forced check: one causal forward over the committed tokens.

If at every position the committed token is the argmax of the prefix before it, then by induction plain greedy
decoding would have written the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_viz.decoding import decoder
from medusa_viz.decoding.clock import Clock
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.models.backbone import Backbone

TIE_FP32 = 1e-3  # logits; two kernels differ by about 2e-4 at most
TIE_ULPS = 4  # half precision: this many units in the last place of the logit


@dataclass(frozen=True)
class Difference:
    """First position (0-based, among the new tokens) where plain greedy would differ, and its top-2 logit gap."""

    position: int
    gap: float
    tie: bool
    """The gap lies within rounding; otherwise it is a fault."""


class GreedyCheck:
    """Follows a run on a cache of its own."""

    def __init__(self, backbone: Backbone, prompt_ids: Sequence[int]) -> None:
        self.backbone = backbone
        self.cache = backbone.new_cache(len(prompt_ids) + 64)
        self.checked = 0
        self.difference: Difference | None = None
        self._wanted = backbone.prefill(prompt_ids, self.cache).logits  # [1, V]

    @torch.inference_mode()
    def push(self, tokens: Sequence[int]) -> Difference | None:
        """Check the next committed tokens; returns the first difference so far, if any."""
        if self.difference or not tokens:
            return self.difference
        after = self.backbone.prefill(tokens, self.cache, keep=len(tokens)).logits
        logits = torch.cat([self._wanted, after[:-1]])
        self._wanted = after[-1:]
        wrong = (logits.argmax(-1) != torch.tensor(tokens, device=logits.device)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            gap, tie = _gap(logits[place])
            self.difference = Difference(self.checked + place, gap, tie)
        self.checked += len(tokens)
        return self.difference

    def plain_step(self) -> float | None:
        """Milliseconds of one plain step behind what was checked, which leaves the cache as it was; None where the
        context ends."""
        length = self.cache.length
        if length + 1 >= self.backbone.context:
            return None
        plain, clock = decoder.plan(decoder.PLAIN, self.backbone, None), Clock(self.backbone.device)
        state = decoder.DecodingState(self.cache, self._wanted, int(self._wanted.argmax()))  # no head reads a hidden
        try:
            self.backbone.ready(self.cache, 1)
            clock.mark()
            candidates = decoder.propose(None, state, plain)
            clock.mark()
            forward = decoder.verify(self.backbone, state, plain, candidates)
            clock.mark()
            accepted = decoder.accept(forward, state, plain, candidates, Acceptance())
            clock.mark()
            decoder.commit(state, forward, accepted)
            clock.mark()
        finally:
            self.cache.truncate(length)
        return clock.timings().total


def equals_greedy(backbone: Backbone, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> Difference | None:
    """None where `new_ids` are what plain greedy writes after the prompt, else the first difference."""
    return GreedyCheck(backbone, prompt_ids).push(new_ids)


def _gap(logits: Tensor) -> tuple[float, bool]:
    best, second = logits.float().topk(2).values.tolist()
    bound = TIE_FP32
    if logits.dtype != torch.float32:
        bound = TIE_ULPS * torch.finfo(logits.dtype).eps * max(abs(best), 1.0)
    return best - second, best - second < bound
