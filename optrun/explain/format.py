"""Numbers in few characters."""

from __future__ import annotations

import re


def rate(value: float) -> str:
    """A learning rate as people write one.

    Example:
        >>> rate(0.001), rate(3.28e-4), rate(0.0), rate(0.05), rate(1.0)
        ('1e-3', '3.28e-4', '0', '0.05', '1')
    """
    if value == 0:
        return "0"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def span(low: float, high: float) -> str:
    """One value, or the range of several.

    Example:
        >>> span(0.1, 0.1), span(1e-4, 1e-3)
        ('0.1', '1e-4…1e-3')
    """
    return rate(low) if rate(low) == rate(high) else f"{rate(low)}…{rate(high)}"


def count(value: int) -> str:
    """Elements.

    Example:
        >>> count(192), count(36928), count(124439808), count(7000000000)
        ('192', '36.9 K', '124 M', '7 B')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g} {letter}" if value < 999.5 * size else f"{value / size:.0f} {letter}"
    return str(value)


def size(value: int | None) -> str:
    """Bytes.

    Example:
        >>> size(512), size(147712), size(995518464), size(None)
        ('512 B', '144 KiB', '949 MiB', '?')
    """
    if value is None:
        return "?"
    amount, unit = float(value), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1000:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.5 else f"{amount:.3g} {unit}"


def broken(name: str, width: int) -> str:
    r"""A dotted name in lines of at most `width` characters, broken before dots and blanks where there are some.

    Example:
        >>> broken("encoder.layer.11.output", 16)
        'encoder.layer.11\n.output'
        >>> broken("short", 16)
        'short'
    """
    lines = [""]
    for piece in re.findall(r"[. ]?[^. ]+|[. ]", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line[at : at + width] for line in lines for at in range(0, len(line), width))
