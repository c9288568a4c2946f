"""Draw the lr basins: metric against learning rate, one line per contender."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from optrun.base.formatting import rate
from optrun.report.basin import BasinPoint
from optrun.report.chart import Chart, of_series
from optrun.report.findings import Findings, Row
from optrun.report.picture import Data, Dot, draw_dots, limit, panel, reach, short_name, style_of, tell_cut
from optrun.report.searched import searched_keys
from optrun.report.table import value
from optrun.report.theme import Theme, legend, log_axis

_CROWDED = 10
"""A contender with more learning rates than this was searched at random, not on a grid."""


def basin_data(rows: Sequence[Row], metric: str) -> Data:
    """List the points of all basins, diverged learning rates among them."""
    found: list[list[object]] = []
    for row in rows:
        lost = row.basin.diverged
        for one in row.basin.points:
            best = one is row.basin.best
            found.append([row.name, one.lr, one.mean, one.low, one.high, one.seeds, one.lr in lost, best])
        without = [lr for lr in lost if lr not in {one.lr for one in row.basin.points}]
        found += [[row.name, lr, None, None, None, 0, True, False] for lr in without]
    columns = ["contender", "lr", f"mean {metric}", "lowest seed", "highest seed", "seeds", "diverged", "best"]
    return Data(columns, found)


def draw_basins(rows: Sequence[Row], findings: Findings, theme: Theme) -> Chart:
    """Draw the metric against lr, lr logarithmic."""
    figure, ax = panel(theme, len(rows), "peak learning rate", f"final {findings.metric}")
    log_axis(ax, "x", [lr for row in rows for lr in row.basin.tried])
    ax.margins(x=0.05)
    # With other settings searched, too, neighbours differ by more than lr: a line through them would show that noise.
    joined = len(searched_keys(findings)) < 2 or max(len(row.basin.points) for row in rows) <= _CROWDED
    bests = {series: row.basin.best.mean for series, row in enumerate(rows) if row.basin.best is not None}
    known = [{arm.lr for arm in row.contender.arms if arm.finished} for row in rows]
    points = [[one for one in row.basin.points if one.lr in lrs] for row, lrs in zip(rows, known, strict=True)]
    means = [one.mean for line in points for one in line]
    if bests:
        best = min(bests.values()) if findings.mode == "min" else max(bests.values())
        floors = [abs(each - best) for each in bests.values()]
        level = abs(findings.level - best)
        limit(ax, means, findings.mode, least=max(1.3 * reach(floors), level if math.isfinite(level) else 0.0))
        tell_cut(ax, theme, findings.mode, [(rows[series].name, mean) for series, mean in bests.items()], ())
    if math.isfinite(findings.level):
        ax.axhline(findings.level, color=theme.muted, linestyle="--", linewidth=1.1)
    for series, row in enumerate(rows):
        basin, colour = row.basin, style_of(theme, series)["color"]
        low, high = ax.get_ylim()
        inside = [one for one in points[series] if one.lr not in basin.diverged or low <= one.mean <= high]
        seeds = [ax.plot([one.lr] * 2, [one.low, one.high], linewidth=1.1, alpha=0.7)[0] for one in inside]
        dots = [Dot(one.lr, one.mean, _told(row, one), one is basin.best) for one in inside]
        dots += [Dot(lr, math.nan, f"{row.name}, lr {rate(lr)}: diverged") for lr in basin.diverged]
        if basin.high > basin.low and joined:
            lrs, floor = np.array([(point.lr, point.mean) for point in basin.points]).T
            good = np.array([basin.low, *lrs[(lrs > basin.low) & (lrs < basin.high)], basin.high])
            level = np.interp(np.log(good), np.log(lrs), floor)
            seeds += ax.plot(good, level, linewidth=6, alpha=0.22, solid_capstyle="round")
        for artist in seeds:
            artist.set_color(colour)
        of_series(seeds, series)
        label = f"{short_name(row.name)}  {basin.width_label()}" if len(basin.tried) > 1 else row.name
        draw_dots(figure, ax, series, label, dots, findings.mode, theme, linewidth=1.4 if joined else 0)
    legend(ax, theme, below=True, series=range(len(rows)), title="width of the basin", alignment="left")
    return figure


def _told(row: Row, point: BasinPoint) -> str:
    over = f" ({value(point.low)} to {value(point.high)}, {point.seeds} seeds)" if point.seeds > 1 else ""
    return f"{row.name}, lr {rate(point.lr)}: {value(point.mean)}{over}"
