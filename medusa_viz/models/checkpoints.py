"""Heads on disk: found in a file, a folder or a repository on the hub, checked, loaded, and written again.

Layouts of the keys are in `layouts`. The file is the truth: counts come from its keys, a config that disagrees is
reported, and sizes are compared from headers before any large tensor is read.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_viz.models import beside, hub, layouts
from medusa_viz.models.adapter import ADAPTER_WEIGHTS, is_adapter
from medusa_viz.models.heads import HeadsError, MedusaHeads
from medusa_viz.models.tensors import TensorFile, TensorFileError

WEIGHTS_NAME = layouts.LAYOUTS["medusa"].file
PICKLE_NAME = layouts.LAYOUTS["medusa-pt"].file
CONFIG_NAME = "config.json"
NAMED = 3  # tensors of a report that are told by name
_COUNTS = {"num_heads": "medusa_num_heads", "num_medusa_heads": "medusa_num_heads",
           "num_medusa_layers": "medusa_num_layers"}  # other layouts' names for the counts


class NoHeadsError(HeadsError):
    """A place that exists and holds no heads."""


@dataclass(frozen=True)
class HeadsConfig:
    """What a heads file says of itself. `accuracy` is K rows of a_k(i), i = 0..9, measured on what whoever made the
    file says: that of the shipped heads on greedy replies to the training half of the project's prompts, that of a run
    of `train` on its held-out replies. How heads do on replies that neither they nor the replayed trees were made from
    stands in `trained`: `held_out_top1`, a share per head, and `tokens_per_step` by nodes."""

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
    layout: str = "medusa"
    """In which of `layouts.LAYOUTS` they are filed."""

    @property
    def tensors(self) -> str:
        """The layout and how many tensors were used, unused and missing, the first of these by name, in words."""
        return (f"{self.layout} layout, {len(self.used):,} tensors used, {_counted(self.unused, 'unused')}, "
                f"{_counted(self.missing, 'missing')}")


@dataclass(frozen=True)
class LoadedHeads:
    """Heads as read from disk, on the CPU."""

    module: MedusaHeads
    config: HeadsConfig
    report: LoadReport
    source: str
    dtype: torch.dtype = torch.float32
    """In which they are stored."""
    folder: Path | None = None
    """Where their files lie on this machine."""
    ranked: list[list[float]] | None = None
    """Accuracies by the rank table beside them, where one is theirs; see `with_ranks`."""
    written: int = 0
    """When their file was written before it was read, in nanoseconds: a run that goes on writes it anew."""

    @property
    def accuracy(self) -> list[list[float]]:
        """K rows of a_k(i), by which every tree for these heads is built: of the rank table that lies beside them if
        it is theirs, else of their config; empty where neither says."""
        return self.config.accuracy if self.ranked is None else self.ranked

    @property
    def base(self) -> str:
        """The backbone that they were trained on, as their config names it; empty where that says nothing here."""
        return _named_base(self.config)

    @property
    def adapter(self) -> Path | None:
        """Folder of the adapter that they bring for their backbone."""
        return self.folder if self.folder and is_adapter(self.folder) else None

    def titled(self, title: str) -> str:
        """What a backbone is called with these heads."""
        return title + " + adapter" * bool(self.adapter)


# ------------------------------------------------------------------------------------------------------------- writing


def save(folder: Path, heads: MedusaHeads, config: HeadsConfig, dtype: torch.dtype = torch.float16,
         layout: str = "medusa", lm_head: Tensor | None = None, base: Path | None = None) -> Path:
    """Write weights (in `dtype`) and config in a layout of `layouts`; returns the weights file.

    `lm_head` is the backbone's matrix, for layouts that want one where the heads have none; `base` the backbone's
    folder, which a Medusa-2 folder takes in.
    """
    target = folder / layouts.LAYOUTS[layout].file
    tensors = layouts.tensors_of(heads, layout, dtype, lm_head)
    known = {name: value for name, value in asdict(config).items() if value is not None}
    sizes = {} if heads.output is None or heads.draft_ids is not None else {"vocab_size": heads.output.shape[1]}
    facts = layouts.config_of(heads, layout, {"hidden_size": heads.hidden_size, **sizes, **known})
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "medusa-2":
        facts |= _take_in(base, folder, target.name, tensors)
    part = folder / (CONFIG_NAME + ".part")
    part.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", "utf-8")
    os.replace(part, folder / CONFIG_NAME)  # others may read the folder while training writes to it
    if target.suffix == ".pt":
        torch.save(tensors, target)
    else:
        save_file(tensors, target, {"format": "pt"})
    return target


def _take_in(base: Path | None, folder: Path, name: str, tensors: dict[str, Tensor]) -> dict[str, object]:
    """Copy a backbone's files into `folder` with an index that also lists the heads; the backbone's config."""
    single = hub.WHOLE[0]
    if base is None or not ((base / single).is_file() or (base / hub.INDICES[0]).is_file()):
        raise HeadsError("The medusa-2 layout holds the backbone too: name with --model one whose weights are "
                         "safetensors files.")
    index = hub.shards_of(base)
    if not index:  # a single file of the usual name would be read without its index
        index = dict.fromkeys(TensorFile(base / single).shapes, "model-backbone.safetensors")
        shutil.copyfile(base / single, folder / "model-backbone.safetensors")
    for shard in set(index.values()) & {path.name for path in base.iterdir()}:
        shutil.copyfile(base / shard, folder / shard)
    for path in hub.small_in(base):
        shutil.copyfile(path, folder / path.name)
    index |= dict.fromkeys(tensors, name)
    (folder / hub.INDICES[0]).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1), "utf-8")
    return json.loads((base / CONFIG_NAME).read_text("utf-8"))


# ------------------------------------------------------------------------------------------------------------- reading


def load(source: str | Path, hidden_size: int | None = None, vocab_size: int | None = None,
         dtype: torch.dtype | None = None, report: hub.Report | None = None) -> LoadedHeads:
    """Read heads from a folder, a file or a hub id, in any layout, and check them against a backbone's sizes.

    `dtype` is the backbone's, which the heads will be cast to: a notice says where that loses precision. Without
    sizes and dtype the file's own hold. Raises HeadsError in one sentence for anything missing, misshapen or unknown;
    no head is ever left random.
    """
    try:
        files = [TensorFile(path) for path in _locate(str(source), report)]
    except (hub.HubError, TensorFileError) as error:
        raise HeadsError(str(error)) from error
    written = files[0].path.stat().st_mtime_ns
    shapes = {name: shape for file in files for name, shape in file.shapes.items()}
    config, is_shared, notices = _read_config(files[0].path.with_name(CONFIG_NAME))
    found = layouts.find(shapes, is_shared)
    if not found:
        raise HeadsError("No Medusa head was found; the file's first keys are "
                         f"{', '.join(sorted(shapes)[:3]) or 'none'}.")
    hidden = hidden_size or shapes[found.linear[0, 0, "weight"]][0]
    vocabulary = vocab_size or (config.vocab_size if found.ids else None)
    notices += layouts.check(found, shapes, hidden, vocabulary, _named_base(config))
    tensors = {name: tensor for file in files
               for name, tensor in file.read(name for name in found.keys if name in file.shapes).items()}
    module = layouts.build(found, tensors, hidden, vocabulary)
    stored = tensors[found.keys[0]].dtype
    if dtype and torch.promote_types(stored, dtype) != dtype:
        notices.append(f"the heads are stored in {_name(stored)} and rounded to the backbone's {_name(dtype)}")
    if len(config.accuracy) > module.heads:
        notices.append(f"the accuracy table has {len(config.accuracy)} rows; the {module.heads} heads' are used")
        config = replace(config, accuracy=config.accuracy[: module.heads])
    notices += _notices(config, found)
    unused, is_whole = sorted(set(shapes) - set(found.keys)), _is_whole(found, files[0].path)
    if is_whole:  # the backbone's own are not counted
        unused = [name for name in unused if "medusa" in name]
    layout = layouts.name_of(found, files[0].path.suffix, is_whole)
    return LoadedHeads(module, config, LoadReport(found.keys, unused, [], notices, layout), str(source), stored,
                       files[0].path.parent, written=written)


def with_ranks(loaded: LoadedHeads, model: str = "", dtype: str = "") -> LoadedHeads:
    """The heads with the accuracies of the rank table that counts for them, on a backbone of this name and dtype where
    that is known. A table that cannot be read is noticed, and their config then counts."""
    try:
        path = beside.rank_table(loaded.source, loaded.module, model, dtype)
        return replace(loaded, ranked=beside.accuracies(path)) if path else loaded
    except ValueError as error:
        if str(error) not in loaded.report.notices:
            loaded.report.notices.append(str(error))
        return loaded


def _locate(source: str, report: hub.Report | None) -> list[Path]:
    """The files that hold the heads, fetched if `source` is a hub id: a heads file, or parts of a full model."""
    folder = Path(source)
    if folder.is_file():
        return [folder]
    is_remote = hub.is_id(source)
    if is_remote:
        folder = hub.fetch(source, [*hub.SMALL, WEIGHTS_NAME], report)
    get = partial(hub.fetch, source, report=report) if is_remote else lambda names: folder
    if is_adapter(folder):
        get([ADAPTER_WEIGHTS])
    for name in (WEIGHTS_NAME, PICKLE_NAME):
        if (folder / name).is_file() or (get([name]) / name).is_file():
            return [folder / name]
    if shards := hub.shards_of(folder):
        if names := sorted({shards[key] for key in layouts.among(shards)}):
            get(names)
            return [folder / name for name in names]
        raise NoHeadsError(f"There are no Medusa heads at {source}: its index lists none.")
    for name in (*hub.WHOLE, layouts.LAYOUTS["tensorrt-llm"].file):
        if is_remote and (names := hub.names_in(source, name)) is not None and not layouts.among(names):
            continue  # its header, asked for before the file, lists no heads
        if (get([name]) / name).is_file() and layouts.among(TensorFile(folder / name).shapes):
            return [folder / name]
    raise NoHeadsError(f"There are no Medusa heads at {source}: {WEIGHTS_NAME} is not there, nor a full model that "
                       "holds some.")


def _read_config(path: Path) -> tuple[HeadsConfig, bool, list[str]]:
    """What the config beside the heads says, whether one matrix stands for the backbone's, and notices."""
    if not path.is_file():
        return HeadsConfig(), False, [f"no {CONFIG_NAME} beside the heads; counts are taken from the tensors"]
    try:
        data = json.loads(path.read_text("utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it is no object")
        data = {name: data[other] for other, name in _COUNTS.items() if other in data} | data
        known = {name: data[name] for name in HeadsConfig.__dataclass_fields__ if name in data}
        if not _is_accuracy(known.get("accuracy", [])):
            raise ValueError("its accuracy is no table of shares")
        return HeadsConfig(**known), data.get("original_lm_head") is True, []
    except (ValueError, TypeError, RecursionError) as error:
        raise HeadsError(f"{path} is not a readable heads config ({error}).") from error


def _is_accuracy(table: object) -> bool:
    return isinstance(table, list) and all(
        isinstance(row, list) and all(isinstance(share, (int, float)) and 0 <= share <= 1 for share in row)
        for row in table)


def _named_base(config: HeadsConfig) -> str:
    """The backbone that a config names; empty for nothing, `N/A` and folders of somebody else's disk."""
    name = str(config.base_model_name_or_path or "").strip()
    is_path = name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1
    return "" if name.lower() in ("n/a", "none") or (is_path and not Path(name).is_dir()) else name


def _is_whole(found: layouts.Found, path: Path) -> bool:
    """Whether the file is a full model's or a part of one, with the backbone's tensors beside the heads'."""
    return (found.pattern is not layouts.VLLM and "medusa" in found.keys[0]
            and path.name not in (WEIGHTS_NAME, PICKLE_NAME))


def _counted(names: list[str], what: str) -> str:
    first = ", ".join(f"{name:.60}" for name in names[:NAMED])
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{len(names):,} {what}" + (f" ({first}{more})" if names else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _notices(config: HeadsConfig, found: layouts.Found) -> list[str]:
    notices = []
    for said, stored, what in ((config.medusa_num_heads, found.heads, "heads"),
                               (config.medusa_num_layers, found.layers, "layers")):
        if said not in (None, stored):
            notices.append(f"the config says {said} {what}, the file holds {stored}: {stored} are used")
    if found.one_output:
        notices.append(f"{found.output[0]} is a copy of the backbone's output matrix, which is used itself")
    return notices
