"""Starts the ranks of a run on this machine, and starts them again if that is allowed."""

from __future__ import annotations

import contextlib
import json
import time
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from optrun.artifacts.lock import starting
from optrun.artifacts.metrics import read_summary, write_summary
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.errors import EXIT_FAILED, OptrunError, printable
from optrun.config.registry import origins
from optrun.config.request import Request
from optrun.config.schema.distributed import RanksConfig
from optrun.distributed.heartbeat import Heartbeats
from optrun.distributed.local_ranks import LocalRanks, run_ranks
from optrun.distributed.memory_file import MemoryFile
from optrun.distributed.verdict import RankEnd, error_of
from optrun.launch.payload import Payload
from optrun.launch.rank_checks import nproc
from optrun.runner.outcome import Outcome

if TYPE_CHECKING:
    from rich.console import Console

    from optrun.runner.resume.checkpoint import ResumePoint


def train_on_ranks(
    request: Request,
    run: RunDir,
    console: Console,
    resume: ResumePoint | None,
    stop_at: int | None = None,
) -> Outcome:
    """Start the ranks of a run on this machine, and wait for their end.

    Args:
        request: Composed; no rank runs Hydra.
        run: Where to write; exists.
        console: What rank 0 shows goes to standard output; quiet: nothing.
        resume: Where to continue; None: from the start.
        stop_at: Pause after this many optimizer steps.

    Raises:
        LockedError: Another process writes this run, or is about to.
        OptrunError: A rank failed; one error for the ends of all ranks, see `error_of`.
    """
    distributed = request.config.distributed
    # The ranks are other processes: they must be able to import the code of plugins.
    origins.refuse_code_of_program(request.values, f"the ranks of distributed={distributed.name}")
    assert isinstance(distributed, RanksConfig)
    payload = Payload.of(request, run, resume, stop_at=stop_at, quiet=console.quiet)
    began = time.time()
    starts = 0
    with (
        starting(run.lock),
        closing(MemoryFile("optrun-payload")) as payload_file,
        closing(Heartbeats.create(nproc(request.config), shared=True)) as heartbeats,
    ):

        def begin(before: list[RankEnd] | None) -> list[str]:
            """Write the payload of a start, and return the arguments of a rank's process.

            Args:
                before: How the ranks of the start before ended; None: the first start.
            """
            nonlocal payload, starts
            starts += 1
            # A restart: say why, and go on from the newest checkpoint.
            if before is not None:
                console.show_cursor(True)  # rank 0 may have been killed under its display
                text = f"{error_of(before, run.rank_log)} Starting again, {starts - 1} of"
                text = printable(f"{text} {distributed.max_restarts} times.")
                console.print(text, markup=False, highlight=False, soft_wrap=True)
                if run.metrics.exists() or run.summary.exists() or run.checkpoints.exists():
                    saved_since = any(
                        folder.stat().st_mtime >= began for folder in checkpoint_folders(run)
                    )
                    payload = payload.again(saved_since=saved_since)
            payload_file.write_text(json.dumps(asdict(payload)))
            return ["-m", "optrun.launch.rank", str(heartbeats.path), str(payload_file.path)]

        ranks = LocalRanks(
            nproc=len(heartbeats),
            timeout_seconds=distributed.timeout_seconds,
            max_restarts=distributed.max_restarts,
        )
        ended = run_ranks(ranks, heartbeats, begin)
    error = error_of(ended.ends, run.rank_log)  # None: all ranks ended well
    if error is None:
        return Outcome(run, read_summary(run.summary))
    console.show_cursor(True)
    if ended.stops > 1 and any(end.code > 128 for end in ended.ends):
        error = OptrunError("a second signal ended all ranks at once; nothing new was saved.")
        error.exit_code = max(end.code for end in ended.ends)
    _record_failure(run, error)
    raise error


def _record_failure(run: RunDir, error: OptrunError) -> None:
    """Write the error of a run into its summary, since rank 0 may not know it or may be dead.

    The status becomes `failed`, with the message and the exit code. Does nothing for other exit
    codes than 1, or if the summary says that the run has finished or was interrupted. Errors of
    reading and writing are ignored: the error of the run matters more.
    """
    with contextlib.suppress(OSError, ValueError, OptrunError):
        values = read_summary(run.summary)
        if error.exit_code != EXIT_FAILED or values.get("status") not in ("running", "failed"):
            return
        values.update(status="failed", message=str(error), exit_code=error.exit_code)
        write_summary(run.summary, values)
