"""Draw the common parts of pictures: names, colours, limits and dots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from optrun.base.formatting import list_names
from optrun.report.table import format_metric
from optrun.report.theme import MARKERS, MUTED, SERIES, Chart, above, number_axis, ring, style_axes

SHOWN = 8
"""More contenders than this cannot be told apart by colour; the best are drawn, the table has all.
"""
WIDTH = 4.3
"""Inches: as wide as a phone, where the page shows it at about its own size; two stand side by side
on a desk."""
FAR = 4.0
"""A value further from the best than this many times the distance of the value before it is an
outlier: it would squeeze the others, and is drawn at the border."""
_NAME_LENGTH = 34


@dataclass(frozen=True)
class Picture:
    """One figure."""

    name: str
    """For file names and anchors."""
    title: str
    caption: str
    draw: Callable[[], Chart]


def short_name(text: str) -> str:
    """Shorten a contender's name for a legend."""
    if len(text) <= _NAME_LENGTH:
        return text
    return text[: _NAME_LENGTH - 1] + "…"


def style_of(series: int) -> dict[str, Any]:
    """Return the look of a contender's points, as keywords of `Axes.plot`.

    Colour and marker are its own; no line joins them. Contenders beyond the first `SHOWN` are grey
    circles.

    Args:
        series: Index of the contender.
    """
    colour = MUTED
    marker = "o"
    if series < SHOWN:
        colour = SERIES[series]
        marker = MARKERS[series]
    return {"color": colour, "marker": marker, "markersize": 4.5, "linewidth": 0}


def panel(lines: int, xlabel: str, ylabel: str) -> tuple[Chart, Axes]:
    """Create a figure with room for a legend of `lines` lines below the panel."""
    figure = Chart(WIDTH, 3.3 + 0.17 * lines)
    ax = figure.add_subplot()
    style_axes(ax, xlabel=xlabel, ylabel=ylabel)
    return figure, ax


def find_reach(distances: Iterable[float], least: float = 0.0) -> float:
    """Find how far from the best a picture reaches, without its outliers.

    Args:
        distances: Distances of all values from the best; non-finite ones are ignored.
        least: Smallest distance to return.

    Returns:
        A distance that covers the nearer half of the values, and each further value until one is
        more than `FAR` times as far as the value before it. The first value above 0 is covered in
        any case: no distance is a multiple of 0.

    Example:
        >>> find_reach([0.0, 0.01, 0.02, 0.05]), find_reach([0.0, 0.01, 0.02, 0.6])
        (0.05, 0.02)
    """
    ordered = sorted(distance for distance in distances if math.isfinite(distance))
    # The nearer half is always shown, and at least two values.
    reach = max([least, *ordered[: max(2, (len(ordered) + 1) // 2)]])
    for distance in ordered:
        if reach == 0 or distance <= FAR * reach:
            reach = max(reach, distance)
    return reach


def set_limits(ax: Axes, values: Sequence[float], mode: str, *, least: float) -> None:
    """Set the y limits from the best value to the reach of the others, and format the ticks.

    With values 1.0, 1.1 and 9.0 and mode "min" they reach from 1.0 to 1.1, with a margin. Changes
    nothing without a finite value. If all values are equal, the limits reach 2 % of the best beyond
    it, or 0.01 if it is 0.

    Args:
        ax: The axes; their limits are set.
        values: Values to show; outliers are cut, see `find_reach`.
        mode: "min" or "max".
        least: Distance from the best that is always shown.
    """
    # As costs, of which less is better; the limits are turned back at the end.
    sign = 1.0 if mode == "min" else -1.0
    costs = [sign * value for value in values if math.isfinite(value)]
    if not costs:
        return
    best = min(costs)
    reach = find_reach([cost - best for cost in costs], least) or 0.02 * abs(best) or 0.01
    far = best + reach
    margin = 0.07 * (far - best)
    low, high = sorted((sign * (best - margin), sign * (far + margin)))
    number_axis(ax, [low, high])
    ax.set_ylim(low, high)


def note_cut_contenders(ax: Axes, mode: str, ends: Sequence[tuple[str, float]]) -> None:
    """Note above the picture the contenders with a final value outside its limits.

    Writes nothing if there are none; names two, and counts the others.

    Args:
        ax: The axes, whose limits are set already.
        mode: "min" or "max", for the direction of the arrow.
        ends: Name and final value of each contender; a value that is not finite is left out.
    """
    low, high = ax.get_ylim()
    outside = []
    for name, end in ends:
        if math.isfinite(end) and not low <= end <= high:
            outside.append(f"{short_name(name)} {format_metric(end)}")
    if outside:
        arrow = "↑" if mode == "min" else "↓"
        above(ax, f"{arrow} {list_names(outside, 2)}", 1, 3, fontsize=7.5)


@dataclass(frozen=True)
class Dot:
    """One outcome of a contender, such as the mean at one lr."""

    x: float
    y: float
    """NaN: the run diverged."""
    chosen: bool = False
    """Whether it is the contender's best, which gets a ring."""


def draw_dots(
    ax: Axes,
    series: int,
    label: str,
    dots: Sequence[Dot],
    mode: str,
    width: float,
) -> None:
    """Draw the outcomes of a contender as markers, the chosen one in a ring.

    On the edge of worse values, a cross is a diverged run and an arrowhead a value outside the
    limits.

    Args:
        ax: The axes, whose limits are set already.
        series: Index of the contender, which decides colour and marker.
        label: Text in the legend.
        dots: The outcomes, by rising x if they are joined.
        mode: "min" or "max".
        width: Width of the line that joins them; 0: no line.
    """
    style = style_of(series)
    # As a share of the height of the axes.
    worse_edge = 0.985 if mode == "min" else 0.015
    arrowhead = "^" if mode == "min" else "v"
    finite_dots = [dot for dot in dots if math.isfinite(dot.y)]
    look = style | {"linewidth": width, "label": short_name(label)}
    xs = [dot.x for dot in finite_dots]
    ys = [dot.y for dot in finite_dots]
    ax.plot(xs, ys, **look)
    low, high = ax.get_ylim()
    for dot in dots:
        if low <= dot.y <= high:  # false for NaN
            if dot.chosen:
                ring(ax, dot.x, dot.y, style["color"])
            continue
        marker = "x" if math.isnan(dot.y) else arrowhead
        look = style | {"marker": marker, "markersize": 6, "markeredgewidth": 1.8, "clip_on": False}
        ax.plot(dot.x, worse_edge, transform=ax.get_xaxis_transform(), **look)
