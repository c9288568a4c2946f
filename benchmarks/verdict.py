"""Simulate sweeps whose truth is known.

How often the verdict loses the best contender, and how often it finds a worse.

    python benchmarks/verdict.py [--tables 20000] [--write]

A table of scores is `contenders x seeds`; less is better, contender 0 is the best, and a seed is
easy or hard for all.
Where nothing else is said the others are as good as contender 0: the case in which it is lost most
often. "Before" are figures of the report as it was until Hsu's comparison replaced its test,
measured then; "after" is measured now.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optrun.report.statistics import ALPHA, Verdict, compare, paired_tests, seeds_for

Array = NDArray[np.float64]
Random = np.random.Generator
DOCUMENT = Path(__file__).parents[1] / "docs" / "statistics.md"
BEGIN, END = "<!-- simulation: begin -->", "<!-- simulation: end -->"
SEED = 0
SIZES = [(2, 3), (3, 3), (4, 3), (7, 3), (12, 3), (3, 5), (7, 5), (12, 5), (7, 10)]
"""Contenders and seeds."""


def _basins(apart: float) -> Callable[[Random, tuple[int, ...]], Array]:
    """A run falls into one of two basins, whose means are so many of their own deviations apart.

    Variance 1.
    """
    own = 1 / math.sqrt(1 + (apart / 2) ** 2)
    return lambda random, shape: (
        own * (apart / 2 * random.choice([-1.0, 1.0], shape) + random.standard_normal(shape))
    )


def _families(random: Random, shape: tuple[int, ...]) -> Array:
    """Seeds do three times as much to two groups of contenders as to each contender alone."""
    *tables, contenders, seeds = shape
    group = random.standard_normal((*tables, 2, seeds))[..., np.arange(contenders) % 2, :]
    return random.standard_normal(shape) + 3 * group


def _normal(scales: Callable[[int], Array]) -> Callable[[Random, tuple[int, ...]], Array]:
    return lambda random, shape: random.standard_normal(shape) * scales(shape[-2])[:, None]


NOISES: dict[str, Callable[[Random, tuple[int, ...]], Array]] = {
    "equal": _normal(np.ones),
    "one x 10": _normal(lambda k: np.append(np.ones(k - 1), 10.0)),
    "from 1 to 10, best quietest": _normal(lambda k: np.geomspace(1, 10, k)),
    "from 1 to 10, best noisiest": _normal(lambda k: np.geomspace(10, 1, k)),
    "exponential": lambda random, shape: random.exponential(size=shape) - 1,
    "exponential, to better values": lambda random, shape: 1 - random.exponential(size=shape),
    "t, 3 degrees": lambda random, shape: random.standard_t(3, shape) / math.sqrt(3),
    "bimodal": _basins(4),
    "shared within two families": _families,
}


LIMITS: dict[str, Callable[[Random, tuple[int, ...]], Array]] = {
    "two basins, 14 deviations apart": _basins(14),
    "exponential, best x 10, to better values": lambda random, shape: (
        (1 - random.exponential(size=shape)) * np.append(10.0, np.ones(shape[-2] - 1))[:, None]
    ),
}
"""Noise for which no paired t test of few seeds keeps its rate."""
BLOCK = 2000
"""Tables at a time: 12 contenders on 5 seeds have 720 differences."""


def rule_out(values: Array, mode: str, alpha: float = ALPHA) -> NDArray[np.bool_]:
    """Tell who is worse than some other at alpha / (k - 1), as `compare`; shape (..., k).

    Many tables at once; values: shape (..., k, seeds).
    """
    rejected = paired_tests(values, mode).p < alpha / (values.shape[-2] - 1)
    return np.asarray(rejected.any(axis=-1))


def gone(values: Array, mode: str = "min", alpha: float = ALPHA) -> NDArray[np.bool_]:
    """Rule out, block by block; shape (tables, k)."""
    return np.concatenate(
        [rule_out(values[at : at + BLOCK], mode, alpha) for at in range(0, len(values), BLOCK)]
    )


def draw(noise: str, contenders: int, seeds: int, tables: int, *, workloads: int = 0) -> Array:
    """Draw tables; shape (tables, k, n) or (tables, workloads, k, n)."""
    kinds = NOISES | LIMITS
    random = np.random.default_rng([SEED, list(kinds).index(noise), contenders, seeds, workloads])
    lead = (tables, workloads) if workloads else (tables,)
    return kinds[noise](random, (*lead, contenders, seeds)) + random.standard_normal(
        (*lead, 1, seeds)
    )


def lost(noise: str, contenders: int, seeds: int, tables: int) -> float:
    """Rate at which the best contender is ruled out."""
    return float(gone(draw(noise, contenders, seeds, tables))[:, 0].mean())


def found(
    contenders: int, seeds: int, tables: int, *, ahead: float = 0.0, behind: float = 0.0
) -> float:
    """Rate at which the last contender is ruled out.

    The best is ahead of all, or the last behind all, so many sd.
    """
    values = draw("equal", contenders, seeds, tables)
    values[:, 0] -= ahead
    values[:, -1] += behind
    return float(gone(values)[:, -1].mean())


def size_rows(tables: int) -> Iterator[list[str]]:
    """Error and power of the comparison with the best, for every size."""
    yield [
        "contenders x seeds",
        "best lost, worst of nine kinds of noise",
        "one ahead by 4 sd: another is ruled out",
        "ahead by 2 sd",
        "one behind by 4 sd: it is ruled out",
    ]
    for k, n in SIZES:
        rates = {noise: lost(noise, k, n, tables) for noise in NOISES}
        worst = max(rates, key=lambda name: rates[name])
        four, two = (found(k, n, tables, ahead=ahead) for ahead in (4.0, 2.0))
        yield [
            f"{k} x {n}",
            f"{rates[worst]:.1%} ({worst})",
            f"{four:.0%}",
            f"{two:.0%}",
            f"{found(k, n, tables, behind=4.0):.0%}",
        ]


def lost_while_looking(contenders: int, tables: int, *, counted: bool) -> float:
    """Rate at which the best is ruled out at any of eight looks, at 3, 4, ... 10 seeds."""
    values = draw("equal", contenders, 10, tables)
    gone = [
        rule_out(values[:, :, : look + 2], "min", ALPHA / (look if counted else 1))[:, 0]
        for look in range(1, 9)
    ]
    return float(np.any(gone, axis=0).mean())


def lost_by_metrics(
    correlation: float, tables: int, *, contenders: int = 3, seeds: int = 5, metrics: int = 8
) -> float:
    """Rate at which the best is ruled out by at least one of several metrics."""
    random = np.random.default_rng(SEED)
    shared = random.standard_normal((tables, 1, contenders, seeds))
    own = random.standard_normal((tables, metrics, contenders, seeds))
    values = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    return float(
        np.any([gone(values[:, metric])[:, 0] for metric in range(metrics)], axis=0).mean()
    )


def lost_to_chosen(own: int, other: int, tables: int, *, seeds: int = 5) -> float:
    """Rate at which one of two is ruled out.

    Each is the best of so many configurations, all of them equally good.
    """
    random = np.random.default_rng(SEED)
    best = []
    for configurations in (own, other):
        scores = random.standard_normal((tables, configurations, seeds))
        best.append(
            np.take_along_axis(scores, scores.mean(axis=2).argmin(axis=1)[:, None, None], axis=1)
        )
    return float(gone(np.concatenate(best, axis=1))[:, 0].mean())


def confirmed(contenders: int, pilot_seeds: int, difference: float, pilots: int) -> float:
    """Rate at which a confirmation finds a true difference that it was planned for with power 0.8.

    Each pilot plans a confirmation from its own spread. One contender is the best, all others are
    worse by the difference, in standard deviations, and a given one of them counts.
    """
    random = np.random.default_rng([SEED, contenders, pilot_seeds])
    scores = random.standard_normal((pilots, contenders, pilot_seeds))
    residuals = scores - scores.mean(axis=2, keepdims=True)
    residuals -= residuals.mean(axis=1, keepdims=True)
    degrees = (contenders - 1) * (pilot_seeds - 1)
    observed = np.sqrt((residuals**2).sum(axis=(1, 2)) / degrees)
    plans = [
        seeds_for(difference, sd=float(sd), degrees=degrees, contenders=contenders, most=10_000)
        for sd in observed
    ]
    hits = 0
    for seeds, count in zip(
        *np.unique(np.array(plans, dtype=int), return_counts=True), strict=True
    ):
        values = random.standard_normal((count, contenders, seeds))
        values[:, 1:] += difference
        hits += gone(values)[:, 1].sum()
    return float(hits / pilots)


def over_workloads(values: Array, floor: Array) -> NDArray[np.bool_]:
    """Rule out over several workloads by the mean normalised score of a seed.

    Args:
        values: Shape (tables, workloads, k, n).
        floor: The metric before learning; shape (workloads,).

    Returns:
        Shape (tables, k). A workload where the best gains less than five standard deviations is
        left out, and nobody is ruled out if none is left.
    """
    gain = floor - values.mean(axis=3).min(axis=2)
    taught = gain >= 5 * np.sqrt(values.var(axis=3, ddof=1).mean(axis=2))
    scores = (floor[:, None, None] - values) / np.where(taught, gain, np.inf)[:, :, None, None]
    return np.asarray(gone(scores.sum(axis=1), "max") & taught.any(axis=1)[:, None])


FAR = 100.0
"""Standard deviations that the best gains on a workload that teaches much."""


def lost_over_workloads(tables: int, gains: tuple[float, ...] = ()) -> str:
    """Highest rate at which the best is ruled out over several workloads, and where.

    Args:
        tables: For each rate.
        gains: What the best gains on one of the workloads, in standard deviations; none: as on the
            others, with all kinds of noise.
    """
    rates = {}
    for k, workloads, n in ((2, 2, 3), (3, 5, 3), (7, 5, 3), (7, 2, 5)):
        size = f"{k} contenders, {workloads} workloads, {n} seeds"
        for gain in gains or (FAR,):
            floor = np.append(np.full(workloads - 1, FAR), gain)
            for noise in ["equal"] if gains else NOISES:
                out = over_workloads(draw(noise, k, n, tables, workloads=workloads), floor)
                rates[f"{size}, {noise}" if gain == FAR else f"{size}, gain {gain:g} sd"] = float(
                    out[:, 0].mean()
                )
    worst = max(rates, key=lambda name: rates[name])
    return f"{rates[worst]:.1%} ({worst})"


def found_over_workloads(gain: float | None, tables: int) -> float:
    """Rate at which a contender is ruled out that is worse by two sd on five workloads, beside
    one that gains less.
    """
    floor = np.array([*[FAR] * 5, *([] if gain is None else [gain])])
    values = draw("equal", 3, 3, tables, workloads=len(floor))
    values[:, :5, -1] += 2.0
    return float(over_workloads(values, floor)[:, -1].mean())


def small_difference() -> Verdict:
    """Say what is said of a difference of 0.0001 that is sure, where seeds lie 0.026 apart."""
    random = np.random.default_rng(SEED)
    seed = 0.026 * random.standard_normal(5)
    noise = 1e-5 * random.standard_normal((2, 5))
    scores = {"a": dict(enumerate(seed + noise[0])), "b": dict(enumerate(seed + 1e-4 + noise[1]))}
    return compare(scores, mode="min").comparisons["b"].verdict


def won_by_losing(tables: int, *, counted: bool) -> float:
    """Rate at which the best is ruled out by one that is better by 4 sd where it comes to its
    end, and diverges else.

    Two of its five runs diverge. `counted`: these stand with the score of the untrained model, 10
    sd above; else they are dropped.
    """
    values = draw("equal", 2, 5, tables)
    values[:, 1] -= 4.0
    values[:, 1, :2] = 10.0 if counted else np.nan
    return float(gone(values)[:, 0].mean())


def question_rows(tables: int) -> Iterator[list[str]]:
    """Each question that a reader may have about the error rates, and what a simulation answers."""
    yield ["what", "result"]
    looks = [
        [lost_while_looking(k, tables, counted=counted) for k in (2, 3, 7)]
        for counted in (False, True)
    ]
    yield [
        "seeds are added until a verdict, 3 to 10: best lost",
        f"{max(looks[1]):.1%} (each look at 5 %: {max(looks[0]):.0%})",
    ]
    metrics = [lost_by_metrics(correlation, tables) for correlation in (0.0, 0.8)]
    yield [
        "`metric=` picked of eight: best lost",
        f"{metrics[1]:.0%} (correlation 0.8) to {metrics[0]:.0%} (none), called exploratory",
    ]
    unequal, equal = (
        [f"{lost_to_chosen(1, m, tables):.0%}" for m in (2, 8, 32)],
        lost_to_chosen(8, 8, tables),
    )
    yield [
        "ruled out by the best of 2, 8, 32 equally good configurations, same 5 seeds",
        f"{', '.join(unequal)}; called selected (best of 8 against best of 8: {equal:.0%})",
    ]
    for difference in (1.0, 2.0):
        rates = [confirmed(k, n, difference, tables // 5) for n in (3, 5) for k in range(2, 8)]
        yield [
            (
                f"`confirm power=0.8` of a difference of {difference:g} sd, after 3 or 5 seeds, 2"
                " to 7 contenders"
            ),
            f"{min(rates):.2f} to {max(rates):.2f}",
        ]
    yield ["several workloads, nine kinds of noise: best lost", lost_over_workloads(tables)]
    yield ["the same, one workload at chance", lost_over_workloads(tables, (0.0,))]
    yield [
        "the same, one at the border of teaching nothing",
        lost_over_workloads(tables, (3.0, 4.0, 5.0, 6.0)),
    ]
    alone, chance, little = (found_over_workloads(gain, tables) for gain in (None, 0.0, 6.0))
    yield [
        (
            "worse by 2 sd on five workloads: ruled out; beside one at chance; beside one that"
            " gains 6 sd"
        ),
        f"{alone:.0%}; {chance:.0%}; {little:.0%}",
    ]
    yield ["a sure difference of 0.0001, seeds 0.026 apart", str(small_difference())]
    dropped, counted = (won_by_losing(tables, counted=counted) for counted in (False, True))
    yield [
        "ruled out by one that diverged on 2 of 5 seeds",
        f"{counted:.0%} (were its lost runs dropped: {dropped:.0%})",
    ]
    for noise in LIMITS:
        by_size = {(k, n): lost(noise, k, n, tables) for k, n in SIZES}
        k, n = max(by_size, key=lambda size: by_size[size])
        yield [f"limit, {noise}: best lost", f"{by_size[k, n]:.1%} at {k} x {n}"]


def table(rows: Iterator[list[str]]) -> str:
    """Write a table in Markdown, printing each row when it is known."""
    lines = []
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
        lines += [] if len(lines) > 1 else [f"| {' | '.join(['---'] * len(row))} |"]
        print(lines[-1] if len(lines) > 2 else "\n".join(lines), flush=True)
    return "\n".join(lines)


def main() -> None:
    """Print the tables, and write them where the documentation shows them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=20_000, help="for each figure")
    parser.add_argument("--write", action="store_true", help="into docs/statistics.md")
    options = parser.parse_args()
    source = f"Each figure comes from {options.tables:,} simulated tables."
    tables = [table(rows(options.tables)) for rows in (size_rows, question_rows)]
    text = "\n\n".join([f"{source} Kinds of noise: {'; '.join(NOISES)}.", *tables])
    if options.write:
        page = DOCUMENT.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
