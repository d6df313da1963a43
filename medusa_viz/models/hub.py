"""The Hugging Face hub: every file that comes from it comes through here, and every fault becomes one sentence.

Only what is named is fetched, small files before large ones, into the hub's own cache; what is cached needs no
network. A download that stops is kept and goes on where it stopped.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    SafetensorsParsingError,
)
from tqdm import tqdm

from medusa_viz.models.fetch import MARKER, Report

try:
    import httpx2 as httpx
except ImportError:  # through which an older huggingface_hub speaks
    import httpx

SMALL = ["*.json", "*.jinja", "*.model", "*.txt"]  # configs, indices, tokenizers, templates
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE = ("model.safetensors", "pytorch_model.bin")
_asking = threading.Lock()
_ID = re.compile(r"[\w.-]+/[\w.-]+")


class HubError(ValueError):
    """Something that the hub did not give; the message is one sentence."""


def is_id(source: str) -> bool:
    """Whether this reads as `owner/name` and is no file or folder here."""
    return bool(_ID.fullmatch(source)) and not Path(source).exists()


def fetch(repository: str, patterns: list[str], report: Report | None = None) -> Path:
    """Folder that holds the repository's files of these patterns, as far as it has any. Raises HubError."""
    bar = _bar(repository, report)
    try:
        with _named():
            return Path(snapshot_download(repository, allow_patterns=patterns, tqdm_class=bar))
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:
        raise HubError(sentence(error, repository)) from error
    finally:
        bar.report = None  # the client leaves bars open: they draw once more when they are collected, at any time


def small_files(repository: str) -> Path:
    """Folder with config, tokenizer and indices of a model: enough to check it before its weights are fetched."""
    folder = fetch(repository, SMALL)
    if not (folder / "config.json").is_file():
        raise HubError(f"{repository} holds no config.json, so it is no model that transformers can load; where it "
                       "holds GGUF files, name the original model, or download one file and name that.")
    return folder


def small_in(folder: Path) -> list[Path]:
    """A model's small files: config, tokenizer, templates; no index, and nothing of Medusa-Viz."""
    return [path for pattern in SMALL for path in folder.glob(pattern)
            if path.is_file() and path.name not in (*INDICES, MARKER)]


def names_in(repository: str, name: str) -> list[str] | None:
    """Names of the tensors in a safetensors file, from its header alone; None where nobody can say."""
    try:
        with _named():
            return list(HfApi().parse_safetensors_file_metadata(repository, name).tensors)
    except (OSError, ValueError, RuntimeError, httpx.HTTPError, SafetensorsParsingError):
        return None


def weights(repository: str, folder: Path, report: Report | None = None) -> None:
    """Fetch the weights that the index in `folder` lists, or the one file: safetensors where there are any."""
    if shards := shards_of(folder):
        fetch(repository, sorted(set(shards.values())), report)
        return
    for name in WHOLE:
        if (fetch(repository, [name], report) / name).is_file():
            return
    raise HubError(f"{repository} holds no weights: neither {WHOLE[0]} nor {WHOLE[1]} is there.")


def shards_of(folder: Path) -> dict[str, str]:
    """Tensor name -> file, from the index in a model's folder; empty without one. Raises HubError."""
    for path in (folder / name for name in INDICES):
        if path.is_file():
            try:
                found = json.loads(path.read_text("utf-8"))["weight_map"]
                if not all(Path(file).name == file for file in found.values()):
                    raise ValueError("it names a file outside its folder")
                return found
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise HubError(f"The index {path} cannot be read ({error!s:.100}).") from error
    return {}


def sentence(error: BaseException, repository: str) -> str:
    """What went wrong with a request for `repository`, and what to do about it."""
    causes = list(_causes(error))

    def is_any(*kinds: type) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes):
        return (f"{repository} does not fit on the disk: make room in {constants.HF_HUB_CACHE}, or set HF_HOME to "
                "another folder, and start again.")
    if is_any(GatedRepoError):
        return (f"{repository} is open only to people whom its owner admitted: accept its terms on its page, log in "
                "with `hf auth login` and start again.")
    if is_any(RepositoryNotFoundError):
        return (f"{repository} is not on the hub, or it is private: check the name, or log in with `hf auth login` as "
                "somebody who may read it.")
    if is_any(DisabledRepoError):
        return f"{repository} was disabled on the hub by its owner."
    if is_any(HFValidationError):
        return f"{repository} is no name of a repository: it has the form owner/name."
    if is_any(EntryNotFoundError) and not is_any(LocalEntryNotFoundError):
        return f"{repository} lacks a file that it should hold ({_first_line(error)})."
    if is_any(OfflineModeIsEnabled):
        return f"{repository} is not in this machine's cache, and HF_HUB_OFFLINE forbids asking the hub for it."
    if is_any(httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError):
        return f"{repository} is not in this machine's cache, and the hub cannot be reached from here."
    if is_any(HfHubHTTPError):
        status = next(cause for cause in causes if isinstance(cause, HfHubHTTPError)).response.status_code
        return f"The hub refused {repository} (HTTP status {status}): try again later."
    if is_any(httpx.HTTPError, ConnectionError) or "Consistency check failed" in str(error):
        return (f"The download of {repository} was interrupted; what has arrived is kept: start again and it goes on "
                "from there.")
    return f"{repository} could not be had from the hub ({_first_line(error)})."


@contextmanager
def _named() -> Iterator[None]:
    """The page keeps the hub's client offline. What runs in here was named by a person, so the client may ask."""
    with _asking:
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = before and os.environ.get("MEDUSA_VIZ_HUB") != "named"
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")[:160]


def _bar(repository: str, report: Report | None) -> type[tqdm]:
    """A progress bar that reports the bytes that arrived in place of drawing itself."""

    class Bar(tqdm):
        report = None

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "leave": False})

        def display(self, *args, **kwargs) -> None:
            if (report := type(self).report) and self.unit == "B" and self.total:
                done = min(self.n, self.total)
                report("hub", done / self.total, f"{repository}: {done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB")

    Bar.report = report
    return Bar
