"""Texts: every visible string, by key, from one table (`assets/texts.json`), which the page's scripts read too."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

TABLE = Path(__file__).parents[2] / "assets" / "texts.json"
_SLOT = re.compile(r"\{(\w+)(?:\|([^|{}]*)\|([^|{}]*))?\}")


@cache
def table() -> dict[str, dict[str, str]]:
    """The whole table: language, then key, then text."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


class Texts:
    """Texts of one language. A key that it lacks is taken from English; one that English lacks is a KeyError."""

    def __init__(self, lang: str = "en") -> None:
        self.lang = lang if lang in table() else "en"
        self._texts = {**table()["en"], **table()[self.lang]}

    def __call__(self, key: str, **values: object) -> str:
        """The text with its slots filled: {name} by the value, {n|token|tokens} by the form that the number takes.

        Filled in one pass, so that braces inside a value (it may be a token) stay as they are.
        """

        def fill(slot: re.Match) -> str:
            value = values[slot[1]]
            if slot[2] is not None:
                return slot[2] if value == 1 else slot[3]
            return f"{value:,}" if isinstance(value, int) else str(value)

        return _SLOT.sub(fill, self._texts[key])
