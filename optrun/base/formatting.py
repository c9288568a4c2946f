"""Format numbers, sizes, times and names for people, in few characters."""

import json
import math
import re
from collections.abc import Iterable


def number(value: float, digits: int = 4) -> str:
    """Format a figure with a few significant digits.

    Example:
        >>> number(0.000123456), number(12.3456), number(123456.0), number(float("nan"))
        ('0.0001235', '12.35', '123,456', 'nan')
    """
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}"


def rate(value: float) -> str:
    """Format a learning rate, one below 0.1 with an exponent.

    Example:
        >>> [rate(value) for value in (0.001, 3.28e-4, 0.0, 0.05, 0.1, 5000.0, 123456.0)]
        ['1e-3', '3.28e-4', '0', '5e-2', '0.1', '5000', '1.23e5']
    """
    if value == 0:
        return "0"
    if 0.1 <= abs(value) < 1e5:
        if abs(value) < 999.5:
            return f"{value:.3g}"
        return f"{value:.0f}"
    # 3.28e-04 becomes 3.28e-4, and 1.00e-03 becomes 1e-3.
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    if exponent:
        return f"{mantissa.rstrip('0.')}e{int(exponent)}"
    return mantissa  # nan and inf


def span(low: float, high: float) -> str:
    """Format one learning rate, or the range of several.

    Example:
        >>> span(0.1, 0.1), span(1e-4, 1e-3)
        ('0.1', '1e-4…1e-3')
    """
    if rate(low) == rate(high):
        return rate(low)
    return f"{rate(low)}…{rate(high)}"


def count(value: float) -> str:
    """Format a count of things: exact below ten thousand, three digits above.

    Example:
        >>> count(192), count(2048.0), count(36928), count(124439808), count(7000000000), count(0.5)
        ('192', '2,048', '36.9K', '124M', '7B', '0.5')
    """
    if abs(value) < 9999.5:
        return f"{value:,.6g}"
    # The largest unit of which there is at least one, after rounding: 999,600 is 1M.
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
    unit, letter = next((unit, letter) for unit, letter in units if abs(value) >= 0.9995 * unit)
    if abs(value) >= 999.5 * unit:
        return f"{value / unit:.0f}{letter}"
    return f"{value / unit:.3g}{letter}"


def plural(number_of: int, noun: str) -> str:
    """Write how many there are of something.

    Example:
        >>> plural(1, "run"), plural(1200, "run")
        ('1 run', '1,200 runs')
    """
    if number_of == 1:
        return f"1 {noun}"
    return f"{number_of:,} {noun}s"


def size(value: float | None) -> str:
    """Format a number of bytes; None: unknown.

    Example:
        >>> size(512), size(1536), size(147712), size(995518464), size(3 * 2**30), size(None)
        ('512 B', '1.5 KiB', '144 KiB', '949 MiB', '3 GiB', '?')
    """
    if value is None:
        return "?"
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000:
            break
        value = value / 1024
        unit = larger
    if unit == "B" or abs(value) >= 99.5:
        return f"{value:.0f} {unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Format a number of seconds.

    Example:
        >>> duration(0.42), duration(7.26), duration(59.97), duration(95), duration(7260)
        ('0.42 s', '7.3 s', '1 min 00 s', '1 min 35 s', '2 h 01 min')
    """
    if seconds < 59.95:
        if 0 < seconds < 1:
            return f"{seconds:.2f} s"
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def plain(text: str) -> str:
    r"""Put text on one line without control characters.

    Which could move a terminal's cursor or break a page.

    Example:
        >>> plain("a\x1b[2Jb"), plain("two\nlines")
        ('a?[2Jb', 'two lines')
    """
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


def csv_cell(value: object) -> object:
    """Write a cell of a csv file.

    A list or dict becomes JSON. A text that a spreadsheet would take for a formula gets an
    apostrophe before it. So does a text that begins with apostrophes and then like a formula: a
    reader who takes one apostrophe away from each such cell has every text back.

    Example:
        >>> csv_cell("=1+1"), csv_cell("'=1"), csv_cell("-0.5"), csv_cell(-0.5), csv_cell("'tis")
        ("'=1+1", "''=1", '-0.5', -0.5, "'tis")
        >>> csv_cell(["é", 1])
        '["é", 1]'
    """
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    is_formula = isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    if is_formula:
        return f"'{value}"
    return value


def list_names(names: Iterable[object], most: int) -> str:
    """Join the first names by commas, and count the others.

    Example:
        >>> list_names("ab", 2), list_names("abcd", 2)
        ('a, b', 'a, b and 2 more')
    """
    texts = list(map(str, names))
    shown = ", ".join(texts[:most])
    if len(texts) > most:
        return f"{shown} and {len(texts) - most} more"
    return shown
