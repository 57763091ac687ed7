"""Numbers as a reader wants them."""

import math


def short_count(value: float) -> str:
    """1_200_000 -> 1.2M."""
    for size, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def number(value: float | None, digits: int = 4, sign: str = "") -> str:
    """A loss; JSON's null is what a diverged model's was."""
    return "not finite" if value is None else f"{value:{sign}.{digits}f}"


def signed(value: float) -> str:
    """A difference: three digits and a sign, but none for what rounds to zero."""
    text = f"{value:+.3f}"
    return text[1:] if float(text) == 0 else text


def scientific(value: float) -> str:
    """FLOPs: 1.23e12; nothing for what could not be counted."""
    return f"{value:.2e}".replace("e+", "e") if math.isfinite(value) else ""
