"""Measure steps, tokens and seconds until a level of the metric was reached; runs that never reach it are censored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optrun.report.arms import Arm
from optrun.report.collect import NOT_STARTED, Run

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TimeToTarget:
    """When the runs of one arm first reached a level: medians over all that were begun, a seed once."""

    reached: int
    """Runs that reached it."""
    runs: int
    """Runs that were begun."""
    unknown: int
    """Runs that have not reached it and may yet, or might have: they run still, were cut or failed."""
    steps: float
    """Optimizer steps; infinite where half of the runs never reach it, NaN where there is no run."""
    tokens: float
    """As many steps in tokens; NaN where that is not known."""
    seconds: float
    """Likewise in seconds since the start of the run; NaN where no time was logged."""

    @property
    def share(self) -> str:
        """Format how many of the runs reached it."""
        return f"{self.reached} of {self.runs}"


def first_reached(run: Run, metric: str, mode: str, target: float) -> tuple[float, float] | None:
    """Find step and seconds of the first evaluation, after training began, at least as good as the target."""
    steps, values = run.trained(metric)
    good = np.isfinite(values) & (values <= target if mode == "min" else values >= target)
    if not good.any():
        return None
    step = steps[np.flatnonzero(good)[0]]
    return float(step), float(run.elapsed(np.array([step]))[0])


def time_to_target(arm: Arm, metric: str, mode: str, target: float) -> TimeToTarget:
    """Take median steps, tokens and seconds to a target over the seeds of an arm.

    A run that came to its end or diverged before it saw the target never reaches it: its time is infinite, as in
    AlgoPerf (Dahl et al. 2023, Benchmarking Neural Network Training Algorithms). One that was cut, failed or runs still
    is censored where it stands. No interpolation: a level counts as reached at the evaluation that saw it, so steps are
    whole evaluation intervals.
    """
    runs = [run for run in arm.runs if run.status != NOT_STARTED and run not in arm.repeated]
    if not runs or math.isnan(target):
        return TimeToTarget(0, 0 if math.isnan(target) else len(runs), 0, math.nan, math.nan, math.nan)
    points = [first_reached(run, metric, mode, target) for run in runs]
    reached = np.array([point is not None for point in points])
    unknown = [point is None and not (run.finished or run.diverged) for point, run in zip(points, runs, strict=True)]
    stands = [_stands(run, metric) if open_ else (math.inf, math.inf) for run, open_ in zip(runs, unknown, strict=True)]
    steps, seconds = np.array([found or at for found, at in zip(points, stands, strict=True)]).T
    in_steps, in_seconds = censored_median(steps, reached), censored_median(seconds, reached)
    a_step = [run.tokens / run.global_step for run in runs if run.tokens and run.global_step]
    tokens = in_steps * float(np.median(a_step)) if a_step else math.nan
    return TimeToTarget(int(reached.sum()), len(runs), sum(unknown), in_steps, tokens, in_seconds)


def _stands(run: Run, metric: str) -> tuple[float, float]:
    """Find step and seconds of the last evaluation; 0 before the first."""
    steps, _ = run.series(metric)
    return (float(steps[-1]), float(run.elapsed(steps[-1:])[0])) if len(steps) else (0.0, 0.0)


def censored_median(times: Array, happened: NDArray[np.bool_]) -> float:
    """Estimate the median of times of which some are only known to be longer.

    Args:
        times: Shape (n,), n >= 1: when it happened, or until when it had not; infinite: it never does.
        happened: Shape (n,).

    Returns:
        With d_t events at t among the n_t whose time is not shorter, the median is where the chance to be longer,

            S(t) = prod_{s <= t} (1 - d_s / n_s),

        falls to 1/2; where it is 1/2 for a while, the middle of that while. Without censoring, the median of the
        sample. Infinite where S stays above or at 1/2; NaN where the time of an event is not known.

    Source: Kaplan and Meier 1958, Nonparametric estimation from incomplete observations, section 2.
    """
    if np.isnan(times[happened]).any():
        return math.nan
    longer, lower, upper = 1.0, math.inf, math.inf
    for time in np.unique(times[happened]):
        longer *= 1 - (times[happened] == time).sum() / (~(times < time)).sum()
        if longer <= 0.5 + 1e-9:
            lower = min(lower, float(time))
        if longer < 0.5 - 1e-9:
            upper = min(upper, float(time))
    return (lower + upper) / 2


def choose_target(arms: Sequence[Arm], mode: str) -> float:
    """Choose the best level that more than half of the scores of every arm reach; NaN without scores."""
    sign = 1.0 if mode == "min" else -1.0
    scores = [sorted(sign * score for score in arm.scores.values()) for arm in arms if arm.scores]
    return sign * max((each[len(each) // 2] for each in scores), default=math.nan)
