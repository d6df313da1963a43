"""What the tests of the pages share: a tiny model on disk that the real commands can run, heads, a token file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tiny import model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from medusa_viz.models import checkpoints
from medusa_viz.models.heads import MedusaHeads

VOCAB, WIDTH = 260, 64
PATIENCE = 300.0  # seconds; on busy cores a real command may take minutes, and only a hang takes these


def saved_model(folder: Path) -> Path:
    """A tiny llama with a tokenizer of one id per byte."""
    model("llama", vocab_size=VOCAB, max_position_embeddings=512).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(bytes_to_unicode().values())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=None).save_pretrained(folder)
    return folder


def saved_heads(folder: Path, heads: int = 3, seed: int = 0, trained: dict | None = None, width: int = WIDTH) -> Path:
    torch.manual_seed(seed)
    module = MedusaHeads(heads, width, 1)
    torch.nn.init.normal_(module.weight, std=0.1)
    table = [[round(0.4 / (k + 1) / (rank + 1), 4) for rank in range(10)] for k in range(heads)]
    checkpoints.save(folder, module, checkpoints.HeadsConfig("tiny", heads, 1, width, VOCAB, table, trained or {}))
    return folder


def token_file(path: Path, replies: int = 12, length: int = 40) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    np.savez(path, ids=rng.integers(0, 40, replies * length).astype(np.uint16),
             offsets=np.arange(replies + 1) * length, reply_start=np.full(replies, 6, np.int32),
             temperature=np.zeros(replies, np.float32), split=(np.arange(replies) % 4 == 0).astype(np.uint8))
    return path


def until(true: Callable[[], object], what: str, seconds: float = PATIENCE) -> object:
    """Wait for something that another process or thread does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come within {seconds} s")
