"""Draw a metric during training: one line per contender, the mean over its seeds, with a band over all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from optrun.report import branches
from optrun.report.chart import Chart, of_series
from optrun.report.collect import Run
from optrun.report.curves import smooth
from optrun.report.findings import Row
from optrun.report.overlap import lines_above, wider
from optrun.report.picture import WIDTH, Data, series_colour, short_name
from optrun.report.table import value
from optrun.report.theme import MARKERS, Theme, count_axis, legend, new_figure, number_axis, style_axes, tell_cut

Array = NDArray[np.float64]
Axis = Literal["step", "epoch", "time"]

_POINTS = 600
_MARKS = 40
"""Points of a line that tell their values."""


@dataclass(frozen=True)
class SeedCurve:
    """One contender's line; arrays have shape (n,)."""

    series: int
    name: str
    seeds: int
    finished: bool
    x: Array
    """Steps, epochs or seconds."""
    mean: Array
    low: Array
    high: Array


def progress(rows: Sequence[Row]) -> Axis:
    """Choose the x axis: optimizer steps, or data seen where a step is not the same for all."""
    sizes = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")
    runs = [run for row in rows for run in row.arm.runs]
    alike = len({tuple(str(run.config.get(key)) for key in sizes) for run in runs}) <= 1
    return "step" if alike or not all(len(run.series("epoch")[0]) for run in runs) else "epoch"


def seed_curves(rows: Sequence[Row], metric: str, axis: Axis) -> list[SeedCurve]:
    """Average the runs of each contender's best configuration; a training loss is smoothed before.

    Args:
        rows: The contenders that are drawn.
        metric: What was logged.
        axis: Against what.

    Returns:
        None for a contender that has not logged it.
    """
    found = []
    for series, row in enumerate(rows):
        runs = _counted(row)
        if axis == "time" and not any(len(branches.trunk_line(run, metric, axis)[0]) for run in runs):
            lines = _lines(runs, metric, "step")
            x, mean, low, high = _against_time(runs, *_band(lines))
        else:
            lines = _lines(runs, metric, axis)
            x, mean, low, high = _band(lines)
        if len(x):
            found.append(SeedCurve(series, row.name, len(lines), bool(row.arm.scores), x, mean, low, high))
    return found


def curve_data(curves: Sequence[SeedCurve], metric: str, axis: Axis) -> Data:
    """List the points of all lines."""
    unit = {"step": "step", "epoch": "epoch", "time": "seconds"}[axis]
    columns = ["contender", "seeds", unit, f"mean {metric}", "lowest seed", "highest seed"]
    return Data(
        columns,
        [
            [curve.name, curve.seeds, *map(float, point)]
            for curve in curves
            for point in zip(curve.x, curve.mean, curve.low, curve.high, strict=True)
        ],
    )


def draw_seed_curves(
    curves: Sequence[SeedCurve], metric: str, mode: str, axis: Axis, theme: Theme, runs: Sequence[Run] = ()
) -> Chart:
    """Draw mean lines with bands over seeds, and the trunks of the runs that branch."""
    figure = new_figure(WIDTH, 3.4 + 0.17 * len(curves), theme)
    ax = figure.add_subplot()
    scale, unit = 1.0, ""
    if axis == "time":
        longest = max((float(np.nanmax(curve.x)) for curve in curves), default=1.0)
        scale, unit = (1.0, "seconds") if longest < 180 else (60.0, "minutes") if longest < 10800 else (3600.0, "hours")
    below = {"step": "optimizer step", "epoch": "passes over the training data", "time": f"time since start, {unit}"}
    style_axes(ax, theme, xlabel=below[axis], ylabel=metric)
    for curve, above in zip(curves, lines_above([(curve.x, curve.mean) for curve in curves]), strict=True):
        x, colour = curve.x / scale, series_colour(theme, curve.series)
        style: dict[str, Any] = {"color": colour, "linewidth": 1.8, "linestyle": "-" if curve.finished else "--"}
        label = short_name(curve.name) + ("" if curve.finished else " (not finished)")
        if curve.seeds > 1:
            band = ax.fill_between(x, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
            of_series(band, curve.series)
        every = max(1, len(x) // 8)
        style |= {"marker": MARKERS[curve.series % len(MARKERS)], "markersize": 4.5}
        style["markevery"] = (curve.series * every // 8, every)
        of_series(ax.plot(x, curve.mean, label=label, **wider(style, above)), curve.series)
        for index in np.unique(np.linspace(0, len(x) - 1, min(len(x), _MARKS)).astype(int)):
            figure.mark(ax, x[index], curve.mean[index], _told(curve, index, axis, unit, x[index]), series=curve.series)
    better = "low" if mode == "min" else "high"
    zoom(ax, [(curve.mean, getattr(curve, better)) for curve in curves], mode)
    branches.draw_trunks(ax, runs, metric, axis, theme, scale=scale, smoothed=_smoothing(metric), mode=mode)
    worse = "high" if mode == "min" else "low"
    tell_cut(ax, theme, [y for curve in curves for y in (*curve.mean, *getattr(curve, worse))], mode)
    if axis == "step":
        count_axis(ax)
    legend(ax, theme, below=True, series=[curve.series for curve in curves])
    return figure


def _told(curve: SeedCurve, index: int, axis: Axis, unit: str, x: float) -> str:
    """Say where a point lies and what it is made of."""
    where = {"step": f"step {x:,.0f}", "epoch": f"epoch {x:.3g}", "time": f"{x:.3g} {unit}"}[axis]
    over = f" ({value(curve.low[index])} to {value(curve.high[index])}, {curve.seeds} seeds)" if curve.seeds > 1 else ""
    return f"{curve.name}, {where}: {value(float(curve.mean[index]))}{over}"


def _counted(row: Row) -> list[Run]:
    """The runs of a contender's best configuration; where some are finished, these alone."""
    runs = [run for run in row.arm.runs if run not in row.arm.repeated]
    return [run for run in runs if run.finished] or runs


def _lines(runs: Sequence[Run], metric: str, axis: Axis) -> list[tuple[Array, Array]]:
    """One curve per seed, without the values that are not finite."""
    found = [_line(run, metric, axis) for run in runs]
    return [(x, y) for x, y in found if len(x)]


def _against_time(
    runs: Sequence[Run], steps: Array, mean: Array, low: Array, high: Array
) -> tuple[Array, Array, Array, Array]:
    """Put a band over steps where its runs were at the median: seeds that were slowed down keep their place."""
    times = np.array([run.elapsed(steps) for run in runs if len(run.series("time")[0])])
    if not len(times) or not len(steps):
        return (np.empty(0),) * 4
    known = ~np.isnan(times).any(axis=0)
    return np.median(times[:, known], axis=0), mean[known], low[known], high[known]


def _line(run: Run, metric: str, axis: Axis) -> tuple[Array, Array]:
    steps, values = run.series(metric)
    x = run.elapsed(steps) if axis == "time" else run.epochs(steps) if axis == "epoch" else steps
    keep = np.isfinite(x) & np.isfinite(values)
    smoothed = _smoothing(metric)
    return branches.joined(run, metric, axis, (x[keep], smoothed(values[keep])), smoothed)


def _smoothing(metric: str) -> Callable[[Array], Array]:
    """What is done to a line: a training loss is smoothed, an evaluation is not."""
    return (lambda values: smooth(values, max(1.0, len(values) / 50))) if metric.startswith("train/") else np.asarray


def _band(curves: Sequence[tuple[Array, Array]]) -> tuple[Array, Array, Array, Array]:
    """Mean, lowest and highest of several curves where all of them run, on the points of all."""
    empty = np.empty(0)
    if not curves:
        return empty, empty, empty, empty
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    points = np.unique(np.concatenate([x for x, _ in curves]))
    points = points[(points >= start) & (points <= end)]
    if len(points) > _POINTS:
        points = points[np.linspace(0, len(points) - 1, _POINTS).astype(int)]
    values = np.array([np.interp(points, x, y) for x, y in curves])
    return points, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def zoom(ax: Axes, lines: Sequence[tuple[Array, Array]], mode: str) -> None:
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
