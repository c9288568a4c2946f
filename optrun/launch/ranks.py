"""Starts the ranks of a run, and starts them again where that is allowed."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.artifacts.lock import starting
from optrun.artifacts.metrics import read_summary, write_summary
from optrun.artifacts.provenance import config_digest
from optrun.artifacts.run_dir import RunDir, checkpoint_folders
from optrun.base.errors import EXIT_FAILED, ConfigError, OptrunError, printable
from optrun.config.registry import origins
from optrun.config.request import Request
from optrun.config.schema.distributed import RanksConfig
from optrun.distributed.agent import Ranks, run_ranks
from optrun.distributed.limits import Limits
from optrun.distributed.verdict import RankEnd, error_of
from optrun.launch.payload import Payload
from optrun.launch.rank import FOLDER, PAYLOAD
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
        resume: Where to go on; None: from the start.
        stop_at: Pause after this many optimizer steps.

    Raises:
        LockedError: Another process writes this run, or is about to.
        OptrunError: How the ranks ended, together, where not all ended well.
    """
    _refuse_code_of_program(request)
    distributed = request.config.distributed
    assert isinstance(distributed, RanksConfig)
    payload = Payload.of(request, run, resume, stop_at=stop_at, quiet=console.quiet)
    began = time.time()
    # Of several machines each has an agent at work in this directory.
    alone = distributed.nnodes == 1
    with (
        starting(run.lock) if alone else contextlib.nullcontext(),
        tempfile.TemporaryDirectory(prefix="optrun-ranks-") as base,
    ):
        folder, starts = Path(base), 0

        def begin(before: list[RankEnd] | None) -> None:
            nonlocal payload, starts
            if before is not None:
                starts += 1
                console.show_cursor(True)  # rank 0 may have been killed under its display
                why = error_of(before, run.rank_log) or "Another machine joins."
                told = f"{why} Starting again, {starts} of {distributed.max_restarts} times."
                console.print(printable(told), markup=False, highlight=False, soft_wrap=True)
                if run.metrics.exists() or run.summary.exists() or run.checkpoints.exists():
                    saved_since = any(
                        saved.stat().st_mtime >= began for saved in checkpoint_folders(run)
                    )
                    payload = payload.again(saved_since=saved_since)
            (folder / PAYLOAD).write_text(json.dumps(asdict(payload)), encoding="utf-8")

        ranks = Ranks(
            nproc=nproc(request.config),
            nnodes=distributed.nnodes,
            fewest=distributed.fewest,
            rdzv_endpoint=distributed.rdzv_endpoint,
            limits=Limits.of(vars(distributed)),
            command=["-m", "optrun.launch.rank"],
            environment={FOLDER: str(folder)},
            max_restarts=distributed.max_restarts,
        )
        try:
            ended = run_ranks(ranks, folder, begin, lambda: not alone and _is_over(run, payload))
        except ConfigError as unmet:
            if resume is None:
                raise
            raise OptrunError(str(unmet)) from unmet  # the same command has met the others before
    if not ended.ends:
        console.print(
            f"{run.path}: the run is finished; there is nothing to train.",
            markup=False,
            soft_wrap=True,
        )
    error = error_of(ended.ends, run.rank_log)
    if error is None:
        return Outcome(run, read_summary(run.summary))
    console.show_cursor(True)
    if ended.stops > 1 and any(end.code > 128 for end in ended.ends):
        error = OptrunError("a second signal ended all ranks at once; nothing new was saved.")
        error.exit_code = max(end.code for end in ended.ends)
    _record(run, error)
    raise error


def _refuse_code_of_program(request: Request) -> None:
    """Refuse choices that this program has registered itself.

    Its ranks are other processes, which know none of them.

    Raises:
        ConfigError: With the plugin to give instead.
    """
    for record in origins.records(request.values):
        if "plugin" not in record and "distribution" not in record:
            raise ConfigError(
                f"distributed={request.config.distributed.name}: {', '.join(record['names'])} was"
                f" registered by the module {record['module']} of this program, and each rank is a"
                " process of its own. Give the file or module as a plugin: plugins=[...] of"
                " optrun.run, --plugin on the command line."
            )


def _is_over(run: RunDir, payload: Payload) -> bool:
    """Tell whether this very run has finished, perhaps while this machine was away."""
    try:
        values = read_summary(run.summary)
    except (OSError, ValueError):
        return False
    return values.get("status") == "finished" and values.get("config_digest") == config_digest(
        payload.values
    )


def _record(run: RunDir, error: OptrunError) -> None:
    """Write into the summary why a run failed.

    Where rank 0 could not, or knew only that another rank had left.
    """
    with contextlib.suppress(OSError, ValueError, OptrunError):  # what ended the run is what counts
        values = read_summary(run.summary)
        if error.exit_code != EXIT_FAILED or values.get("status") not in ("running", "failed"):
            return
        values.update(status="failed", message=str(error), exit_code=error.exit_code)
        write_summary(run.summary, values)
