"""Simulate reports whose truth is known: how often a verdict is false, and how often a difference is found.

    python benchmarks/verdicts.py [--repetitions 4000] [--write]

Every table of scores is `contenders x seeds`; a seed is easy or hard for all of them, and each contender scatters by
itself. Without a difference, an error is a report in which any pair, or any comparison with a baseline, is called
different. For power, one contender is four standard deviations better than the others, and a given comparison with it
counts: for every size, and for every situation. Four tests are told the same tables: the paired t test, the t test with
one variance pooled over all, limma's moderated t test, and optrun's; all of them corrected by Holm's method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import special

from optrun.report.statistics import ALPHA, paired_tests

Array = NDArray[np.float64]
DOCUMENT = Path(__file__).parents[1] / "docs" / "statistics.md"
SIZES = [
    (2, 3),
    (3, 3),
    (4, 3),
    (7, 3),
    (12, 3),
    (20, 3),
    (7, 4),
    (2, 5),
    (4, 5),
    (7, 5),
    (12, 5),
    (20, 5),
    (4, 10),
    (7, 10),
]
POWER_SIZES = [(7, 3), (7, 5)]
"""Sizes of the table of power by situation."""
DIFFERENCE = 4.0
BLOCK = 250
"""Tables at a time: 20 contenders have 190 pairs."""


def _scales(name: str, k: int) -> Array:
    """Standard deviation of each contender."""
    scales = np.ones(k)
    match name.split():
        case ["equal"]:
            pass
        case [count, "x", factor]:
            scales[k - (max(1, k // 2) if count == "half" else min(int(count), k - 1)) :] = float(factor)
        case ["graded"]:
            scales = np.geomspace(1, 10, k)
    return scales


SPREADS = [
    "equal",
    "1 x 2",
    "1 x 3",
    "1 x 5",
    "1 x 10",
    "1 x 30",
    "2 x 5",
    "half x 3",
    "half x 10",
    "graded",
    "1 x 0.1",
]
NOISES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "skewed (exponential)": lambda random, shape: random.exponential(size=shape) - 1,
    "heavy tails (t, 3 degrees)": lambda random, shape: random.standard_t(3, shape) / np.sqrt(3),
    "rounded to one deviation": lambda random, shape: np.round(random.standard_normal(shape)),
}
FAMILIES = "two families, noise shared within"
TRIPLE = "three that are one thing, nearly"
GROUPS = "two groups, each one thing, nearly"
SHARED = [FAMILIES, TRIPLE, GROUPS]


def tables(situation: str, k: int, n: int, count: int, *, gap: float = 0.0) -> Array:
    """Draw scores; shape (count, k, n). The first contender is better by `gap`."""
    random = np.random.default_rng([k, n, 7])
    noise = NOISES.get(situation, lambda random, shape: random.standard_normal(shape))
    own = noise(random, (count, k, n))
    if situation in SPREADS:
        own *= _scales(situation, k)[:, None]
    if situation == FAMILIES:
        own += 3 * random.standard_normal((count, 2, n))[:, np.arange(k) % 2]
    if situation == TRIPLE and k > 3:
        own[:, -3:] = own[:, -1:] + 0.01 * random.standard_normal((count, 3, n))
    if situation == GROUPS:
        own = 0.2 * own + random.standard_normal((count, 2, n))[:, np.arange(k) % 2]
    own[:, 0] -= gap
    return own + random.standard_normal((count, 1, n)).round()


def paired(values: Array, i: Array, j: Array) -> Array:
    """The paired t test."""
    difference, n = values[:, i] - values[:, j], values.shape[2]
    return _p(difference.mean(axis=2), difference.var(axis=2, ddof=1), n, n - 1)


def pooled(values: Array, i: Array, j: Array) -> Array:
    """One residual variance of the two-way table for all pairs."""
    _, k, n = values.shape
    centred = values - values.mean(axis=2, keepdims=True)
    squares = ((centred - centred.mean(axis=1, keepdims=True)) ** 2).sum(axis=(1, 2)) / ((k - 1) * (n - 1))
    return _p((values[:, i] - values[:, j]).mean(axis=2), 2 * squares[:, None], n, (k - 1) * (n - 1))


def limma(values: Array, i: Array, j: Array) -> Array:
    """Smyth's moderated t: prior degrees from the dispersion of log variances, at most those that are there."""
    _, k, n = values.shape
    if k < 3:
        return paired(values, i, j)
    difference, own = values[:, i] - values[:, j], n - 1
    variance = difference.var(axis=2, ddof=1)
    logs = np.log(np.maximum(variance, 1e-12)) - special.digamma(own / 2) + np.log(own / 2)
    excess = logs.var(axis=1, ddof=1) - special.polygamma(1, own / 2)
    estimated = 2 * _trigamma_inverse(np.maximum(excess, 1e-6))
    prior = np.minimum(estimated, (k - 2) * own)[:, None]
    centre = np.exp(logs.mean(axis=1) + special.digamma(estimated / 2) - np.log(estimated / 2))[:, None]
    return _p(difference.mean(axis=2), (prior * centre + own * variance) / (prior + own), n, prior + own)


def _trigamma_inverse(values: Array) -> Array:
    found = 0.5 + 1 / values
    for _ in range(12):  # Newton's method on 1 / trigamma, which is nearly straight
        trigamma = special.polygamma(1, found)
        found += trigamma * (1 - trigamma / values) / special.polygamma(2, found)
    return np.asarray(found)


def moderated(values: Array, i: Array, j: Array) -> Array:
    """optrun's test."""
    return np.nan_to_num(paired_tests(values, i, j).p, nan=1.0)


def _p(mean: Array, variance: Array, n: int, degrees: Array | int) -> Array:
    flat = variance <= 1e-18
    t = mean / np.sqrt(np.where(flat, 1.0, variance) / n)
    return np.where(flat, 1.0, 2 * special.stdtr(degrees, -np.abs(t)))


TESTS = {"paired t": paired, "pooled t": pooled, "limma": limma, "optrun": moderated}


def rejected(p: Array) -> NDArray[np.bool_]:
    """Whom Holm's method calls different; shape (tables, comparisons)."""
    order = p.argsort(axis=1)
    steps = np.take_along_axis(p, order, axis=1) * np.arange(p.shape[1], 0, -1)
    found = np.zeros(p.shape, dtype=bool)
    np.put_along_axis(found, order, np.logical_and.accumulate(steps < ALPHA, axis=1), axis=1)
    return found


def errors(situation: str, k: int, n: int, repetitions: int, names: Sequence[str] = ()) -> dict[str, float]:
    """Rate of reports with a false verdict: the larger of all pairs, the first and the last contender as baseline."""
    i, j = np.array(list(combinations(range(k), 2))).T
    families = [np.ones(len(i), dtype=bool), i == 0, j == k - 1]
    drawn = tables(situation, k, n, repetitions)
    found = {}
    for name in names or TESTS:
        test = TESTS[name]
        p = np.concatenate([test(drawn[start : start + BLOCK], i, j) for start in range(0, repetitions, BLOCK)])
        found[name] = max(float(rejected(p[:, family]).any(axis=1).mean()) for family in families)
    return found


def power(
    k: int,
    n: int,
    repetitions: int,
    names: Sequence[str] = (),
    *,
    situation: str = "equal",
    baseline: bool = False,
    gap: float = DIFFERENCE,
) -> dict[str, float]:
    """Rate at which the first contender is told from a given other one that scatters as it does, if any does."""
    i, j = np.array(list(combinations(range(k), 2))).T
    family = i == 0 if baseline else np.ones(len(i), dtype=bool)
    alike = _scales(situation, k)[j[family]] == 1
    counted = (i == 0)[family] & (alike if alike.any() else True)
    drawn = tables(situation, k, n, repetitions, gap=gap)
    found = {}
    for name in names or TESTS:
        test = TESTS[name]
        p = np.concatenate([test(drawn[start : start + BLOCK], i, j) for start in range(0, repetitions, BLOCK)])
        found[name] = float(rejected(p[:, family])[:, counted].mean())
    return found


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def report(repetitions: int) -> str:
    """Run everything; a table of errors, one of power by size, one of power by situation, in Markdown."""
    names = list(TESTS)
    head = [_row(["situation, worst size", *names]), _row(["---"] * (1 + len(names)))]
    lines = [f"{repetitions:,} tables a cell, sizes {', '.join(f'{k} x {n}' for k, n in SIZES)}.", "", *head]
    for situation in [*SPREADS, *NOISES, *SHARED]:
        cells = {
            (k, n): errors(situation, k, n, repetitions) for k, n in SIZES if k > 2 or situation in ("equal", *NOISES)
        }
        worst = {name: max(cells, key=lambda size, name=name: cells[size][name]) for name in names}
        lines.append(
            _row(
                [
                    situation,
                    *(f"{cells[worst[name]][name]:.1%} at {worst[name][0]} x {worst[name][1]}" for name in names),
                ]
            )
        )
        print(lines[-1], flush=True)
    lines += ["", _row(["contenders x seeds", *names, "optrun, baseline", "optrun, one of ten times the noise"])]
    lines.append(_row(["---"] * (3 + len(names))))
    for k, n in SIZES:
        plain, planned = power(k, n, repetitions), power(k, n, repetitions, baseline=True)
        noisy = f"{power(k, n, repetitions, situation='1 x 10')['optrun']:.0%}" if k > 2 else ""
        lines.append(_row([f"{k} x {n}", *(f"{plain[name]:.0%}" for name in names), f"{planned['optrun']:.0%}", noisy]))
        print(lines[-1], flush=True)
    return "\n".join([*lines, "", *by_situation(repetitions)])


def by_situation(repetitions: int) -> list[str]:
    """Tabulate the power of every test in every situation, in Markdown."""
    names = [f"{test}, {k} x {n}" for k, n in POWER_SIZES for test in TESTS]
    lines = [_row(["situation", *names]), _row(["---"] * (1 + len(names)))]
    for situation in [*SPREADS, *NOISES, *SHARED]:
        found = [power(k, n, repetitions, situation=situation) for k, n in POWER_SIZES]
        lines.append(_row([situation, *(f"{one[test]:.0%}" for one in found for test in TESTS)]))
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Print the tables, and write them where the documentation shows them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=4000)
    parser.add_argument("--write", action="store_true", help="into docs/statistics.md")
    options = parser.parse_args()
    found = report(options.repetitions)
    print(found)
    if options.write:
        text = DOCUMENT.read_text()
        begin, end = "<!-- simulation: begin -->", "<!-- simulation: end -->"
        before, after = text.split(begin)[0], text.split(end)[1]
        DOCUMENT.write_text(f"{before}{begin}\n{found}\n{end}{after}")


if __name__ == "__main__":
    main()
