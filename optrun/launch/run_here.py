"""A run in this process: its log, its display, and its result shown."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from optrun.artifacts.run_dir import RunDir
from optrun.config.request import Request
from optrun.distributed.watchdog import watched
from optrun.distributed.world import ALONE, World
from optrun.launch.rank_checks import idle_note

if TYPE_CHECKING:
    from rich.console import Console

    from optrun.runner.outcome import Outcome
    from optrun.runner.resume.checkpoint import ResumePoint


def run_here(
    request: Request,
    run: RunDir,
    console: Console,
    resume: ResumePoint | None,
    *,
    owns_process: bool = True,
    world: World = ALONE,
    stop_at: int | None = None,
) -> Outcome:
    """Train in this process in a run directory, and show the result.

    Also rank 0 of several ranks does its part by this; the others call `optrun.runner.train`.

    Args:
        request: Configuration and command line.
        run: Where to write; exists.
        console: Where progress and result are printed.
        resume: Where to go on; None: from the start.
        owns_process: Whether a second signal may end the process.
        world: The ranks, of which this is the first.
        stop_at: Pause after this many optimizer steps.

    Raises:
        OptrunError: As `optrun.runner.train.train`.
    """
    from optrun.runner.console import introduce, run_log, show
    from optrun.runner.resume.checkpoint import refuse_links
    from optrun.runner.train import train
    from optrun.training.display import make_display

    config = request.config
    refuse_links(run)  # the log is the first that would be written through one
    with run_log(run):
        display = make_display(console)
        introduce(display, config, world.size)
        with contextlib.ExitStack() as stack:
            if world is ALONE:  # ranks are watched by each other, or by who started them
                stack.enter_context(watched(config.distributed.timeout_seconds, display.note))
                idle = idle_note(config)
                if idle is not None:
                    display.note(idle)
            outcome = train(
                request,
                run,
                display,
                resume,
                stop_at=stop_at,
                owns_process=owns_process,
                world=world,
            )
        show(console, outcome, config)
    return outcome
