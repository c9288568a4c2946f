"""Numbers of a job that a study is told."""

from __future__ import annotations

import math
from collections.abc import Sequence

from optrun.artifacts.objective import Objective, known_objectives, objective_value
from optrun.base.errors import ConfigError, did_you_mean
from optrun.config.schema.objective import read_objectives
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Job

KEY = "hydra.sweeper.objectives"


def objectives_of(texts: Sequence[str]) -> list[Objective]:
    """Read what the configuration says; empty: the main metric alone."""
    return [Objective(name, mode) for name, mode in read_objectives(texts, KEY)]


def values_of(sweep: SweepDir, job: Job, objectives: Sequence[Objective]) -> list[float] | None:
    """Read the objectives of a job that has finished.

    Returns:
        None if one of them is not finite.

    Raises:
        ConfigError: The job has no number of that name.
    """
    log, summary, values = sweep.metrics(job.name), sweep.summary(job.name), []
    for objective in objectives:
        value = objective_value(objective, log, summary)
        if value is None:
            hint = did_you_mean(objective.name, known_objectives(log, summary))
            raise ConfigError(
                f"{KEY}: {objective.name}: {sweep.run(job.name).path} has no such number. {hint}"
            )
        values.append(value)
    return values if all(map(math.isfinite, values)) else None


def untrained(sweep: SweepDir, job: Job, name: str) -> float | None:
    """Read a metric as it was before the first step.

    None if that was not evaluated, or is not finite.
    """
    steps, values = sweep.metrics(job.name).series(name)
    return values[0] if steps[:1] == [0] and math.isfinite(values[0]) else None
