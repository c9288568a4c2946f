"""Say before anything runs what the comparison at the end will be able to see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optrun.report.arms import comparable, compared, differing, telling
from optrun.report.branches import KEY, planned_step
from optrun.report.collect import Run
from optrun.report.comparable import workload_of
from optrun.report.config_file import flatten
from optrun.report.findings import find
from optrun.report.power import foreseen, foreseen_over
from optrun.report.statistics import ALPHA, MIN_SEEDS

MORE_SEEDS = (3, 5, 10)
"""Numbers of seeds to compare with; the first one above what is planned is told."""


@dataclass(frozen=True)
class _Planned:
    """A run that has a configuration and nothing else yet."""

    config: Mapping[str, Any]
    overrides: Sequence[str]

    def setting(self, key: str) -> Any:
        value = self.config.get(key)
        return planned_step(value) if key == KEY else value


@dataclass(frozen=True)
class Spread:
    """How far the seeds of a configuration lie apart."""

    metric: str
    sd: float
    """In units of the metric."""
    runs: int
    """How many say so."""


def forecast(configs: Sequence[Mapping[str, Any]], overrides: Sequence[str], spread: Spread | None = None) -> str:
    """Say which differences so many contenders and seeds will show with a chance of 80 %.

    Args:
        configs: Configurations of the runs, resolved.
        overrides: What was typed, for the names of what differs.
        spread: Of runs that are there, to say it in units of the metric; not over several workloads.

    Returns:
        A sentence; empty where nothing is compared over seeds.
    """
    workloads = _workloads(configs, overrides)
    sizes = [_sizes(each) for each in workloads]
    contenders, seeds = max(size for size, _ in sizes), min(few for _, few in sizes)
    within = f"within each of {len(workloads)} workloads: " if len(workloads) > 1 else ""
    said = forecast_sizes(contenders, seeds, spread if len(workloads) == 1 else None)
    if not said or seeds < MIN_SEEDS or len(workloads) == 1:
        return within + said if said else ""
    over = foreseen_over(len(workloads), contenders, seeds, ALPHA)
    return f"{within}{said}; over all of them: {over:.1f} sd, where they differ by as much in each"


def forecast_sizes(contenders: int, seeds: int, spread: Spread | None = None) -> str:
    """Say the same where contenders and seeds are counted; see `forecast`."""
    if contenders < 2 or seeds < 2:
        return ""
    if seeds < MIN_SEEDS:
        return f"{contenders} contenders, {seeds} seeds: too few for a verdict, which takes {MIN_SEEDS}"
    more = next((n for n in MORE_SEEDS if n > seeds), None)

    def size(n: int, *, baseline: bool = False) -> str:
        found = foreseen(contenders, n, ALPHA, baseline=baseline)
        return f"{found:.1f} sd" + (f" ({found * spread.sd:.3g})" if spread else "")

    parts = [f"{contenders} contenders, {seeds} seeds: differences of {size(seeds)} will be seen in 4 of 5 cases"]
    if more:
        parts.append(f"{more} seeds: {size(more)}")
    if contenders > 2:
        parts.append(f"a baseline named beforehand: {size(seeds, baseline=True)}")
    here = f", {spread.sd:.3g} {spread.metric} in {spread.runs} runs that are there" if spread else ""
    return "; ".join(parts) + f" (sd: of a contender over seeds{here})"


def spread_of(runs: Sequence[Run]) -> Spread | None:
    """Pool how far the seeds of a configuration lie apart in runs of one workload that are there; None: too few."""
    findings = find(runs) if runs else None
    if findings is None or findings.incomparable:
        return None
    arms = [arm for row in findings.rows for arm in row.contender.arms if len(arm.scores) > 1]
    degrees = sum(len(arm.scores) - 1 for arm in arms)
    if not degrees:
        return None
    squares = sum((len(arm.scores) - 1) * arm.sd**2 for arm in arms)
    return Spread(findings.metric, math.sqrt(squares / degrees), sum(len(arm.scores) for arm in arms))


def count_workloads(configs: Sequence[Mapping[str, Any]]) -> int:
    """Count the kinds of runs whose numbers can be compared; see `comparable.workload_of`."""
    return len(_workloads(configs, ()))


def _workloads(configs: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> list[list[_Planned]]:
    found: dict[tuple[object, ...], list[_Planned]] = {}
    for config in configs:
        run = _Planned(flatten(config), overrides)
        found.setdefault(workload_of(run), []).append(run)
    return list(found.values())


def _sizes(planned: Sequence[_Planned]) -> tuple[int, int]:
    """Count contenders, and the fewest seeds that a configuration of one has."""
    keys = differing(planned)
    between = telling(compared(keys), planned)
    seeds: dict[tuple[object, ...], set[object]] = {}
    for run in planned:
        arm = tuple(comparable(run.setting(key)) for key in keys)
        seeds.setdefault(arm, set()).add(run.setting("seed"))
    contenders = {tuple(comparable(run.setting(key)) for key in between) for run in planned}
    return len(contenders), min(map(len, seeds.values()))
