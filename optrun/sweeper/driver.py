"""The process that keeps a sweep together: it launches what is missing, watches, and starts again what was cut."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.metrics import to_json
from optrun.config.schema.sweeper import SweeperConfig
from optrun.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_EARLY, LockedError, OptrunError
from optrun.sweeper import launch as launching
from optrun.sweeper.command import SweepCommand
from optrun.sweeper.folder import JobState, SweepDir
from optrun.sweeper.jobs import Job
from optrun.sweeper.view import Board, PlainView

_POLL_SECONDS = 0.2
_IDLE_LAUNCHES = 3
_A_DAY = 86_400


class Stop:
    """A request to end the sweep: the first is for saving, a second ends everything at once.

    Outside the main thread, where Python takes no signals, there are none.

    Args:
        owns_process: Whether a second request ends this process; else it raises KeyboardInterrupt.
    """

    def __init__(self, *, owns_process: bool = True) -> None:
        self.owns_process = owns_process
        self.requested = False
        self.group: int | None = None
        """Process group of the running launch."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if main else ():
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.requested:
            if self.group is not None:
                os.killpg(self.group, signal.SIGKILL)
            if not self.owns_process:
                raise KeyboardInterrupt
            sys.stderr.write("\nstopped at once: nothing new was saved\n")
            sys.stderr.flush()
            os._exit(128 + number)
        self.requested = True


class Driver:
    """Brings jobs to their end, or to a rung.

    Args:
        sweep: The sweep directory.
        command: What started the sweep.
        options: Of the sweeper.
        view: Shows progress.
        stop: Requests by signal.
        sleep: Waits that many seconds.
    """

    def __init__(
        self,
        sweep: SweepDir,
        command: SweepCommand,
        options: SweeperConfig,
        view: PlainView,
        stop: Stop,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.sweep = sweep
        self.command = command
        self.options = options
        self.view = view
        self.stop = stop
        self.sleep = sleep
        self.board = Board()
        self.token = secrets.token_hex(6)
        self._server: launching.Server | None = None
        self._launches = 0
        self._retry: dict[str, int] = {}
        self._suspects: list[str] = []
        self.out_of_time: set[str] = set()
        """Jobs whose `training.max_seconds` is spent; the next start goes on with them."""
        self._announced: set[str] = set()

    # What is known --------------------------------------------------------------------------------------------------

    def add(self, jobs: Iterable[Job]) -> None:
        """More jobs of this sweep; those that failed before are tried again where that was asked for."""
        known = {job.name for job in self.board.jobs}
        for job in jobs:
            if job.name in known:
                continue
            self.board.jobs.append(job)
            state = self.sweep.state(job.name)
            self.board.states[job.name] = state
            record = self.sweep.read_record(job.name)
            if state.status == "failed" and self.options.retry_failed:
                self._retry[job.name] = record.attempts
            elif state.ended:
                self._announced.add(job.name)
            if record.stopped_at is not None and not state.ended:
                self.board.resting.add(job.name)

    def refresh(self, jobs: Iterable[Job] | None = None) -> None:
        """Read where the jobs stand, and show those that ended."""
        for job in self.board.jobs if jobs is None else jobs:
            name = job.name
            if name in self._announced:
                continue
            record = self.sweep.read_record(name)
            state = self.board.states[name] = self.sweep.state(name)
            running = record.open is not None and (record.open == self.token or self.sweep.held(name))
            (self.board.running.add if running else self.board.running.discard)(name)
            if state.ended and not running and self._retry.get(name) != record.attempts:
                self._announced.add(name)
                self.view.ended(job, state, self.board, str(self.sweep.run(name).log))
                self.write_result()
        self.view.update(self.board)

    def _wanted(self, job: Job, stop_at: int | None) -> bool:
        state = self.board.states[job.name]
        record = self.sweep.read_record(job.name)
        if state.status == "finished" or job.name in self.out_of_time:
            return False
        if state.status == "failed":
            return self._retry.get(job.name) == record.attempts
        return stop_at is None or str(stop_at) not in record.rungs

    # What is done ---------------------------------------------------------------------------------------------------

    def advance(self, jobs: Sequence[Job], stop_at: int | None = None) -> None:
        """Bring jobs to their end or to a rung, whoever does the work; a failed job has got as far as it will.

        Args:
            jobs: Known to the sweep by `add`.
            stop_at: Optimizer steps; None: the end.

        Raises:
            OptrunError: The launcher itself fails.
        """
        idle = 0
        for job in jobs:
            self.board.resting.discard(job.name)
        while not self.stop.requested:
            self.refresh(jobs)
            wanted = [job for job in jobs if self._wanted(job, stop_at)]
            if not wanted:
                return
            free = [job for job in wanted if not self.sweep.held(job.name)]
            if not free:  # others are at them: theirs may die, so they are looked at again
                self.sleep(_POLL_SECONDS)
                continue
            suspects = [job for job in free if job.name in self._suspects]
            batch = suspects[:1] or free[: self.options.max_batch_size]
            before = [self._mark(job) for job in batch]
            why = self._launch(batch, stop_at)
            self._account(batch, why)
            idle = idle + 1 if before == [self._mark(job) for job in batch] else 0
            if why and idle:
                raise OptrunError(f"the launcher failed before any job began: {why} See {self.sweep.log}.")
            if idle >= _IDLE_LAUNCHES:
                raise OptrunError(f"the launcher came back {idle} times without a job begun. See {self.sweep.log}.")
        self.refresh(jobs)

    def _mark(self, job: Job) -> tuple[object, ...]:
        record, state = self.sweep.read_record(job.name), self.sweep.state(job.name)
        return record.attempts, state.status, state.step, len(record.rungs), self.sweep.held(job.name)

    def _launch(self, batch: Sequence[Job], stop_at: int | None) -> str:
        """Run a launcher over jobs; returns why it failed, empty where it did not."""
        self._launches += 1
        token = f"{self.token}-{self._launches}"
        launch = launching.Launch(
            folder=str(self.sweep.path.resolve()),
            token=self.token,
            command=self.command,
            names=[job.name for job in batch],
            overrides=[list(job.overrides) for job in batch],
            stop_at=stop_at,
            retry=self._retry,
        )
        spec, error = self.sweep.spec(token), self.sweep.error(self.token)
        error.unlink(missing_ok=True)
        launching.write_spec(spec, launch)
        if self._server is None:
            self._server = launching.Server(self.sweep.log)
        self._server.send(spec)
        self.stop.group = self._server.pid
        try:
            while (code := self._server.code()) is None:
                if self.stop.requested:
                    self.sweep.stop(self.token).touch()
                self.refresh(batch)
                self.sleep(_POLL_SECONDS)
        finally:
            self.stop.group = None
            spec.unlink(missing_ok=True)
        if error.is_file():
            return error.read_text(encoding="utf-8").strip().splitlines()[0]
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}."
        return "" if code == 0 else f"its process ended with code {code}."

    def _account(self, batch: Sequence[Job], why: str) -> None:
        """Find jobs whose worker died, and jobs that stopped because their time was up."""
        if self.stop.requested:
            return
        for job in batch:
            try:
                with self.sweep.working_on(job.name) as record:
                    died = record.open == self.token
                    state = self.sweep.state(job.name)
                    if died:
                        record.open = None
                        self.sweep.write_record(job.name, record)
                        self._suspect(job, state, alone=len(batch) == 1, why=why)
                    elif state.status == "interrupted" and "time budget" in state.message:
                        self.out_of_time.add(job.name)
            except LockedError:
                continue  # at work still, in a process of its own

    def _suspect(self, job: Job, state: JobState, *, alone: bool, why: str) -> None:
        """A worker died: the job is tried once more, alone; if it dies again, that is its result."""
        from optrun.sweeper.worker import record_failure

        if state.ended:
            return
        if alone and job.name in self._suspects:
            self._suspects.remove(job.name)
            record_failure(
                self.sweep,
                job.name,
                f"the process of this job died twice, last after step {state.step}: {why or 'no reason given.'} "
                "Killed for memory? Try a smaller training.per_device_train_batch_size with more "
                "training.gradient_accumulation_steps.",
                job.values,
                job.overrides,
                self.command,
            )
            return
        if job.name not in self._suspects:
            self._suspects.append(job.name)
        self.view.note(f"the worker of {job.label} died after step {state.step}; tried once more, alone")

    def rest(self, jobs: Iterable[Job], rung: int, why: str) -> None:
        """Stop jobs at a rung for good."""
        for job in jobs:
            try:
                with self.sweep.working_on(job.name) as record:
                    record.stopped_at = rung
                    self.sweep.write_record(job.name, record)
            except LockedError:
                continue  # a sweep with another ladder is at it
            self.board.resting.add(job.name)
            self.view.note(f"stopped at step {rung}: {job.label}  {why}")
        self.write_result()

    def close(self) -> None:
        """Let the launching process end; should it be at work still, its jobs save first."""
        if self._server is not None:
            self.sweep.stop(self.token).touch()
            self._server.close()
            self._server = None
            if not self.stop.requested:  # else a queue may still hold jobs that look for it
                self.sweep.stop(self.token).unlink()

    # How it ended ---------------------------------------------------------------------------------------------------

    def exit_code(self) -> int:
        """0: every job is finished or rests at a rung; 1: some failed; 75: stopped with everything saved."""
        states = [self.board.states[job.name] for job in self.board.jobs if job.name not in self.board.resting]
        if self.stop.requested or any(not state.ended for state in states):
            return EXIT_STOPPED_EARLY
        return EXIT_FAILED if any(state.status == "failed" for state in states) else EXIT_DONE

    def steps(self) -> tuple[int, int]:
        """Optimizer steps done, and those that all jobs would take to their end."""
        states = list(self.board.states.values())
        return sum(state.step for state in states), sum(state.total or state.step for state in states)

    def write_result(self) -> None:
        """Write `sweep.json` anew."""
        rows: list[dict[str, Any]] = []
        for job in self.board.jobs:
            state = self.board.states[job.name]
            rows.append(
                {
                    "name": job.name,
                    "config_digest": job.digest,
                    "overrides": list(job.overrides),
                    "status": "stopped at a rung" if job.name in self.board.resting else state.status,
                    "global_step": state.step,
                    "max_steps": state.total,
                    "metric": state.metric,
                    "best": state.best,
                    "message": state.message,
                    "log": f"{job.name}/{self.sweep.run(job.name).log.name}",
                }
            )
        result = {"format": 1, "jobs": rows}
        replace_text(self.sweep.result, json.dumps(to_json(result), indent=2, ensure_ascii=False) + "\n")


def clean(sweep: SweepDir) -> None:
    """Remove what launches of earlier sweep processes left behind, a day later."""
    for pattern in ("stop-*", "launch-*.json", "launch-*.error"):
        for path in sweep.hidden.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # another sweep process tidies up too
                if time.time() - path.stat().st_mtime > _A_DAY:
                    path.unlink()
