"""The process that keeps a sweep together.

It launches what is missing, watches, and starts again what was cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.metrics import to_json
from optrun.base.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED_EARLY,
    EXIT_STORAGE,
    LockedError,
    OptrunError,
    signal_name,
)
from optrun.base.formatting import duration
from optrun.base.reading import read_json
from optrun.config.schema.sweeper import SweeperConfig
from optrun.sweeper import launch as launching
from optrun.sweeper.command import Launch, SweepCommand
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.jobs import Job
from optrun.sweeper.stop import GRACE_SECONDS, Stop, end_family
from optrun.sweeper.view import JobRow, JobTable, View
from optrun.sweeper.workers import Workers

_POLL_SECONDS = 0.2
_IDLE_LAUNCHES = 3
_GIVE_UP_SECONDS = 30.0
"""A process that is killed and does not end waits for a disk or a device; it is left behind."""


class PlannedJob(NamedTuple):
    """A job and the step, such as a rung, that it is to reach next."""

    job: Job
    stop_at: int | None = None
    """Optimizer steps; None: its end."""


@dataclass(frozen=True)
class _OpenLaunch:
    server: launching.Server
    batch: Sequence[JobRow]
    spec: Path
    before: list[tuple[object, ...]]
    """Progress of its jobs when it began, see `Driver._progress_of`."""


@dataclass(eq=False)
class Driver:
    """Runs the jobs of a sweep to their planned steps, launch by launch."""

    sweep: SweepDir
    command: SweepCommand
    """What started the sweep."""
    options: SweeperConfig
    workers: Workers
    """The processes that launchers run in."""
    view: View
    stop: Stop
    """Requests by signal."""
    tuned: Sequence[str] = ()
    """Keys that the report takes for tuned, whatever they are."""
    job_table: JobTable = field(default_factory=JobTable, init=False)
    failed_before: list[JobRow] = field(default_factory=list, init=False)
    """Jobs that failed in an earlier start, and are left so."""

    def __post_init__(self) -> None:
        """Connect the stop request to the workers."""
        self.token = secrets.token_hex(6)
        self._open: list[_OpenLaunch] = []
        self._launches = 0
        self._unbegun = 0
        """Launches in a row that came back without a job begun."""
        self._said_stop = False
        self._signalled = False
        self._killed = False
        self.stop.groups = self.workers.pids
        self.stop.at_work = self._unsaved

    # What is known
    # ----------------------------------------------------------------------------------------------

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs of this sweep.

        Jobs that failed before run again if `retry_failed` is set.
        """
        for job in jobs:
            if job.name in self.job_table.rows:
                continue
            row = JobRow(job, self.sweep.state(job.name), self.sweep.read_record(job.name))
            self.job_table.rows[job.name] = row
            if row.state.status == "failed" and self.options.retry_failed:
                row.retry = row.record.attempts
            elif row.state.ended:
                row.is_reported = True
                if row.state.status == "failed":
                    self.failed_before.append(row)
            row.paused = row.record.stopped_at is not None and not row.state.ended

    def refresh(self, jobs: Iterable[Job]) -> None:
        """Read the states of jobs, print those that ended since, and rewrite `sweep.json`.

        A job counts as running if its record names a sweep process, and a launch of this sweep has
        it or a process holds its lock. Jobs whose end was printed are not read again.
        """
        at_work = self._at_work
        for row in map(self.job_table.row, jobs):
            name = row.job.name
            if row.is_reported:
                continue
            row.record = self.sweep.read_record(name)
            row.state = self.sweep.state(name)
            ours = row.record.open == self.token and name in at_work
            row.running = row.record.open is not None and (ours or self.sweep.is_running(name))
            if row.state.ended and not row.running and row.retry != row.record.attempts:
                row.is_reported = True
                self.view.ended(row, self.job_table, str(self.sweep.run(name).log))
                self.write_result()
        self.view.update(self.job_table)

    def _needs_work(self, planned_job: PlannedJob) -> bool:
        """Tell whether a job needs more work and may get it in this start."""
        row = self.job_table.row(planned_job.job)
        record = self.sweep.read_record(planned_job.job.name)
        if row.state.status == "finished" or row.out_of_time:
            return False
        if row.state.status == "failed":
            return row.retry == record.attempts
        return planned_job.stop_at is None or str(planned_job.stop_at) not in record.rungs

    def is_short_of(self, planned_job: PlannedJob) -> bool:
        """Tell whether a job has not reached its planned step, whether or not it may still run."""
        return self.job_table.row(planned_job.job).out_of_time or self._needs_work(planned_job)

    # What is done
    # ----------------------------------------------------------------------------------------------

    def pursue(self, plan: Callable[[], Sequence[PlannedJob]]) -> None:
        """Run jobs until every planned job is where it is to be, or a stop is requested.

        Args:
            plan: Returns the jobs to run next, known by `add`. It is called again after each
                launch, but not after a stop request; then running jobs save and end.

        Raises:
            OptrunError: The launcher itself fails.
        """
        planned_jobs = plan()
        while True:
            codes = [(launch, launch.server.code()) for launch in self._open]
            finished = [(launch, code) for launch, code in codes if code is not None]
            for launch, code in finished:
                self._finish_launch(launch, code)
            self.refresh(job for job, _ in planned_jobs)
            is_done = not any(map(self._needs_work, planned_jobs))
            if not self.stop.requested and (finished or is_done):
                planned_jobs = plan()
            for job, _ in planned_jobs:
                self.job_table.row(job).paused = False
            if self.stop.requested:
                self._tell_of_stop()
                if not self._open or self._is_given_up():
                    break
                self._ask_to_stop()
            elif not self._open and not any(map(self._needs_work, planned_jobs)):
                return
            elif self._start(planned_jobs):
                continue
            else:
                self.workers.tidy()
            time.sleep(_POLL_SECONDS)
        self.refresh(job for job, _ in planned_jobs)

    def _ask_to_stop(self) -> None:
        """Ask running jobs to save and end.

        It writes a stop file, or sends a signal if the disk is full.
        """
        try:
            self.sweep.stop(self.token).touch()
        except OSError:
            for group in self.workers.pids() if not self._signalled else ():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGTERM)
            self._signalled = True

    def _is_given_up(self) -> bool:
        """Kill jobs still running long after the time limit.

        Returns:
            Whether to stop waiting, because even killing them did not end them.
        """
        patience = self.stop.patience
        if patience is None or patience > 0:
            return False
        if not self._killed:
            at_work = (row.job for launch in self._open for row in launch.batch)
            slow = ", ".join(job.label for job in at_work if self.sweep.is_running(job.name))
            self.view.note(
                f"{slow}: not stopped {duration(GRACE_SECONDS)} after hydra.sweeper.timeout was up;"
                " killed"
            )
        self._killed = True
        for pid in self.workers.pids():
            end_family(pid)
        return patience < -_GIVE_UP_SECONDS

    def _unsaved(self) -> list[str]:
        """List this sweep's jobs that still train, and so have unsaved steps.

        A job after its last save, which may still draw curves, is left out.
        """
        return [
            name
            for name in self._at_work
            if self.sweep.is_running(name) and self.sweep.state(name).status == "running"
        ]

    def _tell_of_stop(self) -> None:
        """Print once, at the first stop request, what happens now.

        Jobs then still need the time of one step and one save.
        """
        if self._said_stop:
            return
        self._said_stop = True
        unsaved = len(self._unsaved())
        if unsaved == 1:
            jobs = "the job at work saves and ends"
        else:
            jobs = f"{unsaved} jobs at work save and end"
        self.view.note(
            f"{self.stop.why}{f': {jobs} after this step' if unsaved else ''}; a second Ctrl-C ends"
            " all at once"
        )

    @property
    def _at_work(self) -> set[str]:
        """Names of the jobs now in a process of this sweep."""
        return {row.job.name for launch in self._open for row in launch.batch}

    def _start(self, planned_jobs: Sequence[PlannedJob]) -> bool:
        """Start a launch if a job is waiting and its devices are free."""
        at_work = self._at_work
        for batch in self._batches(planned_jobs, at_work):
            count = max(self.workers.devices_of(job.values) for job, _ in batch)
            server = self.workers.take(count, busy=self._devices_of_others(at_work))
            if server is not None:
                self._send(server, batch)
                return True
        return False

    def _devices_of_others(self, at_work: set[str]) -> set[str]:
        """Find devices that workers of a killed sweep still use while they save."""
        rows = [row for row in self.job_table.running if row.job.name not in at_work]
        return {device for row in rows for device in row.record.devices}

    def _batches(
        self, planned_jobs: Sequence[PlannedJob], at_work: set[str]
    ) -> Iterator[Sequence[PlannedJob]]:
        """Yield batches of jobs with the step that each is to reach, one batch for each launch.

        Jobs that are running, here or in another process, and jobs that need no work are left out.

        - Workers on devices run one job each: every job is a batch, in the order given.
        - Else one launch runs at a time, and nothing is yielded before it has ended.
        - If the worker of a job died, the first such job is a batch alone, so that it cannot end
          others with it.
        - Else the batch is the first `max_batch_size` jobs. Two trials may be one job: it is in the
          batch once, with the step of the later trial.
        """
        waiting = (
            planned_job
            for planned_job in planned_jobs
            if planned_job.job.name not in at_work
            and self._needs_work(planned_job)
            and not self.sweep.is_running(planned_job.job.name)
        )
        if self.workers.one_job_each:
            yield from ([planned_job] for planned_job in waiting)
            return
        if self._open:
            return
        by_name = {planned_job.job.name: planned_job for planned_job in waiting}
        distinct_jobs = list(by_name.values())
        for planned_job in distinct_jobs:
            if self.job_table.row(planned_job.job).worker_died:
                yield [planned_job]
                return
        if distinct_jobs:
            yield distinct_jobs[: self.options.max_batch_size]

    def _progress_of(self, row: JobRow) -> tuple[object, ...]:
        """Return what changes when a worker makes progress on a job."""
        record = self.sweep.read_record(row.job.name)
        state = self.sweep.state(row.job.name)
        return (
            record.attempts,
            state.status,
            state.step,
            len(record.rungs),
            self.sweep.is_running(row.job.name),
        )

    def _send(self, server: launching.Server, planned_jobs: Sequence[PlannedJob]) -> None:
        """Write the jobs of a launch to a JSON file, and send its path to a process.

        Args:
            server: The process.
            planned_jobs: The jobs, and how far each is to go.
        """
        self._launches += 1
        batch = [self.job_table.row(planned_job.job) for planned_job in planned_jobs]
        spec = self.sweep.spec(f"{self.token}-{self._launches}")
        launch = Launch(
            folder=str(self.sweep.path.resolve()),
            token=self.token,
            command=self.command,
            jobs={row.job.name: list(row.job.overrides) for row in batch},
            stop_at={job.name: stop_at for job, stop_at in planned_jobs if stop_at is not None},
            retry={row.job.name: row.retry for row in batch if row.retry is not None},
            devices=server.devices,
        )
        spec.write_text(json.dumps(asdict(launch)), encoding="utf-8")
        self._open.append(_OpenLaunch(server, batch, spec, list(map(self._progress_of, batch))))
        server.send(spec)

    def _finish_launch(self, launch: _OpenLaunch, code: int) -> None:
        """Record the end of a launch, and read the states of its jobs.

        Raises:
            OptrunError: The launcher itself fails.
        """
        self._open.remove(launch)
        launch.spec.unlink(missing_ok=True)
        why = ""
        answer = launching.answer_file(launch.spec)
        if answer.is_file():
            why = str(read_json(answer)["why"]).strip().partition("\n")[0]
            answer.unlink()
        refused = bool(why)
        if code and not refused:
            end = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            why = f"its process {end}."
        if code == EXIT_STORAGE and not self.stop.requested:
            self.stop.refused = why if refused else "the disk refused."
        self._handle_unfinished(launch.batch, why)
        has_begun = launch.before != list(map(self._progress_of, launch.batch))
        self._unbegun = 0 if has_begun else self._unbegun + 1
        pinned = ",".join(launch.server.devices)
        self.workers.give_back(
            launch.server,
            fresh=any(self.sweep.state(row.job.name).status == "failed" for row in launch.batch),
            broken=refused and not has_begun,
        )
        if self.stop.requested:
            return
        if why and not has_begun and not pinned:
            raise OptrunError(
                f"the launcher failed before any job began: {why} See {self.sweep.log}."
            )
        if refused and not has_begun:
            self.view.note(f"device {pinned} is left out: {why}")
        elif self._unbegun >= _IDLE_LAUNCHES:
            times = f"{self._unbegun} times without a job begun"
            raise OptrunError(f"the launcher came back {times}. {why} See {self.sweep.log}.")

    def _handle_unfinished(self, batch: Sequence[JobRow], why: str) -> None:
        """Handle the jobs of an ended launch that have no result: dead workers, time is up.

        Does nothing after a stop request. A job that another process still holds is left to it.

        Args:
            batch: The jobs of the launch.
            why: How the launch ended, for the message of a job whose worker died.
        """
        if self.stop.requested:
            return
        for row in batch:
            try:
                with self.sweep.working_on(row.job.name) as record:
                    row.state = self.sweep.state(row.job.name)
                    if record.open == self.token:  # its worker died
                        record.open = None
                        self.sweep.write_record(row.job.name, record)
                        self._retry_alone(row, was_alone=len(batch) == 1, why=why)
                    elif row.state.status == "interrupted" and "time budget" in row.state.message:
                        row.out_of_time = True
            except LockedError:
                continue  # at work still, in a process of its own

    def _retry_alone(self, row: JobRow, *, was_alone: bool, why: str) -> None:
        """Retry a job whose worker died, once, in a launch of its own.

        If the worker dies again, the job has failed.
        """
        from optrun.sweeper.worker import record_failure

        if row.state.ended:
            return
        job = row.job
        step = max(
            row.state.step, self.sweep.steps_done(job.name)
        )  # the summary may be a second behind
        if was_alone and row.worker_died:
            row.worker_died = False
            failure = (
                f"the process of this job died twice, last after step {step}:"
                f" {why or 'no reason given.'} Killed for memory? Try a smaller"
                " training.per_device_train_batch_size with more"
                " training.gradient_accumulation_steps."
            )
            record_failure(self.sweep, job.name, failure, job.values, job.overrides, self.command)
            return
        row.worker_died = True
        self.view.note(f"the worker of {job.label} died after step {step}; tried once more, alone")

    def stop_at_rung(self, jobs: Iterable[Job], rung: int) -> None:
        """Mark the unfinished jobs of a pruned trial as stopped at a rung."""
        for row in map(self.job_table.row, jobs):
            if row.state.ended or row.paused:
                continue
            try:
                with self.sweep.working_on(row.job.name) as record:
                    record.stopped_at = rung
                    self.sweep.write_record(row.job.name, record)
            except LockedError:
                continue  # another sweep process is at it
            row.paused = True
            self.view.note(f"pruned at step {rung}: {row.job.label}")
            self.write_result()

    def close(self) -> None:
        """End the launching processes; running jobs save first."""
        self._ask_to_stop()
        self.workers.close(self.stop.patience)
        if not self.stop.requested:  # else a queue may still hold jobs that look for it
            self.sweep.stop(self.token).unlink(missing_ok=True)

    # How it ended
    # ----------------------------------------------------------------------------------------------

    def exit_code(self) -> int:
        """Return the exit code of the sweep.

        0: all jobs finished or were pruned. 1: some failed. 74: the disk refused a write. 75: the
        sweep stopped with everything saved.
        """
        states = [row.state for row in self.job_table.rows.values() if not row.paused]
        if self.stop.refused:
            return EXIT_STORAGE
        if self.stop.requested or any(not state.ended for state in states):
            return EXIT_STOPPED_EARLY
        if any(state.status == "failed" for state in states):
            return EXIT_FAILED
        return EXIT_DONE

    def write_result(self) -> None:
        """Write the state of every job to `sweep.json`."""
        rows: list[dict[str, object]] = [
            {
                "name": row.job.name,
                "config_digest": row.job.digest,
                "overrides": list(row.job.overrides),
                "status": "stopped at a rung" if row.paused else row.state.status,
                "global_step": row.state.step,
                "max_steps": row.state.total,
                "metric": row.state.metric,
                "best": row.state.best,
                "message": row.state.message,
                "devices": row.record.devices,
                "log": f"{row.job.name}/{self.sweep.run(row.job.name).log.name}",
            }
            for row in self.job_table.rows.values()
        ]
        result: dict[str, object] = {"format": 1, "tuned": list(self.tuned), "jobs": rows}
        replace_text(
            self.sweep.result, json.dumps(to_json(result), indent=2, ensure_ascii=False) + "\n"
        )
