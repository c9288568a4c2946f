"""What a run that diverged counts as: one rule for the search, the choice, the test and scores over workloads."""

from __future__ import annotations

import math
from collections.abc import Iterable


def stand_in(finite: Iterable[float], untrained: Iterable[float | None], mode: str) -> float | None:
    """Find the score that a diverged run counts with: nobody wins by losing runs.

    Args:
        finite: Scores of the runs that finished.
        untrained: The metric before the first step; None where it was not evaluated.
        mode: `min` or `max`.

    Returns:
        The worst of all of them; None where nothing is known.

    Example:
        >>> stand_in([3.1, 3.3], [10.8, None], "min"), stand_in([0.9], [None], "max"), stand_in([], [], "min")
        (10.8, 0.9, None)
    """
    known = [value for value in (*finite, *untrained) if value is not None and math.isfinite(value)]
    return (max if mode == "min" else min)(known, default=None)
