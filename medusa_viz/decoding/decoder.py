"""The decoder: propose, verify, accept, commit, again and again.

`decode` computes just what acceptance needs and yields one small result per step; what pages show beyond that is
read off the same tensors by `observe`. Nothing is kept on the model: cache, mask and settings belong to the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from medusa_viz.decoding import acceptance
from medusa_viz.decoding.records import Timings
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import MAX_NODES, TreeError, TreeShape, dense
from medusa_viz.models.backbone import Backbone, Forward
from medusa_viz.models.cache import TreeCache
from medusa_viz.models.heads import Drafter, DraftTokens


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


@dataclass(frozen=True)
class StepResult:
    """What one step of `decode` did. `tokens` are committed: the accepted ones up to an end token."""

    tokens: list[int]
    nodes: int
    timings: Timings
    finish: str | None = None


def plan(shape: TreeShape, backbone: Backbone, drafter: Drafter | None) -> Plan:
    """Put a shape on the device. Raises TreeError if the heads cannot fill it."""
    heads, choices = (drafter.heads, drafter.choices) if drafter else (0, 0)
    if shape.height > heads:
        raise TreeError(f"The tree has depth {shape.height}, but there are {heads} heads to draft it.")
    if shape.nodes > MAX_NODES:
        raise TreeError(f"The tree has {shape.nodes:,} nodes; at most {MAX_NODES:,} can be verified at once.")
    width = max(shape.widths, default=0)
    if width > choices:
        raise TreeError(f"The tree takes rank {width - 1} (from 0), but a head can draft {choices} tokens.")
    gather = (shape.depth[1:].astype(np.int64) - 1) * width + shape.rank[1:]
    return Plan(shape, torch.as_tensor(shape.depth.astype(np.int64), device=backbone.device),
                backbone.additive(torch.from_numpy(shape.mask)), torch.as_tensor(gather, device=backbone.device), width)


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
    root = torch.tensor([state.root], device=plan.depth.device)
    if drafter is None or not (plan.width or width):
        return Candidates(root, None)
    top = drafter.top(state.hidden, max(plan.width, width), with_p=width > 0)
    return Candidates(torch.cat([root, top.ids[:, : plan.width].flatten()[plan.gather]]), top)


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


def commit(state: DecodingState, forward: Forward, accepted: Accepted) -> None:
    """Keep the accepted rows of the cache; the next heads read the last of them: no second forward pass."""
    state.cache.commit(accepted.rows)
    state.hidden = forward.hidden[accepted.rows[-1] :][:1]
    state.root = accepted.next_root


def decode(backbone: Backbone, drafter: Drafter | None, ids: Sequence[int], shape: TreeShape, settings: Acceptance,
           max_new_tokens: int, end_ids: Collection[int] | None = None) -> Iterator[StepResult]:
    """Decode from a prompt; yields a result per step. A shape without nodes is plain decoding.

    Ends at the first end token (committed as the last), at `max_new_tokens`, or at the context's end, exactly.
    The last token of a text needs no forward pass, so a step that can only commit its root runs none.
    """
    end_ids = backbone.end_ids if end_ids is None else end_ids
    remaining = min(max_new_tokens, backbone.context - len(ids))
    limit = "length" if remaining == max_new_tokens else "context"
    plans = _Plans(backbone, drafter, shape)
    plans.within(shape.height)  # a tree that the heads cannot fill is refused before the prompt is run
    state = start(backbone, ids, settings, room=max(remaining, 0) + shape.nodes + 1)
    while remaining > 0:
        if state.root in end_ids or remaining == 1:
            yield StepResult([state.root], 0, Timings(), "end" if state.root in end_ids else limit)
            return
        step = plans.within(remaining - 1)
        marks = [_now(backbone)]
        candidates = propose(drafter, state, step)
        marks.append(_now(backbone))
        forward = verify(backbone, state, step, candidates)
        marks.append(_now(backbone))
        accepted = accept(forward, state, step, candidates, settings)
        marks.append(_now(backbone))
        tokens = acceptance.cut_at_end(accepted.tokens, end_ids)
        commit(state, forward, replace(accepted, rows=accepted.rows[: len(tokens)], tokens=tokens))
        marks.append(_now(backbone))
        remaining -= len(tokens)
        finish = "end" if tokens[-1] in end_ids else limit if remaining == 0 else None
        yield StepResult(tokens, step.shape.nodes, Timings(*((b - a) * 1e3 for a, b in zip(marks, marks[1:]))), finish)
        if finish:
            return


@dataclass
class _Plans:
    """The shape's plan, and those of its tops for the last steps of a run."""

    backbone: Backbone
    drafter: Drafter | None
    shape: TreeShape
    by_depth: dict[int, Plan] = field(default_factory=dict)

    def within(self, room: int) -> Plan:
        """The plan that drafts at most `room` tokens deep: drafting past the limit would be in vain."""
        depth = min(self.shape.height, room)
        if depth not in self.by_depth:
            self.by_depth[depth] = plan(self.shape.trimmed(depth), self.backbone, self.drafter)
        return self.by_depth[depth]


def tempered(logits: Tensor, shape: TreeShape, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """p of each row's token at its parent and the entropy there in nats, softmax(logits / T): float32 [n+1] each.

    The root's entries are 1 and 0. Only rows with children are looked at.
    """
    p, entropy = torch.ones(len(tokens), device=logits.device), torch.zeros(len(tokens), device=logits.device)
    if shape.nodes:
        parents, place = np.unique(shape.parent[1:], return_inverse=True)
        log_p = (logits[torch.as_tensor(parents, device=logits.device)].float() / temperature).log_softmax(-1)
        place = torch.as_tensor(place, device=logits.device)
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


def _now(backbone: Backbone) -> float:
    if backbone.device.type == "cuda":
        torch.cuda.synchronize(backbone.device)
    return perf_counter()
