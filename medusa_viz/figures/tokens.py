"""Tokens as they are drawn: whitespace made visible, and text of the model never markup.

Plotly reads label and hover strings as pseudo-HTML and, where MathJax is about, dollars as maths. `escaped` is the
one function through which text of the model enters a figure.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

_SPACE = "␣"
# The codec's ␠ and ␍ are in no font that Linux desktops commonly have; the open box and the arrows are.
_MARKS = {" ": _SPACE, "␠": _SPACE, "\n": "⏎", "\r": "↵", "␍": "↵", "\t": "⇥", "\ufffd": "<U+FFFD>"}
_UNMARKED = str.maketrans({"␠": " ", "␣": " ", "⏎": "\n", "␍": "\r", "⇥": "\t"})
_BYTES = re.compile("(<[0-9A-F]{2}(?: [0-9A-F]{2})*>)")
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"})


def escaped(text: str) -> str:
    """Text for a Plotly label or hover string, shown literally."""
    return text.translate(_ESCAPES)


def _mark(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    # Controls, odd spaces, format and unassigned characters would be invisible or move their neighbours.
    return f"<U+{ord(character):04X}>" if unicodedata.category(character)[0] in "CZ" else character


@lru_cache(maxsize=1 << 16)
def visible(text: str) -> str:
    """Every space and control character by a mark; never empty. Text that is marked already stays as it is."""
    # Bytes of no character come as <F0 9F>, whose spaces are none of the token's.
    parts = _BYTES.split(text)
    return "".join(part if place % 2 else "".join(map(_mark, part)) for place, part in enumerate(parts)) or "∅"


def spaced(text: str) -> str:
    """As `visible`, but one space before visible text is a space: a chip or quotation marks show it by its width."""
    shown = visible(text)
    return " " + shown[1:] if shown[0] == _SPACE and shown[1:2] not in ("", *_MARKS.values()) else shown


def quoted(text: str) -> str:
    """Inside a sentence, in straight quotes, cut where it is longer than a word."""
    return f"'{shortened(spaced(text), 24)}'"


def plain_text(shown: Iterable[str]) -> str:
    """Text from the display texts of its tokens: marks become what they stand for, loose bytes are joined."""
    parts = []
    for text in shown:
        for place, part in enumerate(_BYTES.split(text)):
            parts.append(bytes.fromhex(part[1:-1]) if place % 2 else part.translate(_UNMARKED).encode())
    return b"".join(parts).decode("utf-8", "replace")


def width(text: str) -> int:
    """Columns the text takes in a monospaced font: wide East Asian characters and emoji take two."""
    return sum(0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
               for character in text)


def shortened(text: str, columns: int) -> str:
    """The text cut to `columns` of a monospaced font, with an ellipsis where something was cut."""
    if width(text) <= columns:
        return text
    room, kept = columns - 1, ""
    for character in text:
        room -= width(character)
        if room < 0:
            break
        kept += character
    return kept + "…"
