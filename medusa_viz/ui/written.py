"""What a branch has written so far, as text to take away."""

from __future__ import annotations

from medusa_viz.figures.tokens import plain_text
from medusa_viz.ui.session import ExplorerSession


def written(session: ExplorerSession) -> str:
    """The committed tokens as text, special ones left out; a recording has only their display texts to go by."""
    if not session.lines:
        return ""
    ids = session.line.committed(len(session.line.done()))
    if session.recorded or session.model is None:
        wording = session.wording
        return plain_text(wording.texts[token] for token in ids if wording.kinds.get(token) != "special")
    return session.model.engine.codec.decode(ids)
