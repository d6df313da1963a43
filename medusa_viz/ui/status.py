"""Status, run, text and steps: the parts of the view that tell where a session stands."""

from __future__ import annotations

from medusa_viz.decoding.records import Step
from medusa_viz.figures import numbers, tokens
from medusa_viz.figures.palette import source
from medusa_viz.figures.texts import Texts
from medusa_viz.ui import command, prompt_box
from medusa_viz.ui.snapshot import Snapshot

PHASES = ("propose", "verify", "accept", "commit")


def status(snapshot: Snapshot, t: Texts) -> dict:
    """The one status line. What went wrong is said by the model side; the rest by us."""
    model, shown = snapshot.model, snapshot.model.coming or snapshot.model
    text = t("view.status.ready")
    if snapshot.renewed:
        same = model.title == snapshot.title
        text = t("view.status.renewed") if same else t("view.status.renewed_model", title=model.title)
    if model.state == "error":
        text = model.detail or t("view.status.error")
    elif shown.state == "loading":
        text = t(f"view.status.{shown.phase or 'load'}")
        # Only once something is under way does the detail say more than the phase: how much of it is done. Of a file
        # that grows while it is unpacked, it says how large.
        if shown.detail and (shown.fraction or shown.phase == "unpack"):
            text = f"{text} {shown.detail}"
        if model.coming:
            text = t("view.status.beside", what=text)
    key = "view.status.astray" if model.astray else "view.status.not_switched"
    notice = snapshot.notice or (t(key, error=model.fault) if model.fault else "")
    return {"state": model.state, "text": text, "fraction": shown.fraction, "loading": shown.state == "loading",
            "notice": notice, "title": (not snapshot.renewed and model.title) or snapshot.title}


def run(snapshot: Snapshot, step: Step | None, t: Texts) -> dict:
    """What can be done now, and what the buttons say. A run has ended where its last step is shown as it was."""
    at_end = snapshot.index + 1 >= len(snapshot.steps) and not snapshot.changed
    finished = snapshot.finished if at_end else None
    return {
        "recorded": snapshot.recorded, "banner": t(f"view.banner.{snapshot.model.state}") if snapshot.recorded else "",
        "finished": finished, "finished_text": t(f"view.finished.{finished}") if finished else "",
        "pending": snapshot.pending, "changed": snapshot.changed, "step_label": _step_label(snapshot, step, t),
        "verify": _verify_label(step, t), "verify_blocked": blocked(snapshot, step, t), "can": _can(snapshot, step),
        "branch": snapshot.branch,
        "command": command.command(snapshot), "command_blocked": command.blocked(snapshot, t),
        "branches": [{"name": tab.name, "steps": tab.steps, "fork": tab.fork} for tab in snapshot.branches],
    }


def too_large(snapshot: Snapshot, step: Step | None) -> bool:
    """Drawn only: it has more nodes than are verified here."""
    return step is not None and step.verification is None and step.shape.nodes > snapshot.max_nodes


def blocked(snapshot: Snapshot, step: Step | None, t: Texts) -> str:
    """Why the step shown cannot be run, which verifies the drawn tree; empty where it can."""
    if too_large(snapshot, step):
        return t("session.over_limit", nodes=step.shape.nodes, limit=snapshot.max_nodes)
    if snapshot.model.state != "ready":
        return t("session.not_ready")
    return t("session.other_model") if snapshot.foreign else ""


def _can(snapshot: Snapshot, step: Step | None) -> dict[str, bool]:
    count, ready = len(snapshot.steps), snapshot.model.state == "ready"
    further = snapshot.index + 1 < count
    # A step that must be run needs the model; one that is only shown does not.
    runs = (snapshot.changed or snapshot.pending) and ready and not snapshot.foreign and not too_large(snapshot, step)
    step = runs or (further and not snapshot.changed)
    return {"start": ready, "step": step, "back": snapshot.index > 0, "forward": further, "play": step,
            "reset": count > 0 and (ready or snapshot.recorded)}


def _step_label(snapshot: Snapshot, step: Step | None, t: Texts) -> str:
    if step is None:
        return t("view.step.none")
    if snapshot.changed:
        return t("view.step.branch")
    if not snapshot.pending:
        ended = snapshot.finished if snapshot.index + 1 >= len(snapshot.steps) else None
        return t(f"view.finished.{ended}") if ended else t("view.step.forward")
    return t("view.step.commit", n=len(step.verdict.committed)) if step.verdict else t("view.step.verify")


def _verify_label(step: Step | None, t: Texts) -> str:
    if step is None or step.verification is not None:
        return ""
    if step.estimate_ms is None:
        return t("view.verify", nodes=step.shape.nodes)
    return t("view.verify_estimate", nodes=step.shape.nodes, time=numbers.duration(step.estimate_ms))


def steps(snapshot: Snapshot) -> dict:
    """The step slider: dots as high as what each step committed. What was not yet, the tip and a changed step, has
    nothing to tell: it may still have to be guessed."""
    committed = [len(step.verdict.committed) if step.verdict else 0 for step in snapshot.steps]
    if committed and not snapshot.finished:
        committed[-1] = 0
    if snapshot.changed:
        committed[snapshot.index] = 0
    return {"index": snapshot.index, "count": len(snapshot.steps), "committed": committed}


def phases(snapshot: Snapshot, step: Step | None, t: Texts) -> list[dict]:
    """Measured milliseconds of the four parts; of verify, on how many nodes where they are not those drawn."""
    found = [{"name": name, "ms": getattr(step.timings, name) if step else None, "note": "", "hint": ""}
             for name in PHASES]
    nodes = snapshot.verified_nodes
    if step is not None and step.timings.verify is not None and nodes not in (None, step.shape.nodes):
        found[1] |= {"note": t("view.phase.on_nodes", n=nodes), "hint": t("view.phase.on_nodes_hint", n=nodes)}
    return found


def equality(snapshot: Snapshot, t: Texts) -> dict:
    """Does the text equal plain greedy's?"""
    found = snapshot.equality
    # A recording has no model to compare with, so nothing is to be waited for.
    state = "off" if snapshot.recorded and found.note == "waiting" else found.note
    gap = "" if found.gap is None else f"{found.gap:.1e}"
    return {"state": state, "on": snapshot.check_on, "plain_due": snapshot.plain_due,
            "text": t(f"view.equality.{state}", position=(found.position or 0) + 1, gap=gap)}


def text(snapshot: Snapshot, step: Step | None, t: Texts) -> dict:
    """Prompt and committed tokens, each with the head it came from, and the tokens of the step shown."""
    chips = [_chip(snapshot, token, None, -1) for token in snapshot.prompt_ids]
    for done in snapshot.steps[: snapshot.index]:
        chips += [_chip(snapshot, token, depth, done.index)
                  for depth, token in enumerate(done.verdict.committed if done.verdict else ())]
    pending = []
    if step is not None and step.verdict is not None:
        for depth, (token, row) in enumerate(zip(step.verdict.committed, step.verdict.accepted, strict=False)):
            path = ".".join(map(str, step.shape.paths[row]))
            pending.append({**_chip(snapshot, token, depth, step.index), "path": path})
    return {"prompt": snapshot.prompt, "chips": chips, "pending": pending,
            "beside": prompt_box.beside(snapshot.on_start, t)}


def _chip(snapshot: Snapshot, token: int, depth: int | None, step: int) -> dict:
    kind = snapshot.kinds.get(token, "text")
    shown = tokens.spaced(snapshot.texts.get(token) or f"#{token}")
    return {"t": shown, "k": kind, "src": None if depth is None else source(depth), "step": step}
