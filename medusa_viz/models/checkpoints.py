"""Heads on disk: a safetensors file and a config beside it.

Keys are those of the published residual-block layout, `{head}.{layer}.linear.weight|bias` with heads from 0, plus
`{head}.{layers}.weight` where a head owns its output matrix, plus `draft_vocabulary` (int32 ids). The file is the
truth: counts come from its keys, and a config that disagrees is reported.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa_viz.models.heads import HeadsError, MedusaHeads

WEIGHTS_NAME = "medusa_lm_head.safetensors"
CONFIG_NAME = "config.json"
DRAFT_VOCABULARY = "draft_vocabulary"
MAX_PADDING = 1024  # own output matrices may have this many rows more than the backbone, rounded up by their trainer
_PREFIXES = ("model.", "module.", "medusa_heads.", "medusa_head.")
_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True)
class HeadsConfig:
    """What a heads file says of itself. `accuracy` is K rows of a_k(i), i = 0..9, measured on held-out text."""

    base_model_name_or_path: str = ""
    medusa_num_heads: int | None = None
    medusa_num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    accuracy: list[list[float]] = field(default_factory=list)
    trained: dict[str, object] = field(default_factory=dict)
    """How and on what the heads were trained; free-form facts for the page and the model card."""


@dataclass(frozen=True)
class LoadReport:
    """Which tensors were used, which were not, what was missing, and notices for the person who loads."""

    used: list[str]
    unused: list[str]
    missing: list[str]
    notices: list[str]


@dataclass(frozen=True)
class LoadedHeads:
    """Heads as read from disk, on the CPU."""

    module: MedusaHeads
    config: HeadsConfig
    report: LoadReport
    source: str


def save(folder: Path, heads: MedusaHeads, config: HeadsConfig, dtype: torch.dtype = torch.float16) -> Path:
    """Write weights (in `dtype`) and config; returns the weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for h in range(heads.heads):
        for layer in range(heads.layers):
            tensors[f"{h}.{layer}.linear.weight"] = heads.weight[layer, h].detach().to("cpu", dtype).contiguous()
            tensors[f"{h}.{layer}.linear.bias"] = heads.bias[layer, h].detach().to("cpu", dtype).contiguous()
        if heads.output is not None:
            tensors[f"{h}.{heads.layers}.weight"] = heads.output[h].detach().to("cpu", dtype).contiguous()
    if heads.draft_ids is not None:
        tensors[DRAFT_VOCABULARY] = heads.draft_ids.to("cpu", torch.int32)
    save_file(tensors, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(asdict(config), indent=1, ensure_ascii=False) + "\n", "utf-8")
    return folder / WEIGHTS_NAME


def load(source: str | Path, hidden_size: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> LoadedHeads:
    """Read heads from a folder, a .safetensors file or a hub id and check them against a backbone's sizes.

    `dtype` is the backbone's, which the heads will be cast to: a notice says where that loses precision.
    Raises HeadsError in one sentence for anything missing, misshapen or unknown; no head is ever left random.
    """
    path = _weights_path(str(source))
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise HeadsError(f"The heads file {path} cannot be read ({str(error).splitlines()[0]:.120}).") from error
    config, notices = _read_config(path.with_name(CONFIG_NAME))
    module, report = from_tensors(tensors, config, hidden_size, vocab_size)
    stored = tensors[report.used[0]].dtype
    if torch.promote_types(stored, dtype) != dtype:
        notices.append(f"the heads are stored in {_name(stored)} and rounded to the backbone's {_name(dtype)}")
    if len(config.accuracy) > module.heads:
        notices.append(f"the accuracy table has {len(config.accuracy)} rows; the {module.heads} heads' are used")
        config = replace(config, accuracy=config.accuracy[: module.heads])
    return LoadedHeads(module, config, replace(report, notices=notices + report.notices), str(source))


def from_tensors(tensors: dict[str, Tensor], config: HeadsConfig, hidden_size: int, vocab_size: int
                 ) -> tuple[MedusaHeads, LoadReport]:
    """Heads from tensors in the published layouts, under any of their prefixes."""
    named = _named(tensors)
    linear = {name: _LINEAR.fullmatch(name) for name in named if _LINEAR.fullmatch(name)}
    output = {name: _OUTPUT.fullmatch(name) for name in named if _OUTPUT.fullmatch(name)}
    if not linear:
        raise HeadsError("No Medusa head was found; the file's first keys are "
                         f"{', '.join(sorted(tensors)[:3]) or 'none'}.")
    heads = 1 + max(int(match[1]) for match in (*linear.values(), *output.values()))
    layers = 1 + max(int(match[2]) for match in linear.values())
    wanted = [f"{h}.{layer}.linear.{part}" for h in range(heads) for layer in range(layers)
              for part in ("weight", "bias")]
    owned = [f"{h}.{layers}.weight" for h in range(heads) if f"{h}.{layers}.weight" in output]
    missing = [name for name in wanted if name not in linear]
    if missing:
        raise HeadsError(f"The heads file lacks {missing[0]} (head {missing[0].split('.')[0]} of {heads}, counted "
                         f"from 0){f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; "
                         "heads with missing tensors would draft noise.")
    if output and len(owned) < heads:
        odd = [str(h) for h in range(heads) if f"{h}.{layers}.weight" not in owned]
        raise HeadsError(f"Some heads own an output matrix and head {', '.join(odd)} (from 0) does not; "
                         "all must, or none.")
    draft_ids = _draft_ids(tensors, vocab_size)
    rows = vocab_size if draft_ids is None else len(draft_ids)
    parts = {name: tensors[named[name]] for name in wanted + owned}
    padded = _cut_padding(parts, owned, rows)
    _check_shapes(parts, hidden_size, rows)

    module = MedusaHeads(heads, hidden_size, layers, draft_ids,
                         torch.stack([parts[name] for name in owned]) if owned else None)
    with torch.no_grad():
        for h in range(heads):
            for layer in range(layers):
                module.weight[layer, h] = parts[f"{h}.{layer}.linear.weight"]
                module.bias[layer, h] = parts[f"{h}.{layer}.linear.bias"]
    used = [named[name] for name in wanted + owned] + [DRAFT_VOCABULARY] * (draft_ids is not None)
    unused = sorted(set(tensors) - set(used))
    return module, LoadReport(used, unused, [], padded + _notices(config, heads, layers, unused))


def _weights_path(source: str) -> Path:
    """The weights file in a folder, of that name, or in a repository on the hub, fetched with its config."""
    path = Path(source)
    if path.is_file():
        return path
    if not path.exists() and _HUB_ID.fullmatch(source):
        try:
            path = Path(snapshot_download(source, allow_patterns=[WEIGHTS_NAME, CONFIG_NAME]))
        except (OSError, ValueError, HfHubHTTPError) as error:
            raise HeadsError(f"The heads {source} are no folder here and could not be had from the hub "
                             f"({str(error).splitlines()[0]:.120}).") from error
    path /= WEIGHTS_NAME
    if not path.is_file():
        raise HeadsError(f"There are no Medusa heads at {source}: {WEIGHTS_NAME} is not there.")
    return path


def _read_config(path: Path) -> tuple[HeadsConfig, list[str]]:
    if not path.is_file():
        return HeadsConfig(), [f"no {CONFIG_NAME} beside the heads; counts are taken from the tensors"]
    try:
        data = json.loads(path.read_text("utf-8"))
        known = {name: data[name] for name in HeadsConfig.__dataclass_fields__ if name in data}
        if not isinstance(data, dict) or not _is_accuracy(known.get("accuracy", [])):
            raise ValueError("it is no object, or its accuracy is no table of shares")
        return HeadsConfig(**known), []
    except (ValueError, TypeError, RecursionError) as error:
        raise HeadsError(f"{path} is not a readable heads config ({error}).") from error


def _is_accuracy(table: object) -> bool:
    return isinstance(table, list) and all(
        isinstance(row, list) and all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in row)
        for row in table)


def _named(tensors: dict[str, Tensor]) -> dict[str, str]:
    """The file's key by the name without prefix."""
    named: dict[str, str] = {}
    for key in tensors:
        if (name := _stripped(key)) in named:
            raise HeadsError(f"The heads file holds {name} twice, as {named[name]} and as {key}.")
        named[name] = key
    return named


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cut_padding(parts: dict[str, Tensor], owned: list[str], rows: int) -> list[str]:
    """Cut output matrices that were rounded up to more rows than the vocabulary has ids; a notice if so."""
    extra = {name: len(parts[name]) - rows for name in owned if 0 < len(parts[name]) - rows <= MAX_PADDING}
    for name in extra:
        parts[name] = parts[name][:rows]
    return [f"the output matrices have {max(extra.values())} rows more than the vocabulary; those are never drafted"
            ] if extra else []


def _stripped(key: str) -> str:
    changed = True
    while changed:
        changed = False
        for prefix in _PREFIXES:
            if key.startswith(prefix):
                key, changed = key.removeprefix(prefix), True
    return key


def _draft_ids(tensors: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    ids = tensors.get(DRAFT_VOCABULARY)
    if ids is None:
        return None
    ids = ids.long()
    if ids.dim() != 1 or not len(ids) or (ids[1:] <= ids[:-1]).any() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise HeadsError(f"The draft vocabulary must list rising ids below {vocab_size}; this one does not.")
    return ids


def _check_shapes(tensors: dict[str, Tensor], hidden: int, rows: int) -> None:
    for name, tensor in tensors.items():
        expected = (hidden,) if name.endswith("bias") else (hidden, hidden) if "linear" in name else (rows, hidden)
        if tuple(tensor.shape) != expected:
            raise HeadsError(f"The heads tensor {name} has shape {list(tensor.shape)}, but this backbone needs "
                             f"{list(expected)}: these heads belong to another model.")
        if not tensor.isfinite().all():
            raise HeadsError(f"The heads tensor {name} holds NaN or infinite numbers.")


def _notices(config: HeadsConfig, heads: int, layers: int, unused: list[str]) -> list[str]:
    notices = []
    if config.medusa_num_heads not in (None, heads):
        notices.append(f"the config says {config.medusa_num_heads} heads, the file holds {heads}: {heads} are used")
    if config.medusa_num_layers not in (None, layers):
        notices.append(f"the config says {config.medusa_num_layers} layers, the file holds {layers}: {layers} are used")
    if unused:
        notices.append(f"{len(unused)} tensors were not used, the first is {unused[0]}")
    return notices
