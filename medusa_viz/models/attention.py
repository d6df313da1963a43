"""Attention for trees on a CPU: the fused kernel over grouped heads, without copying keys.

Where several query heads share one key head, transformers repeats keys and values before it calls the kernel with a
mask. On CUDA that keeps the fast kernel; the CPU kernel reads grouped heads as they are, masked or not.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from medusa_viz.models.packed import agree

UNREPEATED = "medusa_viz_unrepeated"
_ELSEWHERE = ("position_bias", "softcap", "is_causal")  # what transformers' own function deals with


def unrepeated_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                         scaling: float | None = None, dropout: float = 0.0, **others: object) -> tuple[Tensor, None]:
    """Attention of query [B, H, T, D] over key and value [B, G, S, D] with an additive mask [B, 1, T, S]; returns
    [B, T, H, D]. Without a mask, or with anything unusual, transformers' own sdpa function is called."""
    if attention_mask is None or any(others.get(name) is not None for name in _ELSEWHERE):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
    mixed = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True)
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(UNREPEATED, unrepeated_attention)
AttentionMaskInterface.register(UNREPEATED, sdpa_mask)


def stop_repeating(model: PreTrainedModel, probe: Callable[[], Tensor]) -> bool:
    """Let a model on the CPU that repeats keys under sdpa attend without that, if its logits stay the same.

    `probe` runs the model on a few tokens, with a mask, and returns their logits. False where nothing changed.
    """
    config, own = model.config.get_text_config(), model.config._attn_implementation
    heads, groups = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", None)
    if model.device.type != "cpu" or groups in (None, heads) or own != "sdpa":
        return False
    expected = probe()
    model.set_attn_implementation(UNREPEATED)
    try:
        if agree(probe(), expected):
            return True
    except (RuntimeError, TypeError, ValueError):
        pass  # heads that this kernel cannot group; the model's own attention can
    model.set_attn_implementation(own)
    return False
