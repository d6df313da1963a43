"""How good heads are on held-out replies: accuracy per rank, and tokens per step of replayed trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from medusa_viz.models.heads import MedusaHeads
from medusa_viz.training.data import SELF_SYNTHESISED, Replies
from medusa_viz.training.objectives import OutputRows
from medusa_viz.tuning.accuracy import Halves, accuracy, shares
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.calibration import prompt_of
from medusa_viz.tuning.ranking import ranks_of
from medusa_viz.tuning.replay import RankTable, subset

REPLAYED_NODES = (3, 7, 15, 63)
WRITTEN = "written prompts"
CHUNK = 256  # positions ranked at once, by all heads


@dataclass(frozen=True)
class Scores:
    """One group of held-out replies.

    positions[k]: head k's scorable positions; accuracy[k][i]: share of them where exactly rank i is right; a target
    outside the draft vocabulary counts as a miss. tokens_per_step: by number of nodes (text, for JSON), of greedy
    replies only, each replayed with trees that were not built from it.
    """

    name: str
    replies: int
    positions: list[int]
    accuracy: list[list[float]]
    tokens_per_step: dict[str, float]

    def top(self, n: int) -> list[float]:
        """Per head, the share of positions where one of the first n ranks is right."""
        return [sum(row[:n]) for row in self.accuracy]


def judged(scores: dict[str, Scores]) -> Scores | None:
    """The group that a run is summed up by: all greedy replies, or all replies where none is greedy."""
    return scores.get("all, greedy") or scores.get("all")


@torch.inference_mode()
def perplexity(hidden: np.ndarray, replies: Replies, rows: OutputRows) -> float:
    """e to the mean of −log p over all reply tokens, from the hidden states [N, d] of the replies and the whole LM
    head: how surprised the backbone is by the text."""
    places, total = replies.before_reply, 0.0
    for start in range(0, len(places), CHUNK):
        part = places[start : start + CHUNK]
        states = torch.from_numpy(hidden[part]).to(rows.weight)
        logits = torch.nn.functional.linear(states, rows.weight, rows.bias)
        ids = torch.from_numpy(replies.ids[part + 1].astype(np.int64)).to(logits.device)
        total += float(torch.nn.functional.cross_entropy(logits, ids, reduction="sum"))
    return float(np.exp(total / max(1, len(places))))


@torch.inference_mode()
def same_choice(before: np.ndarray, now: np.ndarray, replies: Replies, rows: OutputRows) -> float:
    """Share of the reply tokens at whose place the backbone's first choice is what it was before training, from both
    hidden states [N, d] of the replies. Perplexity alone is not enough: it falls where training only makes the
    backbone surer of what it would have said."""
    places, total = replies.before_reply, 0
    for start in range(0, len(places), CHUNK):
        choices = [torch.nn.functional.linear(torch.from_numpy(states[places[start : start + CHUNK]]).to(rows.weight),
                                              rows.weight, rows.bias).argmax(-1) for states in (before, now)]
        total += int((choices[0] == choices[1]).sum())
    return total / max(1, len(places))


@torch.inference_mode()
def rank_table(module: MedusaHeads, rows: OutputRows, hidden: np.ndarray, replies: Replies) -> RankTable:
    """Rank of every reply token under every head (see `ranking.ranks_of`), from the hidden states [N, d]."""
    # The first step drafts at the last prompt token.
    first = replies.offsets[:-1] + np.maximum(replies.reply_start, 1) - 1
    lengths = np.maximum(replies.offsets[1:] - 1 - first, 0)
    places = np.concatenate([np.arange(start, start + n) for start, n in zip(first, lengths)] or [[]]).astype(np.int64)
    ends = np.repeat(replies.offsets[1:], lengths)
    targets = _targets(module, replies, places, ends)
    ranks = np.empty(targets.shape, np.uint8)
    for start in range(0, len(places), CHUNK):
        part = slice(start, start + CHUNK)
        states = torch.from_numpy(hidden[places[part]]).to(module.weight)
        logits = torch.stack([torch.nn.functional.linear(features.to(rows.weight.dtype), rows.weight, rows.bias)
                              for features in module.features(states)])
        ranks[part] = ranks_of(logits, torch.from_numpy(targets[part].T))
    return RankTable(ranks, lengths)


def _targets(module: MedusaHeads, replies: Replies, places: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """int64 [P, K]: drafting row of the token that each head should have named; -1 past the end or not draftable."""
    ahead = places[:, None] + np.arange(2, module.heads + 2)
    ids = replies.ids[np.minimum(ahead, len(replies.ids) - 1)].astype(np.int64)
    if module.draft_ids is not None:
        draft_ids = module.draft_ids.cpu().numpy()
        found = np.minimum(np.searchsorted(draft_ids, ids), len(draft_ids) - 1)
        ids = np.where(draft_ids[found] == ids, found, -1)
    return np.where(ahead < ends[:, None], ids, -1)


def groups(replies: Replies) -> dict[str, np.ndarray]:
    """bool [n] per group that is judged: all, by source of the prompt, and the greedy replies of each."""
    self_made = np.isin(replies.kind, [i for i, kind in enumerate(replies.kinds) if kind == SELF_SYNTHESISED])
    greedy = replies.temperature == 0
    named = {"all": np.ones(len(replies), bool), SELF_SYNTHESISED: self_made, WRITTEN: ~self_made}
    chosen = named | {f"{name}, greedy": rows & greedy for name, rows in named.items()}
    return {name: rows for name, rows in chosen.items() if rows.any()}


def table_to_ship(accuracies: dict[str, list[list[float]]]) -> list[list[float]]:
    """The table that stands in the heads' config: greedy replies, sources weighted equally.

    Greedy, because that is the mode the trees are built for; equally, because the sizes of the held-out sources say
    nothing about what people will ask. Without greedy replies all are taken; without any, the table is empty.
    """
    sources = [accuracies[name] for name in (f"{SELF_SYNTHESISED}, greedy", f"{WRITTEN}, greedy") if name in accuracies]
    sources = sources or [accuracies[name] for name in ("all",) if name in accuracies]
    return np.mean(sources, axis=0).tolist() if sources else []


def evaluate(table: RankTable, held_out: Replies) -> dict[str, Scores]:
    """Scores of every group of the replies that `table` ranks."""
    taken, scores = _steps(table, held_out), {}
    for name, rows in groups(held_out).items():
        found, tokens = accuracy(subset(table, rows)), table.lengths[rows].sum()
        rates = {str(nodes): float(tokens / max(1, steps[rows].sum())) for nodes, steps in taken.items()}
        scores[name] = Scores(name, int(rows.sum()), list(found.positions), found.share.tolist(),
                              rates if name.endswith("greedy") else {})
    return scores


def _steps(table: RankTable, held_out: Replies) -> dict[int, np.ndarray]:
    """By number of nodes, the steps that each greedy reply takes with a sparse tree built from the greedy replies to
    the other half of the prompts: on its own text a tree looks better than it is. Empty where all answer one prompt."""
    greedy = held_out.temperature == 0
    halves = Halves(subset(table, greedy), prompt_of(held_out.select(greedy)) % 2 == 1)
    if len(halves.masks) < 2:
        return {}
    guides = [shares(guide) for guide in halves.guides]
    taken = {nodes: np.zeros(len(held_out), np.int64) for nodes in REPLAYED_NODES}
    for nodes, steps in taken.items():
        steps[greedy], _ = halves.steps(lambda place, nodes=nodes: sparse(guides[place], nodes))
    return taken
