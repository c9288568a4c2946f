"""Find the configurations that no other beats in all objectives: the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optrun.artifacts.objective import Objective, known_objectives, objective_value
from optrun.errors import ConfigError, did_you_mean
from optrun.formatting import count, duration, rate, size
from optrun.report.arms import Arm
from optrun.report.collect import Run
from optrun.report.findings import Findings
from optrun.report.table import Table, value


@dataclass(frozen=True)
class Point:
    """A configuration, and what it came to."""

    contender: str
    arm: Arm
    values: tuple[float, ...]
    """The mean over its seeds of each objective."""
    spread: tuple[float, ...]
    """The standard deviation of each over seeds; NaN below two."""
    seeds: int
    front: bool


def expected(objectives: Sequence[Objective], runs: Sequence[Run]) -> Sequence[Objective]:
    """Refuse a number that no run has.

    Raises:
        ConfigError: There is one.
    """
    known = {name for run in runs for name in known_objectives(run.log, run.summary)}
    for each in objectives:
        if each.name not in known:
            raise ConfigError(f"objectives={each.name}: no run has such a number. {did_you_mean(each.name, known)}")
    return objectives


def on_front(costs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell which points no other dominates: none is at least as low in all columns and lower in one.

    Args:
        costs: Shape (points, objectives), finite; less is better.

    Returns:
        Shape (points,). Of equal points all are on it, or none.

    Example:
        >>> on_front(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [1.0, 3.0]])).tolist()
        [True, True, False, True]
    """
    no_worse = np.all(costs[:, None, :] <= costs[None, :, :], axis=2)
    lower = np.any(costs[:, None, :] < costs[None, :, :], axis=2)
    front: NDArray[np.bool_] = ~np.any(no_worse & lower, axis=0)
    return front


def points(findings: Findings) -> list[Point]:
    """List the configurations with finite means of all objectives, best in the first one at the top."""
    found: list[tuple[str, Arm, list[float], list[float], int]] = []
    for row in findings.rows:
        for arm in row.contender.arms:
            rows = [_values(run, findings.objectives) for run in arm.runs if run.finished and run not in arm.repeated]
            columns = np.array([each for each in rows if each is not None])
            if len(columns):
                spread = columns.std(axis=0, ddof=1) if len(columns) > 1 else np.full(columns.shape[1], math.nan)
                found.append((row.name, arm, columns.mean(axis=0).tolist(), spread.tolist(), len(columns)))
    if not found:
        return []
    signs = np.array([each.sign for each in findings.objectives])
    front = on_front(np.array([means for _, _, means, _, _ in found]) * signs)
    listed = [
        Point(name, arm, tuple(means), tuple(spread), seeds, bool(kept))
        for (name, arm, means, spread, seeds), kept in zip(found, front, strict=True)
    ]
    return sorted(listed, key=lambda each: signs[0] * each.values[0])


def pareto_sentence(findings: Findings) -> str:
    """Say what the front is, and how far to trust it."""
    tried = points(findings)
    if not tried:
        names = ", ".join(each.name for each in findings.objectives)
        return f"No finished run has all of {names}: there is nothing to weigh."
    kept = [each for each in tried if each.front]
    named = [f"{each.name} ({'lower' if each.mode == 'min' else 'higher'} is better)" for each in findings.objectives]
    fewest = min(each.seeds for each in tried)
    text = (
        f"{len(kept)} of {len(tried)} configurations are on the front of {', '.join(named[:-1])} and {named[-1]}: no "
        "other is better in one and at least as good in all. Metrics of evaluations are those of the best checkpoint."
    )
    if fewest < 2:
        return f"{text} Some have one seed alone: nothing says how far their numbers are chance."
    return f"{text} Means over {fewest} or more seeds; neighbours that are closer than their spread may change places."


def pareto_table(findings: Findings) -> Table | None:
    """Tabulate the front; None where nothing is weighed, or nothing has all numbers."""
    kept = [each for each in points(findings) if each.front] if findings.objectives else []
    if not kept:
        return None
    names = [each.name for each in findings.objectives]
    table = Table(["contender", *names, "seeds", "settings"], [False, *[True] * (len(names) + 1), False])
    for each in kept:
        table.rows.append([each.contender, *_cells(each, names), str(each.seeds), settings(each)])
        table.styles.append("")
    return table


def settings(point: Point) -> str:
    """Describe what sets a configuration apart within its contender."""
    shared = {key for key in point.arm.settings if key == "optimizer.name"}
    rest = {key: found for key, found in point.arm.settings.items() if key not in shared}
    return ", ".join(f"{key} {rate(one) if isinstance(one, float) else one}" for key, one in rest.items())


def shown(name: str, number: float) -> str:
    """Format a value of an objective: metrics with decimals, times, sizes and counts with a unit."""
    if name.startswith(("eval/", "train/")):
        return value(number)
    if name.endswith("seconds"):
        return duration(number)
    return size(number) if name.endswith("_bytes") else count(float(f"{number:.4g}"))


def _cells(point: Point, names: Sequence[str]) -> list[str]:
    cells = zip(names, point.values, point.spread, strict=True)
    return [shown(name, mean) + ("" if math.isnan(sd) else f" ± {_rounded(name, sd)}") for name, mean, sd in cells]


def _rounded(name: str, sd: float) -> str:
    return f"{sd:.2g}" if name.startswith(("eval/", "train/")) else shown(name, float(f"{sd:.2g}"))


def _values(run: Run, objectives: Sequence[Objective]) -> list[float] | None:
    values = [objective_value(each, run.log, run.summary) for each in objectives]
    finite = [each for each in values if each is not None and math.isfinite(each)]
    return finite if len(finite) == len(values) else None
