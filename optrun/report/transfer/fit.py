"""Fit lr basins and the power law that their optima follow; numbers alone, no files.

All learning rates are natural logarithms here, all metrics costs: less is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]

CONFIDENCE = 0.9
NEAR, WIDE = 2.2, 4.5
"""A parabola is fitted to the best learning rate, its neighbours, and what else lies within the
first factor of it. How far it holds is seen by fitting once more, with what lies within the
second and the next neighbours.
"""
GRAIN = 1 / 12
"""A grid tells where its optimum is no better than to this part of its step, as a standard
deviation.
"""
NORMAL = float(special.ndtri(0.5 + CONFIDENCE / 2))
LOW = 0.2
"""Share of draws in which the variance over seeds is estimated lower than this assumes."""
MIN_LRS = 3
MIN_SEEDS = 2


@dataclass(frozen=True)
class Basin:
    """The optimum of the learning rate at one size."""

    best: float
    """Where the parabola is lowest; shape (), ln lr."""
    level: float
    """Cost of the parabola there, mean over seeds."""
    curvature: float
    """Of cost = level + curvature * (ln lr - best)^2."""
    window: tuple[float, float]
    """Lowest and highest ln lr of the fit."""
    variance: float
    """Of `best`, over seeds: the jackknife's."""
    step: float
    """Of the grid around it: the distance of two learning rates."""
    wide: float
    """Where the parabola is lowest that takes in more learning rates; NaN: there are no more."""
    seeds: int


@dataclass(frozen=True)
class Law:
    """ln lr* = intercept + exponents . ln size, and how sure that is."""

    coefficients: Array
    """Intercept first; shape (1 + keys,)."""
    covariance: Array
    """Of the coefficients for an error variance of 1; shape (1 + keys, 1 + keys)."""
    seed_variance: float
    """Of an optimum, over seeds: the upper end of what its estimate allows."""
    spare: int
    """Sizes beyond those that the coefficients need: degrees of freedom of `misfit`."""
    bent: Array
    """What the coefficients change by if each parabola takes in more learning rates; shape (1 +
    keys,)."""
    misfit: float
    """Root of the mean square of the optima around the law; NaN where there is no size to spare."""
    bends: bool
    """Whether the optima lie further from the law than seeds explain."""

    def exponent(self, key: int) -> tuple[float, float, float]:
        """Return an exponent and the ends of its interval."""
        return self._interval(np.eye(len(self.coefficients))[key + 1])

    def predict(self, size: Sequence[float]) -> tuple[float, float, float]:
        """Predict ln lr* of a size, and the ends of its interval."""
        return self._interval(np.array([1.0, *np.log(size)]))

    def _interval(self, row: Array) -> tuple[float, float, float]:
        """Return a value and its interval, which is infinite without a size to spare.

        Seeds do not dilute the misfit: it has `spare` degrees of freedom. What seeds alone do to
        the optima is a lower bound of the interval.
        """
        value = float(row @ self.coefficients)
        leverage = math.sqrt(float(row @ self.covariance @ row))
        half = NORMAL * math.sqrt(self.seed_variance) * leverage
        if len(row) > 1 and not self.spare:
            return value, -math.inf, math.inf
        if self.spare:
            half = max(half, quantile(self.spare) * self.misfit * leverage)
        half += abs(float(row @ self.bent))
        return value, value - half, value + half


def quantile(degrees: int) -> float:
    """Return Student's t of the confidence, two-sided."""
    return float(special.stdtrit(degrees, 0.5 + CONFIDENCE / 2))


def fit_basin(lrs: Array, costs: Array) -> Basin:
    """Fit a parabola in ln lr around the best learning rate.

    Args:
        lrs: ln of the learning rates, rising; shape (k,).
        costs: Shape (seeds, k); NaN where a run is missing. The best mean lies inside of the grid,
            and two seeds or more have all runs there and at both neighbours.

    Returns:
        The least squares fit of cost = c_seed + b x + a x^2: seeds share the basin, each has its
        own height.
    """
    near, far = (_around(lrs, best_of(costs), *reach) for reach in ((1, NEAR), (2, WIDE)))
    costs = costs[
        np.isfinite(costs[:, near]).sum(axis=1) > 1
    ]  # a seed with one run in there tells its height alone
    x, y = lrs[near], costs[:, near]
    best, level, curvature = _parabola(x, y)
    wide = _parabola(lrs[far], costs[:, far])[0] if far.sum() > near.sum() else math.nan
    left_out = [_parabola(x, np.delete(y, seed, axis=0))[0] for seed in range(len(y))]
    variance = (len(y) - 1) * float(np.var(left_out))
    step = float(x[-1] - x[0]) / (len(x) - 1)
    return Basin(best, level, curvature, (float(x[0]), float(x[-1])), variance, step, wide, len(y))


def _around(lrs: Array, middle: int, neighbours: int, factor: float) -> NDArray[np.bool_]:
    """Select what is fitted: so many neighbours on both sides, and all within a factor."""
    places = np.abs(np.arange(len(lrs)) - middle)
    return np.asarray((places <= neighbours) | (np.abs(lrs - lrs[middle]) <= math.log(factor)))


def best_of(costs: Array) -> int:
    """Find the learning rate with the best mean over seeds.

    Seeds that lack a run do not tip the balance.
    """
    return int(np.argmin(np.nanmean(costs - np.nanmean(costs, axis=1, keepdims=True), axis=0)))


def _parabola(x: Array, costs: Array) -> tuple[float, float, float]:
    """Fit a parabola with a height for each seed.

    Where it has no minimum inside, its lower end stands for it.
    """
    seed, at = np.nonzero(np.isfinite(costs))
    centre = float(x.mean())
    z = x - centre
    heights = (seed[:, None] == np.arange(len(costs))).astype(float)
    design = np.column_stack([z[at] ** 2, z[at], heights])
    a, b, *c = np.linalg.lstsq(design, costs[seed, at], rcond=None)[0]
    ends = (z[0], z[-1])
    best = (
        float(np.clip(-b / (2 * a), *ends))
        if a > 0
        else min(ends, key=lambda end: a * end**2 + b * end)
    )
    return centre + best, float(np.mean(c) + b * best + a * best**2), float(a)


def fit_law(sizes: Array, basins: Sequence[Basin]) -> Law:
    """Fit the power law through the optima of sizes, by least squares.

    Args:
        sizes: Shape (sizes, keys), positive, such that the exponents are identified.
        basins: Of each.

    Returns:
        The law. Its misfit has (sizes - coefficients) degrees of freedom, whatever the seeds.
    """
    design = np.column_stack([np.ones(len(sizes)), np.log(sizes)])
    optima = np.array([basin.best for basin in basins])
    covariance = np.linalg.inv(design.T @ design)
    coefficients = covariance @ design.T @ optima
    bent = np.nan_to_num([basin.wide - basin.best for basin in basins]) @ design @ covariance
    residual = float(np.sum((optima - design @ coefficients) ** 2))
    spare = len(sizes) - design.shape[1]
    degrees = sum(basin.seeds - 1 for basin in basins)
    over_seeds = sum((basin.seeds - 1) * basin.variance for basin in basins) / degrees
    grain = float(np.mean([(GRAIN * basin.step) ** 2 for basin in basins]))
    seed_variance = over_seeds * degrees / float(special.chdtri(degrees, 1 - LOW)) + grain
    misfit = math.sqrt(residual / spare) if spare else math.nan
    bends = bool(spare) and misfit**2 > (over_seeds + grain) * special.fdtri(
        spare, degrees, CONFIDENCE
    )
    return Law(coefficients, covariance, seed_variance, spare, bent, misfit, bool(bends))
