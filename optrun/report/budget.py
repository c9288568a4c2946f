"""Compute the score that a contender would have reached with fewer configurations tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optrun.report.arms import Arm, Contender, order_of_choice

Array = NDArray[np.float64]

BAND = (0.1, 0.9)
"""Quantiles between which the band lies."""


@dataclass(frozen=True)
class ScoreAgainstBudget:
    """The score of the best of k configurations, k = 1 ... all that were tried; arrays have shape (tried,)."""

    expected: Array
    """Its expectation, in units of the metric."""
    low: Array
    high: Array
    """Its quantiles `BAND`."""
    stand_ins: int
    """Configurations that diverged, for which the metric before learning stands."""
    stopped: int
    """Configurations that were stopped early or run still, for which their last evaluation stands."""

    @property
    def tried(self) -> int:
        """Configurations with an outcome."""
        return len(self.expected)

    def at(self, number: int) -> float:
        """The expected best score of so many configurations; NaN where fewer were tried."""
        return float(self.expected[number - 1]) if 0 < number <= self.tried else math.nan


def score_against_budget(contender: Contender, metric: str, mode: str, start: float) -> ScoreAgainstBudget:
    """Draw the configurations of a contender in random order, and follow the score that would have been reported.

    Args:
        contender: Each of its arms is one configuration, its mean over seeds one score. One that diverged was tried,
            too, and leaves one with a model that has learnt nothing; one that was stopped early, as by a rung, with
            what it had learnt by then. One that was never evaluated does not count.
        metric: What gives the score.
        mode: "min" or "max".
        start: The metric before learning; NaN where it is not known: the worst score stands for it.
    """
    scored = sorted((arm for arm in contender.arms if arm.scores), key=lambda arm: order_of_choice(arm, mode))
    means = [arm.mean for arm in scored]
    if not means:
        return ScoreAgainstBudget(np.empty(0), np.empty(0), np.empty(0), 0, 0)
    rest = [arm for arm in contender.arms if not arm.scores]
    lost = sum(bool(arm.diverged) for arm in rest)
    last = (_last(arm, metric) for arm in rest if not arm.diverged)
    stopped = sorted((value for value in last if value is not None), reverse=mode == "max")
    known = [*means, *stopped, *([] if math.isnan(start) else [start])]
    worst = max(known) if mode == "min" else min(known)
    return ScoreAgainstBudget(*expected_best([*means, *stopped, *[worst] * lost]), lost, len(stopped))


def _last(arm: Arm, metric: str) -> float | None:
    """Average the last evaluations of an arm's runs; None where there is none."""
    values = [value for run in arm.runs if (value := run.last(metric)) is not None and math.isfinite(value)]
    return float(np.mean(values)) if values else None


def expected_best(scores: Sequence[float]) -> tuple[Array, Array, Array]:
    r"""Compute expectation and quantiles of the best of k of n scores, drawn without replacement, for each k.

    With v_1 the score that is chosen of all, v_2 the one that is chosen without it, and so on, the best of k drawn ones
    is v_i in C(n - i, k - 1) of C(n, k) equally likely draws:

        E_k = sum_i v_i C(n - i, k - 1) / C(n, k)

    It is the U-statistic of Tang et al. 2020 (Showing Your Work Doesn't Always Work), the one unbiased estimate of
    E best(V_1, ..., V_k) for any distribution. Dodge et al. 2019 (Show Your Work) plug the empirical distribution into
    the same expectation, a V-statistic, which draws with replacement:

        E_k = sum_i v_i ((1 - (i - 1) / n)^k - (1 - i / n)^k)

    It counts the same configuration twice, so it is too pessimistic, most of all near k = n, where it does not even
    reach the best score that was found. Dodge et al. 2021 (Expected Validation Performance) find that its smaller
    variance can outweigh its bias. Here contenders are compared at the largest k that all of them have, where those
    with more configurations have a small variance either way, and the end of a curve has to be the score in the table:
    so this is the U-statistic. No estimate says anything of more than n configurations.

    Args:
        scores: Shape (n,), n >= 1, in the order of choice: where all configurations have equally many seeds and none
            diverged, the best first.

    Returns:
        Expectation and the quantiles `BAND`, shapes (n,), for k = 1 ... n. All three are v_1 at k = n: only one search
        of that size was seen, so nothing is known of its spread.

    Example:
        >>> [each.round(4).tolist() for each in expected_best([1.0, 2.0, 3.0])]
        [[2.0, 1.3333, 1.0], [1.0, 1.0, 1.0], [3.0, 2.0, 1.0]]
    """
    values = np.asarray(scores, dtype=np.float64)
    n, rising = len(values), np.argsort(values, kind="stable")
    rank = np.arange(n + 1)
    beyond = np.ones(n + 1)  # chance that all of the k drawn lie behind rank i: C(n - i, k) / C(n, k)
    expected, low, high = np.empty(n), np.empty(n), np.empty(n)
    for k in range(n):
        beyond = beyond * np.maximum(n - rank - k, 0) / (n - k)
        chance = beyond[:-1] - beyond[1:]
        expected[k] = values @ chance
        reached = np.cumsum(chance[rising])
        low[k], high[k] = (values[rising[int(np.argmax(reached >= quantile - 1e-9))]] for quantile in BAND)
    return expected, low, high
