"""Start one run in a new directory, as a job of Hydra."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from optrun.artifacts.lock import refuse_held
from optrun.artifacts.run_dir import HYDRA_FILES, RANK_LOG, RunDir, unused_path
from optrun.base import shell
from optrun.base.errors import ConfigError, StorageError, refuse_url
from optrun.config.compose import build_request
from optrun.config.hydra_internals import Hydra
from optrun.config.literal import quote_path
from optrun.config.request import CommandLine, Request
from optrun.config.schema.distributed import RanksConfig
from optrun.config.tokens import key_of
from optrun.distributed.join import Launched
from optrun.launch.leader import Leader
from optrun.launch.rank_checks import refuse_unfit
from optrun.launch.ranks import train_on_ranks
from optrun.launch.run_here import run_here

if TYPE_CHECKING:
    from rich.console import Console

    from optrun.runner.outcome import Outcome
    from optrun.runner.resume.checkpoint import ResumePoint


@dataclass(frozen=True)
class Caller:
    """Who asked for a run."""

    console: Console
    """Where progress and result are printed."""
    owns_process: bool = True
    """Whether a second signal may end the process; not so in a notebook, or inside of another
    program."""
    leader: Leader | None = None
    """Where torchrun or another launcher started this process as rank 0."""

    @property
    def launched(self) -> Launched | None:
        """The launch as its launcher describes it; None if optrun was started by itself."""
        if self.leader is None:
            return None
        return self.leader.launched


def start(hydra: Hydra, command_line: CommandLine, cfg: DictConfig, caller: Caller) -> Outcome:
    """Train a new run in a new directory.

    Args:
        hydra: Finds configurations in the user's folders.
        command_line: The command line, with checked overrides.
        cfg: The composed configuration, with the node `hydra`.
        caller: Who asked for the run.

    Raises:
        OptrunError: As `execute`. If the run is refused before it began, its files are removed.
    """
    # 1. Refuse what cannot run, before a directory is made.
    request = build_request(command_line, cfg, command_line.overrides)
    # `resume=auto` has found nothing here, and will find the run if the command is repeated.
    resumes = cfg.resume is not None or any(
        key_of(token) == "resume" for token in command_line.argv
    )
    refuse_unfit(request.config, command_line.overrides, caller.launched, resumes=resumes)
    refuse_url("hydra.run.dir", str(cfg.hydra.run.dir))
    folder = Path(str(cfg.hydra.run.dir))
    if not any(token.startswith("hydra.run.dir=") for token in command_line.overrides):
        folder = unused_path(folder)
    refuse_used(folder)
    results: list[Outcome | Exception] = []  # one, from the job

    def job(_: DictConfig) -> None:
        """Run, and keep the outcome or the error.

        For an error that is raised `hydra.core.utils.JobReturn` would print a message of its own.
        """
        run = RunDir(Path(HydraConfig.get().runtime.output_dir))
        try:
            results.append(execute(request, run, caller))
        except Exception as error:
            if isinstance(error, ConfigError):  # any other may be about a run of another process
                forget_unbegun(run)
            results.append(error)

    # 2. Run as a job of Hydra, which writes `.hydra/`, and calls `job` in that folder. `job` raises
    # nothing, so an error here is Hydra's own.
    _mark_as_ours(RunDir(folder))
    try:
        hydra.run(
            config_name=command_line.config_name,
            task_function=job,
            overrides=[*command_line.overrides, f"hydra.run.dir={quote_path(folder)}"],
        )
    except Exception:
        forget_unbegun(RunDir(folder))
        raise
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result


def execute(
    request: Request, run: RunDir, caller: Caller, resume: ResumePoint | None = None
) -> Outcome:
    """Train in a run directory and show the result.

    With `distributed=none` in this process; with `ddp` or `fsdp` as the leader of ranks that a
    launcher has started, or without a launcher on ranks that optrun starts.

    Raises:
        OptrunError: As `optrun.runner.train.train`.
    """
    if not isinstance(request.config.distributed, RanksConfig):
        return run_here(request, run, caller.console, resume, owns_process=caller.owns_process)
    if caller.leader is not None:
        return caller.leader.lead(request, run, caller.console, resume)
    return train_on_ranks(request, run, caller.console, resume)


def _mark_as_ours(run: RunDir) -> None:
    """Create the folder and lock file of a run, before Hydra writes there.

    If the start is killed, the lock file shows that the torn `.hydra/` is optrun's.

    Raises:
        StorageError: The disk refused.
    """
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        run.lock.touch()
    except OSError as error:
        raise StorageError(f"{run.lock}: cannot be made: {error.strerror or error}.") from error


def refuse_used(folder: Path) -> None:
    """Refuse a used or unwritable directory for a new run.

    Raises:
        ConfigError: Something is there already.
        LockedError: Another process is at work there, perhaps since a moment ago.
        StorageError: It could not be written.
    """
    run = RunDir(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"hydra.run.dir={folder}: this is a file.")
    if folder.is_dir() and not run.is_unbegun():
        refuse_held(run.lock)
        if run.is_run():
            raise ConfigError(
                f"hydra.run.dir={folder}: there is a run in it already, and nothing is overwritten."
                f" Continue it with {shell.quote(f'resume={folder}')}, or choose another directory."
            )
        raise ConfigError(
            f"hydra.run.dir={folder}: this directory is not empty. Choose another one."
        )
    # The nearest folder that exists already.
    parent = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not os.access(parent, os.W_OK):
        raise StorageError(
            f"hydra.run.dir={folder}: no permission to write in {parent}. Choose another directory."
        )


def forget_unbegun(run: RunDir) -> None:
    """Remove the files of a refused start; the corrected command can then use the folder.

    Does nothing if the run has a summary or metrics. Only files that a start writes are deleted, by
    name; a folder goes if nothing else is in it.
    """
    if run.summary.exists() or run.metrics.exists():
        return
    for name in HYDRA_FILES:
        (run.hydra / name).unlink(missing_ok=True)
    for path in run.logs.glob("*") if run.logs.is_dir() else ():
        if RANK_LOG.fullmatch(path.name):
            path.unlink()
    for file in (run.config, run.log, run.lock):
        file.unlink(missing_ok=True)
    for folder in (run.hydra, run.logs, run.path):
        with contextlib.suppress(OSError):  # missing, or something of the user's is in it
            folder.rmdir()
