"""Draw a metric during training: one line per contender, the mean over its seeds, with bands where there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from optrun.report import branches
from optrun.report.chart import SEEDS, Chart, of_series
from optrun.report.collect import Run
from optrun.report.curves import smooth
from optrun.report.findings import Row
from optrun.report.picture import Data, limit, panel, reach, short_name, style_of, tell_cut
from optrun.report.table import value
from optrun.report.theme import PAGE, Theme, count_axis, legend

Array = NDArray[np.float64]
Axis = Literal["step", "epoch", "time"]

_POINTS = 600
_BANDS = 3
"""With more contenders than this the bands are a fog: the best two have one, the page shows the seeds of the others."""


@dataclass(frozen=True)
class SeedCurve:
    """One contender's line."""

    series: int
    name: str
    finished: bool
    x: Array
    """Steps, epochs or seconds; shape (n,)."""
    values: Array
    """Shape (seeds, n)."""

    @property
    def mean(self) -> Array:
        """Over seeds; shape (n,)."""
        return np.asarray(self.values.mean(axis=0))

    @property
    def low(self) -> Array:
        """Lowest seed; shape (n,)."""
        return np.asarray(self.values.min(axis=0))

    @property
    def high(self) -> Array:
        """Highest seed; shape (n,)."""
        return np.asarray(self.values.max(axis=0))


def progress(rows: Sequence[Row]) -> Axis:
    """Choose the x axis: optimizer steps, or data seen where a step is not the same for all."""
    sizes = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")
    runs = [run for row in rows for run in row.arm.runs]
    alike = len({tuple(str(run.config.get(key)) for key in sizes) for run in runs}) <= 1
    return "step" if alike or not all(len(run.series("epoch")[0]) for run in runs) else "epoch"


def seed_curves(rows: Sequence[Row], metric: str, axis: Axis) -> list[SeedCurve]:
    """Put the runs of each contender's best configuration on common points; a training loss is smoothed before.

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
            x, values = _against_time(runs, *_common(runs, metric, "step"))
        else:
            x, values = _common(runs, metric, axis)
        if len(x):
            found.append(SeedCurve(series, row.name, bool(row.arm.scores), x, values))
    return found


def curve_data(curves: Sequence[SeedCurve], metric: str, axis: Axis) -> Data:
    """List the points of all lines."""
    unit = {"step": "step", "epoch": "epoch", "time": "seconds"}[axis]
    columns = ["contender", "seeds", unit, f"mean {metric}", "lowest seed", "highest seed"]
    rows = [
        [curve.name, len(curve.values), *map(float, point)]
        for curve in curves for point in zip(curve.x, curve.mean, curve.low, curve.high, strict=True)
    ]  # fmt: skip
    return Data(columns, rows)


def draw_seed_curves(
    curves: Sequence[SeedCurve], metric: str, mode: str, axis: Axis, theme: Theme, runs: Sequence[Run] = ()
) -> Chart:
    """Draw mean lines, bands over seeds for a few, and the trunks of the runs that branch."""
    longest = max((float(curve.x[-1]) for curve in curves), default=0.0) if axis == "time" else 0.0
    scale, unit = (1.0, "seconds") if longest < 180 else (60.0, "minutes") if longest < 10800 else (3600.0, "hours")
    below = {"step": "optimizer step", "epoch": "passes over the training data", "time": f"time since start, {unit}"}
    figure, ax = panel(theme, len(curves), below[axis], metric)
    for place, curve in enumerate(curves):
        x, mean, style = curve.x / scale, curve.mean, style_of(theme, curve.series)
        every, several = max(1, len(x) // 8), len(curve.values) > 1
        label = short_name(curve.name) + ("" if curve.finished else " (not finished)")
        line = "-" if curve.finished else "--"
        mark = (curve.series * every // 8, every)  # not at the same places: a line may lie on another
        of_series(ax.plot(x, mean, label=label, linewidth=1.8, linestyle=line, markevery=mark, **style), curve.series)
        if several and (len(curves) <= _BANDS or place < 2):
            band = ax.fill_between(x, curve.low, curve.high, color=style["color"], alpha=0.16, linewidth=0)
            of_series(band, curve.series)
        elif several and theme is PAGE:
            seeds = ax.plot(x, curve.values.T, color=style["color"], linewidth=0.8, alpha=0.75, zorder=3)
            of_series(seeds, curve.series, SEEDS)
        figure.mark_line(ax, x, mean, partial(_told, curve, x, axis, unit), series=curve.series)
    _limit(ax, curves, mode)
    branches.draw_trunks(ax, runs, metric, axis, theme, scale=scale, smoothed=_smoothing(metric))
    ends = [(curve.name, float(curve.mean[-1])) for curve in curves]
    tell_cut(ax, theme, mode, ends, [y for curve in curves for y in (*curve.mean, *curve.low, *curve.high)])
    if axis == "step":
        count_axis(ax)
    legend(ax, theme, below=True, series=[curve.series for curve in curves])
    return figure


def _told(curve: SeedCurve, x: Array, axis: Axis, unit: str, index: int) -> str:
    """Say where a point lies and what it is made of."""
    where = f"{x[index]:.3g} {unit}" if axis == "time" else f"{axis} {x[index]:,.6g}"
    over = f" ({value(curve.low[index])} to {value(curve.high[index])}, {len(curve.values)} seeds)"
    return f"{curve.name}, {where}: {value(curve.mean[index])}{over if len(curve.values) > 1 else ''}"


def _limit(ax: Axes, curves: Sequence[SeedCurve], mode: str) -> None:
    """Show how the curves end; of the steep begin as much as leaves room for that."""
    sign = 1.0 if mode == "min" else -1.0
    ends = [float(curve.mean[-1]) for curve in curves]
    best = min(sign * end for end in ends)
    # The first value is that of the untrained model, and a quarter further on the steep descent is over.
    early = float(np.median([sign * curve.mean[(len(curve.mean) + 2) // 4] for curve in curves])) - best
    least = min(early, max(3 * reach([sign * end - best for end in ends]), 0.33 * early))
    edge = [each for curve in curves for each in (curve.low.min(), curve.high.max())]
    limit(ax, ends, mode, least=least, edge=[max(edge, key=lambda each: -sign * each)])


def _counted(row: Row) -> list[Run]:
    """Select the runs of a contender's best configuration; if some are finished, these alone."""
    runs = row.arm.counted
    return [run for run in runs if run.finished] or runs


def _against_time(runs: Sequence[Run], steps: Array, values: Array) -> tuple[Array, Array]:
    """Put values over steps where the runs were at the median: seeds that were slowed down keep their place."""
    times = np.array([run.elapsed(steps) for run in runs if len(run.series("time")[0])])
    if not len(times) or not len(steps):
        return np.empty(0), values
    known = ~np.isnan(times).any(axis=0)
    return np.median(times[:, known], axis=0), values[:, known]


def _line(run: Run, metric: str, axis: Axis) -> tuple[Array, Array]:
    """Return one seed, without the values that are not finite."""
    x, values = branches.joined(run, metric, axis, run.line(metric, axis))
    return x, _smoothing(metric)(values)


def _smoothing(metric: str) -> Callable[[Array], Array]:
    """Choose what is done to a line: a training loss is smoothed, an evaluation is not."""
    return (lambda values: smooth(values, max(1.0, len(values) / 50))) if metric.startswith("train/") else np.asarray


def _common(runs: Sequence[Run], metric: str, axis: Axis) -> tuple[Array, Array]:
    """Interpolate several runs where all of them run, on the points of all; shapes (n,) and (seeds, n)."""
    curves = [line for run in runs if len((line := _line(run, metric, axis))[0])]
    if not curves:
        return np.empty(0), np.empty((0, 0))
    start, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    points = np.unique(np.concatenate([x for x, _ in curves]))
    points = points[(points >= start) & (points <= end)]
    if len(points) > _POINTS:
        points = points[np.linspace(0, len(points) - 1, _POINTS).astype(int)]
    return points, np.array([np.interp(points, x, y) for x, y in curves])
