"""Numbers, sizes and times in few characters, for people."""

from __future__ import annotations


def number(value: float, digits: int = 4) -> str:
    """A figure of a few significant digits.

    Example:
        >>> number(0.000123456), number(12.3456), number(123456.0)
        ('0.0001235', '12.35', '123,456')
    """
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}"


def size(count: float) -> str:
    """A number of bytes for people.

    Example:
        >>> size(1536), size(3 * 2**30)
        ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """A duration for people.

    Example:
        >>> duration(7.26), duration(95), duration(7260)
        ('7.3 s', '1 min 35 s', '2 h 01 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
