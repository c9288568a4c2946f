"""Aggregate scores over workloads: normalised scores, profiles, and intervals that hold for the workloads at hand.

Everything here works on numbers alone. A score is an array of shape (workloads, seeds), NaN where a seed is missing.

Two questions are kept apart. *On these workloads, would other seeds say the same?* is answered by the stratified
bootstrap and the stratified t test: seeds are the sample, workloads are fixed, so a handful of them is enough. *Would
it be so on other workloads?* makes the workloads the sample: `sign_test` needs `FEWEST_WORKLOADS` of them before any
answer could pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from optrun.report.moderated import CAUTION, spread_of_pairs
from optrun.report.statistics import ALPHA, CONFIDENCE, MIN_SEEDS, holm

Array = NDArray[np.float64]

FEWEST_WORKLOADS = 6
"""Workloads from which a two-sided sign test can fall below 5 %: 2 / 2^6 = 0.031, 2 / 2^5 = 0.063."""
_CAUTION = 2.0
"""What p values over workloads are multiplied by, see `stratified_t_tests`."""
LAST_TAU = 4.0
"""Where the profile score stops counting, as in AlgoPerf."""


def normalised(score: float, floor: float, best: float) -> float:
    """Put a score on the scale of what was learnt on its workload: 0 is the floor, 1 the best contender.

    z = (floor - x) / (floor - best), for a loss as for an accuracy; not clipped.

    Args:
        score: In units of the metric.
        floor: The metric before learning, common to all contenders.
        best: Mean of the best contender.

    Example:
        >>> normalised(3.0, floor=4.0, best=2.0), normalised(0.8, floor=0.1, best=0.8)
        (0.5, 1.0)
    """
    return (floor - score) / (floor - best)


def ratios(costs: Mapping[str, Sequence[float]]) -> dict[str, Array]:
    """Divide what each contender needed by what the quickest needed, workload by workload.

    Args:
        costs: Contender -> steps or seconds to the target on each workload; infinite where it was not reached.

    Returns:
        Shape (workloads,) each: r = t / min over contenders of t; infinite where not reached, by all on a workload that
        no contender solved.

    Source: Dolan and More 2002, Benchmarking optimization software with performance profiles, equation (1).
    """
    names = list(costs)
    table = np.array([costs[name] for name in names], dtype=np.float64)
    quickest = table.min(axis=0)
    found = np.full(table.shape, np.inf)
    np.divide(table, quickest, out=found, where=np.isfinite(table))
    return dict(zip(names, found, strict=True))


def performance_profile(ratio: Array, taus: Array) -> Array:
    """Share of workloads on which a contender is within a factor tau of the best.

    Args:
        ratio: As `ratios`; shape (workloads,).
        taus: Factors, 1 or more; shape (n,).

    Returns:
        rho(tau) = (workloads with r <= tau) / workloads; shape (n,).

    Source: Dolan and More 2002, equation (2).

    Example:
        >>> performance_profile(np.array([1.0, 1.5, np.inf]), np.array([1.0, 2.0])).round(2).tolist()
        [0.33, 0.67]
    """
    return np.asarray((ratio[:, None] <= taus[None, :]).mean(axis=0), dtype=np.float64)


def profile_score(ratio: Array, last: float = LAST_TAU) -> float:
    """Mean of the performance profile between a factor of 1 and a last one: 1 is the quickest everywhere.

    B = 1 / (last - 1) * integral from 1 to last of rho(tau) d tau, which is the mean over workloads of the part of that
    range in which the workload counts.

    Source: Dahl et al. 2023, Benchmarking Neural Network Training Algorithms (AlgoPerf), section 4.5, last = 4.

    Example:
        >>> profile_score(np.array([1.0, 2.5, np.inf]))
        0.5
    """
    return float(np.clip((last - ratio) / (last - 1), 0.0, 1.0).mean())


def score_profile(scores: Array, taus: Array) -> Array:
    """Share of runs that end with a normalised score above tau, each workload with the same weight.

    Args:
        scores: Shape (workloads, seeds).
        taus: Shape (n,).

    Returns:
        F(tau) = mean over workloads of the share of its seeds with z > tau; shape (n,).

    Source: Agarwal et al. 2021, Deep Reinforcement Learning at the Edge of the Statistical Precipice, equation (2).
    """
    above = np.where(np.isnan(scores)[..., None], np.nan, scores[..., None] > taus)
    return np.asarray(np.nanmean(above, axis=1).mean(axis=0), dtype=np.float64)


def mean_score(scores: Array) -> Array:
    """Mean over workloads of the mean over seeds; shape (..., workloads, seeds) to (...)."""
    return np.asarray(np.nanmean(scores, axis=-1).mean(axis=-1), dtype=np.float64)


def interquartile_mean(scores: Array) -> Array:
    """Mean of the middle half of all runs, whichever workload they are of; shape (..., workloads, seeds) to (...).

    Source: Agarwal et al. 2021, section 4.3: the mean after a quarter is cut from each end (`scipy.stats.trim_mean`).
    """
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)  # NaN at the end
    count = (~np.isnan(flat)).sum(axis=-1, keepdims=True)
    position = np.arange(flat.shape[-1])
    cut = count // 4
    middle = np.where((position >= cut) & (position < count - cut), flat, np.nan)
    return np.asarray(np.nanmean(middle, axis=-1), dtype=np.float64)


def optimality_gap(scores: Array) -> Array:
    """How far the runs stay behind the best contender on average; what is above 1 counts as 1.

    Source: Agarwal et al. 2021, section 4.3, with gamma = 1: 1 - mean of min(z, 1).
    """
    return np.asarray(1.0 - mean_score(np.minimum(scores, 1.0)), dtype=np.float64)


def resample(scores: Array, *, resamples: int = 2000, seed: int = 0) -> Array:
    """Draw seeds with replacement within each workload.

    n seeds drawn from n spread by (n - 1) / n too little; deviations from a workload's mean are stretched by
    sqrt(n / (n - 1)), without which three seeds give intervals that are a fifth too short.

    Args:
        scores: Shape (workloads, seeds).
        resamples: How often.
        seed: Of the drawing, so that a report says the same twice.

    Returns:
        Shape (resamples, workloads, seeds).

    Source: Agarwal et al. 2021, section 4.1 (stratified bootstrap); Davison and Hinkley 1997, Bootstrap Methods and
    their Application, section 2.5 (the stretch).
    """
    random = np.random.default_rng(seed)
    drawn = np.full((resamples, *scores.shape), np.nan)
    for index, row in enumerate(scores):
        known = row[~np.isnan(row)]
        n = len(known)
        centre = known.mean()
        stretched = centre + (known - centre) * (math.sqrt(n / (n - 1)) if n > 1 else 1.0)
        drawn[:, index, :n] = stretched[random.integers(n, size=(resamples, n))]
    return drawn


def bootstrap_interval(aggregate: Callable[[Array], Array], scores: Array) -> tuple[float, float]:
    """Take the 95 % percentile interval of an aggregate; NaN where a workload has fewer than three seeds.

    Args:
        aggregate: Shape (..., workloads, seeds) to (...).
        scores: Shape (workloads, seeds).
    """
    if ((~np.isnan(scores)).sum(axis=1) < MIN_SEEDS).any():
        return math.nan, math.nan
    low, high = np.quantile(aggregate(resample(scores)), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class StratifiedTest:
    """A contender against another one over fixed workloads."""

    difference: float
    """Mean over workloads of the mean difference over seeds, in normalised score."""
    low: float
    high: float
    """95 % t interval; NaN where no test was made."""
    p: float
    """Two-sided; NaN where no test was made."""
    seeds: int
    """The fewest that all contenders share on a workload; below three no test is made."""

    def reversed(self) -> StratifiedTest:
        """The same with the two sides exchanged."""
        return StratifiedTest(-self.difference, -self.high, -self.low, self.p, self.seeds)


def stratified_t_tests(scores: Sequence[Array], pairs: Sequence[tuple[int, int]]) -> list[StratifiedTest]:
    """Test whether means over fixed workloads differ, seeds paired within each workload.

    D = (1/W) sum of d_w, Var D = (1/W^2) sum of v_w, v_w = s~_w^2 / n_w, where d_w is the mean difference over the n_w
    seeds of workload w and s~_w^2 the variance of the differences, moderated as within a single workload. Degrees of
    freedom by Satterthwaite, (sum v_w)^2 / sum(v_w^2 / d_w).

    Where one workload scatters most, that formula promises more degrees of freedom than there are, and the more so the
    fewer v_w has. Moderated variances have enough of them, and their p values are doubled. Where one of them is hardly
    moderated (below four contenders, or where contenders scatter unlike each other) half of the way to the fewest
    degrees of any workload is gone, and p values are doubled, too.

    Args:
        scores: Of each workload, shape (contenders, seeds), without NaN.
        pairs: Two contenders each; the second is subtracted from the first.

    Source: Satterthwaite 1946, An approximate distribution of estimates of variance components; the variances as in
    `optrun.report.moderated`.
    """
    i, j = (np.array(side, dtype=np.int64) for side in zip(*pairs, strict=True))
    means = np.array(
        [(part[i] - part[j]).mean(axis=1) if part.shape[1] else np.full(len(i), np.nan) for part in scores]
    )
    difference = means.mean(axis=0)
    seeds = min(part.shape[1] for part in scores)
    if seeds < MIN_SEEDS:
        return [StratifiedTest(float(each), math.nan, math.nan, math.nan, seeds) for each in difference]
    spreads = [spread_of_pairs(part[None], i, j) for part in scores]
    shares = np.array([each.moderated[0] ** 2 / part.shape[1] for each, part in zip(spreads, scores, strict=True)])
    degrees = np.array([each.degrees[0] for each in spreads])
    total = shares.sum(axis=0)
    made = total > 0
    joint = np.divide(total**2, (shares**2 / degrees).sum(axis=0), out=np.ones(len(i)), where=made)
    plain = (np.array([each.caution[0] for each in spreads]) < CAUTION).any(axis=0)
    joint = np.where(plain, (joint + degrees.min(axis=0)) / 2, joint)
    error = np.where(made, np.sqrt(total) / len(scores), np.nan)
    reach = error * special.stdtrit(joint, 1 - (1 - CONFIDENCE) / 2 / _CAUTION)
    p = np.minimum(1.0, _CAUTION * 2 * special.stdtr(joint, -np.abs(difference / error)))
    return [
        StratifiedTest(float(mean), float(mean - half), float(mean + half), float(chance), seeds)
        for mean, half, chance in zip(difference, reach, p, strict=True)
    ]


def sign_test(better: int, worse: int) -> float:
    """Two-sided sign test over workloads; ties do not count. NaN where the workloads could not decide.

    Source: Dixon and Mood 1946; Demsar 2006, Statistical Comparisons of Classifiers over Multiple Data Sets, section
    3.1.4.

    Example:
        >>> sign_test(6, 0), sign_test(5, 0)
        (0.03125, nan)
    """
    if better + worse < FEWEST_WORKLOADS:
        return math.nan
    return float(stats.binomtest(better, better + worse).pvalue)


def compare_over_workloads(
    scores: Mapping[str, Array], reference: str, *, named_beforehand: bool
) -> dict[str, tuple[StratifiedTest, float]]:
    """Test every contender against the reference.

    Args:
        scores: Contender -> shape (workloads, seeds), all of one shape.
        reference: One of them.
        named_beforehand: Whether a person named it. If not, it is the best of the same numbers, and Holm's method
            corrects over all pairs of contenders instead of those shown.

    Returns:
        Contender -> its test and its p value after Holm's correction; not the reference.
    """
    names = list(scores)
    if named_beforehand:
        pairs = [(name, reference) for name in names if name != reference]
    else:
        pairs = [(name, other) for index, name in enumerate(names) for other in names[index + 1 :]]
    if not pairs:
        return {}
    table = np.array([scores[name] for name in names])
    shared = ~np.isnan(table).any(axis=0)
    parts = [table[:, workload, shared[workload]] for workload in range(table.shape[1])]
    tests = stratified_t_tests(parts, [(names.index(first), names.index(second)) for first, second in pairs])
    found: dict[str, tuple[StratifiedTest, float]] = {}
    for (first, second), test, p in zip(pairs, tests, holm([test.p for test in tests]), strict=True):
        if second == reference:
            found[first] = (test, float(p))
        elif first == reference:
            found[second] = (test.reversed(), float(p))
    return found


def is_found(p: float) -> bool:
    """Tell whether a corrected p value makes a verdict."""
    return p < ALPHA
