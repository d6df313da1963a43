"""The tree cache: keys and values of the committed tokens, with room behind them for one tree's rows.

A verification writes its rows at the end without making them part of the prefix; commit moves the accepted rows
together and advances, truncate goes back. Every layer is full attention: a sliding window lives in the mask.
"""

from __future__ import annotations

import weakref

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _TreeLayer(CacheLayerMixin):
    """Preallocated keys and values [1, key heads, capacity, head size] of one layer."""

    def __init__(self, owner: TreeCache) -> None:
        super().__init__()
        self.owner = weakref.proxy(owner)  # no cycle: a closed session's memory returns at once

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Zeros, not empty memory: a masked row holding NaN would still poison the softmax of real ones.
        self.keys = key_states.new_zeros(*key_states.shape[:2], self.owner.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], self.owner.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
               ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows behind the prefix; return views of prefix + rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, last = self.owner.length, self.owner.length + key_states.shape[2]
        self.keys[:, :, first:last] = key_states
        self.values[:, :, first:last] = value_states
        return self.keys[:, :, :last], self.values[:, :, :last]

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """One session's cache. `length` rows are the prefix; rows behind it are scratch."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.length = 0
        self.capacity = capacity
        super().__init__(layers=[_TreeLayer(self) for _ in range(layers)])

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        """Make room for `rows` behind the prefix; capacity grows by doubling."""
        needed = self.length + rows
        if needed <= self.capacity:
            return
        self.capacity = max(needed, 2 * self.capacity)
        for layer in self._filled():
            layer.keys, layer.values = (self._grown(old) for old in (layer.keys, layer.values))

    @torch.inference_mode()
    def commit(self, rows: list[int], index: torch.Tensor | None = None) -> None:
        """Keep the scratch rows with these numbers (ascending, 0 = first behind the prefix), in this order. `index`
        may begin with the same numbers, where they lie on the device already."""
        if rows != list(range(len(rows))):  # a chain accepted from its first row on lies right already
            for buffer in self._buffers():
                if index is None:
                    index = torch.tensor(rows, device=buffer.device)
                kept = buffer.index_select(-2, index[: len(rows)].to(buffer.device) + self.length)
                buffer[..., self.length : self.length + len(rows), :] = kept
        self.length += len(rows)

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        self.length = min(self.length, length)

    @property
    def bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._filled())

    def _buffers(self) -> list[torch.Tensor]:
        """Keys and values, rows in the last dimension but one."""
        return [buffer for layer in self._filled() for buffer in (layer.keys, layer.values)]

    def _filled(self) -> list[_TreeLayer]:
        return [layer for layer in self.layers if layer.is_initialized]

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros(*old.shape[:2], self.capacity, old.shape[3])
        new[:, :, : self.length] = old[:, :, : self.length]
        return new
