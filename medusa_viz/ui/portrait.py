"""A session as others see it: what its page shows now, and its whole run as a record."""

from __future__ import annotations

from medusa_viz.decoding.records import Branch, Session
from medusa_viz.ui.session import ExplorerSession
from medusa_viz.ui.snapshot import BranchTab, Heads, ModelStatus, Pinned, Snapshot


def snapshot(session: ExplorerSession, status: ModelStatus, notice: str) -> Snapshot:
    """What the page shows now; `notice` is the sentence for the status line."""
    model, _, place = _names(session)
    has_steps = bool(session.lines)
    steps = [entry.step for entry in session.line.entries] if has_steps else []
    if session.draft:
        steps[session.index] = session.draft.step
    own = session.model
    return Snapshot(
        model=status, recorded=session.recorded, title=" · ".join(part for part in (model, *place) if part),
        prompt=session.prompt, prompt_ids=session.prompt_ids, accuracy=session.accuracy,
        texts=session.wording.texts, kinds=session.wording.kinds, steps=steps, index=session.index,
        pending=has_steps and session.pending,
        changed=session.draft is not None, finished=session.line.finished if has_steps else None,
        walls=session.knobs.walls, acceptance=session.knobs.acceptance, delta_locked=session.knobs.delta_locked,
        branch=session.branch,
        branches=[BranchTab(line.name, len(line.entries), line.fork) for line in session.lines.values()],
        notice=notice, equality=session.watch.now(session.line if has_steps else None, session.recorded),
        plain_ms=None if session.recorded or own is None else own.plain_ms, knobs_since=session.knobs_since,
        verified_nodes=session.entry.verified.shape.nodes if has_steps else None, plain_due=session.watch.due,
        pinned=_pinned(session), check_on=session.watch.on, max_nodes=session.max_nodes, screen=session.screen,
        heads=_heads(session), own_tree=session.knobs.own is not None, dynamic=session.knobs.dynamic,
        renewed=session.seat is not None and session.seat.model is not session.host.model, foreign=session.foreign,
        options={} if session.recorded or own is None else own.options, on_start=session.host.options,
        locked=session.host.locked)


def record(session: ExplorerSession) -> Session:
    """The whole session as a record, drawings that were never verified left out."""
    session.needs_steps()
    model, heads, (device, dtype) = _names(session)
    branches = [Branch(line.name, line.parent, line.fork,
                       [entry.step for entry in line.entries if entry.step.verdict is not None])
                for line in session.lines.values()]
    return Session(model, heads, device, dtype, session.prompt, list(session.prompt_ids), session.accuracy,
                   dict(session.wording.texts), dict(session.wording.kinds), branches)


def _names(session: ExplorerSession) -> tuple[str, str, tuple[str, str]]:
    """Model, heads, (device, dtype) of what is shown."""
    if session.recorded:
        opening = session.opening
        return opening.model, opening.heads, (opening.device, opening.dtype)
    if session.model is None:
        return "", "", ("", "")
    placement = session.model.engine.backbone.placement
    return *session.model.names, (placement.device_name, placement.dtype_name)


def _heads(session: ExplorerSession) -> Heads | None:
    """The heads that draft now, as their own file tells of them; a recording's are those of the model that runs.
    Notices may name files of the server, of which visitors are told none."""
    if session.model is None:
        return None
    engine, loaded = session.model.engine, session.model.engine.loaded
    backbone, notices = engine.backbone, () if session.host.locked else tuple(loaded.report.notices)
    return Heads(loaded.source, loaded.config.trained, loaded.config.accuracy, engine.place,
                 backbone.placement.reason, backbone.linears, backbone.step, notices, loaded.report.tensors,
                 engine.drafter.drafts_from)


def _pinned(session: ExplorerSession) -> Pinned | None:
    pin = session.pin
    if pin is None:
        return None
    return Pinned(pin.step, pin.knobs.walls, pin.knobs.acceptance, pin.prefix == session.prefix(), pin.knobs.dynamic)
