"""Tensor files: names and shapes first, numbers only when asked for, and never any code.

A `.safetensors` file says its names and shapes in its header. A `.pt` or `.bin` file is a pickle; it is read by
torch's restricted unpickler, which knows tensors and refuses everything else, and its numbers stay on disk.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

PICKLES = (".pt", ".bin", ".pth")
_STARTS = (b"PK\x03\x04", b"\x80")  # torch's zip form, and its older plain pickle


class TensorFileError(ValueError):
    """A file that is no readable tensor file; the message is one sentence."""


class TensorFile:
    """One file's tensors by name. `shapes` is known at once; `read` fetches numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = _unpickled(path) if path.suffix in PICKLES else None
        if self._tensors is not None:
            self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
            return
        try:
            with safe_open(path, "pt") as file:
                self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise TensorFileError(f"The heads file {path} cannot be read ({_first_line(error)}).") from error

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named tensors, on the CPU."""
        if self._tensors is not None:
            return {name: self._tensors[name] for name in names}
        with safe_open(self.path, "pt") as file:
            return {name: file.get_tensor(name) for name in names}


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise TensorFileError(f"The heads file {path} cannot be read ({error.strerror}).") from error
    if not start.startswith(_STARTS):
        raise TensorFileError(f"{path} cannot be read: it is no file that torch has saved.")
    try:
        data = torch.load(path, "cpu", weights_only=True, mmap=start.startswith(_STARTS[0]))
    except pickle.UnpicklingError as error:
        raise TensorFileError(f"{path} was not opened: it holds more than tensors, and such a file could run a "
                              "program of its own.") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise TensorFileError(f"The heads file {path} cannot be read ({_first_line(error)}).") from error
    if isinstance(data, Mapping) and isinstance(data.get("state_dict"), Mapping):
        data = data["state_dict"]
    tensors = data if isinstance(data, Mapping) else {}
    return {str(name): tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")[:120]
