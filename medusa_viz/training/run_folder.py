"""What the folder of a run says: whether one was begun there, and whether a command may go on with it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout

from medusa_viz.training.settings import JointSettings, TrainSettings

LOG_NAME = "log.jsonl"
LOCK_NAME = "run.lock"


class TrainingError(RuntimeError):
    """A run that cannot start or go on; the message is one sentence."""


def check_folder(out: Path, settings: TrainSettings, resume: bool) -> None:
    """Refuse a run that what lies in its folder rules out: it needs no model, and may be asked before one loads. A run
    that ended before its first checkpoint is gone on with from its start."""
    begun, kept = (out / LOG_NAME).is_file(), checkpoints_in(out)
    if begun and not resume:
        raise TrainingError(f"{out} holds a run already: add --resume to go on with it, or choose another folder.")
    if resume and not (begun or kept):
        raise TrainingError(f"{out} holds no run to go on with: leave --resume out, or name the folder of one.")
    if not (resume and kept):
        return
    joint, at = isinstance(settings, JointSettings), checkpoint_of(out, 2)
    if not (joint and at.is_file()):
        at, settings = checkpoint_of(out, 1), settings.first_stage if joint else settings
    refuse_changed(out, changed_settings(read_checkpoint(at), settings) if at.is_file() else ["recipe"])


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Keep a folder to one run; raise TrainingError where another process trains there. Of the processes that share
    a run, one asks for all."""
    if not PartialState().is_main_process:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise TrainingError(f"Another process trains in {out}: wait until it has ended, or choose another "
                            "folder.") from None
    try:
        yield
    finally:
        lock.release()


def checkpoint_of(folder: Path, stage: int) -> Path:
    """Where a stage keeps what it has come to."""
    return folder / ("checkpoint.pt" if stage == 1 else f"checkpoint-stage{stage}.pt")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of all stages."""
    return sorted(folder.glob("checkpoint*.pt"))


def read_checkpoint(path: Path, device: torch.device | None = None) -> dict:
    """What `save_checkpoint` wrote; without a device its tensors stay on disk. Raises TrainingError."""
    try:
        return torch.load(path, map_location=device or "cpu", weights_only=True, mmap=device is None)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise TrainingError(f"The checkpoint {path} cannot be read: choose another folder, and begin anew.") from error


def stored_precision(folder: Path) -> str | None:
    """The precision that the unfinished run in a folder was begun with; None where there is no checkpoint."""
    return next((read_checkpoint(path).get("precision") for path in checkpoints_in(folder)), None)


def changed_settings(saved: dict, settings: TrainSettings) -> list[str]:
    """Names of the settings that a checkpoint was not made with."""
    if saved["settings"].keys() != settings.decisive.keys():
        return ["recipe"]
    return [name for name, value in settings.decisive.items() if saved["settings"][name] != value]


def refuse_changed(folder: Path, changed: Sequence[str]) -> None:
    """Refuse to go on with a run of other settings or data."""
    if changed:
        raise TrainingError(f"The checkpoint in {folder} was made with other settings ({', '.join(changed)}); "
                            "repeat those of its run, or choose another folder.")
