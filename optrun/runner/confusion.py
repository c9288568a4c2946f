"""Draw which class was taken for which."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from optrun.base.formatting import count
from optrun.report.theme import Chart, Theme, style_axes

_NUMBERED = 26
"""With more classes there is no room for a number in each cell."""
_LONGEST = 18
_DARK = 0.55
"""Shares above this are drawn in so full a colour that paper reads better on it than ink."""


def draw_confusion(
    labels: Sequence[str], counts: Sequence[Sequence[int]], theme: Theme, *, subtitle: str
) -> Chart:
    """Draw a cell for each pair of classes.

    Its colour the share of the true class, its text share and count.

    Args:
        labels: Names of the classes.
        counts: Rows are true classes, columns predicted ones.
        theme: Colours.
        subtitle: Of what.
    """
    size = len(labels)
    numbered = size <= _NUMBERED
    cell = 0.62 if size <= 12 else 0.44 if numbered else max(0.12, 9 / size)
    names = [_short(label) for label in labels]
    margin = 0.075 * max(map(len, names))
    figure = Chart(
        max(4.2, size * cell + 1.4 + margin), max(3.4, size * cell + 1.5 + min(margin, 1.1)), theme
    )
    ax = figure.add_subplot()
    style_axes(ax, theme, title="True and predicted classes", subtitle=subtitle)
    ax.grid(visible=False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    for row, line in enumerate(counts):
        total = sum(line)
        for column, number in enumerate(line):
            _cell(
                ax,
                theme,
                row,
                column,
                number,
                number / total if total else 0.0,
                size=size,
                numbered=numbered,
            )
            if not numbered and number:
                told = f"{labels[row]} taken for {labels[column]}: {number:,}"
                figure.mark(ax, column + 0.5, row + 0.5, told)
    ax.set_xlim(0, size)
    ax.set_ylim(size, 0)
    ax.set_aspect("equal")
    _name_sides(ax, theme, names, [sum(line) for line in counts])
    return figure


def _cell(
    ax: Axes,
    theme: Theme,
    row: int,
    column: int,
    number: int,
    share: float,
    *,
    size: int,
    numbered: bool,
) -> None:
    """Draw one pair of classes: right ones in the first colour, wrong ones in the second."""
    colour = theme.series[0 if row == column else 1]
    ax.add_patch(
        Rectangle((column, row), 1, 1, facecolor="none", edgecolor=theme.grid, linewidth=0.6)
    )
    if share:
        inner = Rectangle(
            (column, row), 1, 1, facecolor=colour, edgecolor="none", alpha=0.06 + 0.94 * share
        )
        ax.add_patch(inner)
    if not numbered or not number:
        return
    ink = theme.paper if share > _DARK else theme.ink
    small = 6.5 if size > 12 else 7.5
    write = partial(ax.text, ha="center", va="center", color=ink)
    if size > 12:
        write(column + 0.5, row + 0.5, count(number), fontsize=small)
        return
    percent = f"{100 * share:.0f} %" if share >= 0.995 or share >= 0.1 else f"{100 * share:.1f} %"
    weight = "bold" if row == column else "normal"
    write(column + 0.5, row + 0.41, percent, fontsize=9, fontweight=weight)
    write(column + 0.5, row + 0.70, count(number), fontsize=small - 0.5)


def _name_sides(ax: Axes, theme: Theme, names: list[str], totals: list[int]) -> None:
    """Draw the classes at both sides: true ones with how many there are, predicted ones below."""
    size = len(names)
    every = max(1, -(-size // 60))
    places = [place + 0.5 for place in range(0, size, every)]
    ax.set_yticks(places, [f"{names[at]}  {count(totals[at])}" for at in range(0, size, every)])
    long = max(map(len, names)) > (7 if size <= 12 else 4)
    ax.set_xticks(
        places,
        names[::every],
        rotation=40 if long else 0,
        ha="right" if long else "center",
        rotation_mode="anchor" if long else "default",
    )
    ax.tick_params(length=0, labelsize=8.5 if size <= _NUMBERED else 6, labelcolor=theme.ink)
    ax.set_xlabel("predicted", fontsize=9, color=theme.muted)
    ax.set_ylabel("true, with how many there are", fontsize=9, color=theme.muted)


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
