"""Error and power of the verdict over several workloads: python benchmarks/workloads.py [TABLES]."""

from __future__ import annotations

import sys

import numpy as np

from optrun.report.statistics import ALPHA
from optrun.report.workloads_statistics import Array, compare_over_workloads, mean_score

SIZES = ((7, 5, 3), (7, 2, 3), (3, 5, 3), (2, 2, 3), (7, 5, 5))
"""Contenders, workloads, seeds."""
APART = 2.0
"""Standard deviations between a contender and the others, where power is counted."""
TENFOLD = 10.0


def situations(contenders: int, workloads: int, seeds: int, random: np.random.Generator) -> dict[str, Array]:
    """Draw a table of scores without a difference for each situation; shape (contenders, workloads, seeds)."""
    normal = random.normal(size=(contenders, workloads, seeds))
    one_contender, one_workload, one_cell = (np.ones((contenders, workloads, 1)) for _ in range(3))
    one_contender[0], one_workload[:, 0], one_cell[0, 0] = TENFOLD, TENFOLD, TENFOLD
    return {
        "equal": normal,
        "workloads from 1 to 10": normal * np.geomspace(1, TENFOLD, workloads)[None, :, None],
        "one workload x 10": normal * one_workload,
        "contenders from 1 to 10": normal * np.geomspace(TENFOLD, 1, contenders)[:, None, None],
        "one contender x 10": normal * one_contender,
        "one contender x 10 on one workload": normal * one_cell,
        "skewed (exponential)": random.exponential(size=normal.shape) - 1,
        "heavy tails (t, 3 degrees)": random.standard_t(3, size=normal.shape),
    }


def verdicts(table: Array, *, named_beforehand: bool) -> list[bool]:
    """Say which contenders are told from the reference: the first, or the best of the table."""
    scores = {str(index): part for index, part in enumerate(table)}
    best = max(scores, key=lambda name: float(mean_score(scores[name])))
    tests = compare_over_workloads(scores, "0" if named_beforehand else best, named_beforehand=named_beforehand)
    return [p < ALPHA for _, p in tests.values()]


def main(tables: int) -> None:
    """Print a line for each size and situation."""
    for size in SIZES:
        random = np.random.default_rng(0)
        wrong: dict[str, list[tuple[bool, bool]]] = {}
        found = []
        for _ in range(tables):
            for name, table in situations(*size, random).items():
                pairs, baseline = (any(verdicts(table, named_beforehand=named)) for named in (False, True))
                wrong.setdefault(name, []).append((pairs, baseline))
                if name == "equal":
                    better = table.copy()
                    better[0] += APART
                    found.append(np.mean(verdicts(better, named_beforehand=False)))
        print("{} contenders, {} workloads, {} seeds; power {:.1%}".format(*size, np.mean(found)))
        for name, both in wrong.items():
            print("    {}: {:.1%} over all pairs, {:.1%} with a baseline".format(name, *np.mean(both, axis=0)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
