"""How published Medusa heads name their tensors: one table, read in both directions.

`find` recognises a layout by its keys, under any of the usual prefixes; `check` compares shapes with a backbone's
before any number is read; `build` makes the heads. `tensors_of` and `config_of` are the way back, and `losses` says
what a layout cannot hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from medusa_viz.models.heads import HeadsError, MedusaHeads, OtherModelError

MAX_PADDING = 1024  # own output matrices may have this many rows more than the backbone, rounded up by their trainer
DRAFT_IDS = ("draft_vocabulary", "token_map")
"""Tensors that list the ids of a draft vocabulary: ours, and vLLM's (in any order)."""

_PREFIXES = ("model.", "module.", "medusa_heads.", "medusa_head.")


@dataclass(frozen=True)
class Keys:
    """Key patterns, heads and layers counted from 0."""

    linear: str
    output: str
    needs_bias: bool = True


@dataclass(frozen=True)
class Layout:
    """One way to file heads: its keys, the file that holds them, and what it can hold."""

    keys: Keys
    file: str
    prefix: str = ""
    ids: str = ""
    """Key of the draft vocabulary; empty where the layout has none."""
    bias: bool = True
    shares: bool = True
    """Whether heads may do without output matrices of their own."""


MEDUSA = Keys("{head}.{layer}.linear.{part}", "{head}.{layer}.weight")
VLLM = Keys("blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight", needs_bias=False)
TENSORRT = Keys("{head}.medusa_layers.{layer}.linear.{part}", "{head}.lm_head.weight")

LAYOUTS = {
    "medusa": Layout(MEDUSA, "medusa_lm_head.safetensors", ids="draft_vocabulary"),
    "medusa-pt": Layout(MEDUSA, "medusa_lm_head.pt", ids="draft_vocabulary"),
    "medusa-2": Layout(MEDUSA, "model-medusa-heads.safetensors", prefix="medusa_head.", ids="draft_vocabulary"),
    "vllm": Layout(VLLM, "model.safetensors", ids="token_map", shares=False),
    "vllm-no-bias": Layout(VLLM, "model.safetensors", ids="token_map", bias=False, shares=False),
    "tensorrt-llm": Layout(TENSORRT, "rank0.safetensors", prefix="medusa_heads.", shares=False),
}


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Found:
    """Heads recognised in a file: the file's own keys by what they are."""

    pattern: Keys
    heads: int
    layers: int
    linear: dict[tuple[int, int, str], str]
    output: dict[int, str]
    ids: str
    one_output: bool = False
    """One matrix, the backbone's own, stands for all heads (vLLM's `original_lm_head`)."""

    @property
    def keys(self) -> list[str]:
        """Every key that is used, head by head."""
        order = sorted(self.linear, key=lambda place: (place[0], place[1], place[2] != "weight"))
        return ([self.linear[place] for place in order]
                + ([] if self.one_output else [self.output[head] for head in sorted(self.output)])
                + [self.ids] * bool(self.ids))


def among(keys: Iterable[str]) -> list[str]:
    """Those of a file's keys that name parts of heads, in any layout; empty where no residual block is among them."""
    for pattern in (MEDUSA, VLLM, TENSORRT):
        places = {key: _place(pattern, _stripped(key)) for key in keys}
        if any(place and place[2] for place in places.values()):
            return [key for key, place in places.items() if place or _stripped(key) in DRAFT_IDS]
    return []


def find(keys: Iterable[str], original_lm_head: bool = False) -> Found | None:
    """The heads among `keys`, or None. Raises HeadsError where they are incomplete or stored twice."""
    for pattern in (MEDUSA, VLLM, TENSORRT):
        linear: dict[tuple[int, int, str], str] = {}
        output: dict[tuple[int, int], str] = {}
        for key in sorted(keys):
            place = _place(pattern, _stripped(key))
            if place is None:
                continue
            group, at = (linear, place) if place[2] else (output, place[:2])
            if at in group:
                raise HeadsError(f"The heads file holds {_stripped(key)} twice, as {group[at]} and as {key}.")
            group[at] = key
        if linear:
            ids = next((key for key in sorted(keys) if _stripped(key) in DRAFT_IDS), "")
            return _counted(pattern, linear, output, ids, original_lm_head)
    return None


def check(found: Found, shapes: Mapping[str, Sequence[int]], hidden: int, vocabulary: int | None,
          base: str = "") -> list[str]:
    """Compare shapes with a backbone's sizes, from headers alone; notices. `base` is the backbone that their config
    names. Raises OtherModelError, which asks for that one."""
    owner = (f"{base}, which --model can name" if base
             else "another model, which their config does not name: name it with --model")

    def expect(key: str, *expected: int) -> None:
        if tuple(shapes[key]) != expected:
            raise OtherModelError(f"The heads tensor {key} has shape {list(shapes[key])}, but this backbone needs "
                                  f"{list(expected)}: these heads belong to {owner}.", base)

    for key in sorted(found.linear.values(), key=lambda key: key.endswith("bias")):
        expect(key, *([hidden] if key.endswith("bias") else [hidden, hidden]))
    if found.ids and len(shapes[found.ids]) != 1:
        raise HeadsError("The draft vocabulary must be a list of ids; this one is a table.")
    extra = 0
    for key in found.output.values():
        rows = shapes[key][0] if shapes[key] else 0
        choices = shapes[found.ids][0] if found.ids else vocabulary or shapes[found.output[0]][0]
        padding = rows - (vocabulary or choices)
        is_whole = 0 <= padding <= MAX_PADDING  # all rows, also where a draft vocabulary picks some of them
        expect(key, rows if is_whole else choices, hidden)
        extra = max(extra, padding if is_whole else 0)
    return [f"the output matrices have {extra} rows more than the vocabulary; those are never drafted"] if extra else []


def name_of(found: Found, suffix: str, is_whole: bool) -> str:
    """The entry of LAYOUTS that these heads are filed by, in a file of this suffix; `is_whole`: a full model's."""
    if found.pattern is TENSORRT:
        return "tensorrt-llm"
    if found.pattern is VLLM:
        return "vllm" if any(part == "bias" for _, _, part in found.linear) else "vllm-no-bias"
    if is_whole:
        return "medusa-2"
    return "medusa" if suffix == ".safetensors" else "medusa-pt"


def build(found: Found, tensors: Mapping[str, Tensor], hidden: int, vocabulary: int | None) -> MedusaHeads:
    """Heads of tensors that `check` has passed."""
    for key in found.keys:
        if not tensors[key].isfinite().all():
            raise HeadsError(f"The heads tensor {key} holds NaN or infinite numbers.")
    ids = tensors[found.ids].long() if found.ids else None
    order = None
    if ids is not None:
        ids, order = ids.sort()
        top = vocabulary or int(ids[-1:].sum()) + 1
        if not len(ids) or (ids[1:] == ids[:-1]).any() or ids[0] < 0 or ids[-1] >= top:
            raise HeadsError(f"The draft vocabulary must list different ids below {top}; this one does not.")
    own = [tensors[found.output[head]] for head in sorted(found.output)] if not found.one_output else []
    output = torch.stack([_rows(matrix, ids, order, vocabulary) for matrix in own]) if own else None
    module = MedusaHeads(found.heads, hidden, found.layers, ids, output)
    with torch.no_grad():
        for (head, layer, part), key in found.linear.items():
            getattr(module, part)[layer, head] = tensors[key]
    return module


def _rows(matrix: Tensor, ids: Tensor | None, order: Tensor | None, vocabulary: int | None) -> Tensor:
    """The rows that are drafted from, by rising id; a matrix of the whole vocabulary still holds the others."""
    if ids is None:
        return matrix[:vocabulary]
    return matrix[order if len(matrix) == len(ids) else ids]


def _counted(pattern: Keys, linear: dict[tuple[int, int, str], str], output: dict[tuple[int, int], str], ids: str,
             original_lm_head: bool) -> Found:
    """Heads and layers, counted by their keys; refuses gaps."""
    heads = 1 + max(place[0] for place in (*linear, *output))
    layers = 1 + max(place[1] for place in linear)
    biased = pattern.needs_bias or any(part == "bias" for _, _, part in linear)
    missing = [(head, layer, part) for head in range(heads) for layer in range(layers)
               for part in ("weight", "bias")[: 1 + biased] if (head, layer, part) not in linear]
    if missing:
        head, layer, part = missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        name = pattern.linear.format(head=head, layer=layer, part=part)
        raise HeadsError(f"The heads file lacks {name} (head {head} of {heads}, counted from 0){more}; heads with "
                         "missing tensors would draft noise.")
    layer = layers if "{layer}" in pattern.output else 0
    owned = {head: output[head, layer] for head in range(heads) if (head, layer) in output}
    one = original_lm_head and set(owned) == {0} and len(output) == 1
    if output and len(owned) < heads and not one:
        odd = ", ".join(str(head) for head in range(heads) if head not in owned)
        raise HeadsError(f"Some heads own an output matrix and head {odd} (from 0) does not; all must, or none.")
    return Found(pattern, heads, layers, linear, owned, ids, one)


def _place(pattern: Keys, name: str) -> tuple[int, int, str] | None:
    """Head, layer and part (`weight`, `bias`, or empty for an output matrix) that a key names."""
    if match := _compiled(pattern.linear).fullmatch(name):
        return int(match["head"]), int(match["layer"]), match["part"]
    if match := _compiled(pattern.output).fullmatch(name):
        return int(match["head"]), int(match.groupdict().get("layer", 0)), ""
    return None


@cache
def _compiled(pattern: str) -> re.Pattern:
    groups = {"head": r"(?P<head>\d{1,3})", "layer": r"(?P<layer>\d{1,3})", "part": "(?P<part>weight|bias)"}
    return re.compile(pattern.replace(".", r"\.").format(**groups))


def _stripped(key: str) -> str:
    changed = True
    while changed:
        changed = False
        for prefix in _PREFIXES:
            if key.startswith(prefix):
                key, changed = key.removeprefix(prefix), True
    return key


# ------------------------------------------------------------------------------------------------------------- writing


def losses(module: MedusaHeads, layout: str) -> list[str]:
    """What this layout cannot hold of these heads, in words for the person who asked for it."""
    target, lost = LAYOUTS[layout], []
    if not target.bias and (largest := float(module.bias.detach().abs().max())):
        lost.append(f"this layout has no biases: they are left out (the largest is {largest:.2g}), so the heads will "
                    "draft worse")
    if module.draft_ids is not None and not target.ids:
        lost.append("this layout has no draft vocabulary: the heads will draft from the whole vocabulary")
    return lost


def tensors_of(module: MedusaHeads, layout: str, dtype: torch.dtype, lm_head: Tensor | None = None
               ) -> dict[str, Tensor]:
    """The heads as this layout names them. `lm_head` [V, d], the backbone's, is written where the layout wants output
    matrices and the heads share that one. Raises HeadsError."""
    target, ids, output = LAYOUTS[layout], module.draft_ids, module.output
    if output is None and not target.shares:
        if lm_head is None:
            raise HeadsError(f"The {layout} layout needs an output matrix, and these heads share the backbone's: name "
                             "the backbone with --model.")
        output = (lm_head if ids is None or not target.ids else lm_head[ids])[None]
        if target.keys is not VLLM:
            output = output.expand(module.heads, -1, -1)
    elif output is not None and ids is not None and not target.ids:
        raise HeadsError(f"The {layout} layout has no draft vocabulary, and these heads own matrices for one.")
    made = {}
    for head in range(module.heads):
        for layer in range(module.layers):
            for part in ("weight", "bias")[: 1 + target.bias]:
                made[target.keys.linear.format(head=head, layer=layer, part=part)] = getattr(module, part)[layer, head]
    for head in range(0 if output is None else len(output)):
        made[target.keys.output.format(head=head, layer=module.layers)] = output[head]
    made = {target.prefix + name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
            for name, tensor in made.items()}
    if ids is not None and target.ids:
        made[target.prefix + target.ids] = ids.to("cpu", torch.int64 if target.keys is VLLM else torch.int32)
    return made


def config_of(module: MedusaHeads, layout: str, facts: Mapping[str, object]) -> dict[str, object]:
    """`facts` (a heads config) with the fields that this layout's loaders read."""
    heads, layers = module.heads, module.layers
    if LAYOUTS[layout].keys is VLLM:  # its loader takes every field with "num" and "heads" in its name for the count
        rest = {name: value for name, value in facts.items() if not name.startswith("medusa_num")}
        return {**rest, "model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": heads,
                "num_hidden_layers": layers, "max_paths": 64, "topk": 10, "medusa_fc_bias": LAYOUTS[layout].bias,
                "original_lm_head": module.output is None,
                "truncated_vocab_size": None if module.draft_ids is None else len(module.draft_ids)}
    if LAYOUTS[layout].keys is TENSORRT:
        return {**facts, "num_medusa_heads": heads, "num_medusa_layers": layers, "max_draft_len": 63}
    return {**facts, "medusa_num_heads": heads, "medusa_num_layers": layers}
