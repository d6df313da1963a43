"""Text that repeats itself to the end.

The rule: a text loops once its tail is the same n-gram over and over, n at most 64, three times or more and over at
least 24 tokens. What is kept of it ends with the n-gram's first occurrence.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MAX_PERIOD = 64
MIN_REPEATS = 3
MIN_SPAN = 24

RULE = (f"a text ends where its tail is one n-gram (n <= {MAX_PERIOD}) repeated {MIN_REPEATS} times or more over at "
        f"least {MIN_SPAN} tokens, and is cut after the first occurrence of the n-gram")


class LoopWatch:
    """Follows a text token by token."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._periods = np.arange(1, MAX_PERIOD + 1)
        self._run = np.zeros(MAX_PERIOD, np.int64)
        """Per period, how many tokens at the end equal the token one period before them."""

    def push(self, token: int) -> int | None:
        """How many tokens to keep once the text loops with this one, else None."""
        recent = np.array(self._ids[: -MAX_PERIOD - 1 : -1], np.int64)  # latest first: recent[p-1] is p tokens back
        self._run[len(recent) :] = 0
        self._run[: len(recent)] = np.where(recent == token, self._run[: len(recent)] + 1, 0)
        self._ids.append(token)
        span = self._run + self._periods
        looping = (self._run > 0) & (span >= np.maximum(MIN_REPEATS * self._periods, MIN_SPAN))
        if not looping.any():
            return None
        period = int(self._periods[looping.argmax()])
        return len(self._ids) - int(span[period - 1]) + period


def kept_length(ids: Iterable[int]) -> int | None:
    """How many tokens of a text to keep; None where it does not loop anywhere."""
    watch = LoopWatch()
    return next((kept for token in ids if (kept := watch.push(int(token))) is not None), None)
