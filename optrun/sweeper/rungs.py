"""Rungs: steps at which a search asks Optuna's pruner about a trial, and the trial's value there.

The jobs of a trial stop at each rung. They are evaluated and saved, and continue from that
checkpoint unless the pruner ends the trial. Their lr schedule has the full length throughout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import optuna

from optrun.artifacts.objective import score_of_diverged
from optrun.base.errors import ConfigError
from optrun.config.schema.sweeper import OptunaConfig, Pruner
from optrun.sweeper.driver import Driver
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Job


def build_pruner(options: OptunaConfig, max_steps: int | None) -> optuna.pruners.BasePruner:
    """Build the Optuna pruner of a study; without `min_resource` one that prunes nothing.

    Args:
        options: Options of the sweeper.
        max_steps: Optimizer steps of a full trial; None: its configuration counts in epochs.

    Raises:
        ConfigError: No trial reaches the first rung, or hyperband lacks the steps of a full trial.
    """
    first = options.min_resource
    if options.pruner is Pruner.none or first is None:
        return optuna.pruners.NopPruner()
    if max_steps is not None and first >= max_steps:
        raise ConfigError(
            f"hydra.sweeper.min_resource={first}: expected fewer than {max_steps}, the steps of a"
            " full trial (training.max_steps)."
        )
    if options.pruner is Pruner.asha:
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=first, reduction_factor=options.reduction_factor
        )
    if max_steps is None:
        raise ConfigError(
            "hydra.sweeper.pruner=hyperband: it needs the number of steps of a full trial. Set"
            " training.max_steps, or use hydra.sweeper.pruner=asha."
        )
    return optuna.pruners.HyperbandPruner(
        min_resource=first, max_resource=max_steps, reduction_factor=options.reduction_factor
    )


def rungs_of(options: OptunaConfig) -> Iterator[int]:
    """Yield the rungs of a trial in optimizer steps, endlessly; none without a pruner.

    At a rung the jobs of a trial stop, and the pruner decides whether it goes on.

    Rung i is min_resource * reduction_factor ** i.

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


def mean_if_complete(values: Iterable[float | None]) -> float | None:
    """Average values; None if one of them is None, NaN if one is NaN. There must be one."""
    numbers = []
    for value in values:
        if value is None:
            return None
        numbers.append(value)
    return sum(numbers) / len(numbers)


def job_value_at_rung(
    driver: Driver, job: Job, rung: int, other_values: Sequence[float]
) -> float | None:
    """Return the best value of a job up to a rung; None if it was not evaluated until then.

    The first case that applies:

    1. It failed before the rung and did not diverge: NaN.
    2. It diverged before the rung: the worst of `other_values`, or its own value before training if
       that is worse; NaN if there is none.
    3. Its worker recorded a value at the rung: that one.
    4. Else the best value in its metrics.

    Args:
        driver: The driver of the sweep.
        job: A job that has ended, or is at the rung.
        rung: Optimizer steps.
        other_values: Values of other trials there.
    """
    state = driver.job_table.row(job).state
    failed_before_rung = state.status == "failed" and state.step <= rung
    if failed_before_rung and not state.diverged:
        return math.nan
    if failed_before_rung:
        before_training = value_before_training(driver.sweep, job, state.metric or "")
        score = score_of_diverged(other_values, [before_training], state.mode)
        return math.nan if score is None else score
    rungs = driver.sweep.read_record(job.name).rungs
    if str(rung) in rungs:
        return rungs[str(rung)]
    return driver.sweep.best_until(job.name, rung)


def value_before_training(sweep: SweepDir, job: Job, metric: str) -> float | None:
    """Read the value of a metric at step 0; None if there is none or it is not finite."""
    steps, values = sweep.metrics(job.name).series(metric)
    if steps[:1] != [0] or not math.isfinite(values[0]):
        return None
    return values[0]
