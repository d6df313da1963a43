"""Last hidden states of a frozen backbone, computed once and kept in a memory-mapped file.

Medusa-1 never changes the backbone, so its states over the training text are the same in every pass. The file is
float16 [N, d], one row per token, written sequence by sequence in order of length; a small JSON file beside it says
how many sequences are done, so that an interrupted pass goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from transformers import PreTrainedModel

from medusa_viz.models.backbone import Backbone
from medusa_viz.training.data import Replies

BATCH_TOKENS = 2048  # padded tokens per forward
PROBE = (512, 512, 4096)  # rows, inner and outer size of the matrix product that is timed

Progress = Callable[[int, int], None]
"""Called with tokens done and tokens in all."""


def fast_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The faster of fp32 and bf16 for matrix products here, by measurement, and why."""
    seconds = {dtype: _product_seconds(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    ratio = seconds[torch.float32] / seconds[torch.bfloat16]
    if ratio > 1.2:
        return torch.bfloat16, f"bf16 matrix products run {ratio:.1f} times as fast as fp32 here"
    return torch.float32, f"bf16 matrix products run only {ratio:.1f} times as fast as fp32 here"


def _product_seconds(device: torch.device, dtype: torch.dtype) -> float:
    rows, inner, outer = PROBE
    a = torch.ones(rows, inner, device=device, dtype=dtype)
    b = torch.ones(outer, inner, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):  # the first run packs and warms up
        start = time.perf_counter()
        (a @ b.t())[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return best


def model_fingerprint(model: PreTrainedModel) -> str:
    """First 16 hex digits of a SHA-256 over all weights.

    Over the parameters themselves: to make a state dict of 4-bit layers on a CPU rounds their scales anew, in
    place.
    """
    digest = hashlib.sha256()
    for name, tensor in model.named_parameters():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def hidden_states(backbone: Backbone, replies: Replies, folder: Path, dtype: torch.dtype,
                  progress: Progress = lambda done, total: None) -> np.ndarray:
    """float16 [N, d]: what the LM head reads at every token of `replies`; from the file in `folder` where it is done.

    `dtype` is the precision of the matrix products (bf16 runs under autocast, the residual stream stays fp32).
    """
    name = f"hidden-{model_fingerprint(backbone.model)}-{replies.fingerprint}-{str(dtype).removeprefix('torch.')}"
    path, state = folder / f"{name}.f16", folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):  # a second run over the same text waits, then finds it done
        done = json.loads(state.read_text())["sequences"] if state.is_file() and path.is_file() else 0
        if done < len(replies):
            _fill(backbone, replies, path, state, done, dtype, progress)
    return np.memmap(path, np.float16, "r", shape=(len(replies.ids), backbone.hidden_size))


def _fill(backbone: Backbone, replies: Replies, path: Path, state: Path, done: int, dtype: torch.dtype,
          progress: Progress) -> None:
    """Compute and write what is missing after the first `done` sequences, in order of length."""
    shape = (len(replies.ids), backbone.hidden_size)
    store = np.memmap(path, np.float16, "r+" if done else "w+", shape=shape)
    tokens_done = int(np.diff(replies.offsets)[_by_length(replies)[:done]].sum())
    for sequences in _batches(replies, done):
        for i, hidden in zip(sequences, _batch_hidden(backbone, replies, sequences, dtype)):
            store[replies.offsets[i] : replies.offsets[i + 1]] = hidden
        done += len(sequences)
        tokens_done += sum(len(replies.sequence(i)) for i in sequences)
        store.flush()  # the rows first, then the count that vouches for them
        _write_atomically(state, json.dumps({"sequences": done}))
        progress(tokens_done, len(replies.ids))


def _by_length(replies: Replies) -> np.ndarray:
    return np.argsort(-np.diff(replies.offsets), kind="stable")


def _batches(replies: Replies, done: int) -> Iterator[list[int]]:
    """Sequences of like length together, longest first, so that little is padding and memory peaks at the start."""
    batch: list[int] = []
    for i in _by_length(replies)[done:].tolist():
        longest = len(replies.sequence(batch[0] if batch else i))
        if batch and longest * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@torch.inference_mode()
def _batch_hidden(backbone: Backbone, replies: Replies, sequences: list[int], dtype: torch.dtype) -> list[np.ndarray]:
    """float16 [length, d] per sequence."""
    hidden = forward(backbone, [replies.sequence(i) for i in sequences], dtype).half().cpu().numpy()
    return [hidden[row, : len(replies.sequence(i))] for row, i in enumerate(sequences)]


def forward(backbone: Backbone, sequences: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """[n, longest, d] in fp32: `Backbone.states` of the sequences, with matrix products in `dtype`."""
    fast = torch.autocast(backbone.device.type, dtype) if dtype == torch.bfloat16 else nullcontext()
    with fast:
        return backbone.states([torch.from_numpy(ids.astype(np.int64)) for ids in sequences]).float()


def hidden_states_now(backbone: Backbone, replies: Replies, dtype: torch.dtype) -> np.ndarray:
    """float16 [N, d] of a backbone whose weights are still changing: nothing is kept on disk."""
    states = np.empty((len(replies.ids), backbone.hidden_size), np.float16)
    for sequences in _batches(replies, 0):
        for i, hidden in zip(sequences, _batch_hidden(backbone, replies, sequences, dtype)):
            states[replies.offsets[i] : replies.offsets[i + 1]] = hidden
    return states


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
