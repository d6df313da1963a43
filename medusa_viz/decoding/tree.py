"""Tree shapes: which ranks of which heads are drafted, and the mask, positions and gather rows that follow.

A shape is a set of paths closed under prefixes. It is stored as rows: row 0 is the root (the backbone's own next
token), rows 1..n are the nodes ordered by depth, then path. Everything else is derived from each row's parent.
numpy only, so that figures and page can use it without torch.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MAX_TREE_TEXT = 1_000_000  # characters; the densest tree of 4,680 nodes needs about 60,000
MAX_TREE_DEPTH = 64
MAX_RANK = 1_000_000  # no vocabulary is larger
MAX_NODES = 16_384  # per verification; the mask of one more doubling takes 4 GB

Path = tuple[int, ...]


class TreeError(ValueError):
    """A tree that cannot be built; the message is one sentence for the person who asked for it."""


@dataclass(frozen=True, eq=False)
class TreeShape:
    """Structure without tokens. All arrays have one entry per row, n + 1 in all, root first.

    parent: int32, row of the parent, -1 for the root; always smaller than the row's own number.
    rank:   int32, 0-based rank among its head's tokens, -1 for the root.
    depth:  int32, 0 for the root; depth k is drafted by head k.
    """

    parent: np.ndarray
    rank: np.ndarray
    depth: np.ndarray

    @property
    def nodes(self) -> int:
        """Number of drafted nodes; the root is not one."""
        return len(self.parent) - 1

    @property
    def height(self) -> int:
        """Depth of the deepest node: how many heads the shape needs."""
        return int(self.depth[-1])

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """Ranks from depth 1 down, one tuple per row; the root's is empty."""
        paths: list[Path] = [()]
        for parent, rank in zip(self.parent[1:].tolist(), self.rank[1:].tolist()):
            paths.append(paths[parent] + (rank,))
        return tuple(paths)

    @cached_property
    def row_of(self) -> dict[Path, int]:
        """Row number by path."""
        return {path: row for row, path in enumerate(self.paths)}

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Top-k each head must supply: its widest rank + 1, per head 1..height."""
        return tuple(int(self.rank[self.depth == k].max()) + 1 for k in range(1, self.height + 1))

    @cached_property
    def depth_counts(self) -> tuple[int, ...]:
        """Nodes per depth 1..height."""
        return tuple(np.bincount(self.depth)[1:].tolist())

    @cached_property
    def is_parent(self) -> np.ndarray:
        """bool [n+1]: rows that have children."""
        flags = np.zeros(len(self.parent), bool)
        flags[self.parent[1:]] = True
        return flags

    @property
    def leaves(self) -> int:
        """Number of leaf paths; a bare root counts as none."""
        return int((~self.is_parent).sum()) if self.nodes else 0

    @cached_property
    def mask(self) -> np.ndarray:
        """bool [n+1, n+1]: entry (i, j) is True where row i sees row j, that is itself and its ancestors."""
        rows = len(self.parent)
        mask = np.zeros((rows, rows), bool)
        mask[0, 0] = True
        starts = np.searchsorted(self.depth, np.arange(self.height + 2))
        for first, last in zip(starts[1:-1], starts[2:]):
            # An ancestor lies in an earlier level, so only those columns can be open.
            mask[first:last, :first] = mask[self.parent[first:last], :first]
            mask[np.arange(first, last), np.arange(first, last)] = True
        return mask

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hex digits of the SHA-256 of the sorted path list as compact JSON."""
        text = json.dumps([list(path) for path in self.paths[1:]], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def path_to(self, row: int) -> list[int]:
        """Rows from the root down to `row`, both included."""
        rows = [row]
        while rows[-1]:
            rows.append(int(self.parent[rows[-1]]))
        return rows[::-1]

    def rows_in(self, larger: TreeShape) -> np.ndarray | None:
        """Row in `larger` of each row here, or None unless this shape lies inside it."""
        if self.nodes > larger.nodes:
            return None
        rows = [larger.row_of.get(path) for path in self.paths]
        return None if None in rows else np.asarray(rows, np.int64)

    def trimmed(self, depth: int) -> TreeShape:
        """The part of the shape that `depth` heads can draft."""
        keep = self.depth <= depth
        return TreeShape(self.parent[keep], self.rank[keep], self.depth[keep])


def from_paths(paths: Iterable[Sequence[int]]) -> TreeShape:
    """Shape holding `paths` and all their prefixes. Raises TreeError for a rank that is no whole number >= 0."""
    closed: set[Path] = set()
    for path in paths:
        if len(path) > MAX_TREE_DEPTH:
            raise TreeError(f"A tree path of {len(path):,} ranks is deeper than {MAX_TREE_DEPTH} heads.")
        path = tuple(path)
        if not all(_is_rank(rank) for rank in path):
            raise TreeError(f"A tree path holds whole numbers from 0 to {MAX_RANK:,}; {_short(list(path))} does not.")
        while path and path not in closed:
            closed.add(path)
            path = path[:-1]
    ordered = [()] + sorted(closed, key=lambda path: (len(path), path))
    row_of = {path: row for row, path in enumerate(ordered)}
    return TreeShape(
        parent=np.array([-1] + [row_of[path[:-1]] for path in ordered[1:]], np.int32),
        rank=np.array([-1] + [path[-1] for path in ordered[1:]], np.int32),
        depth=np.array([len(path) for path in ordered], np.int32),
    )


def _is_rank(rank: object) -> bool:
    return isinstance(rank, (int, np.integer)) and not isinstance(rank, bool) and 0 <= rank <= MAX_RANK


def _short(value: object) -> str:
    """What a person typed, short enough for a sentence."""
    try:
        return f"{value!r:.40}"
    except ValueError:  # Python prints no whole number of more than 4,300 digits
        return "one of thousands of digits"


def dense(top_s: Sequence[int]) -> TreeShape:
    """Cartesian product of the first s_k ranks of each head k (Medusa paper §2.1.2); a 0 ends the tree there."""
    parents, ranks, depths = [np.array([-1])], [np.array([-1])], [np.array([0])]
    level, first = 1, 0
    for depth, s in enumerate(top_s, start=1):
        if s <= 0:
            break
        parents.append(np.repeat(np.arange(first, first + level), s))
        ranks.append(np.tile(np.arange(s), level))
        depths.append(np.full(level * s, depth))
        first, level = first + level, level * s
    return TreeShape(*(np.concatenate(parts).astype(np.int32) for parts in (parents, ranks, depths)))


def dense_nodes(top_s: Sequence[int]) -> list[int]:
    """Nodes per depth of dense(top_s), without building it: s_1, s_1·s_2, …"""
    counts: list[int] = []
    for s in top_s:
        if s <= 0:
            break
        counts.append(s * (counts[-1] if counts else 1))
    return counts


def parse_paths(text: str) -> tuple[TreeShape, list[str]]:
    """Read a list of paths typed or pasted by a person, as JSON or as a Python literal; never evaluated.

    Bare integers stand for one-rank paths, missing prefixes are added, duplicates are dropped: each is noted.
    Returns the shape and the notes. Raises TreeError in one sentence.
    """
    if len(text) > MAX_TREE_TEXT:
        raise TreeError(f"The tree text has {len(text):,} characters; {MAX_TREE_TEXT:,} are the limit.")
    try:
        entries = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise TreeError("The tree is not a list of paths such as [[0], [1], [0, 0]].") from None
    if not isinstance(entries, (list, tuple)):
        raise TreeError(f"The tree is of type {type(entries).__name__}; a list of paths such as [[0], [1], [0, 0]] is "
                        "needed.")
    return _normalised(entries)


def _normalised(entries: Sequence[object]) -> tuple[TreeShape, list[str]]:
    bare = sum(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries)
    paths = [(entry,) if isinstance(entry, int) else entry for entry in entries]
    for path in paths:
        if not isinstance(path, (list, tuple)):
            raise TreeError(f"Every path is a list of ranks; {_short(path)} is not.")
        if not path:
            raise TreeError("An empty path was listed; the root is never listed.")
    shape = from_paths(paths)
    distinct = len({tuple(path) for path in paths})
    notes = []
    if bare:
        notes.append(f"{bare} bare number{'s' * (bare > 1)} read as one-rank path{'s' * (bare > 1)}")
    if distinct < len(paths):
        notes.append(f"{len(paths) - distinct} duplicate{'s' * (len(paths) - distinct > 1)} dropped")
    if distinct < shape.nodes:
        added = shape.nodes - distinct
        notes.append(f"{added} missing inner node{'s' * (added > 1)} added")
    return shape, notes
