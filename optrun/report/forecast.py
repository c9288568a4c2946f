"""Say before anything runs what the comparison at the end will be able to see."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from optrun.report.alike import workload_of
from optrun.report.arms import compared, differing
from optrun.report.branches import KEY, planned_step
from optrun.report.collect import NOT_STARTED, Run, flatten
from optrun.report.statistics import MIN_SEEDS, foreseen
from optrun.report.sweep_folder import names_of

MORE_SEEDS = (3, 5, 10)
"""Numbers of seeds to compare with; the first one above what is planned is told."""


def forecast(configs: Sequence[Mapping[str, object]], tuned: Collection[str] = ()) -> str:
    """Count contenders and seeds of resolved configurations as the report will; then see `say`.

    Args:
        configs: Of all jobs.
        tuned: Keys that tell no contenders apart.
    """
    sizes = []
    for runs in by_workload(configs):
        keys, seeds = differing(runs), defaultdict[object, set[object]](set)
        for run in runs:
            seeds[run.settings(keys)].add(run.setting("seed"))
        contenders = {run.settings(compared(keys, names_of(tuned))) for run in runs}
        sizes.append((len(contenders), min(map(len, seeds.values()))))
    said = say(max(size for size, _ in sizes), min(few for _, few in sizes))
    return f"within each of {len(sizes)} workloads: {said}" if said and len(sizes) > 1 else said


def say(contenders: int, seeds: int) -> str:
    """Say which differences are found in 4 of 5 cases.

    Empty where nothing is compared over seeds.
    """
    if contenders < 2 or seeds < 2:
        return ""
    found = f"a difference of {foreseen(contenders, seeds):.1f} sd is found in 4 of 5 cases"
    now = found if seeds >= MIN_SEEDS else "nothing is tested"
    more = next(
        (f"; {n} seeds: {foreseen(contenders, n):.1f} sd" for n in MORE_SEEDS if n > seeds), ""
    )
    told = "the standard deviation over the seeds of a contender"
    return f"{contenders} contenders, {seeds} seeds: {now}{more} (sd: {told})"


def by_workload(configs: Sequence[Mapping[str, object]]) -> list[list[Run]]:
    """Gather planned runs whose numbers can be compared; see `alike.workload_of`."""
    found = defaultdict[tuple[object, ...], list[Run]](list)
    for config in map(flatten, configs):
        run = Run(
            Path(), "", NOT_STARTED, config=config, respelt={KEY: planned_step(config.get(KEY))}
        )
        found[workload_of(run)].append(run)
    return list(found.values())
