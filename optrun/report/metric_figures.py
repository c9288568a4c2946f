"""Draw a metric of contenders during training, and at its end against the learning rate."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from optrun.report.configurations import Contender
from optrun.report.findings import Findings
from optrun.report.picture import (
    Dot,
    draw_dots,
    find_reach,
    note_cut_contenders,
    panel,
    set_limits,
    short_name,
    style_of,
)
from optrun.report.runs import Array, Run
from optrun.report.theme import Chart, count_axis, legend, log_axis

Axis = Literal["step", "epoch"]

_CROWDED = 10
"""A contender with more learning rates than this was searched, not run on a grid."""
_POINTS = 200
"""Points of a drawn line; a longer log is thinned."""


@dataclass(frozen=True)
class SeedLine:
    """One run of a contender's best configuration."""

    series: int
    """Index of the contender, which decides its colour."""
    contender: str
    finished: bool
    """Whether the contender has a score; without one its lines are dashed."""
    x: Array
    """Steps or epochs; shape (n,)."""
    y: Array
    """The metric; shape (n,)."""


def choose_axis(contenders: Sequence[Contender]) -> Axis:
    """Choose the x axis: optimizer steps, or epochs if the batch sizes of runs differ.

    Steps again if one of the runs did not log `epoch`.
    """
    runs: list[Run] = []
    for contender in contenders:
        runs += contender.configuration.runs
    if len({run.batch for run in runs}) <= 1:
        return "step"
    if all(len(run.series("epoch")[0]) for run in runs):
        return "epoch"
    return "step"


def seed_lines(contenders: Sequence[Contender], metric: str, axis: Axis) -> list[SeedLine]:
    """List the line of each seed of each contender's chosen configuration.

    Each seed has one run, see `Configuration.latest_runs`. If a contender has finished runs, only
    those are drawn. A line of fewer than two values is left out, a long one is thinned to `_POINTS`
    values.

    Args:
        contenders: The contenders to draw.
        metric: Name of the logged metric.
        axis: The x axis.
    """
    lines = []
    for series, contender in enumerate(contenders):
        runs = contender.configuration.latest_runs
        finished_runs = [run for run in runs if run.finished]
        for run in finished_runs or runs:
            x, y = run.finite_values(metric, axis)
            if len(x) < 2:  # one point is no curve
                continue
            evenly_spaced = np.linspace(0, len(x) - 1, min(len(x), _POINTS))
            indices = np.unique(evenly_spaced.astype(int))
            finished = bool(contender.configuration.scores)
            lines.append(SeedLine(series, contender.name, finished, x[indices], y[indices]))
    return lines


def draw_seed_lines(lines: Sequence[SeedLine], metric: str, mode: str, axis: Axis) -> Chart:
    """Draw one line for each seed, in the colour of its contender.

    A contender without a finished run is dashed; one outside the limits is named above. See
    `_set_metric_limits`.
    """
    contenders: dict[int, list[SeedLine]] = defaultdict(list)
    for line in lines:
        contenders[line.series].append(line)
    below = {"step": "optimizer step", "epoch": "passes over the training data"}[axis]
    figure, ax = panel(len(contenders), below, metric)
    for members in contenders.values():
        for position, line in enumerate(members):
            style = _line_style(line, is_first=position == 0, is_alone=len(members) == 1)
            ax.plot(line.x, line.y, **style)
    _set_metric_limits(ax, lines, mode)
    ends = []
    for members in contenders.values():
        mean = float(np.mean([line.y[-1] for line in members]))
        ends.append((members[0].contender, mean))
    note_cut_contenders(ax, mode, ends)
    if axis == "step":
        count_axis(ax)
    legend(ax, below=figure)
    return figure


def _line_style(line: SeedLine, *, is_first: bool, is_alone: bool) -> dict[str, Any]:
    """Style the line of a seed; only the first one of a contender has markers and a label."""
    style = style_of(line.series)
    # About eight markers, shifted by contender, because one line may lie on another.
    spacing = max(1, len(line.x) // 8)
    style["markevery"] = (line.series * spacing // 8, spacing)
    style["linewidth"] = 1.8 if is_alone else 1.1
    style["linestyle"] = "-" if line.finished else "--"
    if not is_first:
        style["marker"] = ""
        return style
    style["label"] = short_name(line.contender)
    if not line.finished:
        style["label"] += " (not finished)"
    return style


def _set_metric_limits(ax: Axes, lines: Sequence[SeedLine], mode: str) -> None:
    """Set the y limits so that the last three quarters of training are seen.

    They reach from the best value of any line to the last values and to the median of the values
    after a quarter of training. The steep descent before is cut, as are outliers, see `set_limits`.
    """
    ends = [float(line.y[-1]) for line in lines]
    values = np.concatenate([line.y for line in lines])
    best = float(values.min() if mode == "min" else values.max())
    # Adding 2 rounds the quarter to the nearest index.
    values_after_quarter = [line.y[(len(line.y) + 2) // 4] for line in lines]
    after_quarter = float(np.median(values_after_quarter))
    set_limits(ax, [best, *ends], mode, least=abs(after_quarter - best))


def draw_lr_curves(contenders: Sequence[Contender], findings: Findings) -> Chart:
    """Draw the final metric against lr, on a logarithmic lr axis.

    Each point is a mean over seeds with a thin line from the best to the worst seed. Points of
    a contender with more than `_CROWDED` rates are not joined.
    """
    # 1. The axes: all tried rates, and the means without outliers.
    figure, ax = panel(len(contenders), "peak learning rate", f"final {findings.metric}")
    lrs: list[float] = []
    all_means: list[float] = []
    for contender in contenders:
        lrs += contender.lr_curve.finished_lrs
        all_means += [point.mean for point in contender.lr_curve.points.values()]
    log_axis(ax, "x", lrs)
    ax.margins(x=0.05)
    bests = [
        (contender.name, contender.lr_curve.best.mean)
        for contender in contenders
        if contender.lr_curve.best is not None
    ]
    if bests:
        means = [mean for _, mean in bests]
        best = min(means) if findings.mode == "min" else max(means)
        # The best point of each contender is seen, but for outliers, with some room beyond.
        reach = find_reach(abs(mean - best) for mean in means)
        set_limits(ax, all_means, findings.mode, least=1.3 * reach)
        note_cut_contenders(ax, findings.mode, bests)
    # 2. The lines and points of each contender.
    width = 1.4
    if max(len(contender.lr_curve.points) for contender in contenders) > _CROWDED:
        # So many rates come from a search, whose neighbours differ in other settings, too: a line
        # through them would show that noise.
        width = 0.0
    for series, contender in enumerate(contenders):
        dots = _lr_dots(ax, contender)
        for dot in dots:
            if math.isnan(dot.y):
                continue
            # A thin line from the best to the worst seed.
            scores = contender.lr_curve.points[dot.x].finished_scores.values()
            if scores:
                ax.plot(
                    [dot.x, dot.x],
                    [min(scores), max(scores)],
                    linewidth=1.1,
                    alpha=0.7,
                    color=style_of(series)["color"],
                )
        draw_dots(ax, series, contender.name, dots, findings.mode, width)
    legend(ax, below=figure)
    return figure


def _lr_dots(ax: Axes, contender: Contender) -> list[Dot]:
    """List the mean at each lr, then a NaN at each lr with a diverged run.

    The mean at an lr with diverged runs is left out if it lies outside the y limits.
    """
    low, high = ax.get_ylim()
    lr_curve = contender.lr_curve
    dots = []
    for lr, configuration in lr_curve.points.items():
        if lr in lr_curve.diverged and not low <= configuration.mean <= high:
            continue
        dots.append(Dot(lr, configuration.mean, configuration is lr_curve.best))
    dots.extend(Dot(lr, math.nan) for lr in lr_curve.diverged)
    return dots
