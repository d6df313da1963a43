"""Numbers as the page writes them: one rule per kind of number, used by figures, sentences and tables alike."""

from __future__ import annotations

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"


def probability(p: float) -> str:
    """Three decimals; what would read 0.000 but is not is "<0.001", and what would read 1.000 but is not ">0.999"."""
    if 0 < p < 0.001:
        return "<0.001"
    if 0.9995 <= p < 1:
        return ">0.999"
    return f"{p:.3f}"


def exact(p: float) -> str:
    """Three significant digits however small, for hover texts."""
    return f"{p:.3f}" if p >= 0.1 or p == 0 else f"{p:.3g}"


def compared(a: float, b: float, decimals: int = 3) -> tuple[str, str]:
    """Both with that many decimals, or with as many as it takes to see which is larger and that none is 0."""
    for places in range(decimals, 9):
        texts = f"{a:.{places}f}", f"{b:.{places}f}"
        if texts[0] != texts[1] and all(float(text) for text in texts):
            break
    return texts[0].replace("-", MINUS), texts[1].replace("-", MINUS)


def subscript(number: int) -> str:
    """As in s₂."""
    return "".join(chr(0x2080 + int(digit)) for digit in str(number))


def milliseconds(ms: float) -> str:
    """Whole from 10 up, one decimal below."""
    return f"{ms:,.0f}" if ms >= 9.95 else f"{ms:.1f}"


def duration(ms: float) -> str:
    """`84 ms`, or `15 s` from a second up."""
    return f"{ms / 1000:.2g} s" if ms >= 1000 else f"{milliseconds(ms)} ms"


def ratio(value: float, n: int) -> str:
    """Two decimals once at least ten steps stand behind it, else one."""
    return f"{value:.2f}" if n >= 10 else f"{value:.1f}"
