"""Self-distillation: the model writes the text that its heads will learn from.

Job number n is one reply: its prompt, its temperature and its draws follow from the settings, the seed and n alone.
Finished texts go to a part file line by line, so a run that was stopped goes on where it was, and ends with the same
file as one that was not: the replies of the first jobs, in order, until the wanted number of tokens is reached.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

import numpy as np

from medusa_viz.decoding.batch import Draw, Request, Writer, Written, shared_prefix
from medusa_viz.decoding.settings import SettingsError
from medusa_viz.models.backbone import Backbone
from medusa_viz.training.data import HELD_OUT, SELF_SYNTHESISED, TRAIN, DataError
from medusa_viz.training.distil_settings import LEAST_TURN, MOST_DROPPED, DistilSettings
from medusa_viz.training.prompts import Prompt, TurnFrame
from medusa_viz.training.written import Entry, Label

LEAST_BEFORE_LOOP = 8
"""Tokens that a reply must keep once its loop is cut."""


class Source(Protocol):
    """Where the prompts of the jobs come from."""

    name: str
    digest: str
    """Changes with the prompts."""
    kinds: tuple[str, ...]
    prefix: Sequence[int]
    """Ids that every request starts with."""
    jobs: int | None
    """How many there are; None: no end."""
    draws: int
    """Stretches that the model writes per job; the last is the reply."""
    shortest: int
    """Ids before a reply, at least."""

    def request(self, number: int) -> Request: ...

    def label(self, text: Written) -> Label: ...

    def temperature(self, number: int) -> float: ...


class FromPrompts:
    """Jobs over the prompts of a file, pass after pass, each pass in an order of its own.

    Passes after the first are sampled only: a greedy reply to the same prompt would be the same reply again.
    """

    draws, shortest = 1, 0

    def __init__(self, prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]], backbone: Backbone,
                 settings: DistilSettings, name: str) -> None:
        self.prompts, self.settings, self.name = prompts, settings, name
        self.ids = [tuple(encode(prompt.text)) for prompt in prompts]
        self.prefix = shared_prefix(self.ids)
        self.kinds = tuple(dict.fromkeys(prompt.kind for prompt in prompts))
        self.end_ids, self.context = backbone.end_ids, backbone.context
        for prompt, ids in zip(prompts, self.ids):
            if len(ids) >= self.context:
                raise DataError(f"The prompt “{prompt.text:.40}…” has {len(ids):,} tokens, but {backbone.name} has "
                                f"room for {self.context:,}.")
        greedy_only = set(settings.mix) == {0.0}
        self.jobs = len(prompts) if greedy_only or not settings.tokens else None
        self.digest = _digest([asdict(prompt) for prompt in prompts])

    def place(self, number: int) -> tuple[int, int]:
        """Pass, and place in the file, of the prompt of job `number`."""
        turn, within = divmod(number, len(self.prompts))
        return turn, int(np.random.default_rng((self.settings.seed, turn)).permutation(len(self.prompts))[within])

    def temperature(self, number: int) -> float:
        return self.settings.temperature(number, sampled_only=number >= len(self.prompts))

    def request(self, number: int) -> Request:
        ids = self.ids[self.place(number)[1]]
        limit = min(self.settings.max_new_tokens, self.context - len(ids))
        return Request(number, ids, (Draw(limit, self.end_ids, self.temperature(number),
                                          watch_loops=self.settings.loops == "cut"),))

    def label(self, text: Written) -> Label:
        turn, place = self.place(text.number)
        prompt = self.prompts[place]
        return Label(self.kinds.index(prompt.kind), prompt.split, place, turn)


class SelfWritten:
    """Jobs whose user turn the model writes too: from the bare chat template, at temperature 1."""

    name = SELF_SYNTHESISED
    kinds = (SELF_SYNTHESISED,)
    jobs = None
    draws = 2

    def __init__(self, frame: TurnFrame, backbone: Backbone, settings: DistilSettings) -> None:
        if not settings.tokens:
            raise SettingsError("tokens is 0, which means one reply to every prompt of a file; with prompts of the "
                                "model's own, say how many tokens to write.")
        self.frame, self.settings, self.end_ids = frame, settings, backbone.end_ids
        self.prefix, self.digest = frame.before, _digest([frame.before, frame.after])
        self.shortest = len(frame.before) + LEAST_TURN + len(frame.after) - 1
        if self.request(0).room > backbone.context:
            raise SettingsError(f"turn_tokens and max_new_tokens together need more room than {backbone.name}'s "
                                f"{backbone.context:,} tokens.")

    def temperature(self, number: int) -> float:
        return self.settings.temperature(number)

    def request(self, number: int) -> Request:
        settings = self.settings
        turn = Draw(settings.turn_tokens, frozenset([self.frame.end]), 1.0, self.frame.after[1:], watch_loops=True)
        reply = Draw(settings.max_new_tokens, self.end_ids, self.temperature(number),
                     watch_loops=settings.loops == "cut")
        return Request(number, self.frame.before, (turn, reply))

    def label(self, text: Written) -> Label:
        """Split by the turn's own tokens, so that equal turns are never on both sides."""
        share = int(_digest(text.ids[: text.starts[-1]])[:8], 16) / 16**8
        return Label(0, HELD_OUT if share < self.settings.held_out else TRAIN)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class Shelf:
    """Which texts make up the file: those of the first jobs, in order, until there are enough tokens.

    The order of the jobs decides, not the order in which their texts ended, so that the file is the same however
    often a run was stopped.
    """

    def __init__(self, source: Source, tokens: int) -> None:
        self.source, self.wanted = source, tokens
        self.entries: list[Entry] = []
        self.dropped: Counter[str] = Counter()
        self.dropped_since: Counter[str] = Counter()
        """Those that came in a row behind the last text that was fit."""
        self.tokens = 0
        self.waiting = 0
        """Reply tokens of texts that came in before the text of an earlier job."""
        self._early: dict[int, Written] = {}
        self._next = 0
        self._seen: set[tuple[int, ...]] = set()

    @property
    def complete(self) -> bool:
        enough = 0 < self.wanted <= self.tokens
        return enough or self._next == self.source.jobs

    def add(self, text: Written) -> None:
        self._early[text.number] = text
        self.waiting += self._reply_tokens(text)
        while self._next in self._early and not self.complete:
            text = self._early.pop(self._next)
            self.waiting -= self._reply_tokens(text)
            self._next += 1
            if reason := self._unfit(text):
                self.dropped[reason] += 1
                self.dropped_since[reason] += 1
            else:
                self.dropped_since.clear()
                self.tokens += self._reply_tokens(text)
                self.entries.append(Entry(text, self.source.label(text), self.source.temperature(text.number)))

    def check(self) -> None:
        """Refuse to go on, in a run without an end, where text after text is dropped. Raises DataError."""
        if self.complete or self.source.jobs is not None or self.dropped_since.total() < MOST_DROPPED:
            return
        reasons = ", ".join(f"{reason}: {count}" for reason, count in self.dropped_since.most_common())
        ending = f"; --resume with --tokens {self.tokens} ends with what is written" if self.tokens else ""
        raise DataError(f"Writing stopped at {self.tokens:,} of {self.wanted:,} reply tokens, since the last "
                        f"{self.dropped_since.total():,} texts were all unfit ({reasons}){ending}.")

    def _reply_tokens(self, text: Written) -> int:
        return len(text.ids) - text.starts[-1] if len(text.starts) == self.source.draws else 0

    def _unfit(self, text: Written) -> str:
        """Why a text stays out; empty if it does not."""
        if len(text.starts) < self.source.draws:
            return "user turn without an end"
        if text.starts[-1] < self.source.shortest:
            return "user turn too short"
        if text.finishes[-1] == "loop" and self._reply_tokens(text) < LEAST_BEFORE_LOOP:
            return "hardly more than a loop"
        if (key := tuple(text.ids)) in self._seen:
            return "written before"
        self._seen.add(key)
        return ""


def write(backbone: Backbone, source: Source, settings: DistilSettings, shelf: Shelf, done: Mapping[int, Written]
          ) -> Iterator[tuple[Written, int]]:
    """Write jobs until the shelf is complete; yields each text that ends, and the reply tokens so far, those of
    unfinished texts included. `done` are the texts of an earlier run, already on the shelf. Raises DataError where
    text after text is dropped."""
    rows = settings.rows
    if settings.tokens:  # every row finishes its text: more rows than texts are wanted write in vain
        rows = min(rows, max(4, settings.tokens // settings.max_new_tokens))
    writer = Writer(backbone, source.prefix, rows, settings.seed)
    numbers = (number for number in itertools.count() if number not in done)

    def so_far() -> int:
        return shelf.tokens + shelf.waiting + writer.in_flight

    def next_request() -> Request | None:
        """None while the texts under way will probably do."""
        if 0 < shelf.wanted <= so_far():
            return None
        number = next(numbers)
        return source.request(number) if source.jobs is None or number < source.jobs else None

    shelf.check()
    if not shelf.complete:
        for text in writer.run(next_request):
            shelf.add(text)
            yield text, so_far()
            if shelf.complete:
                return
            shelf.check()
