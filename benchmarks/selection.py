"""What choosing on the seeds that one is judged by does to the error rate of the report's tests.

    python benchmarks/selection.py [--reports 20000]

Two contenders, equally good in truth: one is the best of M equally good configurations by its mean, the other had one,
or M as well. Every score is normal noise, of the same spread but in the last table. The figure is the share of reports
whose test calls one of them better or worse; without a choice it is 5 %. The first table is that of
`optrun.report.selection.RATES`.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from optrun.report.statistics import BETTER, WORSE, compare

SEEDS = (3, 5, 10)
CONFIGURATIONS = (1, 2, 4, 8, 16, 32)


def best_of(configurations: int, seeds: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Draw configurations that are alike, and keep the scores of the one with the lowest mean. Shape (seeds,)."""
    scores = random.standard_normal((configurations, seeds))
    return scores[scores.mean(axis=1).argmin()]


def false_rate(first: int, second: int, spread: float, seeds: int, reports: int, random: np.random.Generator) -> float:
    """Count the reports on two contenders, chosen of so many, that name a difference."""
    false = 0
    for _ in range(reports):
        chosen = {"a": spread * best_of(first, seeds, random), "b": best_of(second, seeds, random)}
        found = compare({name: dict(enumerate(values.tolist())) for name, values in chosen.items()}, mode="min")
        false += any(each.verdict in (BETTER, WORSE) for each in found.values())
    return false / reports


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reports", type=int, default=20_000)
    reports = parser.parse_args().reports
    cases = (
        ("the best of M against one", False, 1.0),
        ("the best of M against the best of M", True, 1.0),
        ("the best of M against one, of a tenth of its spread", False, 10.0),
    )
    for title, equal, spread in cases:
        print(f"\n{title}\n\n| seeds |" + "".join(f" M = {m} |" for m in CONFIGURATIONS))
        print("| ---: |" + " ---: |" * len(CONFIGURATIONS))
        for seeds in SEEDS:
            random = np.random.default_rng(seeds)
            rates = [false_rate(m, m if equal else 1, spread, seeds, reports, random) for m in CONFIGURATIONS]
            print(f"| {seeds} |" + "".join(f" {rate:.1%} |" for rate in rates), flush=True)


if __name__ == "__main__":
    main()
