"""Choose the level of the metric at which the lr basins of all contenders are measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optrun.report.arms import Contender
from optrun.report.collect import Run

LEAST = 0.5
"""The share of what the best contender learnt that the level asks for, however little another one learnt."""
MARGIN = 0.02
"""How far the level lies behind the contender that sets it, as a share of what the best one learnt."""


@dataclass(frozen=True)
class Level:
    """One level for all contenders, in units of the metric."""

    value: float
    """The target, where a person set one; NaN where no contender has a score, or nothing was learnt."""
    start: float
    """The metric before learning: the median, over the runs that have a score, of the evaluation before the first step;
    of a run without one the first value."""
    best: float
    """Mean of the best contender."""


def common_level(contenders: Sequence[Contender], metric: str, mode: str, *, target: float | None = None) -> Level:
    """Choose the level that half of the contenders reach at their best.

    Each width is taken at the same level, so that a contender gains nothing by being equally bad at every learning
    rate, and one that is far behind does not make every learning rate of the others a good one.

    Args:
        contenders: The level is the median of their best means (of two in the middle the better one), yet at least
            `LEAST` of what the best one learnt, behind which it is set by `MARGIN`.
        metric: Where it is a loss of a run without that evaluation, the first training loss counts in its place.
        mode: "min" or "max".
        target: The level that a person set.
    """
    sign = 1.0 if mode == "min" else -1.0
    means = sorted(sign * each.best.mean for each in contenders if each.best.scores)
    runs = [run for each in contenders for arm in each.arms for run in arm.runs if run.score(metric) is not None]
    firsts = [first for run in runs if (first := _first(run, metric)) is not None]
    if not means or not firsts:
        return Level(math.nan if target is None else target, math.nan, math.nan)
    best, median, start = means[0], means[(len(means) - 1) // 2], sign * float(np.median(firsts))
    learnt = start - best
    level = min(median, best + LEAST * learnt) + MARGIN * learnt if learnt > 0 else math.nan
    return Level(sign * level if target is None else target, sign * start, sign * best)


def _first(run: Run, metric: str) -> float | None:
    """Read the value before the first step; of a run without one the first finite value, of a loss that of training."""
    before = run.before_training(metric)
    if before is not None:
        return before
    for name in ("train/loss", metric) if metric.endswith("loss") else (metric,):
        _, values = run.series(name)
        finite = values[np.isfinite(values)]
        if len(finite):
            return float(finite[0])
    return None
