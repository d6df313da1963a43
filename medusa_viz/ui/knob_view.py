"""The knobs as the page shows them: values, bounds, what they add up to, and why one has no effect."""

from __future__ import annotations

from dataclasses import fields

from medusa_viz.decoding.records import Step
from medusa_viz.decoding.settings import MAX_RANKS, SIZE_DETENTS, Acceptance
from medusa_viz.decoding.tree import dense_nodes
from medusa_viz.figures import numbers
from medusa_viz.figures.texts import Texts
from medusa_viz.ui.presets import PRESETS
from medusa_viz.ui.snapshot import Snapshot

_SLIDERS = ("temperature", "epsilon", "delta", "top_p")


def knobs(snapshot: Snapshot, step: Step | None, t: Texts) -> dict:
    """Everything about the knobs."""
    walls, acceptance = snapshot.walls, snapshot.acceptance
    return {
        "top_s": list(walls.top_s), "heads": len(walls.top_s), "max_rank": MAX_RANKS, "size": walls.size,
        "detents": list(SIZE_DETENTS), "mode": acceptance.rule, "temperature": acceptance.temperature,
        "epsilon": acceptance.epsilon, "delta": acceptance.delta, "top_p": acceptance.top_p,
        "delta_locked": snapshot.delta_locked, "tree": _tree_title(snapshot, t), "readout": readout(snapshot, step, t),
        "badge": badge(step, t), "disabled": _disabled(acceptance.rule, t),
        "presets": [{"name": name, "label": t(f"view.preset.{name}")} for name in PRESETS],
        "bounds": {f.name: [f.metadata["low"], f.metadata["high"], f.metadata["step"]]
                   for f in fields(Acceptance) if f.name in _SLIDERS},
    }


def _tree_title(snapshot: Snapshot, t: Texts) -> str:
    """What stands above the tree. The recording of another model keeps its own trees."""
    return t("view.tree.dynamic" if snapshot.dynamic and not snapshot.foreign else "ui.tree")


def readout(snapshot: Snapshot, step: Step | None, t: Texts) -> str:
    """`4·3·2·2 → 88 possible nodes (4+12+24+48), 48 paths; using 16 (4/6/4/2)`."""
    walls = snapshot.walls
    used = "/".join(f"{count:,}" for count in step.shape.depth_counts) if step is not None else ""
    if snapshot.own_tree and step is not None:
        return t("view.readout.own", nodes=step.shape.nodes, parts=used, paths=step.shape.leaves)
    counts = dense_nodes(walls.top_s)
    product = "·".join(map(str, walls.top_s))
    if snapshot.dynamic and walls.size and counts:
        here = t("view.readout.dynamic_here", nodes=step.shape.nodes, parts=used or "0") if step is not None else ""
        return t("view.readout.dynamic", product=product, size=walls.size, here=here)
    if not counts:
        return t("view.readout.none", product=product)
    possible = t("view.readout.possible", product=product, nodes=sum(counts), paths=counts[-1],
                 parts="+".join(f"{count:,}" for count in counts))
    if step is None:
        return possible
    nodes = step.shape.nodes
    if walls.size > sum(counts) == nodes:
        return possible + t("view.readout.all", size=walls.size, nodes=nodes)
    return possible + (t("view.readout.using", nodes=nodes, parts=used) if nodes else t("view.readout.using_none"))


def badge(step: Step | None, t: Texts) -> dict:
    """How the latest change was answered."""
    if step is None or step.verdict is None:
        return {"kind": "", "text": ""}
    return {"kind": step.reused, "text": t(f"view.badge.{step.reused}", ms=numbers.milliseconds(step.answer_ms))}


def _disabled(rule: str, t: Texts) -> dict[str, str]:
    """Knobs without effect under the rule in force, each with its reason."""
    reasons = {}
    if rule != "typical":
        reasons["epsilon"] = reasons["delta"] = t("view.disabled.typical")
    if rule != "rejection":
        reasons["top_p"] = t("view.disabled.rejection")
    return reasons
