"""Draw the lr basins: metric against learning rate, one line per contender."""

from __future__ import annotations

import math
from collections.abc import Sequence

from optrun.base.formatting import rate
from optrun.report.basin import BasinPoint
from optrun.report.chart import Chart, of_series
from optrun.report.findings import Findings, Row
from optrun.report.picture import Dot, draw_dots, limit, panel, reach, style_of, tell_cut
from optrun.report.searched import searched_keys
from optrun.report.table import value
from optrun.report.theme import Theme, legend, log_axis

_CROWDED = 10
"""A contender with more learning rates than this was searched at random, not on a grid."""


def draw_basins(rows: Sequence[Row], findings: Findings, theme: Theme) -> Chart:
    """Draw the metric against lr, lr logarithmic."""
    figure, ax = panel(theme, len(rows), "peak learning rate", f"final {findings.metric}")
    log_axis(ax, "x", [lr for row in rows for lr in row.basin.tried])
    ax.margins(x=0.05)
    # With other settings searched, too, neighbours differ by more than lr: a line through them would show that noise.
    joined = len(searched_keys(findings)) < 2 or max(len(row.basin.points) for row in rows) <= _CROWDED
    bests = [(row.name, row.basin.best.mean) for row in rows if row.basin.best is not None]
    if bests:
        means = [mean for _, mean in bests]
        best = min(means) if findings.mode == "min" else max(means)
        every = [one.mean for row in rows for one in row.basin.points]
        limit(ax, every, findings.mode, least=1.3 * reach(abs(mean - best) for mean in means))
        tell_cut(ax, theme, findings.mode, bests, ())
    low, high = ax.get_ylim()
    for series, row in enumerate(rows):
        basin = row.basin
        inside = [one for one in basin.points if one.lr not in basin.diverged or low <= one.mean <= high]
        dots = [Dot(one.lr, one.mean, _told(row, one), one is basin.best) for one in inside]
        dots += [Dot(lr, math.nan, f"{row.name}, lr {rate(lr)}: diverged") for lr in basin.diverged]
        colour = style_of(theme, series)["color"]
        for one in inside:
            of_series(ax.plot([one.lr] * 2, [one.low, one.high], linewidth=1.1, alpha=0.7, color=colour), series)
        draw_dots(figure, ax, series, row.name, dots, findings.mode, theme, linewidth=1.4 if joined else 0)
    legend(ax, theme, below=True, series=range(len(rows)))
    return figure


def _told(row: Row, point: BasinPoint) -> str:
    over = f" ({value(point.low)} to {value(point.high)}, {point.seeds} seeds)" if point.seeds > 1 else ""
    return f"{row.name}, lr {rate(point.lr)}: {value(point.mean)}{over}"
