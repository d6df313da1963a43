"""Greedy and typical acceptance as tensors, for steps that ask the device for numbers once.

`acceptance` judges the same on the host, from numbers that have come over. Here the tree's structure lies on the
device, so that path, tokens and next root come over together, and the cache can be told the path without a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medusa_viz.decoding.tree import TreeShape


@dataclass(frozen=True)
class Tables:
    """A shape's structure on the device; int64 but for `ancestors`."""

    depth: Tensor
    """[n+1]"""
    parent: Tensor
    """[n+1]; the root's is itself."""
    ancestors: Tensor
    """bool [n+1, n+1]: column j is row i itself or above it."""
    paths: Tensor
    """[n+1, height+1]: rows from the root down to each row, which then repeats."""
    parents: Tensor
    """Rows that have children."""
    place: Tensor
    """[n]: entry of each node's parent in `parents`."""


def tables(shape: TreeShape, device: torch.device) -> Tables:
    parent = np.maximum(shape.parent, 0).astype(np.int64)
    paths = np.zeros((shape.nodes + 1, shape.height + 1), np.int64)
    starts = np.searchsorted(shape.depth, np.arange(1, shape.height + 2))
    for depth, (first, last) in enumerate(zip(starts, starts[1:]), start=1):
        paths[first:last] = paths[parent[first:last]]
        paths[first:last, depth:] = np.arange(first, last)[:, None]
    parents, place = np.unique(parent[1:], return_inverse=True)
    return Tables(*(torch.as_tensor(array, device=device) for array in (
        shape.depth.astype(np.int64), parent, shape.mask, paths, parents, place)))


def greedy_tests(tree: Tables, tokens: Tensor, argmax: Tensor) -> Tensor:
    """bool [n+1]: a node's token equals the backbone's argmax at its parent. The root's entry says nothing."""
    return tokens == argmax[tree.parent]


def typical_tests(p: Tensor, entropy: Tensor, epsilon: float, delta: float) -> Tensor:
    """bool [n+1]: p > min(ε, δ·e^(−H)), for p and H [n+1] of a node's token at its parent."""
    return p > (delta * (-entropy).exp()).clamp(max=epsilon)


def longest_path(tree: Tables, own: Tensor, log_p: Tensor | None = None) -> Tensor:
    """int64 [1]: the last row of the longest passed path. Ties: larger summed log p [n+1], which greedy needs not."""
    is_root = tree.depth == 0
    passed = (own | is_root | ~tree.ancestors).all(-1)
    depth = torch.where(passed, tree.depth, -1)
    if log_p is None:
        return depth.argmax(0, keepdim=True)
    total = torch.where(tree.ancestors, log_p, 0).sum(-1)
    return torch.where(depth == depth.max(), total, -torch.inf).argmax(0, keepdim=True)


def fetch(tree: Tables, last: Tensor, tokens: Tensor, wanted: Tensor) -> tuple[list[int], list[int], int, Tensor]:
    """Rows and tokens of the path that ends at row `last` [1], what is `wanted` [n+1] behind it, and the rows once
    more, on the device: the step's one synchronisation."""
    path = tree.paths[last][0]
    numbers = torch.cat([tree.depth[last] + 1, wanted[last], path, tokens[path]]).tolist()
    count, next_root, rows, kept = numbers[0], numbers[1], numbers[2 : 2 + len(path)], numbers[2 + len(path) :]
    return rows[:count], kept[:count], next_root, path
