"""Reweighing: judge a verified step again from its record, without the model. numpy only.

A record keeps, per node, its logit z, and per parent log-sum-exp(z / T) and E_T[z] at a grid of temperatures. There
p = exp(z / T - lse) and H = lse - E_T[z] / T are exact, so greedy and typical acceptance need nothing else, and
neither does a smaller tree inside the verified one, since a node's logits depend on its ancestors alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from medusa_viz.decoding import acceptance
from medusa_viz.decoding.acceptance import Walk
from medusa_viz.decoding.records import TEMPERATURES, Drafts, Step, Verdict, Verification
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import TreeShape

_AT_ONE = TEMPERATURES.index(1.0)


class ReweighError(ValueError):
    """The record alone cannot answer; the message is one sentence."""


def grid_column(temperature: float) -> int:
    """Index of the temperature of the grid nearest to `temperature`."""
    return min(range(len(TEMPERATURES)), key=lambda i: abs(TEMPERATURES[i] - temperature))


@dataclass(frozen=True)
class Tempered:
    """The backbone's view of every row at one temperature; the root's entries are 1 and 0."""

    p: np.ndarray
    log_p: np.ndarray
    entropy: np.ndarray
    """At the row's parent, in nats."""


def tempered(step: Step, column: int) -> Tempered:
    """p, log p and the parent's entropy of each row, at TEMPERATURES[column]."""
    seen, temperature = step.verification, TEMPERATURES[column]
    parents = step.shape.parent[1:]
    # One look-up per parent, then spread over its children.
    table = np.zeros((2, len(step.drafts.parent)))
    for row in np.unique(parents).tolist():
        table[:, row] = seen.lse[row][column], seen.mean_logit[row][column]
    lse, mean = table[:, parents]
    log_p = np.concatenate([[0.0], np.asarray(seen.logit[1:]) / temperature - lse])
    entropy = np.concatenate([[0.0], lse - mean / temperature])
    # Rounding to four decimals can push p past 1 and a point mass below no entropy.
    return Tempered(np.exp(np.minimum(log_p, 0.0)), np.minimum(log_p, 0.0), np.maximum(entropy, 0.0))


def judge(step: Step, settings: Acceptance, end_ids: Collection[int] = (), walk: Walk | None = None) -> Verdict:
    """Verdict of `settings` on a verified step. p is at temperature 1 under greedy, tempered under the other rules.

    Rejection sampling draws from the model's full distributions, which a record does not hold: its draws come in as
    a `walk`, and without one it raises ReweighError.
    """
    if step.verification is None:
        raise ReweighError("This step is not verified yet, so there is nothing to judge.")
    rule = settings.rule
    if rule == "rejection" and walk is None:
        raise ReweighError("Rejection sampling draws from the model's full distribution, which a record does not hold.")
    shape, tokens = step.shape, step.drafts.token
    view = tempered(step, _AT_ONE if rule == "greedy" else grid_column(settings.temperature))
    own = _own_tests(step, settings, view, walk)
    if rule == "rejection":
        rows = list(walk.rows)
    else:
        rows = acceptance.longest_path(shape, acceptance.passed(shape, own), view.log_p if rule == "typical" else None)
    committed = acceptance.cut_at_end([tokens[row] for row in rows], end_ids)
    typical = acceptance.typical_threshold(view.entropy, settings.epsilon, settings.delta)
    return Verdict(
        settings=settings,
        p=view.p.tolist(),
        entropy=view.entropy.tolist(),
        threshold=(typical if rule == "typical" else np.zeros(len(tokens))).tolist(),
        verdict=acceptance.verdicts(shape, own, rows, len(committed),
                                    walk.seen(shape) if rule == "rejection" else None),
        accepted=rows,
        committed=committed,
        next_root=walk.next_root if rule == "rejection" else step.verification.top[rows[-1]].ids[0],
        finish="end" if committed[-1] in end_ids else None,
    )


def _own_tests(step: Step, settings: Acceptance, view: Tempered, walk: Walk | None) -> np.ndarray:
    """bool [n+1]: each row's own test at its parent."""
    if settings.rule == "rejection":
        return walk.tests(step.shape)
    if settings.rule == "typical":
        return acceptance.typical_tests(view.p, view.entropy, settings.epsilon, settings.delta)
    own = np.asarray(step.verification.rank) == 0
    own[0] = True
    return own


def subtree(step: Step, shape: TreeShape) -> tuple[Step, np.ndarray] | None:
    """The verified step cut down to `shape` and the rows it takes, or None unless `shape` lies inside its tree.

    The result has no verdict yet: the rule in force judges it anew.
    """
    if step.verification is None:
        return None
    rows = shape.rows_in(step.shape)
    if rows is None:
        return None
    smaller = replace(step, drafts=_drafts(step.drafts, shape, rows), verdict=None,
                      verification=_verification(step.verification, shape, rows), reused="subtree")
    return smaller, rows


def _drafts(drafts: Drafts, shape: TreeShape, rows: np.ndarray) -> Drafts:
    taken = rows.tolist()
    return Drafts(
        parent=shape.parent.tolist(),
        rank=shape.rank.tolist(),
        token=[drafts.token[row] for row in taken],
        head_p=[drafts.head_p[row] for row in taken],
        path_p=[drafts.path_p[row] for row in taken],
        heads=drafts.heads,
    )


def _verification(seen: Verification, shape: TreeShape, rows: np.ndarray) -> Verification:
    taken, parents = rows.tolist(), np.flatnonzero(shape.is_parent).tolist()

    def renumbered(by_row: dict) -> dict:
        return {new: by_row[old] for new, old in enumerate(taken)}

    def of_parents(by_row: dict) -> dict:
        return {new: by_row[taken[new]] for new in parents}

    return Verification(
        logit=[seen.logit[row] for row in taken],
        rank=[seen.rank[row] for row in taken],
        top=renumbered(seen.top),
        lse=of_parents(seen.lse),
        mean_logit=of_parents(seen.mean_logit),
        next_rank=renumbered(seen.next_rank),
    )
