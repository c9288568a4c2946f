"""What a study with several objectives is told of a trial: a number for each, the mean over its seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from optrun.artifacts.metrics import MetricsLog, read_metrics, read_summary
from optrun.artifacts.objective import Objective, known_objectives, objective_value
from optrun.config.schema.objective import read_objectives
from optrun.errors import ConfigError, did_you_mean
from optrun.sweeper.folder import JobState, SweepDir
from optrun.sweeper.jobs import Job

KEY = "hydra.sweeper.objectives"


def objectives_of(texts: Sequence[str]) -> list[Objective]:
    """Read what the configuration says; empty: the main metric alone."""
    return [Objective(name, mode) for name, mode in read_objectives(texts, KEY)]


def values_of(
    sweep: SweepDir, jobs: Sequence[Job], states: Mapping[str, JobState], objectives: Sequence[Objective]
) -> list[float] | None:
    """Compute the means over the jobs of a trial.

    Returns:
        None where a job has not finished, or one of its numbers is not finite.

    Raises:
        ConfigError: A finished job has no number of that name.
    """
    if any(states[job.name].status != "finished" for job in jobs):
        return None
    rows = [[_value(sweep, job, each) for each in objectives] for job in jobs]
    means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    return means if all(map(math.isfinite, means)) else None


def _value(sweep: SweepDir, job: Job, objective: Objective) -> float:
    log, summary = _read(sweep, job)
    value = objective_value(objective, log, summary)
    if value is None:
        known = known_objectives(log, summary)
        raise ConfigError(
            f"{KEY}: {objective.name}: {sweep.run(job.name).path} has no such number. "
            f"{did_you_mean(objective.name, known)}"
        )
    return value


def _read(sweep: SweepDir, job: Job) -> tuple[MetricsLog, Mapping[str, Any]]:
    run = sweep.run(job.name)
    try:
        log = read_metrics(run.metrics)
    except OSError:
        log = MetricsLog()
    try:
        return log, read_summary(run.summary)
    except (OSError, ValueError):
        return log, {}
