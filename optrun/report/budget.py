"""Compute the score that a contender would have reached with fewer configurations tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optrun.report.arms import Arm, Contender

Array = NDArray[np.float64]

BAND = (0.1, 0.9)
"""Quantiles between which the band lies."""


@dataclass(frozen=True)
class ScoreAgainstBudget:
    """The best score of k configurations, k = 1 ... all that were tried; arrays have shape (tried,)."""

    expected: Array
    """Its expectation, in units of the metric."""
    low: Array
    high: Array
    """Its quantiles `BAND`, the lower value first."""
    stand_ins: int
    """Configurations that diverged, for which the metric before learning stands."""

    @property
    def tried(self) -> int:
        """Configurations with an outcome."""
        return len(self.expected)

    def at(self, number: int) -> float:
        """The expected best score of so many configurations; NaN where fewer were tried."""
        return float(self.expected[number - 1]) if 0 < number <= self.tried else math.nan


def score_against_budget(contender: Contender, mode: str, start: float) -> ScoreAgainstBudget:
    """Draw the configurations of a contender in random order, and follow the best score so far.

    Args:
        contender: Each of its arms with an outcome is one configuration, its mean over seeds one score. One that
            diverged was tried, too, and leaves one with a model that has learnt nothing.
        mode: "min" or "max".
        start: The metric before learning; NaN where it is not known: the worst score stands for it.
    """
    sign = 1.0 if mode == "min" else -1.0
    values = [arm.mean for arm in contender.arms if _counts(arm, contender)]
    lost = sum(bool(arm.diverged) for arm in contender.arms if not _counts(arm, contender))
    if not values:
        empty = np.empty(0)
        return ScoreAgainstBudget(empty, empty, empty, 0)
    worst = max(sign * value for value in [*values, *([] if math.isnan(start) else [start])])
    expected, low, high = expected_best([*(sign * value for value in values), *[worst] * lost])
    if mode == "max":
        return ScoreAgainstBudget(-expected, -high, -low, lost)
    return ScoreAgainstBudget(expected, low, high, lost)


def _counts(arm: Arm, contender: Contender) -> bool:
    """Tell whether an arm has a score of its own: one that diverged on a seed is not chosen while another is there."""
    return bool(arm.scores) and (not arm.diverged or arm is contender.best)


def expected_best(scores: Sequence[float]) -> tuple[Array, Array, Array]:
    r"""Compute expectation and quantiles of the smallest of k of n scores, drawn without replacement, for each k.

    With the scores in rising order v_1 <= ... <= v_n, the best of k drawn ones is v_i in C(n - i, k - 1) of C(n, k)
    equally likely draws:

        E_k = sum_i v_i C(n - i, k - 1) / C(n, k)

    It is the U-statistic of Tang et al. 2020 (Showing Your Work Doesn't Always Work, section 3), the one unbiased
    estimate of E min(V_1, ..., V_k) for any distribution. Dodge et al. 2019 (Show Your Work, section 3.1, here for a
    minimum) plug the empirical distribution into the same expectation, a V-statistic, which draws with replacement:

        E_k = sum_i v_i ((1 - (i - 1) / n)^k - (1 - i / n)^k)

    It counts the same configuration twice, so it is too pessimistic, most of all near k = n, where it does not even
    reach the best score that was found. Dodge et al. 2021 (Expected Validation Performance) find that its smaller
    variance outweighs its bias in quick comparisons at large k; here contenders are compared at the largest k that all
    have, where those with more configurations have a small variance, and the end of a curve has to be the score in the
    table, so this is the U-statistic. No estimate says anything of more than n configurations.

    Args:
        scores: Shape (n,), n >= 1; smaller is better.

    Returns:
        Expectation and the quantiles `BAND`, shapes (n,), for k = 1 ... n. All three are v_1 at k = n: only one search
        of that size was seen, so nothing is known of its spread.

    Example:
        >>> [each.tolist() for each in expected_best([3.0, 1.0, 2.0])]
        [[2.0, 1.3333333333333333, 1.0], [1.0, 1.0, 1.0], [3.0, 2.0, 1.0]]
    """
    ordered = np.sort(np.asarray(scores, dtype=np.float64))
    n = len(ordered)
    rank = np.arange(n + 1)
    beyond = np.ones(n + 1)  # chance that all of the k drawn lie behind rank i: C(n - i, k) / C(n, k)
    expected, low, high = np.empty(n), np.empty(n), np.empty(n)
    for k in range(n):
        beyond = beyond * np.maximum(n - rank - k, 0) / (n - k)
        expected[k] = ordered @ (beyond[:-1] - beyond[1:])
        reached = 1 - beyond[1:]
        low[k], high[k] = (ordered[int(np.argmax(reached >= quantile - 1e-12))] for quantile in BAND)
    return expected, low, high
