"""GGUF files: a whole model in one file. transformers unpacks its weights into ordinary ones, which take as much memory
as any, and rebuilds the tokenizer from what the file says of it."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from medusa_viz.models import memory
from medusa_viz.models.memory import Footprint, gb

UNPACKED = "fp32"
"""What the weights are unpacked into, all of them at once in the machine's memory, whatever dtype they have then."""


class GgufError(ValueError):
    """A GGUF file that cannot be used; the message is one sentence."""


def file_of(source: str | Path) -> Path | None:
    """The GGUF file that a model is, or that lies in its folder in the place of a config. Raises GgufError for a
    folder that holds several."""
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if len(files) > 1:
        raise GgufError(f"{path} holds {len(files)} GGUF files, {files[0].name} and others: name the one to run.")
    return files[0] if files else None


def located(source: str | Path) -> tuple[str | Path, dict[str, str]]:
    """What transformers' `from_pretrained` takes for a model's place."""
    file = file_of(source)
    return (file.parent, {"gguf_file": file.name}) if file else (source, {})


def notice(file: Path, footprint: Footprint) -> str:
    """What its user should know before it is loaded."""
    return (f"{file.name} holds {gb(file.stat().st_size)} and takes {gb(_unpacked(footprint))} once its weights are "
            f"unpacked into {UNPACKED}; its tokenizer is rebuilt from the file, and may cut some text otherwise than "
            "the original's")


def check(file: Path, footprint: Footprint, quantised: str) -> None:
    """Raise GgufError where unpacking cannot be done, before it begins."""
    if quantised:
        raise GgufError(f"{file.name} is a GGUF file, whose weights are unpacked and cannot be stored in {quantised}: "
                        "choose fp32 or bf16, or name the original model.")
    free = memory.free("cpu")
    if _unpacked(footprint) > free:
        raise GgufError(f"{file.name} takes {gb(_unpacked(footprint))} while its weights are unpacked into {UNPACKED}, "
                        f"and {gb(free)} of memory are free: name the original model instead, with --dtype bf16.")


def as_ordinary(model: PreTrainedModel) -> PreTrainedModel:
    """The model without transformers' quantizer and its config, for which saving and training would refuse weights
    that are ordinary ones by now."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def _unpacked(footprint: Footprint) -> float:
    return (footprint.linears + footprint.rest) * memory.BYTES[UNPACKED]
