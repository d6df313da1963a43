"""The decoder: propose, verify, accept, commit, again and again.

`decode` computes just what acceptance needs and yields one small result per step; what pages show beyond that is
read off the same tensors by `observe`. Nothing is kept on the model: cache, mask and settings belong to the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from medusa_viz.decoding import acceptance, on_device
from medusa_viz.decoding.clock import Clock
from medusa_viz.decoding.records import Timings
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import MAX_NODES, TreeError, TreeShape, dense
from medusa_viz.models.backbone import Backbone, Forward
from medusa_viz.models.cache import TreeCache
from medusa_viz.models.heads import Drafter, DraftTokens
from medusa_viz.models.slab import StaticCache


class StepTrees(Protocol):
    """Gives every step a tree of its own, from what the heads say in that step."""

    nodes: int
    """Most nodes of a tree."""
    height: int
    """Deepest node of any tree."""
    width: int
    """Ranks of every head that a tree may take."""

    def shape(self, top: DraftTokens) -> TreeShape:
        """The tree of one step. `top` holds the best `width` tokens of every head, with probabilities and logits."""


Tree = TreeShape | StepTrees
"""What a run drafts by: one shape for all steps, or one for each."""


@dataclass(frozen=True)
class Plan:
    """A tree shape on the backbone's device: what every step with this shape needs, derived once."""

    shape: TreeShape
    depth: Tensor
    """int64 [n+1]"""
    block: Tensor
    """Additive mask among the rows, [n+1, n+1]."""
    gather: Tensor
    """int64 [n]: entry of each node in the flattened [K, width] table of drafted tokens."""
    width: int
    """Ranks that every head must supply."""

    @cached_property
    def tables(self) -> on_device.Tables:
        """What acceptance on the device needs."""
        return on_device.tables(self.shape, self.depth.device)


@dataclass
class DecodingState:
    """Where a run stands: the prefix in the cache, the hidden state of its last token, and the next root."""

    cache: TreeCache
    hidden: Tensor
    """[1, d]"""
    root: int


@dataclass(frozen=True)
class Candidates:
    """A shape filled with tokens: int64 [n+1], root first. `top` is what the heads said."""

    tokens: Tensor
    top: DraftTokens | None


@dataclass(frozen=True)
class Accepted:
    """Rows of the accepted path, root first, with their tokens, and the next root."""

    rows: list[int]
    tokens: list[int]
    next_root: int
    path: Tensor | None = None
    """The rows on the device, if they were found there; what follows them means nothing."""


@dataclass(frozen=True)
class StepResult:
    """What one step of `decode` did. `tokens` are committed: the accepted ones up to an end token."""

    tokens: list[int]
    nodes: int
    timings: Timings
    finish: str | None = None


def plan(shape: TreeShape, backbone: Backbone, drafter: Drafter | None) -> Plan:
    """Put a shape on the device. Raises TreeError if the heads cannot fill it."""
    width = max(shape.widths, default=0)
    _refuse_unfillable(shape.nodes, shape.height, width, drafter)
    gather = (shape.depth[1:].astype(np.int64) - 1) * width + shape.rank[1:]
    return Plan(shape, torch.as_tensor(shape.depth.astype(np.int64), device=backbone.device),
                backbone.additive(torch.from_numpy(shape.mask)), torch.as_tensor(gather, device=backbone.device), width)


def _refuse_unfillable(nodes: int, height: int, width: int, drafter: Drafter | None) -> None:
    heads, choices = (drafter.heads, drafter.choices) if drafter else (0, 0)
    if height > heads:
        raise TreeError(f"The tree has depth {height}, but there are {heads} heads to draft it.")
    if nodes > MAX_NODES:
        raise TreeError(f"The tree has {nodes:,} nodes; at most {MAX_NODES:,} can be verified at once.")
    if width > choices:
        raise TreeError(f"The tree takes rank {width - 1} (from 0), but a head can draft {choices} tokens.")


def start(backbone: Backbone, ids: Sequence[int], settings: Acceptance, room: int = 0) -> DecodingState:
    """Prefill the prompt. `room` reserves cache rows for what follows."""
    cache = backbone.new_cache(len(ids) + room)
    forward = backbone.prefill(ids, cache)
    return DecodingState(cache, forward.hidden, next_token(forward.logits[0], settings, len(ids)))


@torch.inference_mode()
def propose(drafter: Drafter | None, state: DecodingState, plan: Plan, width: int = 0) -> Candidates:
    """All heads draft at once from the last committed hidden state; the shape picks among their best tokens.

    A `width` makes the heads report that many tokens, with probabilities, beyond what the shape takes.
    """
    root = _root(state, plan)
    if drafter is None or not (plan.width or width):
        return Candidates(root, None)
    return _filled(root, plan, drafter.top(state.hidden, max(plan.width, width), with_p=width > 0))


def _root(state: DecodingState, plan: Plan) -> Tensor:
    return torch.full((1,), state.root, device=plan.depth.device)  # unlike torch.tensor, no transfer to wait for


def _filled(root: Tensor, plan: Plan, top: DraftTokens) -> Candidates:
    return Candidates(torch.cat([root, top.ids[:, : plan.width].flatten()[plan.gather]]), top)


def propose_anew(backbone: Backbone, drafter: Drafter, state: DecodingState, trees: StepTrees, room: int,
                 width: int = 0) -> tuple[Plan, Candidates]:
    """Draft with a tree made for this step alone, at most `room` tokens deep; `width` as for `propose`."""
    top = drafter.top(state.hidden, max(trees.width, width), with_p=True)
    shape = trees.shape(top)
    step = plan(shape.trimmed(min(shape.height, room)), backbone, drafter)
    return step, _filled(_root(state, step), step, top)


def step_shape(drafter: Drafter, hidden: Tensor, tree: Tree) -> TreeShape:
    """The shape that `tree` has for the step behind `hidden` [1, d]."""
    return tree if isinstance(tree, TreeShape) else tree.shape(drafter.top(hidden, tree.width, with_p=True))


def verify(backbone: Backbone, state: DecodingState, plan: Plan, candidates: Candidates) -> Forward:
    """One forward pass over the whole tree behind the prefix."""
    return backbone.verify(candidates.tokens, plan.depth, plan.block, state.cache)


@torch.inference_mode()
def accept(forward: Forward, state: DecodingState, plan: Plan, candidates: Candidates, settings: Acceptance
           ) -> Accepted:
    """The longest acceptable path and the token the backbone wants after it."""
    shape = plan.shape
    if settings.rule == "rejection":
        walk = sampling_walk(forward.logits, shape, candidates.tokens.tolist(), settings, state.cache.length)
        rows, next_root = walk.rows, walk.next_root
        return Accepted(rows, [candidates.tokens[row].item() for row in rows], next_root)
    argmax = best_tokens(forward.logits)
    if isinstance(state.cache, StaticCache):
        return _accepted_on_device(forward, argmax, plan, candidates.tokens, settings)
    if settings.rule == "greedy":
        tokens, wanted = torch.stack([candidates.tokens, argmax]).cpu().numpy()  # the step's one synchronisation
        own, log_p = acceptance.greedy_tests(shape, tokens, wanted), None
    else:
        p, entropy = tempered(forward.logits, shape, candidates.tokens, settings.temperature)
        tokens, wanted = torch.stack([candidates.tokens, argmax]).cpu().numpy()
        p, entropy = p.cpu().numpy(), entropy.cpu().numpy()
        own = acceptance.typical_tests(p, entropy, settings.epsilon, settings.delta)
        log_p = np.log(np.maximum(p, 1e-45))
    rows = acceptance.longest_path(shape, acceptance.passed(shape, own), log_p)
    return Accepted(rows, tokens[rows].tolist(), int(wanted[rows[-1]]))


def _accepted_on_device(forward: Forward, argmax: Tensor, plan: Plan, tokens: Tensor, settings: Acceptance
                        ) -> Accepted:
    tree, log_p = plan.tables, None
    if settings.rule == "greedy":
        own = on_device.greedy_tests(tree, tokens, argmax)
    else:
        p, entropy = _tempered(forward.logits, tree.parents, tree.place, tokens, settings.temperature)
        own, log_p = on_device.typical_tests(p, entropy, settings.epsilon, settings.delta), p.clamp_min(1e-45).log()
    return Accepted(*on_device.fetch(tree, on_device.longest_path(tree, own, log_p), tokens, argmax))


def commit(state: DecodingState, forward: Forward, accepted: Accepted) -> None:
    """Keep the accepted rows of the cache; the next heads read the last of them: no second forward pass."""
    state.cache.commit(accepted.rows, accepted.path)
    state.hidden = forward.hidden[accepted.rows[-1] :][:1]
    state.root = accepted.next_root


def decode(backbone: Backbone, drafter: Drafter | None, ids: Sequence[int], tree: Tree, settings: Acceptance,
           max_new_tokens: int, end_ids: Collection[int] | None = None) -> Iterator[StepResult]:
    """Decode from a prompt; yields a result per step. A tree without nodes is plain decoding.

    Ends at the first end token (committed as the last), at `max_new_tokens`, or at the context's end, exactly.
    The last token of a text needs no forward pass, so a step that can only commit its root runs none.
    """
    end_ids = backbone.end_ids if end_ids is None else end_ids
    remaining = min(max_new_tokens, backbone.context - len(ids))
    limit = "length" if remaining == max_new_tokens else "context"
    plans = _Plans(backbone, drafter, tree)
    plans.refuse_unfillable()  # before the prompt is run
    state = start(backbone, ids, settings, room=max(remaining, 0) + tree.nodes + 1)
    clock = Clock(backbone.device)
    while remaining > 0:
        if state.root in end_ids or remaining == 1:
            yield StepResult([state.root], 0, Timings(), "end" if state.root in end_ids else limit)
            return
        backbone.ready(state.cache, plans.rows(remaining - 1))
        clock.mark()
        step, candidates = plans.proposed(state, remaining - 1)
        clock.mark()
        forward = verify(backbone, state, step, candidates)
        clock.mark()
        accepted = accept(forward, state, step, candidates, settings)
        clock.mark()
        tokens = acceptance.cut_at_end(accepted.tokens, end_ids)
        commit(state, forward, replace(accepted, rows=accepted.rows[: len(tokens)], tokens=tokens))
        clock.mark()
        remaining -= len(tokens)
        finish = "end" if tokens[-1] in end_ids else limit if remaining == 0 else None
        yield StepResult(tokens, step.shape.nodes, clock.timings(), finish)
        if finish:
            return


@dataclass
class _Plans:
    """The plan of each step: of one shape and of its tops for the last steps of a run, or of a new shape each time."""

    backbone: Backbone
    drafter: Drafter | None
    tree: Tree
    by_depth: dict[int, Plan] = field(default_factory=dict)

    def refuse_unfillable(self) -> None:
        if isinstance(self.tree, TreeShape):
            self._within(self.tree.height)
        else:
            _refuse_unfillable(self.tree.nodes, self.tree.height, self.tree.width, self.drafter)

    def rows(self, room: int) -> int:
        """Rows of the next step, drafted at most `room` tokens deep; of a new shape, the most that it can have."""
        return 1 + (self._within(room).shape if isinstance(self.tree, TreeShape) else self.tree).nodes

    def proposed(self, state: DecodingState, room: int) -> tuple[Plan, Candidates]:
        """Draft at most `room` tokens deep: drafting past the limit would be in vain."""
        if isinstance(self.tree, TreeShape):
            step = self._within(room)
            return step, propose(self.drafter, state, step)
        return propose_anew(self.backbone, self.drafter, state, self.tree, room)

    def _within(self, room: int) -> Plan:
        depth = min(self.tree.height, room)
        if depth not in self.by_depth:
            self.by_depth[depth] = plan(self.tree.trimmed(depth), self.backbone, self.drafter)
        return self.by_depth[depth]


def tempered(logits: Tensor, shape: TreeShape, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """p of each row's token at its parent and the entropy there in nats, softmax(logits / T): float32 [n+1] each.

    The root's entries are 1 and 0. Only rows with children are looked at.
    """
    parents, place = np.unique(shape.parent[1:], return_inverse=True)
    return _tempered(logits, *(torch.as_tensor(rows, device=logits.device) for rows in (parents, place)), tokens,
                     temperature)


def _tempered(logits: Tensor, parents: Tensor, place: Tensor, tokens: Tensor, temperature: float
              ) -> tuple[Tensor, Tensor]:
    """`parents` are the rows with children, `place` [n] says where among them each node's parent is."""
    p, entropy = torch.ones(len(tokens), device=logits.device), torch.zeros(len(tokens), device=logits.device)
    if len(place):
        log_p = (logits[parents].float() / temperature).log_softmax(-1)
        p[1:] = log_p[place, tokens[1:]].exp()
        # xlogy-like: 0·log 0 counts as 0, also where log p has underflowed to -inf
        entropy[1:] = torch.special.entr(log_p.exp()).sum(-1)[place]
    return p, entropy


def sampling_walk(logits: Tensor, shape: TreeShape, tokens: Sequence[int], settings: Acceptance, position: int
                  ) -> acceptance.Walk:
    """Draw the next token at the root's row; where it was drafted, move there and draw again."""
    children = {(int(parent), tokens[row]): row for row, parent in enumerate(shape.parent) if row}
    rows = [0]
    while True:
        drawn = next_token(logits[rows[-1]], settings, position + len(rows))
        row = children.get((rows[-1], drawn))
        if row is None:
            return acceptance.Walk(rows, drawn)
        rows.append(row)


def next_token(logits: Tensor, settings: Acceptance, position: int) -> int:
    """The token after logits [V]: drawn in rejection mode, else the argmax. Draws depend on seed and position alone."""
    if settings.rule != "rejection":
        return int(logits.argmax())
    p = truncated(logits, settings).cpu()
    generator = torch.Generator().manual_seed(hash((settings.seed, position)) & (2**63 - 1))
    return int(torch.multinomial(p, 1, generator=generator))


def best_tokens(logits: Tensor) -> Tensor:
    """int64 [rows]: the argmax of each row of logits [rows, V], the first of equals."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:  # where numpy takes a tenth of torch's time
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def truncated(logits: Tensor, settings: Acceptance) -> Tensor:
    """float32 [V]: softmax(logits / T), cut to the smallest set of tokens that holds top-p, not renormalised."""
    p = (logits.float() / settings.temperature).softmax(-1)
    if settings.top_p < 1:
        ordered, index = p.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # the token that crosses the bound stays
        p = p.index_fill(0, index[before >= settings.top_p], 0)
    return p


PLAIN = dense([])
"""The shape without nodes: plain decoding."""
