"""Steps at which a search asks Optuna's pruner about a trial, and the value of a trial there.

The jobs of a trial pause at each rung: they are evaluated and saved, and go on from that checkpoint
if the pruner lets them. Their schedule is that of the whole length throughout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import optuna

from optrun.artifacts.objective import stand_in
from optrun.base.errors import ConfigError
from optrun.config.schema.sweeper import OptunaConfig, Pruner
from optrun.sweeper.driver import Driver
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Job


def build_pruner(options: OptunaConfig, max_steps: int | None) -> optuna.pruners.BasePruner:
    """Build the pruner of a study.

    Args:
        options: Options of the sweeper.
        max_steps: Optimizer steps of a whole trial; None: its configuration counts in epochs.

    Raises:
        ConfigError: No trial reaches the first rung, or the brackets of hyperband have no end.
    """
    first = options.min_resource
    if options.pruner is Pruner.none or first is None:
        return optuna.pruners.NopPruner()
    if max_steps is not None and first >= max_steps:
        raise ConfigError(
            f"hydra.sweeper.min_resource={first}: expected fewer steps than the {max_steps} of a"
            " whole trial."
        )
    if options.pruner is Pruner.asha:
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=first, reduction_factor=options.reduction_factor
        )
    if max_steps is None:
        raise ConfigError(
            "hydra.sweeper.pruner=hyperband: its brackets follow from the steps of a whole trial."
            " Give training.max_steps, or take asha."
        )
    return optuna.pruners.HyperbandPruner(
        min_resource=first, max_resource=max_steps, reduction_factor=options.reduction_factor
    )


def rungs_of(options: OptunaConfig) -> Iterator[int]:
    """Yield the rungs of a trial in optimizer steps, without end.

    Yields nothing without a pruner.

    Example:
        >>> from types import SimpleNamespace
        >>> options = SimpleNamespace(pruner=Pruner.asha, min_resource=10, reduction_factor=3)
        >>> list(itertools.islice(rungs_of(options), 3))
        [10, 30, 90]
    """
    if options.pruner is Pruner.none or options.min_resource is None:
        return
    for power in itertools.count():
        yield options.min_resource * options.reduction_factor**power


def value_at_rung(
    driver: Driver, jobs: tuple[Job, ...], rung: int, other_values: Iterable[float]
) -> float | None:
    """Compute the value of a trial at a rung: the mean over its seeds.

    A job that diverged before the rung counts as the worst of the others there, or as its
    untrained model if that is worse.

    Args:
        driver: The driver of the sweep.
        jobs: Jobs of the trial; all have ended, or are at the rung.
        rung: Optimizer steps.
        other_values: Values of other trials there.

    Returns:
        NaN if a job failed for another reason; None if one was not evaluated before the rung.
    """
    values_there = list(other_values)
    values = []
    for job in jobs:
        value = _value_of_job(driver, job, rung, values_there)
        if value is None:
            return None
        values.append(value)
    return sum(values) / len(values)


def _value_of_job(
    driver: Driver, job: Job, rung: int, other_values: Iterable[float]
) -> float | None:
    """Return the value of one job at a rung, see `value_at_rung`.

    The recorded value of the rung counts; without one, the best evaluation up to it.
    """
    state = driver.job_table.row(job).state
    if state.status == "failed" and state.step <= rung:
        if not state.diverged:
            return math.nan
        before = untrained(driver.sweep, job, state.metric or "")
        worst = stand_in(other_values, [before], state.mode)
        if worst is None:
            return math.nan
        return worst
    rungs = driver.sweep.read_record(job.name).rungs
    if str(rung) in rungs:
        return rungs[str(rung)]
    return driver.sweep.best_until(job.name, rung)


def untrained(sweep: SweepDir, job: Job, metric: str) -> float | None:
    """Read a metric as it was before the first step; None if it was not evaluated or not finite."""
    steps, values = sweep.metrics(job.name).series(metric)
    if steps[:1] != [0] or not math.isfinite(values[0]):
        return None
    return values[0]
