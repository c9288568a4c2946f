"""Draw two objectives against each other, and the front."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from optrun.report.chart import Chart, of_series
from optrun.report.findings import Findings, Row
from optrun.report.pareto import Point, points, settings, shown
from optrun.report.picture import WIDTH, Data, series_colour, short_name
from optrun.report.theme import MARKERS, Theme, legend, new_figure, style_axes


def pareto_data(findings: Findings) -> Data:
    """List all configurations with their means."""
    names = [each.name for each in findings.objectives]
    found = [[each.contender, settings(each), *each.values, each.seeds, each.front] for each in points(findings)]
    return Data(["contender", "settings", *names, "seeds", "front"], found)


def draw_pareto(rows: Sequence[Row], findings: Findings, theme: Theme) -> Chart:
    """Draw the first two objectives; the labels say which direction of each is better."""
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(rows), theme)
    ax = figure.add_subplot()
    first, second = findings.objectives[:2]
    better = {"min": "lower", "max": "higher"}
    across, up = (f"{each.name} ({better[each.mode]} is better)" for each in (first, second))
    style_axes(ax, theme, xlabel=across, ylabel=up)
    found = points(findings)
    kept = [each for each in found if each.front]
    ax.plot(
        [each.values[0] for each in kept], [each.values[1] for each in kept],
        color=theme.muted, linewidth=1.2, linestyle="--", zorder=1,
    )  # fmt: skip
    for series, row in enumerate(rows):
        colour = series_colour(theme, series)
        marker: dict[str, Any] = {"marker": MARKERS[series % len(MARKERS)], "linewidth": 0, "color": colour}
        own = [each for each in found if each.contender == row.name]
        if not own:
            continue
        artists = []
        for each in own:
            size, alpha = (7.0, 1.0) if each.front else (4.0, 0.45)
            artists += ax.plot(*each.values[:2], markersize=size, alpha=alpha, markeredgewidth=0, **marker)
            figure.mark(ax, each.values[0], each.values[1], _told(each, findings), series=series)
        artists += ax.plot([], [], markersize=5, label=short_name(row.name), **marker)
        of_series(artists, series)
    for axis, objective in ((ax.xaxis, first), (ax.yaxis, second)):
        axis.set_major_locator(MaxNLocator(5))
        if not objective.name.startswith(("eval/", "train/")):
            axis.set_major_formatter(FuncFormatter(partial(_tick, objective.name)))
    ax.margins(0.08)
    drawn = [series for series, row in enumerate(rows) if any(each.contender == row.name for each in found)]
    legend(ax, theme, below=True, series=drawn)
    return figure


def _tick(name: str, number: float, _: int) -> str:
    return shown(name, number)


def _told(point: Point, findings: Findings) -> str:
    """Say what a point is."""
    named = [
        f"{each.name} {shown(each.name, value)}" for each, value in zip(findings.objectives, point.values, strict=True)
    ]
    return f"{point.contender}, {settings(point)}: {', '.join(named)}{' (on the front)' if point.front else ''}"
