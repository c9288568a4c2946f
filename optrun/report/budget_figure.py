"""Draw the score against the budget: the expected best of k configurations, one line per contender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from optrun.report.budget import BAND, ScoreAgainstBudget
from optrun.report.chart import Chart, of_series
from optrun.report.cost import equal_budget
from optrun.report.findings import Findings, Row
from optrun.report.overlap import lines_above, wider
from optrun.report.picture import WIDTH, Data, series_colour, short_name
from optrun.report.seed_curves import zoom
from optrun.report.table import value
from optrun.report.theme import MARKERS, Theme, legend, new_figure, style_axes, tell_cut, write

_FEW = 16
"""So many configurations have room for a tick each; for more the axis is logarithmic."""
_MARKS = 40


def budget_data(rows: Sequence[Row], metric: str) -> Data:
    """List the points of all lines."""
    columns = ["contender", "configurations", f"expected best {metric}", *(f"quantile {share}" for share in BAND)]
    found = []
    for row in rows:
        points = zip(row.budget.expected, row.budget.low, row.budget.high, strict=True)
        found += [[row.name, k, *map(float, point)] for k, point in enumerate(points, start=1)]
    return Data(columns, found)


def draw_budget(rows: Sequence[Row], findings: Findings, theme: Theme) -> Chart:
    """Draw lines with bands, and the budget that all contenders have had."""
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(rows), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel="configurations tried", ylabel=f"expected best {findings.metric}")
    drawn = [series for series, row in enumerate(rows) if row.rank and row.budget.tried]
    lines = [(np.arange(1.0, 1 + rows[series].budget.tried), rows[series].budget.expected) for series in drawn]
    for series, above in zip(drawn, lines_above(lines), strict=True):
        row, budget, colour = rows[series], rows[series].budget, series_colour(theme, series)
        k = np.arange(1, budget.tried + 1)
        told = _spaced(budget.tried)
        band = ax.fill_between(
            k, budget.low, budget.high, color=colour, alpha=0.13 if len(drawn) < 5 else 0.08, linewidth=0
        )
        marker: dict[str, Any] = {"marker": MARKERS[series % len(MARKERS)], "markersize": 4.5, "linewidth": 1.8}
        every = told if budget.tried <= _FEW else told[:: max(1, len(told) // 8)]
        label = f"{short_name(row.name)}  ({budget.tried})"
        line = ax.plot(k, budget.expected, color=colour, label=label, markevery=every, **wider(marker, above))
        of_series([band, *line], series)
        for index in told:
            figure.mark(ax, k[index], budget.expected[index], _told(row, budget, index), series=series)
    most, same = max(rows[series].budget.tried for series in drawn), equal_budget(findings.rows)
    if most > _FEW:
        ax.set_xscale("log")
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if tick <= most]
        ax.set_xticks(ticks)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    budgets = [rows[series].budget for series in drawn]
    if most > _FEW or any(budget.stand_ins or budget.stopped for budget in budgets):
        _zoom(ax, budgets, findings.mode, theme)
    if same < most:
        ax.axvline(same, color=theme.muted, linestyle="--", linewidth=1.1)
        up = findings.mode == "min"
        write(
            ax.annotate(
                f"tried for all: {same}", (same, 1 if up else 0), xycoords=("data", "axes fraction"), fontsize=7.5,
                xytext=(4, -9 if up else 4), textcoords="offset points", color=theme.muted, ha="left",
            )
        )  # fmt: skip
    legend(ax, theme, below=True, series=drawn, title="configurations tried", alignment="left")
    return figure


def _zoom(ax: Axes, budgets: Sequence[ScoreAgainstBudget], mode: str, theme: Theme) -> None:
    """Limit y to what differs: what one bad configuration comes to may leave the picture, which is said."""
    better, worse = ("low", "high") if mode == "min" else ("high", "low")
    zoom(ax, [(budget.expected, getattr(budget, better)) for budget in budgets], mode)
    tell_cut(ax, theme, [y for budget in budgets for y in (*budget.expected, *getattr(budget, worse))], mode)


def _spaced(tried: int) -> list[int]:
    """Pick the points that tell their values: all of few, of many some at equal ratios."""
    every = np.unique(np.round(np.geomspace(1, tried, _MARKS)).astype(int)) if tried > _MARKS else range(1, tried + 1)
    return [int(k) - 1 for k in every]


def _told(row: Row, budget: ScoreAgainstBudget, index: int) -> str:
    """Say what a point is."""
    many = "1 configuration" if index == 0 else f"best of {index + 1}"
    low, high = value(float(budget.low[index])), value(float(budget.high[index]))
    spread = f" (8 of 10 draws: {low} to {high})" if low != high else ""
    return f"{row.name}, {many}: {value(float(budget.expected[index]))}{spread}"
