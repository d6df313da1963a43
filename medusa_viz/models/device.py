"""Device and dtype, chosen automatically, each with its reason."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from medusa_viz.models.memory import QUANTISED

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTISER = "bitsandbytes==0.50.2"
ZERO_GPU = "SPACES_ZERO_GPU"
"""Set in the environment of a Hugging Face Space whose hardware is ZeroGPU."""


class DeviceError(ValueError):
    """A device or dtype that this machine does not have; the message is one sentence."""


@dataclass(frozen=True)
class Placement:
    """Where the model runs and in which precision. Where the backbone's linears are `quantised` (8bit or 4bit), `dtype`
    is that of everything else: activations, LM head, cache and Medusa heads."""

    device: torch.device
    dtype: torch.dtype
    reason: str
    quantised: str = ""
    threads: int = field(default_factory=torch.get_num_threads)
    """As they were when the model was placed: each of torch's own threads may be told another number later."""

    @property
    def dtype_name(self) -> str:
        names = {dtype: name for name, dtype in DTYPES.items()}
        return self.quantised or names.get(self.dtype, str(self.dtype).removeprefix("torch."))

    @property
    def device_name(self) -> str:
        """Name of the card, or `CPU` with the number of threads."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.device.type.upper()}, {self.threads} thread{'s' * (self.threads > 1)}"


def choose(device: str = "auto", dtype: str = "auto") -> Placement:
    """Placement for `device` (auto, cpu, cuda, cuda:0, mps) and `dtype` (auto, fp32, bf16, fp16, 8bit, 4bit)."""
    if dtype not in ("auto", *DTYPES, *QUANTISED):
        raise DeviceError(f"dtype {dtype!r} is not known; choose auto, {', '.join([*DTYPES, *QUANTISED])}.")
    reasons = []
    if device == "auto":
        device, reason = _present()
        reasons.append(reason)
    chosen = _device(device)
    if dtype in QUANTISED:
        _check_quantiser(chosen, dtype)
        half = "fp16" if dtype == "8bit" else _half(chosen)  # 8-bit linears round what they get to fp16, whatever it is
        return Placement(chosen, DTYPES[half], "; ".join([*reasons, f"{dtype} as asked, computing in {half}"]), dtype)
    if dtype == "auto" and chosen.type == "cuda":
        dtype = _half(chosen)
        reasons.append(f"{dtype} halves the bytes a CUDA step reads"
                       + ", and this card would only emulate bf16" * (dtype == "fp16"))
    elif dtype == "auto":
        dtype = "fp32"
        reasons.append(f"fp32 is exact and {'fastest' if chosen.type == 'cpu' else 'safe'} on {chosen.type}")
    return Placement(chosen, DTYPES[dtype], "; ".join(reasons) or "as asked")


def settle(device: torch.device) -> None:
    """Wait until a card has done what this thread gave it; elsewhere there is nothing to wait for. Not for the whole
    card: CUDA forbids that while another thread captures a graph."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _present() -> tuple[str, str]:
    """The best kind of device here, and why. On a ZeroGPU Space torch pretends to have a card everywhere, but only a
    process to which one is lent has initialised CUDA."""
    if os.environ.get(ZERO_GPU) and not torch.cuda.is_initialized():
        return "cpu", "ZeroGPU lends its card for one call, and a step needs the cache that the step before left"
    if torch.cuda.is_available():
        return "cuda", "a CUDA device is present"
    return "cpu", "no CUDA device is present"


def _half(card: torch.device) -> str:
    """The half precision that a card computes in: bf16, whose range is that of fp32, if the card has it."""
    with torch.cuda.device(card):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _check_quantiser(device: torch.device, dtype: str) -> None:
    """Refuse, before anything is fetched, a quantised backbone that could not run here."""
    if device.type != "cuda":
        raise DeviceError(f"dtype {dtype} needs a CUDA card; on {device.type} choose fp32 or bf16.")
    if find_spec("bitsandbytes") is None:
        raise DeviceError(f"dtype {dtype} needs the package bitsandbytes: install it with `pip install {QUANTISER}`.")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"device {name!r} is not known; choose auto, cpu, cuda or cuda:1.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device cuda was asked for, but torch sees no CUDA device here.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device {name} was asked for, but there are {torch.cuda.device_count()} CUDA devices.")
    try:
        torch.empty(1, device=device).cpu()
    except (RuntimeError, NotImplementedError, AssertionError):  # a kind that this torch or this machine lacks
        raise DeviceError(f"device {name} was asked for, but torch cannot use it here.") from None
    return device
