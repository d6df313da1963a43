"""Knobs of self-distillation; apart from it, so that the command line needs no model library to list them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from medusa_viz.decoding.settings import Checked, SettingsError, setting

LEAST_TURN = 4
"""Tokens of a user turn that the model wrote, its end included."""

MOST_DROPPED = 256
"""Texts in a row that may prove unfit before a run without an end gives up. Where one text in twenty is fit, the chance
of such a row is two in a million."""


@dataclass(frozen=True)
class DistilSettings(Checked):
    """Knobs of a run."""

    tokens: int = setting(0, "reply tokens to write; 0 = one reply to every prompt of the file", 0, 10**9, 1)
    temperatures: str = setting("0:60,0.7:30,1:10", "mix of temperatures as temperature:share, …; 0 is greedy")
    max_new_tokens: int = setting(256, "most tokens of a reply", 2, 100_000, 1)
    turn_tokens: int = setting(128, "most tokens of a user turn that the model writes itself", LEAST_TURN, 10_000, 1)
    loops: str = setting("cut", "replies that repeat themselves to the end: cut or keep", choices=("cut", "keep"))
    held_out: float = setting(0.1, "share of self-written user turns whose replies are held out", 0.0, 1.0)
    rows: int = setting(64, "replies written side by side", 1, 4_096, 1)
    seed: int = setting(0, "seed of order, temperatures and draws", 0, 2**31 - 1, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.mix  # refuses a mix that cannot be read

    @cached_property
    def mix(self) -> dict[float, float]:
        """Share by temperature; the shares sum to 1."""
        try:
            pairs = [part.partition(":") for part in self.temperatures.split(",")]
            shares = {float(heat): float(share or 1) for heat, _, share in pairs}
            total = sum(shares.values())
            if not all(0 <= heat <= 2 and share > 0 for heat, share in shares.items()) or not np.isfinite(total):
                raise ValueError
        except ValueError:
            raise SettingsError(f"temperatures is {self.temperatures!r:.60}; it must read like 0:60,0.7:40, with "
                                "temperatures from 0 to 2 and shares above 0.") from None
        return {heat: share / total for heat, share in shares.items()}

    def temperature(self, number: int, sampled_only: bool = False) -> float:
        """The temperature of job `number`."""
        shares = {heat: share for heat, share in self.mix.items() if heat > 0 or not sampled_only}
        chances = np.array(list(shares.values()))
        return float(np.random.default_rng((self.seed, number, 1)).choice(list(shares), p=chances / chances.sum()))
