"""Say before anything runs what the comparison at the end will be able to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optrun.report.arms import comparable, compared, differing, telling
from optrun.report.branches import KEY, planned_step
from optrun.report.comparable import workload_of
from optrun.report.config_file import flatten
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


def forecast(configs: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> str:
    """Say which differences so many contenders and seeds will show with a chance of 80 %.

    Args:
        configs: Configurations of the runs, resolved.
        overrides: What was typed, for the names of what differs.

    Returns:
        A sentence; empty where nothing is compared over seeds.
    """
    workloads = _workloads(configs, overrides)
    sizes = [_sizes(each) for each in workloads]
    contenders, seeds = max(size for size, _ in sizes), min(few for _, few in sizes)
    if contenders < 2 or seeds < 2:
        return ""
    within = f"within each of {len(workloads)} workloads: " if len(workloads) > 1 else ""
    if seeds < MIN_SEEDS:
        return f"{within}{contenders} contenders, {seeds} seeds: too few for a verdict, which takes {MIN_SEEDS}"
    more = next((n for n in MORE_SEEDS if n > seeds), None)
    size = _size(contenders, seeds)
    parts = [f"{within}{contenders} contenders, {seeds} seeds: differences of {size} will be seen in 4 of 5 cases"]
    if more:
        parts.append(f"{more} seeds: {_size(contenders, more)}")
    if contenders > 2:
        parts.append(f"a baseline named beforehand: {_size(contenders, seeds, baseline=True)}")
    said = "; ".join(parts) + " (sd: of a contender over seeds)"
    if len(workloads) > 1:
        over = foreseen_over(len(workloads), contenders, seeds, ALPHA)
        said += f"; over all of them: {over:.1f} sd, where they differ by as much in each"
    return said


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


def _size(contenders: int, seeds: int, *, baseline: bool = False) -> str:
    return f"{foreseen(contenders, seeds, ALPHA, baseline=baseline):.1f} sd"
