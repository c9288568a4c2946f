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
NEAR = 2.2
WIDE = 4.5
"""A parabola is fitted to the best lr, its neighbours, and what else lies within the first factor.
A second one, within the second factor and two neighbours, shows how far the first one holds."""
GRAIN = 1 / 12
"""Standard deviation of an optimum between two lrs of a grid, in steps of the grid."""
UNSEEN = 0.2
"""The variance over seeds is taken at an upper bound, which the true one exceeds in this share of
cases."""
BEND = 0.05
"""Standard deviation of the bend c in ln lr* = a + b ln size + c (ln size)^2: no law is straight to
the last digit, and few sizes do not show a slight bend that matters at the target."""
IMPROBABLE = 0.05
"""Optima that lie further from the law than this share of all would are no power law."""
MIN_SEEDS = 2


class Estimate(NamedTuple):
    """A number and its interval at `CONFIDENCE`; infinite ends mean that there is none."""

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

        There is none if the upper end is infinite; the lower end is not looked at then.

        Example:
            >>> Estimate(0.01, 0.005, 0.02).interval(), Estimate(0.01, 0.0, math.inf).interval()
            ('5e-3 to 2e-2', 'none: too few sizes to test the law')
        """
        if not self.is_bounded:
            return "none: too few sizes to test the law"
        # `rate` writes a learning rate with few digits, such as 5e-3.
        return f"{rate(self.low)} to {rate(self.high)}"


@dataclass(frozen=True)
class FittedCurve:
    """Cost over lr at one size: a parabola around its optimum."""

    best: float
    """ln lr of the lowest point."""
    variance: float
    """Variance of `best` over seeds, by the jackknife."""
    step: float
    """Mean distance between the learning rates that were fitted."""
    shift: float
    """Change of `best` if the parabola is fitted to more learning rates."""
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
    """The level, then the slope of each key, then the bend of each key; shape (1 + 2 keys,)."""
    covariance: Array
    """Covariance of the coefficients."""
    shift: Array
    """Change of the coefficients if each parabola is fitted to more learning rates."""
    spare: int
    """Number of sizes minus the number of level and slopes; with 0 there is no interval."""
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
        """Estimate a linear combination of the coefficients, with weights `row`.

        Half of the interval is the normal quantile times the standard deviation, plus the shift.
        """
        value = float(row @ self.coefficients)
        half = math.inf
        if self.spare > 0:
            sd = math.sqrt(row @ self.covariance @ row)
            half = NORMAL * sd + abs(float(row @ self.shift))
        return Estimate(value, value - half, value + half)


def fit_lr_curve(lrs: Array, costs: Array, *, limit: float = math.inf) -> FittedCurve:
    """Fit a parabola around the best learning rate.

    Least squares of cost = c_seed + b x + a x^2: each seed has a height of its own. Fitted are the
    best lr, its neighbours and what lies within `NEAR`.

    Args:
        lrs: Natural logarithms of the learning rates, rising; shape (k,).
        costs: Shape (seeds, k); NaN where a run is missing. The best mean lies inside of the grid,
            and two seeds or more have all runs there and at both neighbours.
        limit: Lowest ln lr above the best at which a run diverged.
    """
    # 1. Select the learning rates of both fits.
    middle = index_of_best_lr(costs)
    is_near = _select_around(lrs, middle, neighbours=1, factor=NEAR)
    is_in_wide_fit = _select_around(lrs, middle, neighbours=2, factor=WIDE)
    # A seed with a single run near the best only determines its own height c_seed.
    n_near = np.isfinite(costs[:, is_near]).sum(axis=1)
    costs = costs[n_near > 1]
    x = lrs[is_near]
    near_costs = costs[:, is_near]
    seeds = len(near_costs)
    # 2. Fit near the best lr, and over a wider range.
    best = _lowest_point_of_parabola(x, near_costs)
    wide_best = _lowest_point_of_parabola(lrs[is_in_wide_fit], costs[:, is_in_wide_fit])
    # 3. Jackknife: fit again without each seed; the variance is (n - 1) times theirs.
    optima = [
        _lowest_point_of_parabola(x, np.delete(near_costs, seed, axis=0)) for seed in range(seeds)
    ]
    average_step = float(x[-1] - x[0]) / (len(x) - 1)
    return FittedCurve(
        best=best,
        variance=(seeds - 1) * float(np.var(optima)),
        step=average_step,
        shift=wide_best - best,
        seeds=seeds,
        limit=limit,
    )


def _select_around(lrs: Array, middle: int, *, neighbours: int, factor: float) -> NDArray[np.bool_]:
    """Select `neighbours` points on each side of an index, and every lr within a factor.

    lrs are logarithms. Returns a mask of their shape.
    """
    distance = np.abs(np.arange(len(lrs)) - middle)
    is_within_factor = np.abs(lrs - lrs[middle]) <= math.log(factor)
    return np.asarray((distance <= neighbours) | is_within_factor)


def index_of_best_lr(costs: Array) -> int:
    """Find the column of the learning rate with the lowest mean cost.

    The mean of each seed is subtracted first: a seed that is hard, and has no run at some rates,
    would make the others look better.

    Args:
        costs: Shape (seeds, lrs); NaN where a run is missing.

    Example:
        >>> index_of_best_lr(np.array([[1.0, 2.0, 3.0], [11.0, 9.0, math.nan]]))  # not 2
        1
    """
    mean_of_seed = np.nanmean(costs, axis=1, keepdims=True)
    return int(np.argmin(np.nanmean(costs - mean_of_seed, axis=0)))


def _lowest_point_of_parabola(x: Array, costs: Array) -> float:
    """Fit cost = a z^2 + b z + height of the seed, z = x - mean, and return its lowest x.

    The lowest point is -b / (2 a), cut to the ends of x; of a parabola that opens downwards, the
    end at which it is lower.

    Args:
        x: Rising; shape (k,).
        costs: Shape (seeds, k); NaN where a run is missing.

    Example:
        >>> x = np.array([-1.0, 0.0, 1.0])  # two seeds of different height, lowest at 0.25
        >>> round(_lowest_point_of_parabola(x, np.array([(x - 0.25) ** 2, (x - 0.25) ** 2 + 7])), 6)
        0.25
    """
    # 1. Least squares over all runs.
    seed, column = np.nonzero(np.isfinite(costs))
    center = float(x.mean())
    z = x - center
    # One indicator column for each seed, whose coefficient is the seed's height.
    is_of_seed = (seed[:, None] == np.arange(len(costs))).astype(float)
    design = np.column_stack([z[column] ** 2, z[column], is_of_seed])
    coefficients = np.linalg.lstsq(design, costs[seed, column], rcond=None)[0]
    a, b = coefficients[:2]
    # 2. The lowest point between the ends.
    low = z[0]
    high = z[-1]
    if a > 0:
        return center + float(np.clip(-b / (2 * a), low, high))
    best_end = min(low, high, key=lambda end: a * end**2 + b * end)
    return center + float(best_end)


def pool_variance(curves: Collection[FittedCurve]) -> float:
    """Estimate the variance of one optimum: over seeds, and between two lrs of a grid.

    The part over seeds is pooled over all curves, and its upper bound is taken: the sum of squares
    divided by the `UNSEEN` quantile of chi squared with as many degrees of freedom. (`chdtri` takes
    the upper tail, so its argument is 1 - `UNSEEN`.)
    """
    degrees = sum(curve.seeds - 1 for curve in curves)
    sum_of_squares = sum((curve.seeds - 1) * curve.variance for curve in curves)
    seed_variance = sum_of_squares / special.chdtri(degrees, 1 - UNSEEN)
    grid_variance = np.mean([(GRAIN * curve.step) ** 2 for curve in curves])
    return float(seed_variance + grid_variance)


def fit_law(sizes: Array, curves: Sequence[FittedCurve]) -> ScalingLaw:
    """Fit ln lr* = level + slope x + bend x^2 by Bayesian regression; x = ln size - mean, per key.

    Level and slope have a flat prior; the bend is normal around 0 with standard deviation `BEND`,
    as in ridge regression. Sizes that show a bend determine it; if they do not, it widens the
    interval of a far target, however many seeds there are. With precision P = X'X / variance +
    prior, the coefficients are P^-1 X'y / variance, and P^-1 is their covariance (Bishop 2006,
    Pattern Recognition and Machine Learning, eq. 3.50 to 3.54). The law is broken if the sum of
    squares, that of the bend included, exceeds the chi squared quantile of `IMPROBABLE`.

    Args:
        sizes: Shape (sizes, keys), positive, of full rank, so that the slopes are identified.
        curves: The fitted curve of each size.

    Without bend and prior, and with one key, level and slope are those of
    `np.polyfit(x, [curve.best for curve in curves], 1)`.

    Example:
        >>> sizes = np.array([[64.0], [128.0], [256.0]])  # the best lr is 0.1 / size
        >>> curves = [
        ...     FittedCurve(math.log(0.1 / size), 1e-3, 0.7, 0.0, 3, math.inf)
        ...     for size in (64.0, 128.0, 256.0)
        ... ]
        >>> law = fit_law(sizes, curves)
        >>> round(law.exponent(0).value, 6), round(law.predict([512.0]).exp().value * 512, 6)
        (-1.0, 0.1)
    """
    center = np.log(sizes).mean(axis=0)
    x = np.log(sizes) - center
    keys = x.shape[1]
    # 1. Solve the normal equations; the prior acts on the bend alone.
    optima = np.array([curve.best for curve in curves])
    variance = pool_variance(curves)
    design = np.column_stack([np.ones(len(x)), x, x**2])
    flat = [0.0] * (1 + keys)  # precision 0 of level and slopes
    prior_precision = np.diag(flat + [BEND**-2] * keys)
    covariance = np.linalg.inv(design.T @ design / variance + prior_precision)
    # The coefficients are P^-1 X'y / variance: this matrix times the optima y.
    coefficients_of_optima = covariance @ design.T / variance
    coefficients = coefficients_of_optima @ optima
    # They are linear in the optima, and so is their shift in the shifts of the optima.
    shift = coefficients_of_optima @ np.array([curve.shift for curve in curves])
    # 2. Test whether the law fits: residuals and bend, each squared over its variance.
    residual = optima - design @ coefficients
    misfit = float(residual @ residual) / variance
    misfit += float(coefficients @ prior_precision @ coefficients)
    spare = len(x) - 1 - keys  # sizes minus level and slopes
    is_broken = spare > 0 and misfit > float(special.chdtri(spare, IMPROBABLE))
    return ScalingLaw(center, coefficients, covariance, shift, spare, is_broken)
