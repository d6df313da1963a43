"""Pin and compare: the pinned step A beside the step on screen B, where both stand on the same prefix."""

from __future__ import annotations

from medusa_viz.decoding.records import UNVERIFIED, Step
from medusa_viz.figures import numbers
from medusa_viz.figures.texts import Texts
from medusa_viz.tuning.builders import expected_tokens_per_step
from medusa_viz.ui.snapshot import Snapshot


def comparison(snapshot: Snapshot, t: Texts) -> dict | None:
    """None without a pin. `rows`: what A and B come to and their difference; `differs`: rows of B whose verdict is
    not that of A's node on the same path (a path that A lacks differs in nothing); `verdicts`: A's verdict by path,
    so that the page can show A in B's tree."""
    pinned = snapshot.pinned
    if pinned is None:
        return None
    label = t("view.pin.label_dynamic" if pinned.dynamic else "view.pin.label",
              top_s="·".join(map(str, pinned.walls.top_s)), nodes=pinned.step.shape.nodes,
              mode=t(f"view.mode.{pinned.acceptance.rule}"), temperature=f"{pinned.acceptance.temperature:g}")
    if not pinned.here or not snapshot.steps:
        return {"here": False, "label": label, "note": t("view.pin.elsewhere"), "rows": [], "differs": [],
                "verdicts": {}}
    shown = snapshot.steps[snapshot.index]
    before = _by_path(pinned.step)
    rows = _rows((pinned.step, pinned.dynamic), (shown, snapshot.dynamic), snapshot.accuracy, t)
    return {"here": True, "label": label, "note": "", "rows": rows,
            "verdicts": before,
            "differs": [row for row, (path, verdict) in enumerate(_by_path(shown).items())
                        if before.get(path, verdict) != verdict]}


def _by_path(step: Step) -> dict[str, str]:
    verdicts = step.verdict.verdict if step.verdict else [UNVERIFIED] * step.cache_rows
    return {".".join(map(str, path)): verdict for path, verdict in zip(step.shape.paths, verdicts, strict=True)}


def _rows(a: tuple[Step, bool], b: tuple[Step, bool], accuracy: list[list[float]], t: Texts) -> list[dict]:
    """Of A and B, each with whether its tree is rebuilt at each step: of no such tree can the table tell the mean."""
    figures = {
        "nodes": (lambda step, _: step.shape.nodes, str),
        "committed": (lambda step, _: len(step.verdict.committed) if step.verdict else None, str),
        "expected": (lambda step, dynamic: expected_tokens_per_step(step.shape, accuracy) if accuracy and not dynamic
                     else None, lambda value: f"{value:.2f}"),
        "forward": (lambda step, _: step.timings.verify, numbers.milliseconds),
    }
    return [_row(key, value(*a), value(*b), write, t) for key, (value, write) in figures.items()]


def _row(key: str, a: float | None, b: float | None, write, t: Texts) -> dict:
    """One line of A | B | Δ; a part that is not known yet is a dash."""
    known = a is not None and b is not None
    sign = "+" if known and b > a else numbers.MINUS if known and b < a else "±"
    return {"key": key, "label": t(f"view.pin.{key}"), "a": numbers.NONE if a is None else write(a),
            "b": numbers.NONE if b is None else write(b),
            "delta": sign + write(abs(b - a)) if known else numbers.NONE}
