"""Plain decoding of many texts side by side, with continuous batching.

Every forward feeds one token to every text: the next one of its prompt, or the one just drawn. A finished text gives
its row to the next request at once, so the batch stays full; the start that all prompts share is computed once.
A text depends on its request, the seed and the request's number alone, not on its neighbours: the forward of a row is
the same bits whatever runs beside it, as far as the CPU's matrix products keep their order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medusa_viz.decoding.loops import LoopWatch
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.rows import RowBackbone

TOP_K = 100
TOP_P = 0.95
LEAST_ROWS = 8  # products of fewer rows take other kernels, which round otherwise; idle rows fill up

TRUNCATION = f"drawn from the smallest set that holds {TOP_P:g} of the probability of the {TOP_K} likeliest tokens"


@dataclass(frozen=True)
class Draw:
    """One stretch of text that the model writes: up to and with an end token, or `limit` tokens.

    `then` are tokens put behind an end token, after which the request's next draw starts; a draw that ends otherwise
    ends the text. `watch_loops` ends a text that repeats itself (see `loops`).
    """

    limit: int
    end_ids: frozenset[int]
    temperature: float = 0.0
    then: tuple[int, ...] = ()
    watch_loops: bool = False


@dataclass(frozen=True)
class Request:
    """A prompt's ids and what to write behind it. The number seeds its draws."""

    number: int
    ids: tuple[int, ...]
    draws: tuple[Draw, ...]

    @property
    def room(self) -> int:
        """Most tokens that the text can have."""
        return len(self.ids) + sum(draw.limit + len(draw.then) for draw in self.draws)


@dataclass(frozen=True)
class Written:
    """A finished text. Draw i starts at ids[starts[i]] and ended by finishes[i]: end, length or loop."""

    number: int
    ids: list[int]
    starts: list[int]
    finishes: list[str]


class Writer:
    """Writes the texts of requests, up to `rows` at a time, in one model pass per token."""

    def __init__(self, backbone: Backbone, prefix: Sequence[int], rows: int, seed: int = 0) -> None:
        """`prefix` are the ids that every request starts with; it may be empty."""
        self.backbone = backbone if isinstance(backbone, RowBackbone) else RowBackbone(backbone)
        self.prefix, self.rows, self.seed = list(prefix), rows, seed
        self._cache = self.backbone.new_row_cache(self.prefix, max(rows, LEAST_ROWS), len(self.prefix) + 1)
        self._texts: list[_Text | None] = []

    @property
    def in_flight(self) -> int:
        """Tokens drawn so far by the last draws of unfinished texts."""
        return sum(text.last_drawn for text in self._texts if text)

    def run(self, next_request: Callable[[], Request | None]) -> Iterator[Written]:
        """Texts in the order in which they end. A None means no request for now; with nothing in flight, the end."""
        self._texts = []
        while True:
            self._admit(next_request)
            if not self._texts:
                return
            yield from self._step()

    def _admit(self, next_request: Callable[[], Request | None]) -> None:
        """Give every free row to a request; rows that stay free are closed up."""
        self._texts += [None] * (self.rows - len(self._texts))
        for row in (row for row, text in enumerate(self._texts) if text is None):
            request = next_request()
            if request is None:
                break
            if list(request.ids[: len(self.prefix)]) != self.prefix:
                raise ValueError(f"Request {request.number} does not start with the shared prefix.")
            self._texts[row] = _Text(request, min(len(self.prefix), len(request.ids) - 1), self.seed)
            self._cache.reserve(request.room)
        self._close_up()

    def _close_up(self) -> None:
        """Move texts from the last rows into free ones, so that the rows in use are the first ones."""
        while self._texts and None in self._texts:
            text = self._texts.pop()
            if text is not None:
                free = self._texts.index(None)
                self._texts[free] = text
                self._cache.move(len(self._texts), free)

    def _step(self) -> Iterator[Written]:
        """One forward; yields the texts that end with it and frees their rows."""
        texts = self._texts
        idle = max(LEAST_ROWS - len(texts), 0)
        writing = [row for row, text in enumerate(texts) if text.at_end]
        logits = self.backbone.advance([text.ids[text.fed] for text in texts] + [0] * idle,
                                       [text.fed for text in texts] + [len(self.prefix)] * idle, self._cache,
                                       writing or [0])
        for text in texts:
            text.fed += 1
        if not writing:
            return
        drawn = draw(logits, [texts[row].draw.temperature for row in writing],
                     [texts[row].random.random() for row in writing])
        for row, token in zip(writing, drawn):
            text = texts[row]
            if text.push(token):
                texts[row] = None
                yield text.written


class _Text:
    """One text on its way. `fed` of its ids are in the cache."""

    def __init__(self, request: Request, fed: int, seed: int) -> None:
        self.request, self.fed = request, fed
        self.ids = list(request.ids)
        self.random = np.random.default_rng((seed, request.number))
        self.starts: list[int] = []
        self.finishes: list[str] = []
        self._start_draw()

    @property
    def draw(self) -> Draw:
        return self.request.draws[len(self.finishes)]

    @property
    def at_end(self) -> bool:
        """The token to be fed is the last one, so its logits give the next."""
        return self.fed == len(self.ids) - 1

    @property
    def last_drawn(self) -> int:
        """Tokens of the request's last draw so far."""
        return len(self.ids) - self.starts[-1] if len(self.starts) == len(self.request.draws) else 0

    @property
    def written(self) -> Written:
        return Written(self.request.number, self.ids, self.starts, self.finishes)

    def _start_draw(self) -> None:
        self.starts.append(len(self.ids))
        self._watch = LoopWatch() if self.draw.watch_loops else None

    def push(self, token: int) -> bool:
        """Append a drawn token; True once the text has ended."""
        draw, start = self.draw, self.starts[-1]
        self.ids.append(token)
        kept = self._watch.push(token) if self._watch else None
        if token in draw.end_ids:
            self.finishes.append("end")
            if len(self.finishes) == len(self.request.draws):
                return True
            self.ids += draw.then
            self._start_draw()
        elif kept is not None:
            del self.ids[start + kept :]
            self.finishes.append("loop")
            return True
        elif len(self.ids) - start == draw.limit:
            self.finishes.append("length")
            return True
        return False


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> list[int]:
    """The next token of each row of logits [rows, V]: the argmax at temperature 0, else drawn from the truncated
    softmax(logits / T) by inverting its cumulative sum at the row's number in [0, 1)."""
    tokens = logits.argmax(-1)
    warm = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if warm:
        heat, u = (torch.tensor([column[row] for row in warm], device=logits.device)[:, None]
                   for column in (temperatures, uniforms))
        best = logits[warm].float().topk(min(TOP_K, logits.shape[-1]))
        p = (best.values / heat).softmax(-1)
        before = p.cumsum(-1) - p
        mass = torch.where(before < TOP_P, p, 0).sum(-1, keepdim=True)
        place = ((before <= u * mass) & (before < TOP_P)).sum(-1, keepdim=True) - 1
        tokens[warm] = best.indices.gather(1, place)[:, 0]
    return tokens.tolist()


def write_all(backbone: Backbone, requests: Sequence[Request], rows: int, seed: int = 0) -> list[Written]:
    """All texts of a list of requests, in its order."""
    prefix = shared_prefix([request.ids for request in requests])
    waiting = iter(requests)
    written = Writer(backbone, prefix, rows, seed).run(lambda: next(waiting, None))
    by_number = {text.number: text for text in written}
    return [by_number[request.number] for request in requests]


def shared_prefix(texts: Sequence[Sequence[int]]) -> list[int]:
    """The ids that all texts start with."""
    prefix: list[int] = []
    for column in zip(*texts):
        if len(set(column)) > 1:
            break
        prefix.append(column[0])
    return prefix
