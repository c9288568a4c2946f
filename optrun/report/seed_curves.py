"""Draw a metric of contenders during training, and at its end against the learning rate.

A line for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes

from optrun.base.formatting import rate
from optrun.report.arms import Contender
from optrun.report.collect import Array, Run
from optrun.report.curves import smooth
from optrun.report.findings import Findings
from optrun.report.picture import (
    Dot,
    draw_dots,
    limit,
    panel,
    reach,
    short_name,
    style_of,
    tell_cut,
)
from optrun.report.searched import searched_keys
from optrun.report.table import value
from optrun.report.theme import PAGE, SEEDS, Chart, Theme, count_axis, legend, log_axis, of_series

Axis = Literal["step", "epoch"]

_CROWDED = 10
"""A contender with more learning rates than this was searched at random, not on a grid."""
_POINTS = 600
_BANDS = 3
"""With more contenders than this the bands are a fog.

The best two have one, the page shows the seeds of the others.
"""


@dataclass(frozen=True)
class SeedCurve:
    """One contender's line."""

    series: int
    name: str
    finished: bool
    x: Array
    """Steps or epochs; shape (n,)."""
    values: Array
    """Shape (seeds, n)."""
    mean: Array
    """Over seeds; shape (n,)."""


def progress(rows: Sequence[Contender]) -> Axis:
    """Choose the x axis: optimizer steps, or data seen where a step is not the same for all."""
    runs = [run for row in rows for run in row.arm.runs]
    alike = len({run.batch for run in runs}) <= 1
    return "step" if alike or not all(len(run.series("epoch")[0]) for run in runs) else "epoch"


def seed_curves(rows: Sequence[Contender], metric: str, axis: Axis) -> list[SeedCurve]:
    """Put the runs of each contender's best configuration on common points.

    A training loss is smoothed before.

    Args:
        rows: The contenders that are drawn.
        metric: What was logged.
        axis: Against what.

    Returns:
        None for a contender that has not logged it.
    """
    found = []
    for series, row in enumerate(rows):
        runs = [run for run in row.arm.counted if run.finished] or row.arm.counted
        x, y = _common(runs, metric, axis)
        if len(x):
            found.append(SeedCurve(series, row.name, bool(row.arm.scores), x, y, y.mean(axis=0)))
    return found


def draw_seed_curves(
    curves: Sequence[SeedCurve], metric: str, mode: str, axis: Axis, theme: Theme
) -> Chart:
    """Draw mean lines, and bands over seeds for a few."""
    below = {"step": "optimizer step", "epoch": "passes over the training data"}[axis]
    figure, ax = panel(theme, len(curves), below, metric)
    for place, curve in enumerate(curves):
        style, every = style_of(theme, curve.series), max(1, len(curve.x) // 8)
        style["markevery"] = (
            curve.series * every // 8,
            every,
        )  # not at the same places: a line may lie on another
        label = short_name(curve.name) + ("" if curve.finished else " (not finished)")
        style |= {"label": label, "linestyle": "-" if curve.finished else "--"}
        of_series(ax.plot(curve.x, curve.mean, linewidth=1.8, **style), curve.series)
        if len(curve.values) > 1 and (len(curves) <= _BANDS or place < 2):
            low, high = curve.values.min(axis=0), curve.values.max(axis=0)
            band = ax.fill_between(
                curve.x, low, high, color=style["color"], alpha=0.16, linewidth=0
            )
            of_series(band, curve.series)
        elif len(curve.values) > 1 and theme is PAGE:
            seeds = ax.plot(
                curve.x, curve.values.T, color=style["color"], linewidth=0.8, alpha=0.75, zorder=3
            )
            of_series(seeds, curve.series, SEEDS)
        told = [_told(curve, axis, index) for index in range(len(curve.x))]
        figure.mark_line(ax, curve.x, curve.mean, told, series=curve.series)
    _limit(ax, curves, mode)
    ends = [(curve.name, float(curve.mean[-1])) for curve in curves]
    tell_cut(ax, theme, mode, ends, [y for curve in curves for y in curve.values.flat])
    if axis == "step":
        count_axis(ax)
    legend(ax, theme, below=figure, series=[curve.series for curve in curves])
    return figure


def _told(curve: SeedCurve, axis: Axis, index: int) -> str:
    """Say where a point lies and what it is made of."""
    return (
        f"{curve.name}, {axis} {curve.x[index]:,.6g}:"
        f" {_over(curve.values[:, index], curve.mean[index])}"
    )


def _over(seeds: Sequence[float] | Array, mean: float) -> str:
    """Write a mean, and the range of several seeds that it is over."""
    over = (
        f" ({value(min(seeds))} to {value(max(seeds))}, {len(seeds)} seeds)"
        if len(seeds) > 1
        else ""
    )
    return value(mean) + over


def _limit(ax: Axes, curves: Sequence[SeedCurve], mode: str) -> None:
    """Show how the curves end; of the steep begin as much as leaves room for that."""
    sign = 1.0 if mode == "min" else -1.0
    ends = [float(curve.mean[-1]) for curve in curves]
    best = min(sign * end for end in ends)
    # The first value is that of the untrained model, and a quarter further on the steep descent is
    # over.
    early = (
        float(np.median([sign * curve.mean[(len(curve.mean) + 2) // 4] for curve in curves])) - best
    )
    least = min(early, max(3 * reach([sign * end - best for end in ends]), 0.33 * early))
    limit(
        ax,
        ends,
        mode,
        least=least,
        edge=[sign * min(float((sign * curve.values).min()) for curve in curves)],
    )


def _common(runs: Sequence[Run], metric: str, axis: Axis) -> tuple[Array, Array]:
    """Interpolate several runs where all of them run, on the points of all.

    Shapes (n,) and (seeds, n).
    """
    curves = [line for run in runs if len((line := run.line(metric, axis))[0])]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    if metric.startswith("train/"):
        curves = [(x, smooth(y, max(1.0, len(y) / 50))) for x, y in curves]
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    points = np.unique(np.concatenate([x for x, _ in curves]))
    points = points[(points >= start) & (points <= end)]
    if len(points) > _POINTS:
        points = points[np.linspace(0, len(points) - 1, _POINTS).astype(int)]
    return points, np.array([np.interp(points, x, y) for x, y in curves])


def draw_basins(rows: Sequence[Contender], findings: Findings, theme: Theme) -> Chart:
    """Draw the metric against lr, lr logarithmic."""
    figure, ax = panel(theme, len(rows), "peak learning rate", f"final {findings.metric}")
    log_axis(ax, "x", [lr for row in rows for lr in row.basin.tried])
    ax.margins(x=0.05)
    # With other settings searched, too, neighbours differ by more than lr: a line through them
    # would show that noise.
    joined = (
        len(searched_keys(findings)) < 2 or max(len(row.basin.points) for row in rows) <= _CROWDED
    )
    bests = [(row.name, row.basin.best.mean) for row in rows if row.basin.best is not None]
    if bests:
        means = [mean for _, mean in bests]
        best = min(means) if findings.mode == "min" else max(means)
        every = [arm.mean for row in rows for arm in row.basin.points.values()]
        limit(ax, every, findings.mode, least=1.3 * reach(abs(mean - best) for mean in means))
        tell_cut(ax, theme, findings.mode, bests, ())
    low, high = ax.get_ylim()
    for series, row in enumerate(rows):
        basin = row.basin
        inside = {
            lr: arm
            for lr, arm in basin.points.items()
            if lr not in basin.diverged or low <= arm.mean <= high
        }
        told = {
            lr: f"{row.name}, lr {rate(lr)}: {_over(arm.finished, arm.mean)}"
            for lr, arm in inside.items()
        }
        dots = [Dot(lr, arm.mean, told[lr], arm is basin.best) for lr, arm in inside.items()]
        dots += [Dot(lr, math.nan, f"{row.name}, lr {rate(lr)}: diverged") for lr in basin.diverged]
        colour = style_of(theme, series)["color"]
        for lr, arm in inside.items():
            ends = [min(arm.finished), max(arm.finished)]
            of_series(ax.plot([lr, lr], ends, linewidth=1.1, alpha=0.7, color=colour), series)
        draw_dots(figure, ax, series, row.name, dots, findings.mode, theme, 1.4 if joined else 0.0)
    legend(ax, theme, below=figure, series=range(len(rows)))
    return figure
