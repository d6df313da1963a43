"""What "quick" and "full" mean for the threshold study, on the page and for the command; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Extent:
    """Which ε and T are tried, and on how many of the prompts that ship, with how many new tokens of each."""

    epsilons: tuple[float, ...]
    temperatures: tuple[float, ...]
    prompts: int
    tokens: int


STUDY = {
    "quick": Extent((0.01, 0.05, 0.09, 0.15, 0.25), (0.3, 0.7, 1.1), 3, 32),
    "full": Extent(tuple(round(0.01 * i, 2) for i in range(1, 26)), (0.3, 0.5, 0.7, 0.9, 1.1, 1.3), 8, 64),
}
