"""Test whether one is better than the other: means, intervals, paired tests over seeds, and a verdict.

Everything here works on numbers alone and knows nothing of runs. The variance of a pair's differences is moderated by
what the other contenders show (`optrun.report.moderated`); with two contenders the test is the paired t test.

How error rates are kept:

- Against a baseline that was chosen beforehand there are k - 1 comparisons, and Holm's method corrects for k - 1.
- Against the best, the reference was picked by looking at the same numbers. Holm's method then corrects for all
  k (k - 1) / 2 pairs, of which the shown ones are a part, so that the chance of any false verdict stays below alpha
  whichever turns out best.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from optrun.report.moderated import spread_of_pairs
from optrun.report.power import detectable, seeds_for

Array = NDArray[np.float64]

ALPHA = 0.05
MIN_SEEDS = 3
"""Seeds in common below which no test is made: two differences have one degree of freedom."""
CONFIDENCE = 0.95

BETTER = "better"
WORSE = "worse"
NO_DIFFERENCE = "no difference found"
TOO_FEW = "cannot tell: too few seeds"
NO_SPREAD = "cannot tell: every seed differs by the same"
REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One contender against the reference."""

    name: str
    reference: str
    pairs: int
    """Seeds that both have."""
    difference: float
    """Mean of (contender - reference) over those seeds, in units of the metric; NaN without pairs."""
    low: float = math.nan
    high: float = math.nan
    """95 % t interval of the difference; NaN where no test was made."""
    p: float = math.nan
    """Two-sided moderated paired t test, uncorrected; NaN where no test was made."""
    p_corrected: float = math.nan
    """After Holm's correction."""
    effect: float = math.nan
    """Hedges' g of the paired differences: positive means the contender is better; NaN where no test was made."""
    verdict: str
    """`BETTER`, `WORSE`, `NO_DIFFERENCE`, `TOO_FEW`, `NO_SPREAD` or `REFERENCE`."""
    spread: float = math.nan
    """Standard deviation of the difference over seeds; NaN where no test was made."""
    degrees: float = math.nan
    """Of freedom, of `spread`."""
    bar: float = math.nan
    """What `p` had to stay below to begin with: alpha after all corrections."""

    @property
    def detectable(self) -> float:
        """The difference this comparison would have found with a chance of 80 %; NaN where no test was made."""
        return detectable(self.spread, self.pairs, self.bar, self.degrees) if self.degrees > 0 else math.nan

    @property
    def needed(self) -> int | None:
        """Seeds that would find the difference with a chance of 80 %; None: it was found, or 100 would not do."""
        if self.verdict != NO_DIFFERENCE or not self.degrees > 0:
            return None
        return seeds_for(self.difference, self.spread, self.pairs, self.bar, self.degrees)


def bootstrap_intervals(samples: Array, *, resamples: int = 2000, seed: int = 0) -> tuple[Array, Array]:
    """Compute bootstrap intervals (percentile) of the means of many samples of one size.

    With few seeds such an interval is too narrow: at five normal values it holds the true mean in about 84 of 100
    cases, at ten in about 90. The verdicts use t tests, which keep their rate at any size.

    Args:
        samples: Shape (k, n): k samples of n values each.
        resamples: How often to resample.
        seed: Of the resampling, so that a report says the same twice.

    Returns:
        Lower and upper ends, shapes (k,); NaN where n < 3.
    """
    k, n = samples.shape
    if n < MIN_SEEDS or k == 0:
        return np.full(k, np.nan), np.full(k, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # equal values: the interval is that point
        result = stats.bootstrap(
            (samples,), np.mean, axis=-1, n_resamples=resamples, confidence_level=CONFIDENCE, method="percentile",
            batch=max(1, 4_000_000 // (samples.size or 1)), rng=np.random.default_rng(seed),
        )  # fmt: skip
    low, high = (np.asarray(end, dtype=np.float64) for end in result.confidence_interval)
    return low, high


@dataclass(frozen=True)
class PairedTests:
    """Tests of pairs of contenders over the same seeds; every array has shape (tables, pairs)."""

    difference: Array
    low: Array
    high: Array
    p: Array
    effect: Array
    spread: Array
    degrees: Array
    caution: Array
    """What `p` was multiplied by, and the chance that an interval misses divided by."""


def paired_tests(values: Array, first: Sequence[int], second: Sequence[int]) -> PairedTests:
    """Run two-sided paired t tests with a moderated variance, many at once.

    Args:
        values: Shape (tables, contenders, seeds), at least two seeds: tables that have nothing to do with each other.
        first: Shape (pairs,): a contender of each pair.
        second: The one that is subtracted from it.

    Returns:
        Mean differences, their standard deviations and degrees of freedom as `moderated.spread_of_pairs` finds them, p
        values and 95 % t intervals from these; Hedges' g (mean over the pair's own standard deviation of differences,
        times 1 - 3 / (4 (n - 1) - 1)). p and g are NaN where the differences have no spread.
    """
    n = values.shape[2]
    i, j = np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64)
    mean = (values[:, i] - values[:, j]).mean(axis=2)
    spread = spread_of_pairs(values, i, j)
    nan = np.full(mean.shape, np.nan)
    error = spread.moderated / math.sqrt(n)
    t = np.divide(mean, error, out=nan.copy(), where=error > 0)
    reach = error * special.stdtrit(spread.degrees, 1 - (1 - CONFIDENCE) / 2 / spread.caution)
    correction = 1 - 3 / (4 * (n - 1) - 1)
    return PairedTests(
        difference=mean,
        low=mean - reach,
        high=mean + reach,
        p=np.minimum(1.0, spread.caution * 2 * special.stdtr(spread.degrees, -np.abs(t))),
        effect=np.divide(correction * mean, spread.own, out=nan.copy(), where=spread.own > 0),
        spread=spread.moderated,
        degrees=spread.degrees,
        caution=spread.caution,
    )


def holm(p: Sequence[float] | Array) -> Array:
    """Correct p values by Holm's step-down method: it bounds the chance of any false rejection.

    Args:
        p: Shape (m,); NaN marks a test that was not made and does not count.

    Returns:
        Shape (m,): corrected p values, at most 1, NaN where the input is.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure:
    adjusted p_(i) = max over j <= i of min(1, (m - j + 1) p_(j)).

    Example:
        >>> [round(float(value), 6) for value in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, dtype=np.float64)
    made = np.flatnonzero(~np.isnan(values))
    order = made[np.argsort(values[made], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    corrected = np.full(len(values), np.nan)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(factors * values[order]))
    return corrected


def compare(
    scores: Mapping[str, Mapping[int, float]],
    *,
    mode: str,
    reference: str | None = None,
    alpha: float = ALPHA,
) -> dict[str, Comparison]:
    """Compare contenders over the seeds they share with a reference.

    Args:
        scores: Name of contender -> seed -> final value.
        mode: "min" where less is better, "max" where more is.
        reference: A contender chosen beforehand; None: the one with the best mean, which costs a harder correction.
        alpha: Chance of any false "better" or "worse" in the whole comparison.

    Returns:
        One `Comparison` per contender, the reference included, in the order given.

    Raises:
        ValueError: No contender, an unknown reference, or another mode.
    """
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r}: expected min or max")
    filled = {name: values for name, values in scores.items() if values}
    if reference is not None and reference not in scores:
        raise ValueError(f"reference={reference!r}: expected one of {', '.join(scores)}")
    if not filled:
        raise ValueError("no contender has a score")
    sign = 1.0 if mode == "max" else -1.0
    chosen = reference
    if chosen is None:
        chosen = max(filled, key=lambda name: sign * float(np.mean(list(filled[name].values()))))
        pairs = list(combinations(filled, 2))
    else:
        pairs = [(name, chosen) for name in filled if name != chosen]
    tests = _test_all(scores, pairs)
    corrected = dict(zip(pairs, holm([tests[pair].p if pair in tests else np.nan for pair in pairs]), strict=True))
    made = max(1, sum(not np.isnan(value) for value in corrected.values()))
    result: dict[str, Comparison] = {}
    for name in scores:
        pair = (name, chosen) if (name, chosen) in corrected else (chosen, name)
        direction = 1.0 if pair[0] == name else -1.0
        seeds = sorted(set(scores[name]) & set(scores[chosen]))
        if name == chosen or pair not in tests:
            difference = float(np.mean([scores[name][s] - scores[chosen][s] for s in seeds])) if seeds else np.nan
            verdict = REFERENCE if name == chosen else TOO_FEW
            result[name] = Comparison(
                name=name, reference=chosen, pairs=len(seeds), difference=difference, verdict=verdict
            )
            continue
        test, p = tests[pair], float(corrected[pair])
        difference = direction * test.difference
        ends = sorted((direction * test.low, direction * test.high))
        result[name] = Comparison(
            name=name,
            reference=chosen,
            pairs=len(seeds),
            difference=difference,
            low=ends[0],
            high=ends[1],
            p=test.p,
            p_corrected=p,
            effect=sign * direction * test.effect,
            verdict=_verdict(p, sign * difference, alpha),
            spread=test.spread,
            degrees=test.degrees,
            bar=alpha / made / test.caution,
        )
    return result


@dataclass(frozen=True)
class _Test:
    """One pair's row of `PairedTests`."""

    difference: float
    low: float
    high: float
    p: float
    effect: float
    spread: float
    degrees: float
    caution: float


def _test_all(
    scores: Mapping[str, Mapping[int, float]], pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], _Test]:
    """Test every pair with enough seeds in common, with what all that have these seeds say about the spread."""
    by_seeds: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for first, second in pairs:
        seeds = tuple(sorted(scores[first].keys() & scores[second].keys()))
        if len(seeds) >= MIN_SEEDS:
            by_seeds.setdefault(seeds, []).append((first, second))
    found: dict[tuple[str, str], _Test] = {}
    for seeds, of_these in by_seeds.items():
        names = [name for name, values in scores.items() if values.keys() >= set(seeds)]
        table = np.array([[[scores[name][seed] for seed in seeds] for name in names]])
        columns = ([names.index(name) for name in side] for side in zip(*of_these, strict=True))
        tests = paired_tests(table, *columns)
        for row, pair in enumerate(of_these):
            found[pair] = _Test(*(float(getattr(tests, field.name)[0, row]) for field in fields(_Test)))
    return found


def _verdict(p: float, gain: float, alpha: float) -> str:
    if np.isnan(p):
        return NO_DIFFERENCE if gain == 0 else NO_SPREAD
    if p >= alpha:
        return NO_DIFFERENCE
    return BETTER if gain > 0 else WORSE
