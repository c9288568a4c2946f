"""The pictures of a comparison: results, curves over seeds, lr basins, score against budget, slices of a search."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from optrun.report.basin_figure import basin_data, draw_basins
from optrun.report.budget_figure import budget_data, draw_budget
from optrun.report.chart import Chart, of_series
from optrun.report.findings import Findings, Row
from optrun.report.pareto import points
from optrun.report.pareto_figure import draw_pareto, pareto_data
from optrun.report.picture import WIDTH, Data, Picture, drawn_rows, series_colour, short_name
from optrun.report.searched import searched_keys
from optrun.report.searched_figure import MOST, draw_slice, searched_data, slice_title
from optrun.report.seed_curves import Axis, curve_data, draw_seed_curves, progress, seed_curves
from optrun.report.table import value
from optrun.report.theme import Theme, new_figure, style_axes, write


def pictures(findings: Findings) -> list[Picture]:
    """List the pictures that this comparison has data for."""
    rows = drawn_rows(findings.rows)
    left_out = len(findings.rows) - len(rows)
    note = f" The best {len(rows)} of {len(findings.rows)} are drawn." if left_out else ""
    arrow = "lower is better" if findings.mode == "min" else "higher is better"
    metric, mode = findings.metric, findings.mode
    axis = progress(rows)
    same = " Batch sizes differ, so the axis is the data seen." if axis == "epoch" else ""
    found: list[Picture] = []

    def add(
        name: str, title: str, caption: str, draw: Callable[[Theme], Figure], data: Callable[[], Data] | None = None
    ) -> None:
        found.append(Picture(name, title, caption + note, draw, data))

    def add_curves(name: str, title: str, caption: str, of: str, axis: Axis, mode: str) -> None:
        curves = seed_curves(rows, of, axis)
        runs = [run for row in rows for run in row.arm.runs]
        if curves:
            add(
                name, title, caption, lambda to: draw_seed_curves(curves, of, mode, axis, to, runs),
                lambda: curve_data(curves, of, axis),
            )  # fmt: skip

    if any(row.rank for row in rows):
        caption = (
            "Dots are seeds, the line is the mean, the bar its 95 % bootstrap interval, for the best configuration "
            "of each."
        )
        title = f"Final {metric} ({arrow})"
        add("results", title, caption, lambda to: _draw_results(rows, metric, to), lambda: _results(rows, metric))
    caption = (
        "Best configuration of each; the line is the mean over seeds, the band spans all seeds; a line that others lie "
        f"on is drawn wider.{same}"
    )
    add_curves("metric", f"{metric} during training", caption, metric, axis, mode)
    caption = (
        "As above, against the time since the start of the run, the median over seeds. Runs side by side on one "
        "machine slow each other."
    )
    add_curves("time", f"{metric} against wall time", caption, metric, "time", mode)
    caption = "Smoothed; the line is the mean over seeds, the band spans all seeds." + same
    add_curves("train-loss", "train/loss during training", caption, "train/loss", axis, "min")
    if any(len(row.basin.tried) > 1 for row in rows):
        caption = (
            "Each point is the mean over seeds at one lr, the bar spans the seeds, the ring is the best. The dashed "
            "line is a level for all contenders; the part of a line that reaches it is thick: its width is how far lr "
            "may be off. A cross marks an lr at which a run diverged, an arrowhead one whose mean lies outside."
        )
        title = f"Final {metric} against learning rate"
        add("basin", title, caption, lambda to: draw_basins(rows, findings, to), lambda: basin_data(rows, metric))
    if findings.objectives and points(findings):
        caption = (
            "A dot is a configuration, the mean over its seeds; those joined by the line are on the front: no other is "
            "better in one number and at least as good in all."
        )
        if len(findings.objectives) > 2:
            caption += f" The first two of {len(findings.objectives)} are drawn: the line may bend back."
        first, second = findings.objectives[:2]
        title = f"{second.name} against {first.name}"
        add("pareto", title, caption, lambda to: draw_pareto(rows, findings, to), lambda: pareto_data(findings))
    if any(row.rank and row.budget.tried > 1 for row in rows):
        caption = (
            "The best mean that so many of a contender's configurations would have given, in random order: the line is "
            "its expectation, the band holds 8 of 10 orders. Compare at equal budget: further right one contender was "
            "tuned more. The band closes at the end, where only one search of that size was seen."
        )
        if any(row.budget.stopped for row in rows):
            caption += " One that was stopped early counts with its last evaluation."
        title = f"{metric} against the number of configurations tried"
        add("budget", title, caption, lambda to: draw_budget(rows, findings, to), lambda: budget_data(rows, metric))
    if len(searched_keys(findings)) > 1:
        caption = (
            "A dot is a configuration, the ring the chosen one, a cross one that diverged, an arrowhead one that lies "
            "outside. The share is how much of the variance of ranks within a contender the setting explains by "
            "itself, corrected for chance; what two settings do only together is in no share."
        )
        if (more := len(searched_keys(findings)) - MOST) > 0:
            caption += f" {more} more settings are in the data alone."
        for key in searched_keys(findings)[:MOST]:
            name, title = "slice-" + re.sub(r"[^\w-]", "-", key), slice_title(findings, key)
            add(
                name,
                title,
                caption,
                partial(draw_slice, rows, findings, key),
                partial(searched_data, rows, findings, key),
            )
            caption = "As before."
    return found


def _results(rows: Sequence[Row], metric: str) -> Data:
    """List the scores of the chosen configurations, a line for each seed."""
    columns = ["contender", "rank", "seed", metric, f"mean {metric}", "interval from", "interval to"]
    found = [
        [row.name, row.rank, seed, score, row.arm.mean, *row.interval]
        for row in rows if row.rank for seed, score in row.arm.scores.items()
    ]  # fmt: skip
    return Data(columns, found)


def _draw_results(rows: Sequence[Row], metric: str, theme: Theme) -> Chart:
    """One line per contender, best on top."""
    ranked = [row for row in rows if row.rank]
    figure = new_figure(WIDTH, 0.9 + 0.42 * len(ranked), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel=f"final {metric}")
    ax.grid(False, axis="y")
    for index, row in enumerate(ranked):
        y, colour = -float(index), series_colour(theme, index)
        seeds, values = list(row.arm.scores), np.array(list(row.arm.scores.values()))
        low, high = row.interval
        artists = []
        if math.isfinite(low):
            artists += ax.plot([low, high], [y, y], color=colour, linewidth=6, alpha=0.28, solid_capstyle="round")
            figure.mark(ax, row.arm.mean, y, _told(row), series=index)
        artists += ax.plot([row.arm.mean] * 2, [y - 0.2, y + 0.2], color=colour, linewidth=2.4, solid_capstyle="round")
        spread = 0.09 * np.linspace(-1, 1, len(values)) if len(values) > 1 else np.zeros(1)
        artists += ax.plot(values, y + spread, marker="o", markersize=4.2, linewidth=0, color=colour, alpha=0.85)
        for seed, x, up in zip(seeds, values, y + spread, strict=True):
            figure.mark(ax, x, up, f"{row.name}, seed {seed}: {value(float(x))}", series=index)
        # The name stands above its line, where a long one takes no room from the picture.
        name: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "ha": "left", "va": "center"}
        text = ax.text(0.0, y + 0.42, f"{row.rank}  {short_name(row.name)}", color=theme.ink, fontsize=8.5, **name)
        of_series([*artists, write(text)], index)
    ax.set_yticks([])
    ax.set_ylim(-len(ranked) + 0.6, 0.7)
    ax.spines["left"].set_visible(False)
    ax.margins(x=0.05)
    return figure


def _told(row: Row) -> str:
    """Say what the mark of the mean is."""
    low, high = row.interval
    return f"{row.name}: mean {value(row.arm.mean)}, 95 % interval {value(low)} to {value(high)}"
