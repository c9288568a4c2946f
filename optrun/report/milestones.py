"""When a level of the metric was reached, and what fewer configurations would have found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optrun.report.arms import Arm
from optrun.report.collect import NOT_STARTED, Run

Array = NDArray[np.float64]


def floor_of(runs: Sequence[Run], metric: str) -> float:
    """Take the metric before the first step: the median over runs; NaN where no run was evaluated then."""
    known = [value for run in runs if (value := run.before_training(metric)) is not None]
    return float(np.median(known)) if known else math.nan


def first_reached(run: Run, metric: str, mode: str, target: float) -> tuple[float, float] | None:
    """Find step and seconds of the first evaluation at least as good as the target; step 0: the untrained model."""
    steps, values = run.series(metric)
    good = steps[np.isfinite(values) & (values <= target if mode == "min" else values >= target)]
    return (float(good[0]), float(run.between("time", good[:1])[0])) if len(good) else None


@dataclass(frozen=True)
class TimeToTarget:
    """When the runs of one arm first reached a level: medians over all that were begun, a seed once."""

    reached: int
    runs: int
    """Runs that were begun."""
    steps: float
    """Optimizer steps; infinite where half of the runs never reach it, NaN where nothing is known."""
    seconds: float
    """Since the start of the run."""


def time_to_target(arm: Arm, metric: str, mode: str, target: float) -> TimeToTarget:
    """Take median steps and seconds to a target over the seeds of an arm; NaN: there is no target.

    A run that ended or diverged before never reaches it, as in AlgoPerf (Dahl et al. 2023). One that was cut or runs
    still is censored where it stands. Steps are whole evaluation intervals.
    """
    runs = [run for run in arm.counted if run.status != NOT_STARTED]
    if not runs or math.isnan(target):
        return TimeToTarget(0, len(runs), math.nan, math.nan)
    points = [first_reached(run, metric, mode, target) for run in runs]
    happened = np.array([point is not None for point in points])
    times = np.array([point or _stands(run) for point, run in zip(points, runs, strict=True)])
    return TimeToTarget(int(happened.sum()), len(runs), *(censored_median(column, happened) for column in times.T))


def _stands(run: Run) -> tuple[float, float]:
    """Find step and seconds where a run stands that has not reached a target; infinite where it never will."""
    if run.finished or run.diverged:
        return math.inf, math.inf
    return float(run.global_step), float(run.between("time", np.array([float(run.global_step)]))[0])


def censored_median(times: Array, happened: NDArray[np.bool_]) -> float:
    """Estimate the median of times of which some are only known to be longer.

    Args:
        times: Shape (n,), n >= 1: when it happened, or until when it had not; infinite: it never does.
        happened: Shape (n,).

    Returns:
        Where the Kaplan-Meier estimate falls to 1/2; where it is 1/2 for a while, the middle of that while. Infinite
        where it stays above; NaN where the time of an event is not known.

    Source: Kaplan and Meier 1958, Nonparametric estimation from incomplete observations, section 2.
    """
    from scipy import stats

    if np.isnan(times[happened]).any():
        return math.nan
    known = np.where(np.isfinite(times), times, np.nanmax(times[np.isfinite(times)], initial=0.0) + 1)
    curve = stats.ecdf(stats.CensoredData.right_censored(known, ~happened)).sf
    below = curve.quantiles[curve.probabilities < 0.5 - 1e-9]
    half = curve.quantiles[np.abs(curve.probabilities - 0.5) <= 1e-9]
    upper = float(below[0]) if len(below) else math.inf
    return (float(half[0]) + upper) / 2 if len(half) else upper


def expected_best(means: Sequence[float], number: int, mode: str) -> float:
    """Compute the best of so many configurations, drawn at random of those that were tried; NaN where too few were.

    Source: Dodge et al. 2019, Show Your Work, eq. 4: sum_i v_i (F(v_i)^k - F(v_(i-1))^k).

    Example:
        >>> round(expected_best([1.0, 2.0, 3.0], 2, "max"), 4), round(expected_best([1.0, 2.0, 3.0], 2, "min"), 4)
        (2.4444, 1.5556)
    """
    from scipy import stats

    if not 0 < number <= len(means):
        return math.nan
    sign = 1.0 if mode == "max" else -1.0
    curve = stats.ecdf(sign * np.asarray(means, dtype=np.float64)).cdf
    return sign * float(curve.quantiles @ np.diff(curve.probabilities**number, prepend=0.0))
