"""Palette: the one owner of status colours, symbols and sizes, in light and dark.

Figures are always drawn in the light hex values; the page swaps them through `dark`, hex by hex. That works because
the table is a function: one light value has one dark value. Where one light colour must become two dark ones, the
second is a neighbour of it, one step away and not told apart by eye.
"""

from __future__ import annotations

from dataclasses import dataclass

INK, INK_2, GROUND, LINE = "#1F2933", "#52606D", "#FFFFFF", "#D5DBE2"
GRID = "#E1E5EA"
HISTOGRAM = "#EEF1F5"
BAND = "#AAB4BF"
ACCEPTED, PASSED, QUIET, NEXT_ROOT = "#00795A", "#C77F00", "#7B8794", "#6A35C9"
ACTION = "#0B5CAD"
PILL, PILL_INK = "#E5E7EB", "#52606E"
MASK_SELF, MASK_ANCESTOR = INK, "#627D98"
OVERVIEW = (GROUND, MASK_ANCESTOR, "#2F76C4")
"""Closed (drawn transparent), ancestor and self cells of an image; at least 3:1 on either ground."""

RAMP = ("#E5E7EB", "#DCEAF7", "#A9CCEA", "#5F9BD1", "#22609F", "#123A6B")
"""Where a token came from: the backbone, then heads 1 to 5 (later heads share the last)."""
RAMP_INK = ("#1F2933", "#1F2933", "#1F2934", "#0B1220", "#FFFFFE", "#FFFFFE")

CURVES = ("#5A93C8", "#3D78B3", "#27609A", "#174A7E", "#0C325A")
"""The ramp of heads 1 to 5 as lines: every step at least 3:1 on either ground."""

DARK = {
    INK: "#F3F4F6", INK_2: "#AEB7C2", GROUND: "#14181F", LINE: "#3A4656", GRID: "#2A323E",
    HISTOGRAM: "#1F2630", BAND: "#566477",
    ACCEPTED: "#2FD0A0", PASSED: "#FFC04D", QUIET: "#8893A1", NEXT_ROOT: "#B79CFF",
    ACTION: "#7DB8F5", PILL: "#374151", PILL_INK: "#F3F4F6", MASK_ANCESTOR: "#8FA9C4",
    "#DCEAF7": "#1E3A5F", "#A9CCEA": "#27588F", "#5F9BD1": "#4C8CD2", "#22609F": "#86B8EA", "#123A6B": "#C7E0F8",
    "#5A93C8": "#4F8CC4", "#3D78B3": "#73A9DA", "#27609A": "#93BFE6", "#174A7E": "#B4D4F0", "#0C325A": "#D6E7F8",
    "#1F2934": "#F3F4F6", "#0B1220": "#0B1220", "#FFFFFE": "#0B1220", "#FFFFFD": "#1B212B", "#6FA8DC": "#2F6DB0",
}
"""Light hex to dark hex, for every colour a figure may hold."""


@dataclass(frozen=True)
class Mark:
    """How a node of one verdict is drawn."""

    symbol: str
    size: int
    color: str
    edge: str
    """Kind of the edge that leads to it, a key of EDGES."""
    glyph: str
    """The same mark as a character, for legends and outlines."""


@dataclass(frozen=True)
class Line:
    """How one kind of edge is drawn."""

    color: str
    dash: str
    width: float


MARKS = {
    "root": Mark("square", 15, INK, "accepted", "■"),
    "accepted": Mark("circle", 14, ACCEPTED, "accepted", "●"),
    "shorter": Mark("diamond", 12, PASSED, "shorter", "◆"),
    "behind": Mark("diamond-open", 12, PASSED, "behind", "◇"),
    "rejected": Mark("x", 8, QUIET, "rejected", "×"),
    "unverified": Mark("circle-open", 10, QUIET, "dotted", "○"),
    "unseen": Mark("circle-open", 6, QUIET, "dotted", "∘"),
    "cut": Mark("hexagon-open", 12, INK_2, "dotted", "⬡"),
    "ghost": Mark("square-open", 14, NEXT_ROOT, "ghost", "□"),
    "folded": Mark("line-ew", 11, PILL, "dotted", "+n"),
    "planned": Mark("circle", 10, INK_2, "rejected", "●"),
    "slot": Mark("circle-open", 9, ACTION, "dotted", "○"),
}

EDGES = {
    "dotted": Line(QUIET, "dot", 1),
    "rejected": Line(QUIET, "solid", 1),
    "behind": Line(PASSED, "dash", 1.5),
    "shorter": Line(PASSED, "solid", 1.5),
    "ghost": Line(NEXT_ROOT, "dashdot", 2),
    "accepted": Line(ACCEPTED, "solid", 4),
}
"""In drawing order: what matters most is drawn last."""

DIMMED_LABELS = ("rejected", "unseen", "slot")
"""Verdicts whose labels are written in the second ink."""

_CJK = {"zh": ("Noto Sans SC", "PingFang SC", "Microsoft YaHei", "Noto Sans Mono CJK SC"),
        "ja": ("Noto Sans JP", "Hiragino Sans", "Yu Gothic", "Noto Sans Mono CJK JP")}


def sans(lang: str) -> str:
    """Font stack of words on the page; the language decides between Chinese and Japanese glyph forms."""
    return ", ".join(["system-ui", *_CJK.get(lang, _CJK["zh"])[:3], "sans-serif"])


def mono(lang: str) -> str:
    """Font stack of tokens."""
    # Fonts for Latin letters come first, since those of the CJK fonts are too narrow.
    latin = ["ui-monospace", "SF Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "Liberation Mono"]
    return ", ".join([*latin, _CJK.get(lang, _CJK["zh"])[3], "monospace"])


def source(depth: int) -> int:
    """Place in the source ramp of a token of that depth: 0 for the root, k for head k, 5 from head 5 on."""
    return min(depth, len(RAMP) - 1)


def page_table() -> dict:
    """What the page needs of this file, as JSON."""
    return {
        "dark": DARK,
        "ramp": {"light": RAMP, "dark": [DARK[color] for color in RAMP],
                 "light_ink": RAMP_INK, "dark_ink": [DARK[color] for color in RAMP_INK]},
        "verdicts": {name: {"color": mark.color, "symbol": mark.symbol, "size": mark.size, "glyph": mark.glyph}
                     for name, mark in MARKS.items()},
    }
