"""Hold a figure whose points tell their values and whose contenders can be switched off, once it is part of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Transform
from numpy.typing import NDArray

Array = NDArray[np.float64]

SERIES, KEY, SEEDS = "s", "k", "h"
"""What a group of an inline picture may be: a contender's artists, its entry in the legend, what is seen on hover."""

_MARKS = 40


@dataclass(frozen=True)
class Mark:
    """A point that tells its value."""

    axes: Axes
    transform: Transform
    """From x and y to the display."""
    x: float
    y: float
    text: str
    series: int | None
    """Whose it is."""
    shown: bool = True
    """Whether the page has it; the data beside the picture has all."""


class Chart(Figure):
    """A figure with marks; `optrun.report.svg` writes them into the page, a PNG file has none."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.marks: list[Mark] = []

    def mark(
        self, ax: Axes, x: float, y: float, text: str, *, series: int | None = None, transform: Transform | None = None
    ) -> None:
        """Let a point tell its value.

        Args:
            ax: Where it lies.
            x: In coordinates of the data.
            y: Likewise.
            text: What it tells.
            series: The contender, counted as the page counts them; None: of nobody.
            transform: Of x and y; None: that of the data.
        """
        self.marks.append(Mark(ax, ax.transData if transform is None else transform, float(x), float(y), text, series))

    def mark_line(self, ax: Axes, x: Array, y: Array, told: Sequence[str], *, series: int | None = None) -> None:
        """Let points of a line tell their values, on the page all of few, evenly many of more."""
        shown = set(np.linspace(0, len(x) - 1, min(len(x), _MARKS)).astype(int).tolist())
        for index in np.flatnonzero(np.isfinite(y)).tolist():
            self.marks.append(Mark(ax, ax.transData, x[index], y[index], told[index], series, index in shown))

    def rows(self) -> Iterable[tuple[str, float, float]]:
        """List the marks: what each tells, and where it lies."""
        return [(mark.text, mark.x, mark.y) for mark in self.marks]


def of_series(artists: Artist | Iterable[Artist], series: int, kind: str = SERIES) -> None:
    """Say whose artists these are, so that the page can hide or show them together."""
    for artist in [artists] if isinstance(artists, Artist) else artists:
        artist.set_gid(f"{kind}-{series}")
