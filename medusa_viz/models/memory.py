"""How much memory a model takes, counted from its parameters, and how much this machine has left."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "8bit": 1.0, "4bit": 0.5 + 1 / 64 + 4 / (64 * 256)}
"""Bytes per weight of a linear. 4-bit: NF4 in blocks of 64 with an 8-bit scale each, and one fp32 scale per 256."""

QUANTISED = ("8bit", "4bit")
CACHED_TOKENS = 2048
"""Tokens of the key-value cache that is counted with a model: one session's."""
CONTROL_GROUP = Path("/sys/fs/cgroup")
capturing = threading.Lock()
"""Held while a CUDA graph is captured, and by whatever waits for a whole card, which must not happen meanwhile."""
log = logging.getLogger(__name__)


class OutOfMemory(RuntimeError):
    """A card ran out of memory; the message is one sentence that says what helps."""


@dataclass(frozen=True)
class Footprint:
    """Parameters by what quantisation does to them."""

    linears: int
    """Weights of the layers' linears, which a quantised backbone stores small."""
    rest: int
    """Embeddings, LM head, norms, and whatever else keeps the compute dtype."""
    beside: int = 0
    """Numbers beside the backbone, in the compute dtype too: Medusa heads and the cache of one session."""

    def bytes(self, dtype: str) -> float:
        """Bytes of all of it with `--dtype` as asked; a quantised backbone computes in half precision."""
        return self.linears * BYTES[dtype] + (self.rest + self.beside) * BYTES["bf16" if dtype in QUANTISED else dtype]


def cached_per_token(layers: int, key_heads: int, head_size: int) -> int:
    """Numbers that the key-value cache keeps of one token."""
    return 2 * layers * key_heads * head_size


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
        with capturing:
            torch.cuda.empty_cache()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def ran_out(error: BaseException | None) -> bool:
    """Whether a card ran out of memory, here or where this error came from: a capture that breaks off raises another
    one on top."""
    torch = sys.modules.get("torch")
    while torch is not None and error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def spoken(error: BaseException) -> BaseException:
    """The error as people should read it: of a card that ran out of memory, one sentence. It holds on to no frame, so
    that what the failed step had made goes at once."""
    if not ran_out(error):
        return error
    log.warning("a card ran out of memory: %s", error)
    return OutOfMemory("The graphics card ran out of memory: choose a smaller tree or fewer new tokens, and go on.")


def gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
