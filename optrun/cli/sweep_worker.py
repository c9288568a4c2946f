"""`python -m optrun.cli.sweep_worker`: the process in which a sweep's jobs run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optrun.config.schema.distributed import RanksConfig
from optrun.launch.rank_checks import refuse_unfit
from optrun.launch.ranks import train_on_ranks
from optrun.launch.run_here import run_here
from optrun.sweeper.launch import serve

if TYPE_CHECKING:
    from rich.console import Console

    from optrun.artifacts.run_dir import RunDir
    from optrun.config.request import Request
    from optrun.runner.resume.checkpoint import ResumePoint


def train_job(
    request: Request, run: RunDir, console: Console, resume: ResumePoint | None, stop_at: int | None
) -> None:
    """Train a job on the devices visible to this process.

    Args:
        request: The composed request of the job.
        run: Run directory of the job.
        console: Where progress is printed.
        resume: The run and checkpoint to resume; None: from the start.
        stop_at: Pause after this many optimizer steps.

    Raises:
        OptrunError: There are too few devices for the ranks, or as `train_on_ranks` and `run_here`
            raise it.
    """
    if isinstance(request.config.distributed, RanksConfig):
        refuse_unfit(request.config, (), None)
        train_on_ranks(request, run, console, resume, stop_at)
    else:
        run_here(request, run, console, resume, stop_at=stop_at)


if __name__ == "__main__":
    from optrun.cli import (
        sweep_worker,  # by its name: launchers send the function to other processes
    )

    serve(sweep_worker.train_job)
