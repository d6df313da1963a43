"""Published Medusa checkpoints by name: backbone, heads, chat template, tree, memory and licence of each.

Sizes are the models' own configs, so that memory is known before anything is fetched. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from medusa_viz.models import memory
from medusa_viz.models.memory import CACHED_TOKENS, Footprint, cached_per_token, gb

TEMPLATES = Path(__file__).resolve().parents[2] / "assets" / "templates"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model of the Llama family."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    attention_heads: int
    key_heads: int

    @property
    def footprint(self) -> Footprint:
        keys = self.hidden // self.attention_heads * self.key_heads
        layer = 2 * self.hidden * self.hidden + 2 * self.hidden * keys + 3 * self.hidden * self.intermediate
        norms = (2 * self.layers + 1) * self.hidden
        return Footprint(self.layers * layer, 2 * self.vocabulary * self.hidden + norms)

    @property
    def cached_per_token(self) -> int:
        return cached_per_token(self.layers, self.key_heads, self.hidden // self.attention_heads)


@dataclass(frozen=True)
class Published:
    """One published pair of backbone and heads; for Medusa-2 both are one repository."""

    name: str
    title: str
    backbone: str
    heads: str
    layout: str
    head_count: int
    own_output: bool
    sizes: Sizes
    tree: str
    """Spec of the tree that its makers drafted with, as `--tree` takes it."""
    licence: str
    """Of the backbone; the heads' repository may add its own terms."""
    template: str = ""
    """File in `assets/templates` for a tokenizer that brings none."""

    @property
    def chat_template(self) -> str:
        return (TEMPLATES / f"{self.template}.jinja").read_text("utf-8") if self.template else ""

    @property
    def head_parameters(self) -> int:
        hidden = self.sizes.hidden
        return self.head_count * (hidden * hidden + hidden + self.own_output * self.sizes.vocabulary * hidden)

    def need(self, dtype: str) -> float:
        """Bytes of backbone, heads and the cache of one session, `--dtype` as asked."""
        beside = self.head_parameters + CACHED_TOKENS * self.sizes.cached_per_token
        return replace(self.sizes.footprint, beside=beside).bytes(dtype)


_LLAMA_7B = Sizes(32, 4096, 11008, 32000, 32, 32)
_LLAMA_13B = Sizes(40, 5120, 13824, 32000, 40, 40)
_LLAMA_33B = Sizes(60, 6656, 17920, 32000, 52, 52)
_MISTRAL_7B = Sizes(32, 4096, 14336, 32000, 32, 8)
_LLAMA31_8B = Sizes(32, 4096, 14336, 128256, 32, 8)
_TINY_1B = Sizes(22, 2048, 5632, 32000, 32, 4)
_GENERAL = "published:mc_sim_7b_63"
_RESEARCH = "non-commercial (LLaMA)"


def _vicuna_v13(size: str, sizes: Sizes) -> Published:
    return Published(f"vicuna-{size}-v1.3", f"Vicuna {size.upper()} v1.3", f"lmsys/vicuna-{size}-v1.3",
                     f"FasterDecoding/medusa-vicuna-{size}-v1.3", "medusa-pt", 5, True, sizes,
                     f"published:vicuna_{size}_stage1", _RESEARCH, "vicuna")


def _medusa_2(name: str, title: str, repository: str, sizes: Sizes, tree: str, licence: str, template: str = ""
              ) -> Published:
    return Published(name, title, repository, repository, "medusa-2", 5, True, sizes, tree, licence, template)


PUBLISHED = {preset.name: preset for preset in (
    Published("tinyllama-1.1b", "TinyLlama 1.1B Chat", "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
              "joaogante/TinyLlama-1.1B-Chat-v1.0-medusa-wikitext", "medusa-pt", 3, True, _TINY_1B, _GENERAL,
              "Apache-2.0"),
    _vicuna_v13("7b", _LLAMA_7B),
    _medusa_2("vicuna-7b-v1.5", "Vicuna 7B v1.5 (Medusa-2)", "FasterDecoding/medusa-1.0-vicuna-7b-v1.5", _LLAMA_7B,
              "published:vicuna_7b_stage2", "Llama 2 Community", "vicuna"),
    _medusa_2("zephyr-7b-beta", "Zephyr 7B beta (Medusa-2)", "FasterDecoding/medusa-1.0-zephyr-7b-beta", _MISTRAL_7B,
              "published:zephyr_stage2", "MIT", "zephyr"),
    Published("mistral-7b-v0.2", "Mistral 7B Instruct v0.2", "mistralai/Mistral-7B-Instruct-v0.2",
              "text-generation-inference/Mistral-7B-Instruct-v0.2-medusa", "medusa", 3, True, _MISTRAL_7B,
              _GENERAL, "Apache-2.0"),
    _medusa_2("mistral-7b-v0.2-medusa2", "Mistral 7B Instruct v0.2 (Medusa-2)",
              "EmbeddedLLM/Medusa2-Mistral-7B-Instruct-v0.2", _MISTRAL_7B, _GENERAL, "Apache-2.0"),
    Published("llama-3.1-8b", "Llama 3.1 8B Instruct", "meta-llama/Meta-Llama-3.1-8B-Instruct",
              "philschmid/llama-3-1-8b-instruct-medusa", "medusa", 3, False, _LLAMA31_8B, _GENERAL,
              "Llama 3.1 Community (its page asks for a log-in)"),
    _vicuna_v13("13b", _LLAMA_13B),
    _medusa_2("vicuna-13b-v1.5", "Vicuna 13B v1.5 (Medusa-2)", "FasterDecoding/medusa-1.0-vicuna-13b-v1.5", _LLAMA_13B,
              "published:vicuna_13b_stage2", "Llama 2 Community", "vicuna"),
    _vicuna_v13("33b", _LLAMA_33B),
    _medusa_2("vicuna-33b-v1.3-medusa2", "Vicuna 33B v1.3 (Medusa-2)", "FasterDecoding/medusa-1.0-vicuna-33b-v1.3",
              _LLAMA_33B, "published:vicuna_33b_stage2", _RESEARCH, "vicuna"),
)}


@dataclass(frozen=True)
class Fit:
    """Whether a published model fits: in which `--dtype`, the most exact first, and one sentence that says so."""

    preset: Published
    dtypes: list[str]
    sentence: str
    needs: str
    """Memory by dtype: `32.1 GB in fp32, 16.0 GB in bf16`."""

    @property
    def dtype(self) -> str | None:
        """The one that it is loaded in where nobody names another."""
        return next(iter(self.dtypes), None)


def fits(device: str, free: int | None = None) -> list[Fit]:
    """Every published model, smallest first, against the memory that is free on `cpu` or `cuda` (measured now)."""
    free = memory.free(device) if free is None else free
    dtypes = ("bf16", "8bit", "4bit") if device.startswith("cuda") else ("fp32", "bf16")
    return [_fit(preset, dtypes, free, "GPU memory" if device.startswith("cuda") else "memory")
            for preset in sorted(PUBLISHED.values(), key=lambda preset: preset.need("bf16"))]


def _fit(preset: Published, dtypes: Sequence[str], free: int, what: str) -> Fit:
    needs = ", ".join(f"{gb(preset.need(dtype))} in {dtype}" for dtype in dtypes)
    fitting = [dtype for dtype in dtypes if preset.need(dtype) <= free]
    if fitting:
        need = f"{gb(preset.need(fitting[0]))} of the {gb(free)} of {what} that are free"
        return Fit(preset, fitting, f"{preset.title} fits in {fitting[0]}: it needs {need}.", needs)
    return Fit(preset, [], f"{preset.title} does not fit: it needs {needs}, and {gb(free)} of {what} are free.", needs)
