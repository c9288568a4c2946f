"""Measure steps and seconds until a level of the metric was reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optrun.report.arms import Arm
from optrun.report.collect import Run


@dataclass(frozen=True)
class TimeToTarget:
    """When the runs of one arm first reached a level."""

    reached: int
    """Runs that reached it."""
    runs: int
    """Runs that count: finished and not diverged."""
    steps: float
    """Median over the runs that reached it, in optimizer steps; NaN where fewer than half did."""
    seconds: float
    """Likewise in seconds since the start of the run; NaN where no time was logged."""


def first_reached(run: Run, metric: str, mode: str, target: float) -> tuple[float, float] | None:
    """Find step and seconds of the first evaluation at least as good as the target; None where there is none."""
    steps, values = run.series(metric)
    good = np.isfinite(values) & (values <= target if mode == "min" else values >= target)
    if not good.any():
        return None
    step = steps[np.flatnonzero(good)[0]]
    return float(step), float(run.elapsed(np.array([step]))[0])


def time_to_target(arm: Arm, metric: str, mode: str, target: float) -> TimeToTarget:
    """Take median steps and seconds to a target over the seeds of an arm.

    No interpolation: a level counts as reached at the evaluation that saw it, so steps are whole evaluation intervals.
    """
    runs = [run for run in arm.runs if run.score(metric) is not None and run not in arm.repeated]
    points = [point for run in runs if (point := first_reached(run, metric, mode, target)) is not None]
    if not points or 2 * len(points) < len(runs):
        return TimeToTarget(len(points), len(runs), float("nan"), float("nan"))
    steps, seconds = zip(*points, strict=True)
    return TimeToTarget(len(points), len(runs), float(np.median(steps)), float(np.median(seconds)))


def choose_target(arms: Sequence[Arm], mode: str) -> float:
    """Choose the level that every arm ends at or beyond on average: the worst of their means; NaN without scores."""
    means = [arm.mean for arm in arms if arm.scores]
    if not means:
        return float("nan")
    return max(means) if mode == "min" else min(means)
