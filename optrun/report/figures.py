"""The pictures of a comparison: results, curves over seeds, lr basins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from optrun.report import branches
from optrun.report.collect import Run
from optrun.report.curves import smooth
from optrun.report.findings import Findings, Row
from optrun.report.theme import (
    MARKERS,
    Theme,
    count_axis,
    legend,
    log_axis,
    new_figure,
    number_axis,
    style_axes,
    tell_cut,
    write,
)

Array = NDArray[np.float64]
Axis = Literal["step", "epoch", "time"]

SHOWN = 8
"""More contenders than this cannot be told apart in one picture; the best are drawn, the table has all."""
_NAME_LENGTH = 34
WIDTH = 4.3
"""Inches: as wide as a phone, where the page shows it at about its own size; two stand side by side on a desk."""


@dataclass(frozen=True)
class Picture:
    """One figure, to be drawn under any theme."""

    name: str
    """For file names and anchors."""
    title: str
    caption: str
    draw: Callable[[Theme], Figure]


def pictures(findings: Findings) -> list[Picture]:
    """List the pictures that this comparison has data for."""
    rows = [row for row in findings.rows if row.arm.runs][:SHOWN]
    left_out = len(findings.rows) - len(rows)
    note = f" The best {len(rows)} of {len(findings.rows)} are drawn." if left_out else ""
    arrow = "lower is better" if findings.mode == "min" else "higher is better"
    metric = findings.metric
    axis = _progress(rows)
    same = " Batch sizes differ, so the axis is the data seen." if axis == "epoch" else ""
    found: list[Picture] = []

    def add(name: str, title: str, caption: str, draw: Callable[[Theme], Figure]) -> None:
        found.append(Picture(name, title, caption + note, draw))

    if any(row.rank for row in rows):
        caption = (
            "Dots are seeds, the line is the mean, the bar its 95 % bootstrap interval, for the best configuration "
        )
        add("results", f"Final {metric} ({arrow})", f"{caption}of each.", lambda to: _draw_results(rows, findings, to))
    if _has(rows, metric):
        caption = "Best configuration of each; the line is the mean over seeds, the band spans all seeds." + same
        mode = findings.mode
        add("metric", f"{metric} during training", caption, lambda to: _draw_curves(rows, metric, mode, to, axis=axis))
        caption = (
            "As above, against the time since the start of the run. Runs side by side on one machine slow each other."
        )
        add(
            "time", f"{metric} against wall time", caption, lambda to: _draw_curves(rows, metric, mode, to, axis="time")
        )
    if _has(rows, loss := "train/loss"):
        caption = "Smoothed; the line is the mean over seeds, the band spans all seeds." + same
        add("train-loss", f"{loss} during training", caption, lambda to: _draw_curves(rows, loss, "min", to, axis=axis))
    if any(len(row.basin.tried) > 1 for row in rows):
        caption = (
            "Each point is the mean over seeds at one lr, the bar spans the seeds, the ring is the best. The dashed "
            "line is a level for all contenders; the part of a line that reaches it is thick: its width is how far lr "
            "may be off. A cross marks an lr at which a run diverged, an arrowhead one whose mean lies outside."
        )
        add("basin", f"Final {metric} against learning rate", caption, lambda to: _draw_basins(rows, findings, to))
    return found


def _progress(rows: Sequence[Row]) -> Axis:
    """Choose the x axis: optimizer steps, or data seen where a step is not the same for all."""
    sizes = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")
    runs = [run for row in rows for run in row.arm.runs]
    alike = len({tuple(str(run.config.get(key)) for key in sizes) for run in runs}) <= 1
    return "step" if alike or not all(len(run.series("epoch")[0]) for run in runs) else "epoch"


def _has(rows: Sequence[Row], name: str) -> bool:
    return any(np.isfinite(run.series(name)[1]).any() for row in rows for run in row.arm.runs)


def _name(text: str) -> str:
    return text if len(text) <= _NAME_LENGTH else text[: _NAME_LENGTH - 1] + "…"


def _colour(theme: Theme, index: int) -> str:
    return theme.series[index % len(theme.series)]


def _draw_results(rows: Sequence[Row], findings: Findings, theme: Theme) -> Figure:
    """One line per contender, best on top."""
    ranked = [row for row in rows if row.rank]
    figure = new_figure(WIDTH, 0.9 + 0.42 * len(ranked), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel=f"final {findings.metric}")
    ax.grid(False, axis="y")
    for index, row in enumerate(ranked):
        y, colour = -float(index), _colour(theme, index)
        values = np.array(list(row.arm.scores.values()))
        low, high = row.interval
        if math.isfinite(low):
            ax.plot([low, high], [y, y], color=colour, linewidth=6, alpha=0.28, solid_capstyle="round")
        ax.plot([row.arm.mean] * 2, [y - 0.2, y + 0.2], color=colour, linewidth=2.4, solid_capstyle="round")
        spread = 0.09 * np.linspace(-1, 1, len(values)) if len(values) > 1 else np.zeros(1)
        ax.plot(values, y + spread, marker="o", markersize=4.2, linewidth=0, color=colour, alpha=0.85)
        # The name stands above its line, where a long one takes no room from the picture.
        name: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "ha": "left", "va": "center"}
        write(ax.text(0.0, y + 0.42, f"{row.rank}  {_name(row.name)}", color=theme.ink, fontsize=8.5, **name))
    ax.set_yticks([])
    ax.set_ylim(-len(ranked) + 0.6, 0.7)
    ax.spines["left"].set_visible(False)
    ax.margins(x=0.05)
    return figure


def _draw_curves(rows: Sequence[Row], metric: str, mode: str, theme: Theme, *, axis: Axis) -> Figure:
    """Mean lines with bands over seeds."""
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(rows), theme)
    ax = figure.add_subplot()
    lines: list[tuple[Array, Array]] = []
    drawn: list[float] = []
    unit, scale = "", 1.0
    if axis == "time":
        longest = max(
            (float(np.nanmax(x)) for row in rows for x, _ in _lines(row, metric, "time") if len(x)), default=1.0
        )
        scale, unit = (1.0, "seconds") if longest < 180 else (60.0, "minutes") if longest < 10800 else (3600.0, "hours")
    below = {"step": "optimizer step", "epoch": "passes over the training data", "time": f"time since start, {unit}"}
    style_axes(ax, theme, xlabel=below[axis], ylabel=metric)
    for index, row in enumerate(rows):
        curves = _lines(row, metric, axis)
        x, mean, low, high = _band(curves)
        if not len(x):
            continue
        x, colour = x / scale, _colour(theme, index)
        style: dict[str, Any] = {"color": colour, "linewidth": 1.8, "linestyle": "-" if row.arm.scores else "--"}
        label = _name(row.name) if row.arm.scores else f"{_name(row.name)} (not finished)"
        if len(curves) > 1:
            ax.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
        every = max(1, len(x) // 8)
        marker = MARKERS[index % len(MARKERS)]
        ax.plot(x, mean, label=label, marker=marker, markersize=4.5, markevery=(index * every // 8, every), **style)
        lines.append((mean, low if mode == "min" else high))
        drawn += [*mean, *(high if mode == "min" else low)]
    _zoom(ax, lines, mode)
    runs = [run for row in rows for run in row.arm.runs]
    branches.draw_trunks(ax, runs, metric, axis, theme, scale=scale, smoothed=_smoothing(metric), mode=mode)
    tell_cut(ax, theme, drawn, mode)
    if axis == "step":
        count_axis(ax)
    legend(ax, theme, below=True)
    return figure


def _smoothing(metric: str) -> Callable[[Array], Array]:
    """What is done to a line: a training loss is smoothed, an evaluation is not."""
    return (lambda values: smooth(values, max(1.0, len(values) / 50))) if metric.startswith("train/") else np.asarray


def _lines(row: Row, metric: str, axis: Axis) -> list[tuple[Array, Array]]:
    """One curve per seed of a contender's best arm, without the values that are not finite; a branch from its trunk."""
    runs = [run for run in row.arm.runs if run not in row.arm.repeated]
    counted = [run for run in runs if run.finished] or runs
    found = [_line(run, metric, axis) for run in counted]
    return [(x, y) for x, y in found if len(x)]


def _line(run: Run, metric: str, axis: Axis) -> tuple[Array, Array]:
    steps, values = run.series(metric)
    x = run.elapsed(steps) if axis == "time" else run.epochs(steps) if axis == "epoch" else steps
    keep = np.isfinite(x) & np.isfinite(values)
    smoothed = _smoothing(metric)
    return branches.joined(run, metric, axis, (x[keep], smoothed(values[keep])), smoothed)


def _band(curves: Sequence[tuple[Array, Array]]) -> tuple[Array, Array, Array, Array]:
    """Mean, lowest and highest of several curves where all of them run, on the points of all."""
    empty = np.empty(0)
    if not curves:
        return empty, empty, empty, empty
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    points = np.unique(np.concatenate([x for x, _ in curves]))
    points = points[(points >= start) & (points <= end)]
    if len(points) > 600:
        points = points[np.linspace(0, len(points) - 1, 600).astype(int)]
    values = np.array([np.interp(points, x, y) for x, y in curves])
    return points, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def _zoom(ax: Axes, lines: Sequence[tuple[Array, Array]], mode: str) -> None:
    """Limit y to what differs: the steep first tenth of training may leave the picture, the best of a band does not.

    Args:
        ax: Where the lines are drawn.
        lines: Mean, and the better edge of its band.
        mode: "min" or "max".
    """
    if not lines:
        return
    sign = 1.0 if mode == "min" else -1.0
    best = min(sign * float(edge.min() if mode == "min" else edge.max()) for _, edge in lines)
    worst_end = max(sign * float(mean[-1]) for mean, _ in lines)
    early = max(sign * float(mean[min(len(mean) - 1, len(mean) // 6)]) for mean, _ in lines)
    # Room for three times the spread of the ends or a third of the late descent, so that small differences are seen.
    far = min(max(early, worst_end), worst_end + max(3 * (worst_end - best), 0.33 * (early - best)))
    best, far = sign * best, sign * far
    margin = 0.06 * abs(far - best) or 0.02 * abs(best) or 0.01
    low, high = (best - margin, far + margin) if mode == "min" else (far - margin, best + margin)
    number_axis(ax, [low, high])
    ax.set_ylim(low, high)


def _draw_basins(rows: Sequence[Row], findings: Findings, theme: Theme) -> Figure:
    """Metric against lr, one line per contender, lr logarithmic."""
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(rows), theme)
    ax = figure.add_subplot()
    style_axes(ax, theme, xlabel="peak learning rate", ylabel=f"final {findings.metric}")
    every_lr = [lr for row in rows for lr in row.basin.tried]
    log_axis(ax, "x", every_lr)
    shown: list[float] = []
    for index, row in enumerate(rows):
        basin, colour = row.basin, _colour(theme, index)
        if basin.best is None:
            continue
        lrs = np.array([point.lr for point in basin.points])
        means = np.array([point.mean for point in basin.points])
        label = f"{_name(row.name)}  {basin.width_label()}" if len(basin.tried) > 1 else _name(row.name)
        marker = MARKERS[index % len(MARKERS)]
        ax.plot(lrs, means, color=colour, linewidth=1.4, marker=marker, markersize=5, label=label)
        for point in basin.points:
            if point.high > point.low:
                ax.plot([point.lr] * 2, [point.low, point.high], color=colour, linewidth=1.1, alpha=0.7)
        if basin.high > basin.low:
            inside = np.array([basin.low, *lrs[(lrs > basin.low) & (lrs < basin.high)], basin.high])
            level = np.interp(np.log(inside), np.log(lrs), means)
            ax.plot(inside, level, color=colour, linewidth=6, alpha=0.22, solid_capstyle="round")
        ax.plot(
            basin.best.lr, basin.best.mean, marker="o", markersize=12, markerfacecolor="none", markeredgecolor=colour,
            markeredgewidth=1.6, linewidth=0,
        )  # fmt: skip
        shown += list(means)
    if shown:
        _basin_limits(ax, rows, shown, findings)
        tell_cut(ax, theme, shown, findings.mode)
    crosses = [(lr, index) for index, row in enumerate(rows) for lr in row.basin.diverged]
    if math.isfinite(findings.level.value):
        ax.axhline(findings.level.value, color=theme.muted, linestyle="--", linewidth=1.1)
    for lr, index in crosses:
        edge = 0.985 if findings.mode == "min" else 0.015
        ax.plot(
            lr, edge, transform=ax.get_xaxis_transform(), marker="x", markersize=7, markeredgewidth=2,
            color=_colour(theme, index), linewidth=0, clip_on=False,
        )  # fmt: skip
    _mark_cut(ax, rows, theme)
    legend(ax, theme, below=True, title="width of the basin", alignment="left")
    return figure


def _mark_cut(ax: Axes, rows: Sequence[Row], theme: Theme) -> None:
    """Draw an arrowhead on the edge at every lr whose mean lies outside the picture."""
    low, high = ax.get_ylim()
    for index, row in enumerate(rows):
        for point in row.basin.points:
            if not low <= point.mean <= high:
                marker, y = ("^", 0.985) if point.mean > high else ("v", 0.015)
                ax.plot(
                    point.lr, y, transform=ax.get_xaxis_transform(), marker=marker, markersize=6,
                    color=_colour(theme, index), linewidth=0, clip_on=False,
                )  # fmt: skip


def _basin_limits(ax: Axes, rows: Sequence[Row], means: Sequence[float], findings: Findings) -> None:
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
    margin = 0.08 * reach
    limits = (best - margin, best + reach + margin) if mode == "min" else (best - reach - margin, best + margin)
    number_axis(ax, limits)
    ax.set_ylim(*limits)
