"""The variance of a difference of two contenders, learnt from all contenders that ran on the same seeds.

With three seeds a pair's own differences have two degrees of freedom, and a test that must hold over many pairs finds
nothing. Contenders of one sweep mostly scatter alike, so their residuals say more; where one does not, its pairs keep
to what they show themselves. This is the moderated t test of Smyth (2004), with three changes that were chosen by
simulation (`benchmarks/verdicts.py`) so that the error rate holds where spreads differ:

- the prior variance is that of a two-way table (contender, seed), without contenders that scatter far more;
- its weight is bounded, not estimated, and fades with the p value of an F test for each contender's own scatter;
- p values are multiplied by `CAUTION`.

Source: Smyth 2004, Linear models and empirical Bayes methods, eq. 7:
s~^2 = (d0 s0^2 + d s^2) / (d0 + d), on d0 + d degrees of freedom; Phipson et al. 2016 for outlying variances.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Index = NDArray[np.int64]

CAUTION = 2.0
"""What p values are multiplied by where anything is learnt from other contenders."""
MOST = 2.5
"""Weight of what others say, at most, in multiples of the weight of the pair's own differences."""
FADES = 0.6
"""Over the number of seeds: the F test's p value below which the weight of the others fades."""
OUTLIER = 0.01
"""Chance with which a contender that scatters like the others is left out of what is learnt from all."""
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
    caution: float
    """What p values are multiplied by."""


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
        return Spread(np.sqrt(own), np.sqrt(own), np.full(own.shape, float(own_degrees)), 1.0)
    centred = values - values.mean(axis=2, keepdims=True)
    among = _alike(centred)
    pooled, ratio_p = _scatter(centred, among)
    trust = np.where(among, np.clip(ratio_p * seeds / FADES, 0.0, 1.0), 0.0)
    prior = own_degrees * _weight(among.sum(axis=1))[:, None] * np.minimum(trust[:, first], trust[:, second])
    degrees = prior + own_degrees
    variance = (prior * 2 * pooled[:, None] + own_degrees * own) / degrees
    return Spread(np.sqrt(own), np.sqrt(variance), degrees, CAUTION)


def expected(contenders: int, seeds: int) -> tuple[float, float]:
    """Say what p values are multiplied by and what the others weigh where all scatter alike.

    The weight is in multiples of that of the pair's own differences, less what F tests take of it by chance.
    """
    if contenders < FEWEST:
        return 1.0, 0.0
    faded = FADES / seeds  # a p value is uniform: on average half of the weight is lost below that
    return CAUTION, float(_weight(np.array(contenders))) * (1 - faded)


def _weight(contenders: NDArray[np.int64]) -> Array:
    return np.asarray(np.clip((contenders - 2) / 2, 0.0, MOST))


def _rounding(values: Array) -> Array:
    """The spread that rounding alone gives values of this size, over the last axis."""
    return np.asarray(1e-10 * np.abs(values).max(axis=-1, initial=0.0))


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
    counts = among.sum(axis=1)
    means = (centred * among[:, :, None]).sum(axis=1) / counts[:, None]
    residual = np.where(among[:, :, None], centred - means[:, None], 0.0)
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
