"""Draw the lr basins: metric against learning rate, one line per contender."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from optrun.formatting import rate
from optrun.report.basin import BasinPoint
from optrun.report.chart import Chart, of_series
from optrun.report.findings import Findings, Row
from optrun.report.picture import WIDTH, Data, series_colour, short_name
from optrun.report.searched import searched_keys
from optrun.report.table import value
from optrun.report.theme import MARKERS, Theme, legend, log_axis, new_figure, number_axis, style_axes, tell_cut

_CROWDED = 10
"""A contender with more learning rates than this was searched at random, not on a grid."""


def basin_data(rows: Sequence[Row], metric: str) -> Data:
    """List the points of all basins, diverged learning rates among them."""
    found: list[list[object]] = []
    for row in rows:
        points = {point.lr: point for point in row.basin.points}
        for lr in row.basin.tried:
            point = points.get(lr)
            numbers = [None] * 3 if point is None else [point.mean, point.low, point.high]
            seeds = 0 if point is None else point.seeds
            best = point is not None and point is row.basin.best
            found.append([row.name, lr, *numbers, seeds, lr in row.basin.diverged, best])
    columns = ["contender", "lr", f"mean {metric}", "lowest seed", "highest seed", "seeds", "diverged", "best"]
    return Data(columns, found)


def draw_basins(rows: Sequence[Row], findings: Findings, theme: Theme) -> Chart:
    """Metric against lr, lr logarithmic."""
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(rows), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel="peak learning rate", ylabel=f"final {findings.metric}")
    log_axis(ax, "x", [lr for row in rows for lr in row.basin.tried])
    ax.margins(x=0.05)
    shown: list[float] = []
    drawn: list[int] = []
    # With other settings searched, too, neighbours differ by more than lr: a line through them would show that noise.
    joined = len(searched_keys(findings)) < 2 or max(len(row.basin.points) for row in rows) <= _CROWDED
    for series, row in enumerate(rows):
        if row.basin.best is not None:
            _draw_basin(figure, ax, series, row, theme, joined=joined)
            shown += [point.mean for point in row.basin.points]
            drawn.append(series)
    if shown:
        _limit(ax, rows, shown, findings)
        tell_cut(ax, theme, shown, findings.mode)
    if math.isfinite(findings.level.value):
        ax.axhline(findings.level.value, color=theme.muted, linestyle="--", linewidth=1.1)
    _mark_edges(figure, ax, rows, findings.mode, theme)
    legend(ax, theme, below=True, series=drawn, title="width of the basin", alignment="left")
    return figure


def _draw_basin(figure: Chart, ax: Axes, series: int, row: Row, theme: Theme, *, joined: bool) -> None:
    """Draw one contender: a line, a bar over the seeds at each lr, the good region thick, a ring around the best."""
    basin, colour = row.basin, series_colour(theme, series)
    assert basin.best is not None
    lrs = np.array([point.lr for point in basin.points])
    means = np.array([point.mean for point in basin.points])
    label = f"{short_name(row.name)}  {basin.width_label()}" if len(basin.tried) > 1 else short_name(row.name)
    style: dict[str, Any] = {"marker": MARKERS[series % len(MARKERS)], "markersize": 5, "label": label}
    artists = ax.plot(lrs, means, color=colour, linewidth=1.4 if joined else 0, **style)
    for point in basin.points:
        if point.high > point.low:
            artists += ax.plot([point.lr] * 2, [point.low, point.high], color=colour, linewidth=1.1, alpha=0.7)
        figure.mark(ax, point.lr, point.mean, _told(row, point), series=series)
    if basin.high > basin.low and joined:
        inside = np.array([basin.low, *lrs[(lrs > basin.low) & (lrs < basin.high)], basin.high])
        level = np.interp(np.log(inside), np.log(lrs), means)
        artists += ax.plot(inside, level, color=colour, linewidth=6, alpha=0.22, solid_capstyle="round")
    artists += ax.plot(
        basin.best.lr, basin.best.mean, marker="o", markersize=12, markerfacecolor="none", markeredgecolor=colour,
        markeredgewidth=1.6, linewidth=0,
    )  # fmt: skip
    of_series(artists, series)


def _told(row: Row, point: BasinPoint) -> str:
    over = f" ({value(point.low)} to {value(point.high)}, {point.seeds} seeds)" if point.seeds > 1 else ""
    return f"{row.name}, lr {rate(point.lr)}: {value(point.mean)}{over}"


def _mark_edges(figure: Chart, ax: Axes, rows: Sequence[Row], mode: str, theme: Theme) -> None:
    """Draw a cross on the edge at every lr that diverged, an arrowhead at every one whose mean lies outside."""
    low, high = ax.get_ylim()
    transform = ax.get_xaxis_transform()
    for series, row in enumerate(rows):
        edges = [(lr, "x", mode == "min", f"{row.name}, lr {rate(lr)}: diverged") for lr in row.basin.diverged]
        for point in row.basin.points:
            if not low <= point.mean <= high:
                above = point.mean > high
                edges.append((point.lr, "^" if above else "v", above, _told(row, point)))
        for lr, marker, above, told in edges:
            y = 0.985 if above else 0.015
            style: dict[str, Any] = {"marker": marker, "markersize": 7 if marker == "x" else 6, "markeredgewidth": 2}
            colour = series_colour(theme, series)
            artists = ax.plot(lr, y, transform=transform, color=colour, linewidth=0, clip_on=False, **style)
            of_series(artists, series)
            figure.mark(ax, lr, y, told, series=series, transform=transform)


def _limit(ax: Axes, rows: Sequence[Row], means: Sequence[float], findings: Findings) -> None:
    """Show the level, and every basin's floor well; far worse learning rates may leave the picture."""
    mode, level = findings.mode, findings.level.value
    bests = [row.basin.best.mean for row in rows if row.basin.best is not None]
    best, worst_best = (min(bests), max(bests)) if mode == "min" else (max(bests), min(bests))
    ordinary = float(np.quantile(means, 0.85 if mode == "min" else 0.15))
    reach = max(
        abs(ordinary - best),
        1.6 * abs(worst_best - best),
        1.6 * abs(level - best) if math.isfinite(level) else 0.0,
    )
    reach = reach or 0.02 * abs(best) or 0.01
    margin = 0.08 * reach
    limits = (best - margin, best + reach + margin) if mode == "min" else (best - reach - margin, best + margin)
    number_axis(ax, limits)
    ax.set_ylim(*limits)
