"""Display texts of the tokens that a session's views name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from medusa_viz.decoding.records import Step


@dataclass
class Wording:
    """Texts by token id, and `special` or `bytes` for those that are no plain text."""

    texts: dict[int, str] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)

    def learn(self, codec: Any, ids: Iterable[int], step: Step) -> None:
        """Add every token of a prefix and of a step's drafts and top lists."""
        tops = [*step.drafts.heads, *step.verification.top.values()]
        for token in {*ids, *step.drafts.token, *(token for top in tops for token in top.ids)} - self.texts.keys():
            self.texts[token] = codec.token_text(token)
            kind = codec.token_kind(token)
            if kind != "text":
                self.kinds[token] = kind
