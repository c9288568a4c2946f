"""Draw a coordinate check.

What goes with the size of a model, on log axes, a panel for each measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from optrun.base.errors import StorageError
from optrun.report.theme import LIGHT, Chart, log_axis, save_png, style_axes

_TITLES = {
    "initial": "initial output",
    "change": "its change in the steps",
    "update": "change by one parameter's update",
}


def draw_coordinates(checks: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw checks, a row each.

    Args:
        checks: Each with `along` and `lines` of `parameter`, `measure`, `expected`, `fails` and
            `means` by size.
        path: Of the PNG.

    Raises:
        StorageError: The picture cannot be written.
    """
    looks: dict[bool, dict[str, Any]] = {True: {"color": LIGHT.alarm, "zorder": 4}}
    looks[False] = {"color": LIGHT.series[0], "alpha": 0.5}
    figure = Chart(11.0, 3.9 * len(checks), LIGHT)
    axes = figure.subplots(len(checks), len(_TITLES), squeeze=False)
    for row, check in zip(axes, checks, strict=True):
        for ax, (measure, title) in zip(row, _TITLES.items(), strict=True):
            lines = [line for line in check["lines"] if line["measure"] == measure]
            style_axes(
                ax,
                LIGHT,
                title=title,
                xlabel=f"{check['along']} over the base",
                ylabel="over the smallest",
            )
            shown = []
            for line in lines:
                sizes = [float(size) for size in line["means"]]
                values = [
                    value / next(iter(line["means"].values())) for value in line["means"].values()
                ]
                dash = "-" if line["expected"] is not None else ":"
                ax.plot(sizes, values, linewidth=1.4, linestyle=dash, **looks[bool(line["fails"])])
                shown += values
            first = sizes[0] if lines else 1.0
            for power in sorted(
                {line["expected"] for line in lines if line["expected"] is not None}
            ):
                values = [(size / first) ** power for size in sizes]
                ax.plot(sizes, values, color=LIGHT.ink, linewidth=1, linestyle="--")
                shown.append(values[-1])
            low, high = min(shown, default=1.0), max(shown, default=1.0)
            middle = max(high / low, 10.0) ** 0.5
            ax.set_yscale("log")
            ax.set_xscale("log")
            ax.set_xticks(sizes if lines else [], [f"{size:g}" for size in sizes] if lines else [])
            ax.xaxis.set_minor_locator(NullLocator())
            log_axis(ax, "y", [low, high])
            ax.set_ylim(min(low / 1.3, 1 / middle), max(high * 1.3, middle))
    look = {"passes": (LIGHT.series[0], "-"), "off": (LIGHT.alarm, "-")}
    look |= {"right": (LIGHT.ink, "--"), "not judged": (LIGHT.muted, ":")}
    handles = [
        Line2D([], [], label=label, color=colour, linestyle=dash)
        for label, (colour, dash) in look.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=4,
        fontsize=8.5,
        frameon=False,
        labelcolor=LIGHT.ink,
    )
    try:
        return save_png(figure, path)
    except OSError as error:
        raise StorageError(f"{path}: the picture cannot be written: {error.strerror}.") from error
