"""Keep lines that lie on each other apart: the one below is drawn wider, so that it shows on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NEAR = 0.008
"""About the width of a line, in heights of the picture."""
_MOST = 3


def lines_above(lines: Sequence[tuple[Array, Array]]) -> list[int]:
    """Count for each line the later ones that cover it.

    Args:
        lines: x, rising, and y, without NaN, in the order in which they are drawn.

    Returns:
        One number per line, at most 3: more would be a bar.

    Example:
        >>> x = np.arange(4.0)
        >>> lines_above([(x, x), (x, x + 1e-3), (x, 4 - x)])
        [1, 0, 0]
    """
    # The steep first part of training would make everything alike.
    late = [y[len(y) // 6 :] for _, y in lines if len(y)]
    height = float(np.ptp(np.concatenate(late))) if late else 0.0
    return [
        min(_MOST, sum(_covers(other, line, _NEAR * height) for other in lines[index + 1 :]))
        for index, line in enumerate(lines)
    ]


def _covers(above: tuple[Array, Array], below: tuple[Array, Array], near: float) -> bool:
    inside = (below[0] >= above[0].min(initial=np.inf)) & (below[0] <= above[0].max(initial=-np.inf))
    if inside.sum() * 2 < len(below[0]) or not inside.any():
        return False
    return bool(np.median(np.abs(np.interp(below[0][inside], *above) - below[1][inside])) <= near)


def wider(style: dict[str, Any], above: int) -> dict[str, Any]:
    """Widen a line and its markers by what lies above."""
    return style | {
        "linewidth": style["linewidth"] + 1.8 * above,
        "markersize": style["markersize"] + 2.0 * above,
    }
