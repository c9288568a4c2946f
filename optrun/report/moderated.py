"""The variance of a difference of two contenders, learnt from all contenders that ran on the same seeds.

With three seeds a pair's own differences have two degrees of freedom, and a test that must hold over many pairs finds
nothing. Contenders of one sweep mostly scatter alike, so their residuals say more; where one does not, its pairs keep
to what they show themselves. This is the moderated t test of Smyth (2004), with four changes that were chosen by
simulation (`benchmarks/verdicts.py`) so that the error rate holds where spreads differ:

- the prior variance is that of a two-way table (contender, seed), without contenders that scatter far more, and with
  one of those that are the same thing, such as one optimizer under two names;
- its weight is bounded, and fades with the p value of an F test for each contender's own scatter;
- it fades for all pairs where the weight that Smyth estimates from them is small: their variances differ too much; and
  where a test of sphericity says that contenders scatter together, in groups, so that they count for fewer;
- p values are multiplied by `CAUTION` where anything is learnt from other contenders. Else it is the paired t test.

Source: Smyth 2004, Linear models and empirical Bayes methods, eq. 7:
s~^2 = (d0 s0^2 + d s^2) / (d0 + d), on d0 + d degrees of freedom; section 6.2 for the estimate of d0. Phipson et al.
2016 for outlying variances. Mauchly 1940 for sphericity, Box 1949 for the distribution of its statistic.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Index = NDArray[np.int64]

CAUTION = 2.0
"""What p values are multiplied by where anything is learnt from other contenders."""
CAUTIOUS_FROM = 0.1
"""Weight of what others say from which all of `CAUTION` counts, in multiples of that of the pair's own differences."""
MOST = 4.0
"""Weight of what others say, at most, in the same multiples."""
FADES = 0.6
"""Over the number of seeds: the F test's p value below which the weight of the others fades."""
OUTLIER = 0.01
"""Chance with which a contender that scatters like the others is left out of what is learnt from all."""
FEW_SEEDS = 5
"""Seeds below which variances must differ more before they are taken to differ, see `_likeness`."""
SAME = 0.02
"""Variance of a difference, over those of both sides, up to which two contenders are the same thing twice."""
TOGETHER = 0.1
"""P value of the test of sphericity below which the weight of the others fades for all pairs."""
FEWEST = 4
"""Contenders from which anything is learnt: of three, it cannot be told which one scatters unlike the others."""


@dataclass(frozen=True)
class Spread:
    """Standard deviations of the differences of pairs, over seeds; all shapes are (tables, pairs)."""

    own: Array
    """From the pair's own differences."""
    moderated: Array
    """With what the other contenders say."""
    degrees: Array
    """Degrees of freedom of `moderated`; those of `own` are the number of seeds less one."""
    caution: Array
    """What p values are multiplied by: 1 where `moderated` is `own`."""


def spread_of_pairs(values: Array, first: Index, second: Index) -> Spread:
    """Estimate how much the difference of each pair of contenders scatters over seeds.

    Args:
        values: Shape (tables, contenders, seeds), at least two contenders and two seeds: tables that have nothing to do
            with each other.
        first: Shape (pairs,): a contender of each pair.
        second: The other one.
    """
    _, contenders, seeds = values.shape
    own_degrees = seeds - 1
    differences = values[:, first] - values[:, second]
    own = differences.var(axis=2, ddof=1)
    own[np.sqrt(own) <= _rounding(differences)] = 0.0
    if contenders < FEWEST:
        return Spread(np.sqrt(own), np.sqrt(own), np.full(own.shape, float(own_degrees)), np.ones(own.shape))
    centred = values - values.mean(axis=2, keepdims=True)
    centred[np.abs(centred) <= _rounding(values.reshape(len(values), -1))[:, None, None]] = 0.0
    among = _alike(centred)
    stands_for = _first_of_same(centred, among)
    among &= stands_for == np.arange(contenders)
    pooled, ratio_p = _scatter(centred, among)
    trust = np.where(among, np.clip(ratio_p * seeds / FADES, 0.0, 1.0), 0.0)
    trust = np.take_along_axis(trust, stands_for, axis=1)
    together = np.clip(_sphericity_p(centred, among) / TOGETHER, 0.0, 1.0)
    trust_in_all = _weight(among.sum(axis=1)) * _likeness(centred, among) * together
    weight = trust_in_all[:, None] * np.minimum(trust[:, first], trust[:, second])
    prior = own_degrees * weight
    degrees = prior + own_degrees
    variance = np.where(prior > 0, (prior * 2 * pooled[:, None] + own_degrees * own) / degrees, own)
    caution = 1 + (CAUTION - 1) * np.clip(weight / CAUTIOUS_FROM, 0.0, 1.0)
    return Spread(np.sqrt(own), np.sqrt(variance), degrees, caution)


def expected(contenders: int, seeds: int) -> tuple[float, float]:
    """Say what p values are multiplied by and what the others weigh where all scatter alike.

    The weight is in multiples of that of the pair's own differences, less what the tests that fade it take of it by
    chance: fitted to the differences that are found in four of five cases when `benchmarks/verdicts.py` draws them.
    """
    if contenders < FEWEST:
        return 1.0, 0.0
    faded = 1.3 / seeds + min(contenders, 20) / 250  # 20: the most that were drawn
    return CAUTION, float(_weight(np.array(contenders))) * (1 - faded)


def _weight(contenders: NDArray[np.int64]) -> Array:
    return np.where(contenders < FEWEST, 0.0, np.clip((contenders - 2) / 2, 0.0, MOST))


def _rounding(values: Array) -> Array:
    """The spread that rounding alone gives values of this size, over the last axis."""
    return np.asarray(1e-10 * np.abs(values).max(axis=-1, initial=0.0))


def _residuals(centred: Array, among: Mask) -> Array:
    """What is left of each contender without the mean of a seed over those that are pooled; shape (tables, k, n)."""
    return np.asarray(centred - (centred * among[:, :, None]).sum(axis=1, keepdims=True) / _count(among)[:, None, None])


def _count(among: Mask) -> Array:
    return np.asarray(np.maximum(among.sum(axis=1), 1), dtype=float)


def _first_of_same(centred: Array, among: Mask) -> Index:
    """The first contender that each is the same thing as, up to `SAME`: most often itself; shape (tables, k)."""
    each = _residuals(centred, among).var(axis=2, ddof=1)
    first: Index = np.broadcast_to(np.arange(centred.shape[1]), each.shape).copy()
    for later in range(1, centred.shape[1]):
        own = (centred[:, :later] - centred[:, later : later + 1]).var(axis=2, ddof=1)
        same = own <= SAME * (each[:, :later] + each[:, later : later + 1])
        same &= among[:, :later] & among[:, later : later + 1]
        first[:, later] = np.where(same.any(axis=1), same.argmax(axis=1), later)
    return first


def _sphericity_p(centred: Array, among: Mask) -> Array:
    """Chance of residuals as uneven as these, were contenders and seeds independent and alike; shape (tables,).

    Mauchly's ratio W = det S / (tr S / p)^p of the p eigenvalues that the residuals have, of m > p degrees of freedom
    each: exact for p = 2, where W^((m - 1) / 2) is uniform, else -(m - (2 p^2 + p + 2) / 6 p) ln W is nearly chi^2 with
    p (p + 1) / 2 - 1 degrees of freedom (Box).
    """
    residuals = np.where(among[:, :, None], _residuals(centred, among), 0.0)
    eigenvalues = np.linalg.svd(residuals, compute_uv=False) ** 2
    rows, columns = np.maximum(among.sum(axis=1) - 1, 0), centred.shape[2] - 1
    found = np.ones(len(centred))
    for p in range(2, min(centred.shape[1] - 1, columns) + 1):
        made = (np.minimum(rows, columns) == p) & (eigenvalues[:, 0] > 0)
        own, m = np.maximum(eigenvalues[made, :p], 1e-12 * eigenvalues[made, :1]), np.maximum(rows, columns)[made]
        log_ratio = np.log(own).sum(axis=1) - p * np.log(own.mean(axis=1))
        statistic = -(m - (2 * p * p + p + 2) / (6 * p)) * log_ratio
        exact = np.exp(log_ratio * (m - 1) / 2)
        found[made] = exact if p == 2 else special.chdtrc(p * (p + 1) / 2 - 1, np.maximum(statistic, 0.0))
    return found


def _likeness(centred: Array, among: Mask) -> Array:
    """How far the variances of all pairs look like one: 1, or less where Smyth's estimate of d0 is small; per table.

    The logarithm of a variance on d degrees of freedom has variance trigamma(d / 2); what logarithms show beyond that
    is trigamma(d0 / 2). Nothing below the bound, full from three times the bound on: d, times 8 / contenders with fewer
    than 8, times 0.4 with three or four seeds, of which even one variance shows little.
    """
    contenders, seeds = centred.shape[1:]
    own_degrees = seeds - 1
    i, j = np.array(list(combinations(range(contenders), 2))).T
    own = (centred[:, i] - centred[:, j]).var(axis=2, ddof=1)
    counted = among[:, i] & among[:, j] & (own > 0)
    logs = np.log(np.where(counted, own, 1.0))
    count = counted.sum(axis=1)
    mean = logs.sum(axis=1) / np.maximum(count, 1)
    dispersion = (np.where(counted, logs - mean[:, None], 0.0) ** 2).sum(axis=1) / np.maximum(count - 1, 1)
    excess = np.maximum(dispersion - special.polygamma(1, own_degrees / 2), 1e-6)
    bound = own_degrees * max(1.0, 8 / contenders) * (0.4 if seeds < FEW_SEEDS else 1.0)
    return np.asarray(np.clip((2 * _inverse_trigamma(excess) - bound) / (2 * bound), 0.0, 1.0))


def _inverse_trigamma(values: Array) -> Array:
    """Solve trigamma(x) = value for x by Newton's method on 1 / trigamma, which is nearly straight (Smyth 2004)."""
    found = 0.5 + 1 / values
    for _ in range(12):
        trigamma = special.polygamma(1, found)
        found += trigamma * (1 - trigamma / values) / special.polygamma(2, found)
    return np.asarray(found)


def _alike(centred: Array) -> Mask:
    """The contenders that are left when those that scatter far more are taken out one by one; shape (tables, k)."""
    tables, contenders, _ = centred.shape
    among = np.ones((tables, contenders), dtype=bool)
    rows = np.arange(tables)
    for _ in range(contenders - FEWEST + 1):
        _, p = _scatter(centred, among)
        worst = p.argmin(axis=1)
        out = p[rows, worst] < OUTLIER / contenders
        if not out.any():
            break
        among[rows[out], worst[out]] = False
    return among


def _scatter(centred: Array, among: Mask) -> tuple[Array, Array]:
    """The variance of a contender's residual, pooled, and for each contender the chance to scatter so if it were alike.

    Args:
        centred: Shape (tables, k, n): less the mean of each contender.
        among: Shape (tables, k): those that are pooled.

    Returns:
        The residual variance of the two-way table, shape (tables,), and for each that is pooled the p value of the F
        test of its own residuals against those of the rest, shape (tables, k); 1 for the others.
    """
    n = centred.shape[2]
    counts = np.maximum(among.sum(axis=1), 2)
    residual = np.where(among[:, :, None], _residuals(centred, among), 0.0)
    residual[np.abs(residual) <= _rounding(centred.reshape(len(centred), -1))[:, None, None]] = 0.0
    squares = (residual**2).sum(axis=2)
    total = squares.sum(axis=1)
    # Without one contender the mean of a seed moves by its residual / (count - 1).
    own = squares * (counts / (counts - 1))[:, None]
    rest = np.maximum(total[:, None] - own, 0.0)
    degrees = ((counts - 2) * (n - 1))[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (own / (n - 1)) / (rest / degrees)
    p = np.where(among & (own > 0), special.fdtrc(n - 1, degrees, ratio), 1.0)
    return total / ((counts - 1) * (n - 1)), np.where(np.isnan(p), 1.0, p)
