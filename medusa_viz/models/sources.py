"""Where a model comes from: a preset, a published checkpoint, a folder or a hub id, found by one name.

`find` costs little: at most config and tokenizer of a remote model are fetched. `fetch_weights` gets the rest, once
the heads were seen to fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import AutoTokenizer

from medusa_viz.models import hub
from medusa_viz.models.fetch import Report, ensure_model
from medusa_viz.models.gguf_files import file_of, located
from medusa_viz.models.presets import DEFAULT_TREE, PRESETS, heads_folder
from medusa_viz.models.published import PUBLISHED
from medusa_viz.models.tensors import TensorFile
from medusa_viz.models.text import TextCodec

LM_HEADS = ("lm_head.weight", "embed_out.weight", "embed_tokens.weight", "wte.weight", "embed_in.weight")
"""How files name the matrix of the LM head, or the embedding that it is tied to."""


class SourceError(ValueError):
    """A model that is not there; the message is one sentence."""


@dataclass(frozen=True)
class Source:
    """A backbone that was found, and what belongs to it."""

    folder: Path
    title: str
    heads: str
    """Its own heads; for a model that nobody listed, itself: Medusa-2 keeps them inside."""
    repository: str = ""
    """Hub id whose weights `fetch_weights` has still to get; empty where they are here."""
    chat_template: str = ""
    """For a tokenizer that brings none."""
    tree: str = DEFAULT_TREE
    """Spec of the tree to draft with where nobody names one."""


def title_of(model: str) -> str:
    """What a model of this name is called."""
    known = PRESETS.get(model) or PUBLISHED.get(model)
    return known.title if known else Path(model).name


def find(model: str, report: Report) -> Source:
    """The model of this name. Raises ValueError or RuntimeError whose text is one sentence."""
    if preset := PRESETS.get(model):
        return Source(ensure_model(preset, report), title_of(model), str(heads_folder(preset)))
    if published := PUBLISHED.get(model):
        return Source(hub.small_files(published.backbone), title_of(model), published.heads, published.backbone,
                      published.chat_template, published.tree)
    if hub.is_id(model):
        return Source(hub.small_files(model), title_of(model), model, model)
    if not Path(model).exists():
        raise SourceError(f"{model} is no folder here, no hub id (owner/name) and none of the models that "
                          "`python -m medusa_viz models` lists.")
    file = file_of(model)
    return Source(Path(model), title_of(model), str(file.parent) if file else model)


def fetch_weights(source: Source, report: Report) -> None:
    """Get what `find` left on the hub."""
    if source.repository:
        hub.weights(source.repository, source.folder, report)


def ready(model: str, report: Report) -> Source:
    """The model of this name with all its files here."""
    source = find(model, report)
    fetch_weights(source, report)
    return source


def bare(model: str, report: Report) -> Source:
    """What `find` gives, for a backbone that writes or learns from data: nothing that heads bring may change it."""
    preset = PRESETS.get(model)
    if preset and preset.weights != preset.name:
        raise SourceError(f"The heads of {model} bring an adapter for their backbone: name that, {preset.weights}.")
    return find(model, report)


def codec(source: Source) -> TextCodec:
    """A model's tokenizer, with the chat template that belongs to it."""
    try:
        place, file = located(source.folder)
        tokenizer = AutoTokenizer.from_pretrained(place, **file)
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"The tokenizer of {source.title} could not be loaded: "
                          f"{str(error).splitlines()[0]:.160}") from error
    if source.chat_template and not tokenizer.chat_template:
        tokenizer.chat_template = source.chat_template
    return TextCodec(tokenizer)


def lm_head(folder: Path) -> Tensor:
    """The matrix [V, d] of a model's LM head, read from its files alone."""
    if file_of(folder):
        raise SourceError(f"The LM head of a GGUF file is not read by itself: name the original model of {folder}.")
    files = hub.shards_of(folder)
    if not files:
        name = next((name for name in hub.WHOLE if (folder / name).is_file()), hub.WHOLE[0])
        files = dict.fromkeys(TensorFile(folder / name).shapes, name)
    for ending in LM_HEADS:
        if key := next((key for key in files if key == ending or key.endswith(f".{ending}")), None):
            return TensorFile(folder / files[key]).read([key])[key]
    raise SourceError(f"The LM head of {folder} was not found among its tensors.")
