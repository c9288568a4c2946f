"""Fit the optimum of lr at each size, and the power law that the optima follow.

Numbers alone, no files. Every learning rate is a natural logarithm, and every metric a cost: less
is better.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from optrun.base.formatting import rate

Array = NDArray[np.float64]

CONFIDENCE = 0.9
NORMAL = float(special.ndtri(0.5 + CONFIDENCE / 2))
NEAR, WIDE = 2.2, 4.5
"""A parabola is fitted to the best lr, its neighbours, and what else lies within the first factor.
A second one, within the second factor and two neighbours, shows how far the first one holds."""
GRAIN = 1 / 12
"""Standard deviation of an optimum between two lrs of a grid, in steps of the grid."""
UNSEEN = 0.2
"""The variance over seeds is taken at its upper bound, which this share of estimates misses."""
BEND = 0.05
"""Standard deviation of the bend c in ln lr* = a + b ln size + c (ln size)^2: no law is straight to
the last digit, and few sizes do not show a slight bend that matters at the target."""
IMPROBABLE = 0.05
"""Optima that lie further from the law than this share of all would are no power law."""
MIN_SEEDS = 2


class Estimate(NamedTuple):
    """A number and the ends of its interval at `CONFIDENCE`; infinite ends: there is none."""

    value: float
    low: float
    high: float

    @property
    def is_bounded(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.high)

    def exp(self) -> Estimate:
        """Convert an estimate of ln x to one of x."""
        return Estimate(*np.exp(self).tolist())

    def interval(self) -> str:
        """Write the ends of the interval of a learning rate, or why there is none.

        Example:
            >>> Estimate(0.01, 0.005, 0.02).interval(), Estimate(0.01, 0.0, math.inf).interval()
            ('5e-3 to 2e-2', 'none: too few sizes to test the law')
        """
        if not self.is_bounded:
            return "none: too few sizes to test the law"
        return f"{rate(self.low)} to {rate(self.high)}"


@dataclass(frozen=True)
class FittedCurve:
    """Cost over lr at one size: a parabola around its optimum."""

    best: float
    """ln lr of the lowest point."""
    variance: float
    """Of `best`, over seeds: the jackknife's."""
    step: float
    """Distance of two learning rates of the grid around it."""
    shift: float
    """How far `best` moves if the parabola takes in more learning rates."""
    seeds: int
    limit: float
    """Lowest ln lr above `best` at which a run diverged; infinite if none did."""

    def optimum(self, variance: float) -> Estimate:
        """Return ln lr* with its interval, whose upper end stays below `limit`.

        Args:
            variance: Of one optimum, see `pool_variance`.
        """
        half = NORMAL * math.sqrt(variance) + abs(self.shift)
        return Estimate(self.best, self.best - half, min(self.best + half, self.limit))


@dataclass(frozen=True)
class ScalingLaw:
    """ln lr* over ln size, nearly a straight line, and how sure that is."""

    center: Array
    """Mean ln size of the sweeps; shape (keys,)."""
    coefficients: Array
    """Level, then slope, then bend of each key; shape (1 + 2 keys,)."""
    covariance: Array
    """Of the coefficients."""
    shift: Array
    """How far they move if each parabola takes in more learning rates."""
    spare: int
    """Sizes beyond those that level and slopes need. Without one there is no interval."""
    is_broken: bool
    """Whether the optima lie further from the law than seeds and a slight bend explain."""

    def exponent(self, key: int) -> Estimate:
        """Return the slope of the key at this index, at the middle of the sizes."""
        return self._estimate(np.eye(len(self.coefficients))[key + 1])

    def predict(self, size: Sequence[float]) -> Estimate:
        """Predict ln lr* of a size, one positive number per key."""
        x = np.log(size) - self.center
        return self._estimate(np.array([1.0, *x, *x**2]))

    def _estimate(self, row: Array) -> Estimate:
        """Estimate a linear combination of the coefficients; unbounded without spare sizes."""
        value = float(row @ self.coefficients)
        half = math.inf
        if self.spare > 0:
            half = NORMAL * math.sqrt(row @ self.covariance @ row) + abs(float(row @ self.shift))
        return Estimate(value, value - half, value + half)


def fit_lr_curve(lrs: Array, costs: Array, *, limit: float = math.inf) -> FittedCurve:
    """Fit a parabola around the best learning rate.

    Least squares of cost = c_seed + b x + a x^2: each seed has a height of its own.

    Args:
        lrs: Natural logarithms of the learning rates, rising; shape (k,).
        costs: Shape (seeds, k); NaN where a run is missing. The best mean lies inside of the grid,
            and two seeds or more have all runs there and at both neighbours.
        limit: Lowest ln lr above the best at which a run diverged.
    """
    middle = best_of(costs)
    near = _around(lrs, middle, neighbours=1, factor=NEAR)
    far = _around(lrs, middle, neighbours=2, factor=WIDE)
    # A seed with one run in there tells its own height alone.
    costs = costs[np.isfinite(costs[:, near]).sum(axis=1) > 1]
    x = lrs[near]
    y = costs[:, near]
    best = _lowest_point(x, y)
    left_out = [_lowest_point(x, np.delete(y, seed, axis=0)) for seed in range(len(y))]
    return FittedCurve(
        best=best,
        variance=(len(y) - 1) * float(np.var(left_out)),
        step=float(x[-1] - x[0]) / (len(x) - 1),
        shift=_lowest_point(lrs[far], costs[:, far]) - best,
        seeds=len(y),
        limit=limit,
    )


def _around(lrs: Array, middle: int, *, neighbours: int, factor: float) -> NDArray[np.bool_]:
    """Select `neighbours` points on each side of an index, and every lr within a factor."""
    distance = np.abs(np.arange(len(lrs)) - middle)
    return np.asarray((distance <= neighbours) | (np.abs(lrs - lrs[middle]) <= math.log(factor)))


def best_of(costs: Array) -> int:
    """Find the learning rate with the best mean, corrected for missing runs."""
    return int(np.argmin(np.nanmean(costs - np.nanmean(costs, axis=1, keepdims=True), axis=0)))


def _lowest_point(x: Array, costs: Array) -> float:
    """Fit a parabola and find its lowest point between the ends of x."""
    seed, at = np.nonzero(np.isfinite(costs))
    center = float(x.mean())
    z = x - center
    heights = (seed[:, None] == np.arange(len(costs))).astype(float)
    design = np.column_stack([z[at] ** 2, z[at], heights])
    a, b = np.linalg.lstsq(design, costs[seed, at], rcond=None)[0][:2]
    if a > 0:
        best = np.clip(-b / (2 * a), z[0], z[-1])
    else:
        best = min(z[0], z[-1], key=lambda end: a * end**2 + b * end)
    return center + float(best)


def pool_variance(curves: Collection[FittedCurve]) -> float:
    """Estimate the variance of one optimum: over seeds, and between two lrs of a grid."""
    degrees = sum(curve.seeds - 1 for curve in curves)
    squares = sum((curve.seeds - 1) * curve.variance for curve in curves)
    grain = np.mean([(GRAIN * curve.step) ** 2 for curve in curves])
    return float(squares / special.chdtri(degrees, 1 - UNSEEN) + grain)


def fit_law(sizes: Array, curves: Sequence[FittedCurve]) -> ScalingLaw:
    """Fit the power law through the optima of sizes, with a slight bend of unknown sign.

    The bend is normal around 0 with standard deviation `BEND` (a ridge): sizes that show it narrow
    it, and where they do not it widens the interval of a far target. Seeds do not dilute it.

    Args:
        sizes: Shape (sizes, keys), positive, of full rank, so that the slopes are identified.
        curves: The fitted curve of each size.
    """
    center = np.log(sizes).mean(axis=0)
    x = np.log(sizes) - center
    keys = x.shape[1]
    optima = np.array([curve.best for curve in curves])
    variance = pool_variance(curves)
    design = np.column_stack([np.ones(len(x)), x, x**2])
    prior = np.diag([0.0] * (1 + keys) + [BEND**-2] * keys)
    covariance = np.linalg.inv(design.T @ design / variance + prior)
    solve = covariance @ design.T / variance
    coefficients = solve @ optima
    residual = optima - design @ coefficients
    misfit = float(residual @ residual) / variance + float(coefficients @ prior @ coefficients)
    spare = len(x) - 1 - keys
    shift = solve @ np.array([curve.shift for curve in curves])
    is_broken = spare > 0 and misfit > float(special.chdtri(spare, IMPROBABLE))
    return ScalingLaw(center, coefficients, covariance, shift, spare, is_broken)
