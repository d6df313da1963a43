"""Records: what one decoding step was, whole, as plain numbers. Pages, exports and tests read only these.

A record never holds a tensor, so nothing here imports torch. JSON stores columns, not rows: one list per quantity
with one entry per row of the tree (row 0 is the root), and floats are rounded to what a page can show.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from medusa_viz.decoding.settings import Acceptance, Walls
from medusa_viz.decoding.tree import TreeShape

FORMAT_VERSION = 1
TEMPERATURES = tuple(round(0.1 * i, 1) for i in range(1, 21))
"""At these, p and H of every parent can be had from a record alone, exactly: `Step.lse` and `Step.mean_logit`."""

ACCEPTED, SHORTER, BEHIND, REJECTED, UNVERIFIED, UNSEEN, CUT = (
    "accepted", "shorter", "behind", "rejected", "unverified", "unseen", "cut")
"""Verdicts. shorter: passed, another path is longer. behind: would pass, behind a rejected node. unseen: the
sampling walk never looked. cut: accepted, but after an end token or the token limit, so not committed."""


class RecordError(ValueError):
    """A session file that cannot be read; the message is one sentence."""


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens of one distribution, best first: ids and probabilities at temperature 1."""

    ids: list[int]
    p: list[float]


@dataclass(frozen=True)
class Drafts:
    """What the heads proposed. Columns per row; the root's own entries are its backbone probability and 1."""

    parent: list[int]
    rank: list[int]
    token: list[int]
    head_p: list[float]
    path_p: list[float]
    heads: list[TopTokens]
    """Per head 1..K its ten likeliest tokens."""


@dataclass(frozen=True)
class Verification:
    """What the backbone said, before any acceptance rule. Columns per row, None-free: the root's entries are
    unused zeros. Keys of the dicts are rows that have children, and the row of every leaf, as strings in JSON."""

    logit: list[float]
    """Per row, the logit of its token at its parent."""
    rank: list[int]
    """Per row, the 0-based rank of its token in the backbone's distribution at its parent."""
    top: dict[int, TopTokens]
    """Per row, the backbone's ten likeliest next tokens after it."""
    lse: dict[int, list[float]]
    """Per parent row, log-sum-exp of z / T at TEMPERATURES."""
    mean_logit: dict[int, list[float]]
    """Per parent row, E_T[z] at TEMPERATURES."""
    next_rank: dict[int, int]
    """Per row, rank of the backbone's argmax after it in the head of the next depth, or -1 if outside its top ranks
    (its draft vocabulary may lack it) or if there is no such head."""


@dataclass(frozen=True)
class Verdict:
    """One acceptance rule applied to a verified tree. Columns per row; entries of the root are unused."""

    settings: Acceptance
    p: list[float]
    """Backbone probability of each row's token at its parent, tempered."""
    entropy: list[float]
    """Entropy at the parent in nats, at the same temperature."""
    threshold: list[float]
    """Typical acceptance: the bound p must exceed; 0 under other rules."""
    verdict: list[str]
    accepted: list[int]
    """Rows of the longest accepted path, root first."""
    committed: list[int]
    """Token ids this step commits: those of the accepted rows, cut at an end token or the limit."""
    next_root: int
    """Token the backbone wants after the accepted path."""
    finish: str | None = None
    """`end`, `length` or `context` when the run ends with this step."""


@dataclass(frozen=True)
class Timings:
    """Milliseconds, measured. A part not run (yet) is None."""

    propose: float | None = None
    verify: float | None = None
    accept: float | None = None
    commit: float | None = None

    @property
    def total(self) -> float:
        return sum(part for part in (self.propose, self.verify, self.accept, self.commit) if part is not None)


@dataclass(frozen=True)
class Step:
    """One step: drafts, verification (None: drawn but not verified), verdict, and what it took."""

    index: int
    branch: str
    prefix_length: int
    drafts: Drafts
    verification: Verification | None
    verdict: Verdict | None
    timings: Timings = field(default_factory=Timings)
    reused: str = "forward"
    """How the latest change was answered: `forward`, `logits` (stored logits), `subtree`."""
    answer_ms: float = 0.0
    """Milliseconds that answer took."""
    estimate_ms: float | None = None
    """Estimated forward time of an unverified tree."""
    walls: Walls = field(default_factory=Walls)
    """The top-s per head and the size that the tree was made from."""

    @cached_property
    def shape(self) -> TreeShape:
        parent = np.asarray(self.drafts.parent, np.int32)
        depth = np.zeros_like(parent)
        for row in range(1, len(parent)):
            depth[row] = depth[parent[row]] + 1
        return TreeShape(parent, np.asarray(self.drafts.rank, np.int32), depth)

    @property
    def cache_rows(self) -> int:
        """Rows the verification wrote to the cache."""
        return len(self.drafts.parent)

    @property
    def kept_rows(self) -> int:
        """Rows that stay in the cache after commit."""
        return len(self.verdict.committed) if self.verdict else 0


@dataclass(frozen=True)
class Branch:
    """A line of steps. It shares the first `fork` steps with its parent branch and goes its own way from there."""

    name: str
    parent: str | None = None
    fork: int = 0
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Session:
    """A recorded session: everything a page needs to show it again without a model."""

    model: str
    heads: str
    device: str
    dtype: str
    prompt: str
    prompt_ids: list[int]
    accuracy: list[list[float]]
    """K × ranks: a_k(i), the chance that exactly rank i of head k is right."""
    texts: dict[int, str]
    """Display text of every token id that occurs."""
    kinds: dict[int, str]
    """`special` or `bytes` for ids that are not plain text."""
    branches: list[Branch]
    version: int = FORMAT_VERSION


def to_json(session: Session) -> str:
    """Compact JSON; floats rounded to five significant digits (logits and their sums to four decimals)."""
    return json.dumps(_rounded(asdict(session)), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> Session:
    """Read a session. Raises RecordError in one sentence for a newer version or anything that is not a session."""
    try:
        data = json.loads(text)
        version = data["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RecordError("This is not a Medusa-Viz session file.") from None
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise RecordError(f"This session was saved by a newer version (format {version}); "
                          f"this one reads up to {FORMAT_VERSION}.")
    try:
        session = _read(Session, data)
        for branch in session.branches:
            for step in branch.steps:
                _check_rows(step)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise RecordError("This session file is damaged: a part is missing or has the wrong type.") from None
    return session


_SCALARS = {int: {int}, float: {int, float}, str: {str}}
_hints = cache(get_type_hints)


def _read(kind: Any, data: Any) -> Any:
    """A value of the annotated type `kind` from JSON. Raises ValueError, TypeError or KeyError where it is not one."""
    arguments = get_args(kind)
    if isinstance(kind, UnionType):  # T | None
        return None if data is None else _read(arguments[0], data)
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _read(hints[name], value) for name, value in data.items()})
    if get_origin(kind) is dict:
        return {arguments[0](key): _read(arguments[1], value) for key, value in data.items()}
    if get_origin(kind) is tuple:
        return tuple(_read(list[arguments[0]], data))
    if get_origin(kind) is list:
        if not isinstance(data, list):
            raise ValueError("not a list")
        if arguments[0] in _SCALARS and {type(item) for item in data} <= _SCALARS[arguments[0]]:
            return data
        return [_read(arguments[0], item) for item in data]
    if type(data) not in _SCALARS[kind]:
        raise ValueError(f"not of type {kind.__name__}")
    return data


def _check_rows(step: Step) -> None:
    """Raise ValueError unless the columns fit together, as everything that draws a record relies on."""
    drafts, seen, verdict = step.drafts, step.verification, step.verdict
    rows, parents = len(drafts.parent), set(drafts.parent[1:])
    columns = [drafts.rank, drafts.token, drafts.head_p, drafts.path_p]
    columns += [seen.logit, seen.rank] if seen else []
    columns += [verdict.p, verdict.entropy, verdict.threshold, verdict.verdict] if verdict else []
    if any(len(column) != rows for column in columns):
        raise ValueError("columns differ in length")
    if drafts.parent[:1] != [-1] or any(not 0 <= parent < row for row, parent in enumerate(drafts.parent[1:], 1)):
        raise ValueError("a parent does not stand before its child")
    if (np.diff(step.shape.depth) < 0).any() or min(drafts.rank[1:], default=0) < 0:
        raise ValueError("rows are not ordered by depth, or a rank is below 0")
    if any(len(top.ids) != len(top.p) for top in [*drafts.heads, *(seen.top.values() if seen else ())]):
        raise ValueError("tokens and probabilities differ in number")
    if seen and not seen.top.keys() == seen.next_rank.keys() == set(range(rows)):
        raise ValueError("not every row was seen")
    if seen and not seen.lse.keys() == seen.mean_logit.keys() == parents:
        raise ValueError("not every parent was seen")
    if seen and any(len(table) != len(TEMPERATURES) for table in [*seen.lse.values(), *seen.mean_logit.values()]):
        raise ValueError("a table does not hold every temperature")
    if verdict and not all(0 <= row < rows for row in verdict.accepted):
        raise ValueError("an accepted row is not in the tree")


def _rounded(value: object, name: str = "") -> object:
    if isinstance(value, float):
        if name in ("logit", "lse", "mean_logit"):
            return round(value, 4)
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item, key if isinstance(key, str) else name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item, name) for item in value]
    return value
