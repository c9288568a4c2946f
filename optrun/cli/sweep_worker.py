"""`python -m optrun.cli.sweep_worker LOCK ...`: the process in which a sweep's jobs run."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from optrun.base.errors import OptrunError
from optrun.config.schema.distributed import RanksConfig
from optrun.distributed.join import Launched, launched
from optrun.launch.rank_checks import refuse_unfit
from optrun.launch.ranks import train_on_ranks
from optrun.launch.run_here import run_here
from optrun.sweeper.launch import serve
from optrun.sweeper.worker import SweepTask

if TYPE_CHECKING:
    from rich.console import Console

    from optrun.artifacts.run_dir import RunDir
    from optrun.config.request import Request
    from optrun.launch.leader import Leader
    from optrun.runner.resume.checkpoint import ResumePoint


def train_job(
    request: Request,
    run: RunDir,
    console: Console,
    resume: ResumePoint | None,
    stop_at: int | None,
    leader: Leader | None = None,
) -> None:
    """Train a job, on the devices that this process sees.

    Args:
        request: Composed for the job.
        run: Its directory.
        console: Where progress is printed.
        resume: Where to go on; None: from the start.
        stop_at: Pause after this many optimizer steps.
        leader: Where this process is the first of the tasks that SLURM has started.

    Raises:
        OptrunError: Its ranks cannot have them, or as `train_on_ranks` and `run_here`.
    """
    if leader is not None:
        refuse_unfit(request.config, request.overrides, leader.launched)
        leader.lead(request, run, console, resume, stop_at)
    elif isinstance(request.config.distributed, RanksConfig):
        refuse_unfit(request.config, (), None)
        train_on_ranks(request, run, console, resume, stop_at)
    else:
        run_here(request, run, console, resume, stop_at=stop_at)


@dataclass
class JobTask:
    """What a launcher calls for every job; tasks that SLURM starts of one job become its ranks."""

    alone: SweepTask
    """Does the work of a process that has no others beside it."""

    def __call__(self, cfg: DictConfig) -> str:
        """Work on one job, or follow the first task that does.

        Args:
            cfg: The job's composed configuration.

        Returns:
            What was done, for the launcher's log.
        """
        found = launched(os.environ)
        return self.alone(cfg) if found is None or found.size == 1 else self._join(found, cfg)

    def _join(self, found: Launched, cfg: DictConfig) -> str:
        from optrun.launch.leader import Leader, follow_leader
        from optrun.launch.rank import begin, leave

        rank = begin(found)
        atexit.register(
            lambda: leave(int(hasattr(sys, "last_value")))
        )  # after submitit has written what is returned
        try:
            meeting = rank.meet(cfg.distributed.timeout_seconds, {})
        except OptrunError as error:
            return (
                str(error)
                if found.rank
                else replace(self.alone, train_run=partial(_fail, error))(cfg)
            )
        if found.rank:
            with contextlib.suppress(OptrunError):  # rank 0 records how they ended
                follow_leader(rank, meeting)
            return f"rank {found.rank}"
        with Leader(rank, meeting) as leader:
            return replace(self.alone, train_run=partial(train_job, leader=leader))(cfg)


def _fail(error: OptrunError, *job: object) -> None:  # noqa: ARG001
    """Fail a job whose ranks did not come, so that the sweep records why."""
    raise error


if __name__ == "__main__":
    from optrun.cli import (
        sweep_worker,  # by its name: launchers send the function to other processes
    )

    serve([int(number) for number in sys.argv[1:]], sweep_worker.train_job, sweep_worker.JobTask)
