"""Trees as other engines write them: export, import, and what each engine cannot say.

No format lists the root. Text that a person pastes is parsed, never evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from medusa_viz.decoding.tree import MAX_TREE_TEXT, TreeError, TreeShape, dense, dense_nodes, from_paths, parse_paths

FILE_VERSION = 1
MEDUSA_RANKS = 10  # the Medusa repository reads so many tokens of every head
NO_DRAFT = "A tree without nodes is plain decoding: leave speculative decoding off."


@dataclass(frozen=True)
class Exported:
    """A tree in one format. exact: the engine will draft this very tree. expressible: there is a text at all.
    `values` are the numbers that the engine wants beside the text."""

    text: str
    exact: bool
    notes: list[str] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)
    expressible: bool = True


@dataclass(frozen=True)
class Imported:
    """A tree read from text, which format it was, and what was done to it. Text that two formats share to the letter
    is of both."""

    shape: TreeShape
    formats: tuple[str, ...]
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What was read, in words."""
        return " or ".join(FORMATS[name].title for name in self.formats)


@dataclass(frozen=True)
class Format:
    """One engine's way to name a tree; `ending` is that of a file which holds its text."""

    name: str
    title: str
    ending: str
    write: Callable[[TreeShape], Exported]


def export(shape: TreeShape, format: str) -> Exported:
    """Write a tree in one of FORMATS. Raises TreeError for another name."""
    if format not in FORMATS:
        raise TreeError(f"'{format:.40}' is no tree format; choose from {', '.join(FORMATS)}.")
    return FORMATS[format].write(shape)


# ------------------------------------------------------------------------------------------------------------- writing


def _lists(shape: TreeShape) -> list[list[int]]:
    return [list(path) for path in shape.paths[1:]]


def _file(shape: TreeShape) -> Exported:
    body = {"medusa_viz_tree": FILE_VERSION, "nodes": shape.nodes, "depth_counts": list(shape.depth_counts),
            "fingerprint": shape.fingerprint, "paths": _lists(shape)}
    return Exported(json.dumps(body), True)


def _medusa(shape: TreeShape) -> Exported:
    notes = ["the Medusa repository takes this list as medusa_choices; it needs as many heads as the tree is deep "
             f"({shape.height})"]
    widest = max(shape.widths, default=0)
    if widest > MEDUSA_RANKS:
        notes.append(f"it reads the {MEDUSA_RANKS} best tokens of every head, and takes a rank past them from the next "
                     f"head without a word: this tree uses rank {widest - 1}")
    return Exported(json.dumps(_lists(shape)), widest <= MEDUSA_RANKS, notes)


def _tensorrt(shape: TreeShape, leaves_only: bool) -> Exported:
    if not shape.nodes:
        return _none(NO_DRAFT)
    paths = [list(path) for row, path in enumerate(shape.paths) if row and not (leaves_only and shape.is_parent[row])]
    return Exported(json.dumps(paths), True, _tensorrt_notes(shape), {"max_draft_len": shape.nodes})


def _tensorrt_notes(shape: TreeShape) -> list[str]:
    notes = [f"build the engine with max_draft_len {shape.nodes} (nodes, the root not counted)",
             "TensorRT-LLM documents Medusa for Vicuna-type models, at temperature 0 (exact match), without beam "
             "search, and in its engine backend alone"]
    if shape.height == 1:
        notes.append("a tree of depth 1 is known to crash that engine; add a node of depth 2")
    return notes


def _triton(shape: TreeShape) -> Exported:
    if not shape.nodes:
        return _none(NO_DRAFT)
    text = ", ".join("{" + ", ".join(map(str, path)) + "}" for path in shape.paths[1:])
    return Exported(text, True, ["a string for the medusa_choices of Triton's tensorrtllm backend",
                                 *_tensorrt_notes(shape)], {"max_draft_len": shape.nodes})


def _vllm(shape: TreeShape) -> Exported:
    if not shape.nodes:
        return _none(NO_DRAFT)
    notes = []
    if _is_chain(shape):
        notes.append(f"vLLM's own Medusa drafts exactly this chain with num_speculative_tokens {shape.nodes}")
    else:
        notes.append("vLLM's own Medusa drafts the best token of every head only, a chain; trees belong to its EAGLE")
    notes.append("speculative_token_tree was removed from vLLM in May 2026 (pull request 42121): newer versions do not "
                 "take it")
    if not _is_dense(shape):
        return _none("vLLM cannot express this tree: all nodes of a level must have equally many children.", *notes)
    body = {"speculative_token_tree": str(list(shape.paths[1:])), "num_speculative_tokens": shape.nodes}
    return Exported(json.dumps(body), True, notes, {"num_speculative_tokens": shape.nodes})


def _sglang(shape: TreeShape) -> Exported:
    if not shape.nodes:
        return _none(NO_DRAFT)
    steps, topk = shape.height, int(np.bincount(shape.parent[1:]).max())
    pool = sglang_pool(steps, topk)
    drafted = min(shape.nodes, pool)
    fixed = _sglang_shape(steps, topk, drafted)
    exact = fixed is not None and fixed.fingerprint == shape.fingerprint
    values = {"speculative_num_steps": steps, "speculative_eagle_topk": topk,
              "speculative_num_draft_tokens": drafted + 1}
    text = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
    notes = ["SGLang drafts with EAGLE, not with Medusa heads: this carries the shape alone",
             f"draft tokens count the root; {topk} candidates a step over {steps} steps give a pool of {pool} nodes"]
    if not exact:
        notes.append("approximate: SGLang picks the best nodes of its pool at run time, not this tree")
    return Exported(text, exact, notes, values)


def _tgi(shape: TreeShape) -> Exported:
    if not shape.nodes:
        return _none(NO_DRAFT)
    notes = ["TGI drafts the best token of every head, a chain"]
    if not _is_chain(shape):
        notes.append(f"approximate: of this tree only a chain of depth {shape.height} remains")
    return Exported(f"--speculate {shape.height}", _is_chain(shape), notes, {"speculate": shape.height})


def _none(*notes: str) -> Exported:
    return Exported("", False, list(notes), expressible=False)


def _is_chain(shape: TreeShape) -> bool:
    return shape.fingerprint == dense([1] * shape.height).fingerprint


def _is_dense(shape: TreeShape) -> bool:
    """Every node of a level has the same first ranks as children."""
    return sum(dense_nodes(shape.widths)) == shape.nodes and dense(shape.widths).fingerprint == shape.fingerprint


def sglang_pool(steps: int, topk: int) -> int:
    """Nodes that SGLang's EAGLE scores before it picks: topk, then topk² at each further step."""
    return topk + (steps - 1) * topk**2


def _sglang_shape(steps: int, topk: int, drafted: int) -> TreeShape | None:
    """The shape that such settings always give, or None where it is picked at run time."""
    if topk == 1:
        return dense([1] * steps) if drafted == steps else None
    full = drafted == sglang_pool(steps, topk) and steps <= 2
    return dense([topk] * steps) if full else None


FORMATS: dict[str, Format] = {entry.name: entry for entry in (
    Format("tree", "Medusa-Viz tree file (JSON)", "json", _file),
    Format("medusa", "Medusa list", "json", _medusa),
    Format("tensorrt", "TensorRT-LLM JSON, all nodes", "json", lambda shape: _tensorrt(shape, False)),
    Format("tensorrt-leaves", "TensorRT-LLM JSON, leaves only", "json", lambda shape: _tensorrt(shape, True)),
    Format("triton", "Triton string", "txt", _triton),
    Format("vllm", "vLLM settings", "json", _vllm),
    Format("sglang", "SGLang settings", "txt", _sglang),
    Format("tgi", "TGI settings", "txt", _tgi),
)}


# ------------------------------------------------------------------------------------------------------------- reading

_ASSIGNED = re.compile(r"\A\s*[A-Za-z_]\w*\s*=\s*(?=[\[(])", re.ASCII)
_TRITON = re.compile(r"\{[{}0-9,\s]*\}", re.ASCII)
_SGLANG = ("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens")


def read(text: str) -> Imported:
    """Read a tree in any format of FORMATS, recognised by its looks. Missing inner nodes are added, and said so.
    Raises TreeError in one sentence."""
    if len(text) > MAX_TREE_TEXT:
        raise TreeError(f"The tree text has {len(text):,} characters; {MAX_TREE_TEXT:,} are the limit.")
    text = text.strip()
    if text.startswith("--"):
        return _read_flags(text)
    if _TRITON.fullmatch(text):
        shape, notes = parse_paths("[" + text.replace("{", "[").replace("}", "]") + "]")
        return Imported(shape, ("triton",), notes)
    if text.startswith("{"):
        return _read_object(text)
    if text[:1] in ("'", '"') and text[:1] == text[-1:]:  # vLLM's string with its quotes
        shape, notes = parse_paths(text[1:-1])
        return Imported(shape, ("vllm",), notes)
    shape, notes = parse_paths(_ASSIGNED.sub("", text, count=1))
    return Imported(shape, _lists_of(text, shape), notes)


def _lists_of(text: str, shape: TreeShape) -> tuple[str, ...]:
    """Which list of paths it is: one of all nodes as JSON is both engines'; tuples are the Medusa repository's, leaves
    alone TensorRT-LLM's."""
    try:
        listed = len(set(map(tuple, json.loads(text))))
    except (ValueError, TypeError):  # tuples, a name before it, bare numbers
        return ("medusa",)
    if listed == shape.nodes:
        return "medusa", "tensorrt"
    return ("tensorrt-leaves",) if listed == shape.leaves else ("medusa",)


def _read_object(text: str) -> Imported:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise TreeError("The text starts like JSON, but is none.") from None
    if "medusa_viz_tree" in body:
        return Imported(_read_file(body), ("tree",))
    if isinstance(body.get("speculative_token_tree"), str):
        shape, notes = parse_paths(body["speculative_token_tree"])
        said = body.get("num_speculative_tokens", shape.nodes)
        if said != shape.nodes:
            notes = [*notes, f"num_speculative_tokens says {said!r:.20}, but the tree has {shape.nodes:,} "
                     f"node{'s' * (shape.nodes != 1)}, and is taken"]
        return Imported(shape, ("vllm",), notes)
    tokens = body.get("num_speculative_tokens")
    if isinstance(tokens, int) and not isinstance(tokens, bool) and 0 < tokens <= 64:
        return Imported(dense([1] * tokens), ("vllm",), [f"settings without a tree: a chain of {tokens}"])
    raise TreeError("The text is a JSON object, but no tree file and no vLLM settings.")


def _read_file(body: dict) -> TreeShape:
    """A tree file of ours, held against its own counts and fingerprint."""
    version, paths = body["medusa_viz_tree"], body.get("paths")
    if not isinstance(version, int) or version > FILE_VERSION:
        raise TreeError(f"The tree file is of a newer version ({version!r:.20}); this one reads {FILE_VERSION}.")
    if not isinstance(paths, list) or not all(isinstance(path, list) and path for path in paths):
        raise TreeError("The tree file holds no list of paths.")
    shape = from_paths(paths)
    said = (body.get("nodes"), body.get("depth_counts"), body.get("fingerprint"))
    found = (shape.nodes, list(shape.depth_counts), shape.fingerprint)
    for name, was, now in zip(("node count", "depth counts", "fingerprint"), said, found):
        if was != now:
            raise TreeError(f"The tree file was changed or damaged: its {name} is {was!r:.60}, its paths give "
                            f"{now!r:.60}.")
    return shape


def _read_flags(text: str) -> Imported:
    words = text.replace("=", " ").split()
    flags = {name[2:]: int(value) for name, value in zip(words, words[1:])
             if name.startswith("--") and value.isascii() and value.isdigit() and len(value) < 7}
    if "speculate" in flags:
        return Imported(_chain(flags["speculate"]), ("tgi",), ["settings, not a tree: a chain"])
    if not all(name in flags for name in _SGLANG):
        raise TreeError(f"The settings name no tree: --speculate, or all of --{', --'.join(_SGLANG)}, are read.")
    steps, topk, tokens = (flags[name] for name in _SGLANG)
    shape = _sglang_shape(steps, topk, tokens - 1) if 0 < steps <= 64 and 0 < topk <= 64 else None
    if shape is None:
        raise TreeError("SGLang picks this tree at run time; only chains and full pools of two steps have a shape.")
    return Imported(shape, ("sglang",), ["settings, not a tree: the shape that they always give"])


def _chain(length: int) -> TreeShape:
    if not 0 < length <= 64:
        raise TreeError(f"A chain of {length} is out of bounds; 1 to 64 can be read.")
    return dense([1] * length)
