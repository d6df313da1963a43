"""Where a model's weights go: sizes from its config, whether they fit, quantised or not, on one card or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from medusa_viz.models import gguf_files, memory
from medusa_viz.models.device import Placement
from medusa_viz.models.memory import BYTES, CACHED_TOKENS, QUANTISED, Footprint, gb


class BackboneError(ValueError):
    """A model that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Outline:
    """A model's sizes, known from its config alone."""

    config: PretrainedConfig
    model: PreTrainedModel
    """All modules, with shapes and without numbers."""
    hidden_size: int
    vocab_size: int
    footprint: Footprint
    """Of the weights and the cache of one session."""


def outline(folder: str | Path) -> Outline:
    """Sizes of the model in `folder`, of which only the config is read. Raises BackboneError."""
    place, file = gguf_files.located(folder)
    with _one_sentence(folder), _quiet():
        config = AutoConfig.from_pretrained(place, **file)
        if config.is_encoder_decoder:
            raise BackboneError(f"{folder} is an encoder-decoder; Medusa needs a decoder-only language model.")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings()
        if head is None:
            raise BackboneError(f"{folder} is no causal language model: it has no LM head.")
    linears = sum(module.weight.numel() for module in model.modules()
                  if isinstance(module, torch.nn.Linear) and module is not head)
    total = sum(parameter.numel() for parameter in model.parameters())
    footprint = Footprint(linears, total - linears, _cached(config.get_text_config()))
    return Outline(config, model, head.weight.shape[1], head.weight.shape[0], footprint)


def load_model(folder: str | Path, placement: Placement, name: str, attention: str | None = None, heads: int = 0
               ) -> PreTrainedModel:
    """The model on its device, every weight from its files. `heads` are the numbers of the Medusa heads that go there
    too. Raises BackboneError, for what does not fit before any weight is read."""
    needed = outline(folder).footprint
    if placement.device.type != "cpu":  # where heads lie already
        needed = replace(needed, beside=needed.beside + heads)
    check_fit(needed, placement, name)
    place, file = gguf_files.located(folder)
    if file:
        gguf_files.check(place / file["gguf_file"], needed, placement.quantised)
    arguments = {"dtype": placement.dtype, "attn_implementation": attention,
                 "device_map": device_map(needed, placement), "quantization_config": quantiser(placement)}
    with _one_sentence(folder), _quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            place, output_loading_info=True, **file,
            **{argument: value for argument, value in arguments.items() if value is not None})
    if missing := sorted(info["missing_keys"]):
        raise BackboneError(f"{name} lacks {len(missing)} of its weights, the first is {missing[0]}: its files are not "
                            "complete.")
    if file:
        gguf_files.as_ordinary(model)
    return model if arguments["device_map"] else model.to(placement.device)


def check_fit(footprint: Footprint, placement: Placement, name: str) -> None:
    """Refuse what is larger than what is free, with what would fit."""
    dtype = placement.dtype_name
    if placement.device.type not in ("cpu", "cuda") or dtype not in BYTES:
        return
    free = memory.free(str(placement.device))
    if footprint.bytes(dtype) <= free:
        return
    is_card = placement.device.type == "cuda"
    smaller = [other for other in (("bf16", *QUANTISED) if is_card else ("bf16",)) if footprint.bytes(other) <= free]
    raise BackboneError(
        f"{name} needs {gb(footprint.bytes(dtype))} in {dtype}, and {gb(free)} of {'GPU ' * is_card}memory are free"
        + (f": --dtype {smaller[0]} would take {gb(footprint.bytes(smaller[0]))}." if smaller else "."))


def device_map(footprint: Footprint, placement: Placement) -> str | dict[str, str] | None:
    """`auto`, over all cards, where `cuda` was chosen and the first card is too small; else the one device. None on a
    device whose weights are moved there after loading."""
    device = placement.device
    if device.type != "cuda":
        return {"": str(device)} if placement.quantised else None
    if device.index is None and torch.cuda.device_count() > 1:
        if footprint.bytes(placement.dtype_name) > memory.free("cuda:0"):
            return "auto"
        return {"": "cuda:0"}
    return {"": str(device)}


def spilled(model: PreTrainedModel, placement: Placement) -> str:
    """What accelerate put elsewhere since the cards were full, in words; empty where all of the model lies on them."""
    places = [str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()]
    slow = [place for place in places if place in ("cpu", "disk")]
    if placement.device.type != "cuda" or not slow:
        return ""
    where = {"cpu": "the machine's memory", "disk": "the disk"}
    return (f"{len(slow)} of {len(places)} parts of the backbone found no room on the cards and lie in "
            f"{' and on '.join(where[place] for place in sorted(set(slow)))}: every step waits for them")


def _cached(config: PretrainedConfig) -> int:
    """Numbers in the cache of one session, about: some models keep fewer of a token."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    tokens = min(CACHED_TOKENS, getattr(config, "max_position_embeddings", None) or CACHED_TOKENS)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return tokens * memory.cached_per_token(config.num_hidden_layers, key_heads, size)


def quantiser(placement: Placement) -> BitsAndBytesConfig | None:
    """How bitsandbytes stores the linears. The LM head stays as it is: heads and verification both read it."""
    if placement.quantised == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    if placement.quantised == "4bit":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                  bnb_4bit_compute_dtype=placement.dtype)
    return None


@contextmanager
def _one_sentence(source: str | Path) -> Iterator[None]:
    """Turns what transformers raises into a BackboneError."""
    try:
        yield
    except BackboneError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BackboneError(f"The model {source} could not be loaded: {first:.200}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither advice nor a progress bar from transformers: heads inside a full model are no unexpected keys, missing
    ones are refused, and whoever loads a model says so."""
    before, with_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if with_bar:
            logging.enable_progress_bar()
