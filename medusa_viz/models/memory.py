"""How much memory a model takes, counted from its parameters, and how much this machine has left."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "8bit": 1.0, "4bit": 0.5 + 1 / 64 + 4 / (64 * 256)}
"""Bytes per weight of a linear. 4-bit: NF4 in blocks of 64 with an 8-bit scale each, and one fp32 scale per 256."""

QUANTISED = ("8bit", "4bit")
CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Footprint:
    """Parameters by what quantisation does to them."""

    linears: int
    """Weights of the layers' linears, which a quantised backbone stores small."""
    rest: int
    """Embeddings, LM head, norms, and whatever else keeps the compute dtype."""

    def bytes(self, dtype: str) -> float:
        """Bytes of all weights with `--dtype` as asked; a quantised backbone computes in bf16."""
        return self.linears * BYTES[dtype] + self.rest * BYTES["bf16" if dtype in QUANTISED else dtype]


def free(device: str) -> int:
    """Bytes that are free for a model on `cpu`, on one card (`cuda:1`), or on all of them together (`cuda`)."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        import torch

        cards = [int(index)] if index else range(torch.cuda.device_count())
        return sum(torch.cuda.mem_get_info(card)[0] for card in cards)
    import psutil

    available = psutil.virtual_memory().available
    try:  # a container may be allowed less than its machine has
        limit, used = (int((CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return available
    return max(0, min(available, limit - used))


def give_back() -> None:
    """Return what was freed to the system: torch keeps it for its cards, the C library for the CPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
