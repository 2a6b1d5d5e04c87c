"""Numbers as people write them."""

from __future__ import annotations

import math

KIB, MIB, GIB = 2**10, 2**20, 2**30


def number(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent unless it is very small or large."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    text = f"{value:.{digits - 1}e}"
    exponent = int(text.partition("e")[2])  # after rounding: 9.99 may have become 10
    return f"{value:,.{max(0, digits - 1 - exponent)}f}" if -5 < exponent < 15 else text.replace("e-0", "e-")


def exact(value: float) -> str:
    """A number that somebody chose, such as a tolerance: no more digits than it needs."""
    text = number(value)
    return f"{value:.3g}".replace("e-0", "e-") if "e" in text else text.rstrip("0").rstrip(".") if "." in text else text


def figure(value: float) -> str:
    """A loss or a perplexity: four significant digits, and at most four places."""
    return number(value, 4) if abs(value) >= 0.1 else number(value, 3)


def count(value: float) -> str:
    return f"{round(value):,}"


def short_count(value: float) -> str:
    """1,234,567 as 1.23 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{number(value / size)} {unit}"
    return count(value)


def size(num_bytes: float) -> str:
    """Bytes in a unit that suits them."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if num_bytes >= unit:
            return f"{number(num_bytes / unit)} {name}"
    return f"{number(num_bytes / KIB)} KiB"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{number(seconds * 1000)} ms"
    if seconds < 60:
        return f"{number(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def share(value: float) -> str:
    """A share as a percentage that is 0% and 100% only if it is exactly that."""
    percent = 100 * value
    if percent in (0, 100):
        return f"{percent:.0f}%"
    return "under 0.1%" if percent < 0.1 else "over 99.9%" if percent > 99.9 else f"{number(percent, 2)}%"


def times(value: float) -> str:
    return f"{number(value)} times"


def plural(amount: int, thing: str, many: str | None = None) -> str:
    return f"{amount:,} {thing if amount == 1 else many or thing + 's'}"


def listed(parts: list[str]) -> str:
    """a, b and c."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
