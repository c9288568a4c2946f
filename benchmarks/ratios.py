"""How ratios are told: the median, and the half that lies in the middle."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def over(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """What was measured in each round over what its base was in the same round."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def cells(ratios: Sequence[float]) -> str:
    """Two cells of a table.

    Example:
        >>> cells([4.0, 1.0, 2.0, 3.0])
        '2.50 | 2.00 to 3.00'
    """
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return (
        f"{statistics.median(ordered):.2f} | {ordered[quarter]:.2f} to {ordered[-1 - quarter]:.2f}"
    )
