"""A backbone over many texts side by side, one token of each per forward.

`RowCache` is a padded static cache: every text has a row of its own and stands at its own position in it. Attention
groups the query heads of one key head instead of copying keys (grouped-query attention), as an attention function of
ours that only this copy of the model's modules and config names; the weights are the shared backbone's own tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import eager_mask

from medusa_viz.models.backbone import Backbone, tolerance
from medusa_viz.models.cache import TreeCache
from medusa_viz.models.copies import own_copy

GROUPED = "medusa_viz_grouped"
_NOT_GROUPED = ("softcap", "s_aux", "position_bias")  # in half precision a wrong logit may pass for a rounded one
BLOCK = 64  # cache rows are made, and attention windows widened, in blocks of this many positions


def grouped_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor,
                      scaling: float | None = None, dropout: float = 0.0, **others: object) -> tuple[Tensor, None]:
    """Attention of query [B, H, T, D] over key and value [B, G, S, D], with an additive mask [B, 1, T, S].

    The H/G query heads of a key head become rows of one product, so no key is repeated. With one query per text, two
    batched products are about as fast on a CPU as the fused kernel over grouped heads; and unlike there, a row comes
    out the same, bit for bit, whatever rows stand beside it and however far the window is padded.
    """
    if more := [name for name in _NOT_GROUPED if others.get(name) is not None]:
        raise ValueError(f"knows no {more[0]}")
    rows, heads, length, size = query.shape
    groups = key.shape[1]
    stacked = (query * (size**-0.5 if scaling is None else scaling)).reshape(rows, groups, -1, size)
    scores = (stacked @ key.transpose(2, 3)).view(rows, groups, heads // groups, length, -1)
    scores += attention_mask[:, :, None]
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    mixed = weights.view(rows, groups, -1, key.shape[2]) @ value
    return mixed.view(rows, heads, length, size).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, eager_mask)  # where transformers makes a mask by itself: additive, 4-D


class _RowLayer(CacheLayerMixin):
    """Keys and values [rows, key heads, capacity, head size] of one layer."""

    def __init__(self, owner: RowCache, prefix: tuple[Tensor, Tensor] | None) -> None:
        super().__init__()
        self.owner, self.prefix = owner, prefix

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty memory: a masked position holding NaN would still poison the softmax of real ones.
        self.keys, self.values = (
            states.new_zeros(self.owner.rows, states.shape[1], self.owner.capacity, states.shape[3])
            for states in (key_states, value_states))
        if self.prefix is not None:
            for buffer, shared in zip((self.keys, self.values), self.prefix):
                buffer[:, :, : shared.shape[2]] = shared
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write one position per row; return views of the rows in use, up to the window."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions, window = self.owner.positions.to(self.keys.device), self.owner.window  # layers may lie apart
        row = torch.arange(len(positions), device=positions.device)
        self.keys[row, :, positions] = key_states[:, :, 0]
        self.values[row, :, positions] = value_states[:, :, 0]
        return self.keys[: len(positions), :, :window], self.values[: len(positions), :, :window]

    def get_seq_length(self) -> int:
        return self.owner.window - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.window, 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """Room for `rows` texts of up to `capacity` tokens that all start with `prefix`, which is copied into each row.

    The rows in use are the first ones. `positions` [rows in use] and `window` say where the next forward writes
    and how far it sees; whoever runs it sets them.
    """

    def __init__(self, rows: int, capacity: int, prefix: TreeCache, layers: int) -> None:
        self.rows, self.capacity = rows, _blocks(capacity)
        self.positions, self.window = torch.zeros(0, dtype=torch.long), 0
        length = prefix.length
        shared = [(layer.keys[:, :, :length], layer.values[:, :, :length]) if length else None
                  for layer in prefix.layers]
        super().__init__(layers=[_RowLayer(self, shared[n]) for n in range(layers)])

    def point(self, positions: Tensor, longest: int) -> None:
        """The next forward writes one token per row at `positions`, the largest of which is `longest`."""
        self.positions, self.window = positions, min(_blocks(longest + 1), self.capacity)

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for buffer in self._buffers():
            buffer[target] = buffer[source]

    @torch.inference_mode()
    def reserve(self, capacity: int) -> None:
        """Make room for longer texts."""
        if capacity <= self.capacity:
            return
        old, self.capacity = self.capacity, _blocks(capacity)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (nn.functional.pad(buffer, (0, 0, 0, self.capacity - old))
                                            for buffer in (layer.keys, layer.values))

    def _buffers(self) -> list[Tensor]:
        return [buffer for layer in self.layers if layer.is_initialized for buffer in (layer.keys, layer.values)]


def _blocks(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


class RowBackbone(Backbone):
    """A backbone's own weights behind modules and config of their own, with grouped attention where it agrees."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(own_copy(backbone.model), backbone.placement, backbone.name)
        self.attention = self._choose_attention(backbone)

    def new_row_cache(self, prefix: list[int], rows: int, capacity: int) -> RowCache:
        """A cache whose rows all hold `prefix`, computed once."""
        shared = self.new_cache(len(prefix))
        if prefix:
            self.prefill(prefix, shared)
        return RowCache(rows, capacity, shared, self.config.num_hidden_layers)

    @torch.inference_mode()
    def advance(self, tokens: list[int], positions: list[int], cache: RowCache, wanted: list[int]) -> Tensor:
        """Feed tokens[i] to row i at positions[i]; logits [wanted, V] of the rows named in `wanted`."""
        places = torch.tensor(positions, device=self.device)
        cache.point(places, max(positions))
        kinds = set(self.layer_kinds)
        masks = {kind: self._row_mask(places, cache.window, kind) for kind in kinds}
        arguments = {
            "input_ids": torch.tensor(tokens, device=self.device)[:, None],
            "position_ids": places[:, None],
            "attention_mask": masks if len(kinds) > 1 else masks[kinds.pop()],
            self._cache_argument: cache,
            "use_cache": True,
        }
        # Rows inside their prompt want no logits, and the LM head is a fifth of a small model.
        rows = torch.tensor(wanted, device=self.device)
        handle = self.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows.to(inputs[0].device)],))
        try:
            return self.model(**arguments).logits[:, -1]
        finally:
            handle.remove()

    def _row_mask(self, positions: Tensor, window: int, kind: str) -> Tensor:
        """Additive [rows, 1, 1, window]: each row sees its own text up to its position."""
        behind = positions[:, None] - torch.arange(window, device=positions.device)
        seen = behind >= 0
        if kind == "sliding_attention":
            seen &= behind < self.config.sliding_window
        return self.additive(seen)[:, None, None]

    def _choose_attention(self, backbone: Backbone) -> str:
        """Grouped attention if the logits of a short text stay the model's own, but for rounding; else what the model
        came with. Says which, and why."""
        own = self.config._attn_implementation
        ids = torch.tensor([[token % self.vocab_size for token in (11, 7, 5, 3, 2, 13)]], device=self.device)
        with torch.inference_mode():
            expected = backbone.model(input_ids=ids, use_cache=False).logits.float()
            try:
                self.model.set_attn_implementation(GROUPED)
                error = (self.model(input_ids=ids, use_cache=False).logits.float() - expected).abs().max()
                if error <= tolerance(self.placement.dtype) * expected.abs().max():
                    return "grouped attention"
                reason = "changes this model's logits"
            except (RuntimeError, TypeError, ValueError) as fault:
                reason = f"failed: {str(fault).splitlines()[0]:.80}"
            self.model.set_attn_implementation(own)
        return f"{own} attention (grouped attention {reason})"
