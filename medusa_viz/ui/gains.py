"""Gains: what each drafted node was expected to bring, best first, beside what this step accepted."""

from __future__ import annotations

from medusa_viz.decoding.records import Step
from medusa_viz.figures import numbers
from medusa_viz.figures.texts import Texts
from medusa_viz.tuning.builders import Accuracy, node_values

MOST = 64  # bars; what follows is thinner than a pixel


def gains(step: Step, accuracy: Accuracy, t: Texts) -> dict:
    """`rows`: the nodes worth most, each with the chance that its whole path is right; `expected`: what they add up
    to; `note`: the same beside what was accepted, which the page tells once it has shown the accepted path."""
    if not accuracy or not step.shape.nodes:
        none = t("view.gains.none")
        return {"expected": none, "note": none, "rows": []}
    values = node_values(step.shape, accuracy)
    best = sorted(range(1, len(values)), key=lambda row: (-values[row], row))[:MOST]
    together = f"{sum(values) - 1:.2f}"
    expected = note = t("view.gains.expected", expected=together)
    if step.verdict:
        note = t("view.gains.accepted", expected=together, accepted=len(step.verdict.accepted) - 1)
    return {"expected": expected, "note": note, "rows": [{"row": row, "value": float(f"{values[row]:.5g}"),
                                    "text": numbers.probability(values[row])} for row in best]}
