"""Compute what a comparison can see: before it is run from its size alone, afterwards from the spread it showed."""

from __future__ import annotations

import bisect
import functools
import math

import numpy as np
from scipy import optimize, stats

from optrun.report import moderated

POWER = 0.8
"""Chance with which a difference that "could be seen" is found."""
MOST_SEEDS = 100
"""More than anybody runs: past it a question is as good as settled."""


def detectable(spread: float, n: int, alpha: float, degrees: float | None = None, *, power: float = POWER) -> float:
    """Compute the difference that a paired test finds with a given chance.

    Args:
        spread: Standard deviation of the differences.
        n: Seeds.
        alpha: Of this comparison, after all corrections.
        degrees: Of freedom, of the spread; None: n - 1.
        power: The chance.
    """
    return _noncentrality(float(n - 1) if degrees is None else degrees, alpha, power) * spread / math.sqrt(n)


@functools.lru_cache(maxsize=4096)
def _noncentrality(degrees: float, alpha: float, power: float) -> float:
    """Solve for the delta at which a noncentral t exceeds t_{1 - alpha/2} with a chance of `power`."""
    critical = stats.t.ppf(1 - alpha / 2, degrees)
    return float(optimize.brentq(lambda delta: stats.nct.sf(critical, degrees, delta) - power, 0.0, 4 * critical + 4))


def seeds_for(
    difference: float,
    spread: float,
    n: int,
    alpha: float,
    degrees: float,
    *,
    power: float = POWER,
    fewest: int | None = None,
) -> int | None:
    """Count the seeds that would find a difference, were it and its spread as they are seen.

    Args:
        difference: Of the means.
        spread: Standard deviation of the differences over seeds.
        n: Seeds that the spread is known from.
        alpha: Of this comparison, after all corrections.
        degrees: Of freedom, of the spread, with `n` seeds.
        power: The chance to find it.
        fewest: Where to begin to count; None: above `n`.

    Returns:
        In all, or None where 100 are too few.
    """
    if not difference or not np.isfinite([difference, spread]).all():
        return None
    share = degrees / (n - 1)
    more = range(n + 1 if fewest is None else fewest, MOST_SEEDS + 1)

    def unseen(m: int) -> float:
        return -detectable(spread, m, alpha, share * (m - 1), power=power)

    few = bisect.bisect_left(more, -abs(difference), key=unseen)
    return more[few] if few < len(more) else None


def foreseen(contenders: int, seeds: int, alpha: float, *, baseline: bool = False) -> float:
    """Compute the difference that a sweep will find with a chance of 0.8, in standard deviations of a contender.

    A standard deviation is that over seeds, less what a seed does to all contenders alike, of contenders that scatter
    alike.

    Args:
        contenders: At least 2.
        seeds: That all of them run, at least 3.
        alpha: Chance of any false verdict in the report.
        baseline: One contender was named beforehand, and the others are compared with it alone.
    """
    comparisons = contenders - 1 if baseline else contenders * (contenders - 1) // 2
    caution, weight = moderated.expected(contenders, seeds)
    return detectable(math.sqrt(2), seeds, alpha / comparisons / caution, (1 + weight) * (seeds - 1))


def foreseen_over(workloads: int, contenders: int, seeds: int, alpha: float) -> float:
    """As `foreseen`, of the mean over several workloads, where contenders differ in each by so many of its own.

    Args:
        workloads: At least 2, whose scores scatter alike.
        contenders: As for `foreseen`, as the two that follow.
        seeds: That all of them run.
        alpha: Chance of any false verdict.
    """
    _, weight = moderated.expected(contenders, seeds)
    each = (1 + weight) * (seeds - 1)
    joint = each * (workloads * each + 2) / (each + 2)  # what Satterthwaite's formula gives where variances are alike
    degrees = (joint + each) / 2  # as `workloads_statistics.stratified_t_tests` has it where one is hardly moderated
    comparisons = contenders * (contenders - 1) // 2
    found = detectable(math.sqrt(2), seeds, alpha / comparisons / moderated.CAUTION, degrees)
    return found / math.sqrt(workloads)
