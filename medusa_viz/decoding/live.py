"""The model side of one visitor's session: looks at pending steps, commits them, goes back, branches.

A `Position` is a point between steps; a `Look` is one verified tree there. The cache follows whatever position is
asked for: what it shares with the tokens it holds stays, the rest is prefilled. All of this runs on the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from medusa_viz.decoding import decoder, observe
from medusa_viz.decoding.acceptance import Walk
from medusa_viz.decoding.check import Difference, GreedyCheck
from medusa_viz.decoding.clock import Clock
from medusa_viz.decoding.engine import Engine
from medusa_viz.decoding.records import Drafts, Timings, Verification
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import MAX_TREE_DEPTH, TreeShape
from medusa_viz.models import device
from medusa_viz.models.backbone import Forward


@dataclass(frozen=True)
class Position:
    """A point between steps: the committed tokens, the hidden state of the last one, and the root that follows."""

    ids: tuple[int, ...]
    hidden: Tensor
    root: int
    root_p: float


@dataclass(frozen=True)
class Look:
    """One verified tree at a position. Only the newest look of a session still has its logits and cache rows."""

    position: Position
    shape: TreeShape
    drafts: Drafts
    verification: Verification
    timings: Timings


class LiveRun:
    """One session's cache and what it holds."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.cache = engine.backbone.new_cache(256)
        self.ids: tuple[int, ...] = ()
        self._look: Look | None = None  # the look whose rows lie behind the prefix
        self._forward: Forward | None = None
        self._check: GreedyCheck | None = None
        self._checked: tuple[tuple[int, ...], tuple[int, ...]] = (), ()  # prompt and new tokens

    def open(self, ids: Sequence[int], settings: Acceptance) -> Position:
        """Prefill a prompt from nothing."""
        ids = tuple(ids)
        self._look, self.ids = None, ()
        self.cache.truncate(0)
        forward = self.engine.backbone.prefill(ids, self.cache)
        self.ids = ids
        root = decoder.next_token(forward.logits[0], settings, len(ids))
        return Position(ids, forward.hidden, root, _p(forward.logits[0], root))

    def shape(self, position: Position, tree: decoder.Tree, room: int) -> TreeShape:
        """The shape that a tree has at a position by what the heads say there, at most `room` tokens deep. The
        backbone does not run."""
        shape = decoder.step_shape(self.engine.drafter, position.hidden, tree)
        return shape.trimmed(min(shape.height, room))

    def look(self, position: Position, tree: decoder.Tree, settings: Acceptance, room: int = MAX_TREE_DEPTH) -> Look:
        """Propose and verify a tree at a position, and read off what a page shows of it. One that is made for this
        step alone is at most `room` tokens deep, and its making counts as proposing."""
        engine = self.engine
        self._align(position.ids)
        fixed = decoder.plan(tree, engine.backbone, engine.drafter) if isinstance(tree, TreeShape) else None
        state = decoder.DecodingState(self.cache, position.hidden, position.root)
        self._look = self._forward = None  # its cache rows are about to be overwritten
        engine.backbone.ready(self.cache, tree.nodes + 1)
        clock = Clock(engine.backbone.device)
        clock.mark()
        if fixed:
            plan, candidates = fixed, decoder.propose(engine.drafter, state, fixed, width=observe.TOP)
        else:
            plan, candidates = decoder.propose_anew(engine.backbone, engine.drafter, state, tree, room, observe.TOP)
        clock.mark()
        forward = decoder.verify(engine.backbone, state, plan, candidates)
        clock.mark()
        decoder.accept(forward, state, plan, candidates, settings)
        clock.mark()
        shape = plan.shape
        look = Look(position, shape, observe.drafts(shape, candidates, position.root_p),
                    observe.verification(shape, candidates, forward, candidates.top.logits, engine.drafter.draft_row),
                    clock.timings())
        self._look, self._forward = look, forward
        return look

    def walk(self, look: Look, shape: TreeShape, rows: Sequence[int], settings: Acceptance) -> tuple[Walk, Look]:
        """A sampling walk over a tree whose rows are `rows` of the look. Needs full logits: a look that no longer
        has them is verified once more and returned anew."""
        if self._look is not look:
            look = self.look(look.position, look.shape, settings)
        logits = self._forward.logits[list(rows)]
        tokens = [look.drafts.token[row] for row in rows]
        return decoder.sampling_walk(logits, shape, tokens, settings, len(look.position.ids)), look

    def advance(self, look: Look, rows: Sequence[int], committed: Sequence[int], next_root: int
                ) -> tuple[Position, float]:
        """Commit rows of a look (those of the tokens `committed`); returns the position behind and the milliseconds."""
        ids = look.position.ids + tuple(committed)
        next_p = _known_p(look.verification, rows[-1], next_root)
        begun = perf_counter()
        if self._look is look and self.ids == look.position.ids:
            forward, accepted = self._forward, decoder.Accepted(list(rows), list(committed), next_root)
            state = decoder.DecodingState(self.cache, look.position.hidden, look.position.root)
            decoder.commit(state, forward, accepted)
            hidden, self.ids = state.hidden.clone(), ids
            if next_p is None:
                next_p = _p(forward.logits[rows[-1]], next_root)
        else:
            last = self._align(ids, run_last=True)
            hidden = last.hidden
            if next_p is None:
                next_p = _p(last.logits[0], next_root)
        device.settle(self.engine.backbone.device)
        self._look = self._forward = None
        return Position(ids, hidden, next_root, next_p), (perf_counter() - begun) * 1e3

    def check_greedy(self, prompt: Sequence[int], new: Sequence[int]) -> Difference | None:
        """Would plain greedy have written `new` after `prompt`? Follows a growing text without starting over."""
        prompt, new = tuple(prompt), tuple(new)
        check, self._check = self._check, None  # a push that fails leaves none: the next one starts over
        known_prompt, known = self._checked
        if check is None or known_prompt != prompt or known != new[: len(known)]:
            check, known = GreedyCheck(self.engine.backbone, prompt), ()
        difference = check.push(new[len(known) :])
        self._check, self._checked = check, (prompt, new)
        return difference

    def plain_step(self) -> float | None:
        """Milliseconds of a plain step, measured now on the cache of the comparison with greedy; None without one."""
        return self._check.plain_step() if self._check else None

    def _align(self, ids: tuple[int, ...], run_last: bool = False) -> Forward | None:
        """Make the cache hold exactly `ids`. Returns the forward of the last of them where one was run: where the
        cache held something else, or where `run_last` asks for it."""
        if ids == self.ids and not run_last:
            return None
        shared = next((i for i, (a, b) in enumerate(zip(ids, self.ids)) if a != b), min(len(ids), len(self.ids)))
        self._look = self._forward = None
        self.cache.truncate(min(shared, len(ids) - 1))
        self.ids = ()  # should the prefill fail half-way, nothing is taken for cached
        forward = self.engine.backbone.prefill(ids[self.cache.length :], self.cache)
        self.ids = ids
        return forward


def _p(logits: Tensor, token: int) -> float:
    return float(logits.float().log_softmax(-1)[token].exp())


def _known_p(verification: Verification, row: int, token: int) -> float | None:
    top = verification.top[row]
    return top.p[top.ids.index(token)] if token in top.ids else None
