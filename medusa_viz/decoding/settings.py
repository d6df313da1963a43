"""Settings: one dataclass per concern; default, bounds and help of each field stand here and nowhere else.

Command line options and page knobs are made from these fields. Field metadata: `help` (English), and for numbers
`low`, `high`, `step`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

ACCEPTANCE_MODES = ("greedy", "typical", "rejection")
LEAST_TEMPERATURE = 1e-6
"""Below it logits / T leave what fp32 can hold; softmax has long been all on the argmax."""

MAX_RANKS = 10
"""Widest top-s the page offers and the ranks an accuracy table holds."""

SIZE_DETENTS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4680)


class SettingsError(ValueError):
    """A setting out of bounds; the message is one sentence naming it, its value and its bounds."""


def setting(default: Any, help: str, low: float | None = None, high: float | None = None, step: float | None = None,
            choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field with its bounds and help."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "step": step, "choices": choices})


class Checked:
    """Checks every field against its own metadata once the dataclass is built."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value, meta = getattr(self, f.name), f.metadata
            if meta.get("choices") and value not in meta["choices"]:
                raise SettingsError(f"{f.name} is {value!r}; choose one of {', '.join(meta['choices'])}.")
            if meta.get("low") is not None:
                kind = int if f.type in ("int", int) else (int, float)
                number = isinstance(value, kind) and not isinstance(value, bool)
                if not number or not meta["low"] <= value <= meta["high"]:  # NaN lies between no bounds
                    whole = " a whole number" if kind is int else ""
                    raise SettingsError(f"{f.name} is {value!r:.40}; it must be{whole} between {meta['low']} and "
                                        f"{meta['high']}.")


@dataclass(frozen=True)
class Acceptance(Checked):
    """Which drafted tokens count. Temperature 0 is greedy in every mode."""

    mode: str = setting("greedy", "greedy: the backbone's argmax; typical: probable enough; rejection: drawn exactly",
                        choices=ACCEPTANCE_MODES)
    temperature: float = setting(0.0, "softmax temperature of the backbone; 0 means greedy", 0.0, 2.0, 0.1)
    epsilon: float = setting(0.09, "typical acceptance: the hard threshold ε", 0.01, 1.0, 0.01)
    delta: float = setting(0.3, "typical acceptance: the factor δ before e^(−entropy)", 0.01, 1.0, 0.01)
    top_p: float = setting(1.0, "rejection: draw from the smallest set of tokens that holds this probability",
                           0.05, 1.0, 0.05)
    seed: int = setting(0, "rejection: seed of the draws", 0, 2**31 - 1, 1)

    @property
    def rule(self) -> str:
        """The mode in force: temperature 0 is greedy whatever the mode, and so is one too small to divide by."""
        return "greedy" if self.temperature < LEAST_TEMPERATURE else self.mode


@dataclass(frozen=True)
class Walls(Checked):
    """Live tree knobs: top-s per head are the walls, size is what fits inside, best first."""

    top_s: tuple[int, ...] = setting((4, 3, 2, 2), "ranks taken of each head; 0 ends the tree there")
    size: int = setting(16, "most nodes drafted per step, best first by the accuracy table", 0, 100_000, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for k, s in enumerate(self.top_s, start=1):
            if isinstance(s, bool) or not isinstance(s, int) or not 0 <= s <= MAX_RANKS:
                raise SettingsError(f"top-s of head {k} is {s!r}; it must be a whole number from 0 to {MAX_RANKS}.")


@dataclass(frozen=True)
class Limits(Checked):
    """When a run ends."""

    max_new_tokens: int = setting(256, "most new tokens; the last step is cut to the token", 1, 100_000, 1)


@dataclass(frozen=True)
class ServerLimits(Checked):
    """How much one server does for its visitors."""

    max_sessions: int = setting(16, "visitors' sessions that are kept, each with its key-value cache; the oldest idle "
                                "one makes room", 1, 1000, 1)
    max_nodes: int = setting(0, "most nodes that a step verifies, larger trees are drawn but not run; 0 means 256 on a "
                             "CPU and 1024 on CUDA", 0, 16_384, 1)
