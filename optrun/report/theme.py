"""How every picture of optrun looks.

Colours that colour-blind readers can tell apart, quiet axes, honest tick labels.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from optrun.base.formatting import count, rate

Array = NDArray[np.float64]

_ROUND_STEPS = (1, 2, 2.5, 5, 10)
"""Distances between ticks, up to a power of ten."""

SOFTWARE = "optrun report"
"""Written into every picture; a file that carries it may be replaced by a newer one."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""One marker per colour, so that lines differ in more than their colour."""

INK = "#1b1f24"
"""Titles and axis labels."""
MUTED = "#5b6470"
"""Tick labels, notes, reference lines."""
GRID = "#d9dde3"
"""Grid lines and axes."""
PAPER = "#ffffff"
"""Behind everything."""
ALARM = "#c4162a"
"""What went wrong: values that are not finite."""
SERIES = (
    "#0067a5",
    "#d1510a",
    "#00856a",
    "#a63d8f",
    "#b97d00",
    "#3d9bd6",
    "#7a4a1e",
    "#5a6270",
)
"""One colour per compared thing, in order."""


class Chart(Figure):
    """A figure whose labels do not overlap.

    Args:
        width: Inches.
        height: Likewise.
    """

    def __init__(self, width: float, height: float) -> None:
        self.engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
        super().__init__(figsize=(width, height), layout=self.engine, facecolor=PAPER)
        FigureCanvasAgg(self)

    def write_title(self, title: str) -> Text:
        """Write a title above the figure, at its left edge."""
        return self.suptitle(title, x=0.012, ha="left", fontsize=12, color=INK, fontweight="bold")


def style_axes(
    ax: Axes,
    *,
    title: str = "",
    xlabel: str,
    ylabel: str = "",
) -> None:
    """Style axes quietly.

    A light grid behind the data, no box, the title on the left above it.
    """
    ax.set_facecolor("none")
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GRID)
    ax.grid(True, color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(
        colors=MUTED,
        labelsize=8.5,
        length=3,
        color=GRID,
        which="both",
    )
    ax.tick_params(length=0, which="minor")
    if title:
        ax.set_title(
            title,
            loc="left",
            fontsize=10.5,
            color=INK,
            fontweight="bold",
            pad=9,
        )
    ax.set_xlabel(xlabel, fontsize=9, color=MUTED)
    ax.set_ylabel(ylabel, fontsize=9, color=MUTED)
    ax.margins(x=0.02)


def above(ax: Axes, text: str, x: int, points: int, *, fontsize: float) -> None:
    """Write text `points` above the axes, flush with their left (x = 0) or right (x = 1) end."""
    side = "right" if x else "left"
    ax.annotate(
        text,
        (x, 1),
        xycoords="axes fraction",
        xytext=(0, points),
        textcoords="offset points",
        fontsize=fontsize,
        color=MUTED,
        ha=side,
        va="bottom",
    )


def ring(ax: Axes, x: float, y: float, colour: str, *, label: str | None = None) -> None:
    """Draw a ring around a point, such as the best result."""
    ax.plot(
        x,
        y,
        color=colour,
        linewidth=0,
        zorder=5,
        clip_on=False,
        marker="o",
        markersize=11,
        markerfacecolor="none",
        markeredgewidth=1.6,
        label=label,
    )


def legend(ax: Axes, *, below: Chart | None = None) -> None:
    """Add a legend without a box, over paper.

    With `below`, it lies under the panels of that figure, in as many columns as fit its longest
    label.
    """
    handles, labels = ax.get_legend_handles_labels()
    if not handles:
        return
    look = {"fontsize": 8.5, "borderaxespad": 0.3, "handlelength": 1.8, "labelcolor": INK}
    if below is None:
        box = ax.legend(handles, labels, loc="best", **look)
    else:
        below.engine.set(h_pad=0.05)  # that of stacked panels leaves a gap above the legend
        columns = _legend_columns(max(map(len, labels)))
        box = below.legend(handles, labels, loc="outside lower left", ncols=columns, **look)
    box.get_frame().set(facecolor=PAPER, edgecolor="none", alpha=0.85)


def _legend_columns(longest: int) -> int:
    """Choose the columns of a legend below a panel from its longest label."""
    if longest < 15:
        return 3
    if longest < 27:
        return 2
    return 1


def count_axis(ax: Axes) -> None:
    """Put whole numbers on the x axis, for steps."""
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=_ROUND_STEPS))
    ax.xaxis.set_major_formatter(lambda value, _: count(value))


def number_axis(ax: Axes, values: Sequence[float], *, log: bool = False) -> None:
    """Put short tick labels on the y axis: `1e-3` if all values are small, `12k` if large.

    Args:
        ax: The axes.
        values: The values to draw.
        log: Make the axis logarithmic.
    """
    if log:
        log_axis(ax, "y", values)
        return
    ax.yaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=3, steps=_ROUND_STEPS))
    spread = max(values, default=1.0) - min(values, default=0.0)
    largest = max((abs(value) for value in values), default=1.0)
    if largest and (largest < 1e-2 or largest >= 1e5):
        ax.yaxis.set_major_formatter(lambda value, _: rate(value))
    elif spread >= 1000:
        ax.yaxis.set_major_formatter(lambda value, _: count(value))


def log_axis(ax: Axes, direction: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic, with readable ticks over a narrow and a wide range.

    Args:
        ax: The axes.
        direction: "x" or "y".
        values: What will be drawn, all positive.
    """
    axis: Axis
    if direction == "x":
        ax.set_xscale("log")
        axis = ax.xaxis
    else:
        ax.set_yscale("log")
        axis = ax.yaxis
    ratio = max(values) / min(values) if len(values) else 10.0
    axis.set_major_locator(LogLocator(base=10, subs=_log_ticks(ratio), numticks=12))
    axis.set_major_formatter(lambda value, _: rate(value))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _log_ticks(ratio: float) -> tuple[float, ...]:
    """Choose the ticks of each decade for an axis from x to ratio * x."""
    if ratio < 8:
        return (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    if ratio < 60:
        return (1.0, 2.0, 5.0)
    if ratio < 2000:
        return (1.0, 3.0)
    return (1.0,)


def to_png(figure: Figure, *, dpi: int = 160) -> bytes:
    """Render a picture as a PNG file.

    Texts are drawn literally: a dollar sign starts no formula, and a letter missing in the font
    gives a box but no warning.
    """
    buffer = io.BytesIO()
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(dpi)
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        # `Figure.savefig` would draw twice, once to no effect.
        canvas.print_png(buffer, metadata={"Software": SOFTWARE})
    return buffer.getvalue()
