"""Keys and values at fixed addresses, for steps whose shapes never change.

A slab holds the buffers of all layers, so that moving accepted rows is one gather for the whole model. A StaticCache
is a TreeCache on a slab: prefill, commit and truncate are the same, growth moves to a larger slab. A slab outlives its
cache, with the graphs captured on it, and serves the next one.

Whatever lies behind the rows of a forward is zero: attention reads the whole buffer there, and a masked row that held
NaN would still poison real ones.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from medusa_viz.models.cache import TreeCache

BLOCK = 512  # capacities are multiples of this many rows, so that few slabs serve many lengths
KEPT = 2  # slabs without a cache that are kept for the next one


class Slab:
    """Zeroed key and value buffers [1, key heads, capacity, head size] of every layer. Layers of one shape lie in one
    store [buffers, 1, key heads, capacity, head size]."""

    def __init__(self, like: Sequence[Tensor], capacity: int) -> None:
        """`like` are buffers of any capacity: keys and values of each layer in turn."""
        self.capacity = capacity
        self.written = 0
        """Rows from here on have never been written, or have been cleared."""
        self.steps: dict[int, Any] = {}
        self.graphs: dict[int, Any] = {}
        """By number of rows: the inputs of a static step, and what was captured on these addresses; see `static`."""
        groups: dict[tuple, list[int]] = {}
        for place, buffer in enumerate(like):
            groups.setdefault((buffer.shape[1], buffer.shape[3], buffer.dtype), []).append(place)
        self.stores: list[Tensor] = []
        buffers: dict[int, Tensor] = {}
        for (heads, size, _), places in groups.items():
            self.stores.append(like[places[0]].new_zeros(len(places), 1, heads, capacity, size))
            buffers |= zip(places, self.stores[-1])
        self.layers = [(buffers[place], buffers[place + 1]) for place in range(0, len(like), 2)]
        self.slots = Cache(layers=[_SlotLayer(keys, values) for keys, values in self.layers])
        """The slab as the model sees it in a static step."""

    def clear_behind(self, row: int) -> None:
        """Zero what was written from `row` on."""
        if row < self.written:
            for store in self.stores:
                store[:, :, :, row : self.written].zero_()
            self.written = row


class _SlotLayer(CacheLayerMixin):
    """One layer of a slab. Rows are written at `slots` [rows] by index copy; attention reads the whole buffer."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.slots: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers are the slab's."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0  # positions and masks are passed in

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class Slabs:
    """The slabs of one model."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = [buffer[:, :, :0].clone() for buffer in like]
        self._free: deque[Slab] = deque(maxlen=KEPT)  # only the worker takes; any thread may give back

    def take(self, capacity: int) -> Slab:
        """A slab of at least that capacity, all zero: a used one of less than twice the size, or a new one."""
        wanted = -(-capacity // BLOCK) * BLOCK
        others = []
        while self._free:
            slab = self._free.pop()
            if wanted <= slab.capacity < 2 * wanted:
                slab.clear_behind(0)
                break
            others.append(slab)
        else:
            slab = None
        self._free.extend(reversed(others))
        return slab or Slab(self._like, wanted)

    def give_back(self, slab: Slab) -> None:
        """The newest ones are kept. May be called from any thread, since a closed tab ends its cache there."""
        self._free.append(slab)


class StaticCache(TreeCache):
    """A TreeCache on a slab."""

    @torch.inference_mode()
    def __init__(self, slabs: Slabs, capacity: int) -> None:
        self._slabs = slabs
        slab = slabs.take(capacity)
        super().__init__(len(slab.layers), slab.capacity)
        self._adopt(slab)

    def _adopt(self, slab: Slab) -> None:
        self.slab, self.capacity = slab, slab.capacity
        for layer, (keys, values) in zip(self.layers, slab.layers):
            layer.keys, layer.values, layer.is_initialized = keys, values, True
        self._let_go = weakref.finalize(self, self._slabs.give_back, slab)
        self._let_go.atexit = False

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        needed = self.length + rows
        if needed > self.capacity:
            old, let_go = self.slab, self._let_go
            self._adopt(self._slabs.take(max(needed, 2 * self.capacity)))
            for store, source in zip(self.slab.stores, old.stores):
                store[:, :, :, : self.length] = source[:, :, :, : self.length]
            let_go()
        self.slab.written = max(self.slab.written, needed)

    def _buffers(self) -> list[Tensor]:
        return self.slab.stores
