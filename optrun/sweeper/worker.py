"""One job, as a launcher calls it: hold it, train or go on, and record how it ended."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from optrun.artifacts.metrics import SUMMARY_FORMAT, write_summary
from optrun.artifacts.provenance import config_digest
from optrun.artifacts.run_dir import RunDir, checkpoint_folders, parse_step
from optrun.base import shell
from optrun.base.errors import (
    EXIT_STOPPED_EARLY,
    ConfigError,
    LockedError,
    OptrunError,
    StoppedEarly,
    StorageError,
    first_line,
    is_out_of_memory,
    is_refused_by_disk,
)
from optrun.base.plain import PlainDict
from optrun.config import saved, store
from optrun.config.batch import unset_derived_size
from optrun.config.registry.plugins import load_again
from optrun.config.request import Request
from optrun.config.schema.checkpoint import OnStorageError
from optrun.sweeper.command import Launch, SweepCommand
from optrun.sweeper.folder import Record, SweepDir

if TYPE_CHECKING:
    from rich.console import Console

    from optrun.runner.resume.checkpoint import ResumePoint

    TrainRun = Callable[[Request, RunDir, Console, ResumePoint | None, int | None], object]
    """Trains a run, in this process or on ranks that it starts, until it ends or pauses."""

REFUSED = "the disk refused: "
"""How the answer of a job begins that the disk has cut."""

_POLICY = "checkpoint.on_storage_error"
_LOOK_SECONDS = 0.2


@dataclass
class SweepTask:
    """The callable that a launcher runs for every job.

    It is sent to other processes, so it holds plain values only.
    """

    launch: Launch
    train_run: TrainRun
    refused: bool = False
    """Whether the disk has cut a job in this process: the next ones would train to their end to
    fail there."""

    def __call__(self, cfg: DictConfig) -> str:
        """Train one job, or continue it; skip it if another process holds it or the sweep stops.

        Args:
            cfg: The job's composed configuration.

        Returns:
            A word for the launcher's log. The result of the job is in its directory.
        """
        run = RunDir(Path(HydraConfig.get().runtime.output_dir))
        # Unresolved, so that a reference to an environment variable stays one.
        task_overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        overrides = list(map(str, task_overrides or ()))
        sweep = SweepDir(Path(self.launch.folder))
        parent = os.getppid()
        if self.refused or sweep.stop_file(self.launch.token).exists():
            return "left"
        try:
            with sweep.locked_record(run.path.name) as record:
                job_cfg = store.without_hydra(cfg)
                unset_derived_size(job_cfg, overrides)
                return self._take(sweep, run, record, job_cfg, overrides)
        except LockedError:
            return "held"
        finally:
            _release_memory()
            is_joblib_worker = multiprocessing.current_process().name.startswith("LokyProcess")
            if is_joblib_worker and os.getppid() != parent:
                # The process that gives it jobs is dead, and it would wait for ever.
                os._exit(EXIT_STOPPED_EARLY)

    def _take(
        self,
        sweep: SweepDir,
        run: RunDir,
        record: Record,
        job_cfg: DictConfig,
        overrides: list[str],
    ) -> str:
        """Run a locked job unless it is done, and record how it ended.

        Before training, the record gets one more attempt, the sweep process and the devices; after
        it, the rung if the job has reached one. An error marks the job as failed in its summary,
        unless a full disk is the cause: then the job stays to be continued, and later jobs of this
        process are skipped.

        Args:
            sweep: Directory of the sweep.
            run: Directory of the job.
            record: The record of the job, changed in place.
            job_cfg: Its composed configuration.
            overrides: Its overrides.

        Returns:
            A word for the log; it begins with `REFUSED` if a disk was full.

        Raises:
            LockedError: Another process holds the run itself.
        """
        name = run.path.name
        stop_at = self.launch.stop_at.get(name)
        # 1. Skip a job that has nothing left to do. A failed job runs only for a retry: the launch
        # holds the attempts that it had when it failed.
        state = sweep.state(name)
        if state.status == "finished":
            return "finished before"
        if state.status == "failed" and self.launch.retry.get(name) != record.attempts:
            return "failed before"
        if stop_at is not None and str(stop_at) in record.rungs:
            return "at the rung before"
        # 2. Record the attempt: a record that still names the sweep process tells of a dead worker.
        record.attempts += 1
        record.open = self.launch.token
        record.stopped_at = None
        record.devices = self.launch.devices
        sweep.write_record(name, record)
        # 3. Train.
        values = saved.plain(job_cfg)
        try:
            with _sigterm_at_stop_file(sweep.stop_file(self.launch.token)):
                self._train(run, job_cfg, values, overrides, stop_at)
            done = "finished"
        except LockedError:
            raise
        except StoppedEarly:
            done = "stopped"
        except Exception as error:
            # A rank of the job reports its disk error in the summary.
            rank_was_cut = sweep.summary(name).get("disk_refused") is True
            if is_refused_by_disk(error) or (isinstance(error, StorageError) and rank_was_cut):
                # Not a failure of the job: it keeps its state, and is continued once there is room.
                self.refused = True
                done = f"{REFUSED}{error}"
            else:
                if not isinstance(error, OptrunError):
                    _log(run, traceback.format_exc())
                why = str(error) if isinstance(error, OptrunError) else describe_failure(error)
                done = "failed"
                _log(run, f"failed: {why}")
                write_failure(sweep, name, why, values, overrides, self.launch.command)
        finally:
            # No worker runs it any more. On a full disk the write may fail; the launch reports it.
            record.open = None
            with contextlib.suppress(*([OSError] if self.refused else [])):
                sweep.write_record(name, record)
        # 4. Record the rung.
        state = sweep.state(name)
        if stop_at is not None and (state.step >= stop_at or state.ended):
            # Only up to the rung: without a pruner, an earlier start may have trained further.
            record.rungs[str(stop_at)] = sweep.best_until(name, stop_at)
            sweep.write_record(name, record)
        return done

    def _train(
        self,
        run: RunDir,
        job_cfg: DictConfig,
        values: dict[str, object],
        overrides: list[str],
        stop_at: int | None,
    ) -> None:
        """Train a job from its newest checkpoint or from the start.

        Returns at once if a checkpoint has reached `stop_at`. `checkpoint.on_storage_error`
        becomes `stop` unless it was typed, since every job has the same disk.

        Args:
            run: Directory of the job.
            job_cfg: Its composed configuration.
            values: The same, plain.
            overrides: Its overrides.
            stop_at: Optimizer steps at which it pauses; None: it goes to its end.

        Raises:
            ConfigError: It is to pause, and saves no checkpoints.
        """
        from rich.console import Console

        from optrun.config.safety import refuse_stored_trust
        from optrun.runner.resume.checkpoint import ResumePoint

        # 1. Check the configuration, with the plugins that the sweep has loaded.
        command = self.launch.command
        load_again(command.plugins, changes_allowed=command.plugins_may_change)
        refuse_stored_trust(job_cfg, command.overrides)
        config = store.typed(job_cfg)
        if not any(token.startswith(_POLICY) for token in overrides):
            config.checkpoint.on_storage_error = OnStorageError.stop  # every job has the same disk
        if stop_at is not None and not config.checkpoint.enabled:
            raise ConfigError(
                "hydra.sweeper.pruner: trials continue from checkpoints, and checkpoint=none saves"
                " none."
            )
        # 2. Find out where to go on; without files of an earlier attempt the job begins.
        last_step = max(
            (parse_step(folder.name) or 0 for folder in checkpoint_folders(run)), default=None
        )
        if stop_at is not None and last_step is not None and last_step >= stop_at:
            return  # an earlier attempt got there, and was killed before it recorded it
        resume = None
        if last_step is not None or run.metrics.exists() or run.checkpoints.exists():
            resume = ResumePoint(None, saved=_saved_before(run, values))
        # 3. Train.
        request = Request(
            config=config,
            values=values,
            argv=command.job_argv(overrides),
            config_name=command.config_name,
            config_dir=command.config_dir,
            config_file=command.config_file,
            overrides=overrides,
        )
        self.train_run(request, run, Console(quiet=True), resume, stop_at)


def _saved_before(run: RunDir, values: PlainDict) -> bool:
    """Tell whether a begun job was configured to save checkpoints.

    By `checkpoint.enabled` in its folder's `config.yaml`; if that is unreadable, by the sweep's
    values.
    """
    try:
        return bool(saved.read_config(run.config)["checkpoint"]["enabled"])
    except (ConfigError, KeyError, TypeError):
        return bool(values["checkpoint"]["enabled"])


def write_failure(
    sweep: SweepDir,
    name: str,
    why: str,
    values: Mapping[str, object],
    overrides: Sequence[str],
    command: SweepCommand,
) -> None:
    """Write the summary of a failed job, and its configuration if it has none.

    What the job itself has written to its summary stays, but for status and message. The caller
    holds the job's lock.

    Args:
        sweep: The sweep directory.
        name: Name of the job.
        why: One or two sentences.
        values: Resolved configuration of the job.
        overrides: Overrides of the job.
        command: The command line of the sweep.
    """
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run = sweep.run_dir(name)
    run.path.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {
        "format": SUMMARY_FORMAT,
        "run_name": values.get("run_name") or name,
        "global_step": 0,
        "max_steps": None,
        "epoch": 0.0,
        "started_at": now,
        "updated_at": now,
        "wall_seconds": 0.0,
        "command": shell.join(["optrun", *command.job_argv(overrides)]),
        "config_name": command.config_name,
        "overrides": list(overrides),
        "config_digest": config_digest(values),
        "metrics": {"last": {}, "best": {}},
        "resumes": [],
        **sweep.summary(name),  # the job's own values replace those above
        "status": "failed",
        "message": why,
        "disk_refused": False,
    }
    write_summary(run.summary, summary)
    if not run.config.is_file():
        run.config.write_text(OmegaConf.to_yaml(OmegaConf.create(dict(values))), encoding="utf-8")


def describe_failure(error: BaseException) -> str:
    r"""Describe an error for a table: kind and first line, or `out of memory`.

    Example:
        >>> describe_failure(MemoryError())
        'out of memory'
        >>> describe_failure(RuntimeError("shapes differ\nin many ways"))
        'RuntimeError: shapes differ'
    """
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    message = first_line(error)
    if message:
        return f"{kind}: {message}"
    return kind


@contextlib.contextmanager
def _sigterm_at_stop_file(stop: Path) -> Iterator[None]:
    """Send this process SIGTERM if the stop file appears, or its parent process is gone.

    Also if SIGUSR2 arrives (main thread only): submitit lets SLURM send it before the time limit
    (`--signal=USR2@90` of `submitit.slurm.slurm`).

    Args:
        stop: Path of the stop file; checked five times a second.
    """
    parent = os.getppid()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_SECONDS):
            if stop.exists() or os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def on_sigusr2(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        os.kill(os.getpid(), signal.SIGTERM)

    is_main_thread = threading.current_thread() is threading.main_thread()
    handler_before = signal.signal(signal.SIGUSR2, on_sigusr2) if is_main_thread else None
    thread = threading.Thread(target=watch, name="optrun-sweep-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if is_main_thread:
            signal.signal(signal.SIGUSR2, handler_before)


def _log(run: RunDir, text: str) -> None:
    with contextlib.suppress(OSError), run.log.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")


def _release_memory() -> None:
    """Free the log handlers, garbage and cached device memory of a job."""
    logging.getLogger("optrun").handlers.clear()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
