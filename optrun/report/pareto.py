"""Find, tabulate and draw the configurations that no other beats in all objectives.

The Pareto front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from optrun.artifacts.objective import Objective, known_objectives, objective_value
from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import count, duration, size
from optrun.report.arms import Contender, describe
from optrun.report.collect import Run
from optrun.report.findings import Findings
from optrun.report.picture import Dot, draw_dots, panel
from optrun.report.table import Table, value
from optrun.report.tables import Column, tabulate
from optrun.report.theme import Chart, Theme, legend


@dataclass(frozen=True)
class Point:
    """A configuration, and what it came to."""

    contender: str
    settings: str
    """What sets it apart within its contender."""
    values: tuple[float, ...]
    """The mean over its seeds of each objective."""
    seeds: int
    """How many have all numbers."""
    front: bool


def expected(objectives: Sequence[Objective], runs: Sequence[Run]) -> Sequence[Objective]:
    """Refuse a number that no run has.

    Raises:
        ConfigError: There is one.
    """
    known = {name for run in runs for name in known_objectives(run.log, run.summary)}
    for each in objectives:
        if each.name not in known:
            raise ConfigError(
                f"objectives={each.name}: no run has such a number."
                f" {did_you_mean(each.name, known)}"
            )
    return objectives


def on_front(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell which points no other dominates.

    None is at least as low in all columns and lower in one.

    Args:
        costs: Shape (points, objectives), finite; less is better.

    Returns:
        Shape (points,). Of equal points all are on it, or none.

    Example:
        >>> on_front(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [1.0, 3.0]])).tolist()
        [True, True, False, True]
    """
    no_worse = np.all(costs[:, None] <= costs, axis=2)
    lower = np.any(costs[:, None] < costs, axis=2)
    return np.asarray(~np.any(no_worse & lower, axis=0))


def points(findings: Findings) -> list[Point]:
    """List the configurations with finite means of all objectives, best in the first one at the top."""
    found: list[tuple[str, str, tuple[float, ...], int]] = []
    for name, arm in ((row.name, arm) for row in findings.rows for arm in row.arms):
        finished = [run for run in arm.counted if run.finished]
        rows = [
            [objective_value(each, run.log, run.summary) for each in findings.objectives]
            for run in finished
        ]
        known = [row for row in np.array(rows, dtype=np.float64) if np.isfinite(row).all()]
        settings = describe(
            {key: each for key, each in arm.settings.items() if key != "optimizer.name"}
        )
        found += [(name, settings, tuple(np.mean(known, axis=0)), len(known))] if known else []
    if not found:
        return []
    signs = np.array([each.sign for each in findings.objectives])
    front = on_front(signs * [values for _, _, values, _ in found])
    return sorted(
        map(Point, *zip(*found, strict=True), front.tolist()),
        key=lambda each: signs[0] * each.values[0],
    )


def pareto_sentence(findings: Findings) -> str:
    """Say what the front is, and how far to trust it."""
    tried = points(findings)
    if not tried:
        return f"No finished run has all of {', '.join(each.name for each in findings.objectives)}."
    fewest = min(each.seeds for each in tried)
    return (
        f"{sum(each.front for each in tried)} of {len(tried)} configurations are on the front of"
        f" {' and '.join(map(_axis_label, findings.objectives))}: no other is better in one and at"
        f" least as good in all. Means over {fewest} or more seeds, evaluations at the best"
        " checkpoint; neighbours that are closer than their spread may change places."
    )


def pareto_table(findings: Findings) -> Table | None:
    """Tabulate the front; None where nothing has all numbers."""

    def cell(index: int, name: str, point: Point) -> str:
        return shown(name, point.values[index])

    kept = [each for each in points(findings) if each.front]
    columns: list[Column[Point]] = [
        ("contender", False, lambda each: each.contender),
        *(
            (each.name, True, partial(cell, index, each.name))
            for index, each in enumerate(findings.objectives)
        ),
        ("seeds", True, lambda each: str(each.seeds)),
        ("settings", False, lambda each: each.settings),
    ]
    return tabulate(kept, columns) if kept else None


def draw_pareto(rows: Sequence[Contender], findings: Findings, theme: Theme) -> Chart:
    """Draw the first two objectives; the labels say which direction of each is better."""
    first, second = findings.objectives[:2]
    figure, ax = panel(theme, len(rows), _axis_label(first), _axis_label(second))
    found = points(findings)
    ax.plot(
        *zip(*(each.values[:2] for each in found if each.front), strict=True),
        color=theme.muted,
        linestyle="--",
    )
    ax.plot(*zip(*(each.values[:2] for each in found), strict=True), alpha=0)
    ax.margins(0.08)
    for series, row in enumerate(rows):
        own = [each for each in found if each.contender == row.name]
        dots = [Dot(each.values[0], each.values[1], _told(each, findings)) for each in own]
        draw_dots(figure, ax, series, row.name, dots, second.mode, theme)
    for axis, objective in ((ax.xaxis, first), (ax.yaxis, second)):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(
            FuncFormatter(lambda number, _, name=objective.name: shown(name, number))
        )
    legend(ax, theme, below=figure, series=range(len(rows)))
    return figure


def shown(name: str, number: float) -> str:
    """Format a value of an objective.

    Metrics with decimals, times, sizes and counts with a unit.
    """
    if name.startswith(("eval/", "train/")):
        return value(number)
    if name.endswith("seconds"):
        return duration(number)
    return size(number) if name.endswith("_bytes") else count(float(f"{number:.4g}"))


def _axis_label(objective: Objective) -> str:
    return f"{objective.name} ({'lower' if objective.mode == 'min' else 'higher'} is better)"


def _told(point: Point, findings: Findings) -> str:
    named = zip(findings.objectives, point.values, strict=True)
    numbers = ", ".join(
        f"{objective.name} {shown(objective.name, number)}" for objective, number in named
    )
    return (
        f"{point.contender}, {point.settings}: {numbers}{' (on the front)' if point.front else ''}"
    )
