"""The coverage of `optrun transfer`: how often the stated interval holds the true learning rate.

    python benchmarks/transfer.py [--sweeps 400] [--write]

Each simulated sweep has a true optimum lr* = width^-0.5 at widths that double, and is asked for the
optimum of a width four times the largest. `--write` puts the table into docs/transfer.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optrun.report.lr_scaling.fit import fit_law, fit_lr_curve, index_of_best_lr
from optrun.report.lr_scaling.predict import WIDEST

Array = NDArray[np.float64]
DOCUMENT = Path(__file__).parents[1] / "docs" / "transfer.md"
BEGIN, END = "<!-- coverage: begin -->", "<!-- coverage: end -->"
EXPONENT, BEYOND = -0.5, 4.0
SHAPES: dict[str, Callable[[Array], Array]] = {
    "a parabola": lambda z: 0.25 * z**2,
    "steeper above": lambda z: 0.25 * np.exp(-0.7 * z) + 0.146 * np.exp(1.2 * z),
    "a cliff above": lambda z: 0.375 * np.exp(-0.4 * z) + 0.075 * np.exp(2.0 * z),
    "flat far away": lambda z: 0.9 - 0.9 * np.exp(-0.35 * z**2 * np.where(z < 0, 1.2, 0.7)),
}
"""Cost over ln lr - ln lr*; lowest at 0."""
GRIDS = {"5 lrs, x 2": (5, 2.0), "7 lrs, x 2": (7, 2.0), "4 lrs, x 3": (4, 3.0)}
NOISES = {"quiet": (0.01, 0.0), "noisy": (0.01, 0.1), "very noisy": (0.04, 0.1)}
"""Deviation of one run's cost, which grows above the optimum; deviation of a seed's own ln lr*."""
SIZES = [(2, 3), (3, 3), (5, 3), (5, 4)]
"""Seeds and sizes."""
PATIENCE = 20
"""A cell in which fewer than one sweep of so many gets a number is left out."""


def draw(
    random: np.random.Generator, shape: str, grid: str, noise: str, seeds: int, size: float
) -> tuple[Array, Array]:
    """Draw the sweep at one size.

    Ln of its learning rates, shape (k,), and costs, shape (seeds, k).
    """
    (lrs, factor), (sigma, shift) = GRIDS[grid], NOISES[noise]
    step, optimum = math.log(factor), EXPONENT * math.log(size)
    first = math.floor((optimum - random.uniform(0.25, 0.75) * (lrs - 1) * step) / step) * step
    x = first + step * np.arange(lrs)
    z = x - optimum - shift * random.standard_normal((seeds, 1))
    spread = sigma * (1 + 0.5 * np.clip(z, 0, 3)) * random.standard_normal((seeds, lrs))
    return x, SHAPES[shape](z) + 0.05 * random.standard_normal((seeds, 1)) + spread


def covered(
    shape: str, grid: str, noise: str, seeds: int, count: int, sweeps: int
) -> tuple[float, float]:
    """Measure how often the interval holds the truth, and the median factor between its ends.

    Sweeps of which optrun predicts nothing are drawn again: an optimum at the edge of a grid, no
    power law, an interval that is too wide.
    """
    random = np.random.default_rng(
        [list(SHAPES).index(shape), list(GRIDS).index(grid), seeds, count]
    )
    sizes = 64.0 * 2.0 ** np.arange(count)
    target = BEYOND * sizes[-1]
    hits, tries, widths = 0, 0, []
    while len(widths) < sweeps:
        drawn = [draw(random, shape, grid, noise, seeds, size) for size in sizes]
        if any(index_of_best_lr(costs) in (0, len(x) - 1) for x, costs in drawn):
            continue
        law = fit_law(sizes[:, None], [fit_lr_curve(x, costs) for x, costs in drawn])
        _, low, high = law.predict([target])
        tries += 1
        if tries > PATIENCE * sweeps:
            return math.nan, math.nan
        if law.is_broken or high - low > math.log(WIDEST):
            continue
        hits += low <= EXPONENT * math.log(target) <= high
        widths.append(high - low)
    return hits / sweeps, math.exp(float(np.median(widths)))


def rows(sweeps: int) -> Iterator[list[str]]:
    """Tabulate, for each shape and each number of seeds and sizes, the least coverage and the
    usual width.
    """
    yield ["basin", *(f"{seeds} seeds, {count} sizes" for seeds, count in SIZES)]
    for shape in SHAPES:
        cells = []
        for seeds, count in SIZES:
            found = [
                covered(shape, grid, noise, seeds, count, sweeps)
                for grid in GRIDS
                for noise in NOISES
            ]
            found = [pair for pair in found if not math.isnan(pair[0])]
            if not found:
                cells.append("no number")
                continue
            rates, widths = zip(*found, strict=True)
            cells.append(
                f"{min(rates):.0%} to {max(rates):.0%}; x {min(widths):.1f} to {max(widths):.1f}"
            )
        yield [shape, *cells]


def main() -> None:
    """Print the table, and write it where the documentation shows it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweeps", type=int, default=400, help="for each figure")
    parser.add_argument("--write", action="store_true", help="into docs/transfer.md")
    options = parser.parse_args()
    lines: list[str] = []
    for row in rows(options.sweeps):
        lines += [
            f"| {' | '.join(row)} |",
            *([] if lines else [f"| {' | '.join(['---'] * len(row))} |"]),
        ]
        print("\n".join(lines[-2:] if len(lines) == 2 else lines[-1:]), flush=True)
    if options.write:
        page = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(
            f"{page.split(BEGIN)[0]}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{page.split(END)[1]}",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
