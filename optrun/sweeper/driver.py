"""The process that runs a sweep: it launches jobs, watches them, and launches cut jobs again."""

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
from optrun.sweeper.stop import GRACE_SECONDS, Stop, kill_process_tree
from optrun.sweeper.view import JobRow, JobTable, View
from optrun.sweeper.workers import Workers

_POLL_SECONDS = 0.2
_IDLE_LAUNCHES = 3
_GIVE_UP_SECONDS = 30.0
"""Seconds to wait for killed processes: one that does not end waits for a disk or a device."""


class PlannedJob(NamedTuple):
    """A job and the step that it is to reach next.

    In a search with a pruner that step is a rung: a step at which jobs stop and are compared.
    """

    job: Job
    stop_at: int | None = None
    """Optimizer steps; None: its end."""


@dataclass(frozen=True)
class _OpenLaunch:
    """A launch that has not ended: one call of the launcher."""

    process: launching.LaunchProcess
    batch: Sequence[JobRow]
    spec: Path
    """JSON file of its `Launch`."""
    progress_before: list[tuple[object, ...]]
    """Progress of its jobs when it began, see `Driver._read_progress`."""


def _explain_exit(code: int) -> str:
    """Explain why the process of a launch ended, in a sentence; empty for exit code 0.

    Example:
        >>> _explain_exit(-9), _explain_exit(1), _explain_exit(0)
        ('its process was ended by SIGKILL.', 'its process ended with code 1.', '')
    """
    if code < 0:
        return f"its process was ended by {signal_name(-code)}."
    if code > 0:
        return f"its process ended with code {code}."
    return ""


def _pop_reported_error(spec: Path) -> str:
    """Read the first line of the error that an ended launch reported; empty if there is none.

    Deletes the files of the launch, so it can be read once.
    """
    spec.unlink(missing_ok=True)
    report = launching.report_file(spec)
    if not report.is_file():
        return ""
    error = str(read_json(report)["why"]).strip().partition("\n")[0]
    report.unlink()
    return error


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
    tuned: Sequence[str]
    """Searched keys; the report takes them for tuned."""
    job_table: JobTable = field(default_factory=JobTable, init=False)
    failed_before: list[JobRow] = field(default_factory=list, init=False)
    """Jobs that failed in an earlier start, and are left so."""

    def __post_init__(self) -> None:
        """Connect the stop request to the workers."""
        self.token = secrets.token_hex(6)
        """Names this process in the records of its jobs and in its stop file."""
        self._open: list[_OpenLaunch] = []
        """The launches that have not ended."""
        self._launches = 0
        """Number of launches so far, for the names of their files."""
        self._unbegun = 0
        """Launches in a row that ended before any of their jobs began."""
        self._said_stop = False
        """Whether the stop was announced."""
        self._signalled = False
        """Whether the workers got a SIGTERM, because the stop file could not be made."""
        self._killed = False
        """Whether overdue jobs were killed."""
        self.stop.groups = self.workers.pids
        self.stop.at_work = self._unsaved_jobs

    # The job table
    # ----------------------------------------------------------------------------------------------

    def add(self, jobs: Iterable[Job]) -> None:
        """Add new jobs to the job table, with the states recorded in their files.

        A job that failed in an earlier start runs again if `retry_failed` is set; else it goes to
        `failed_before`. The end of a job of an earlier start is not printed.
        """
        for job in jobs:
            if job.name in self.job_table.rows:
                continue
            row = JobRow(job, self.sweep.state(job.name), self.sweep.read_record(job.name))
            self.job_table.rows[job.name] = row
            if row.state.status == "failed" and self.options.retry_failed:
                row.retry = row.record.attempts  # until it has begun once more
            elif row.state.ended:
                row.is_reported = True
                if row.state.status == "failed":
                    self.failed_before.append(row)
            row.is_pruned = row.record.stopped_at is not None and not row.state.ended

    def refresh(self, jobs: Iterable[Job]) -> None:
        """Read the states of jobs, print newly begun and ended ones, and rewrite `sweep.json`.

        A job counts as running if its record names a sweep process, and a launch of this process
        has it or another process holds its lock. Jobs whose end was printed are not read again.
        """
        names_at_work = self._at_work
        for row in map(self.job_table.row, jobs):
            name = row.job.name
            if row.is_reported:
                continue
            row.record = self.sweep.read_record(name)
            row.state = self.sweep.state(name)
            was_running = row.running
            # A record still names the sweep process of a worker that was killed: look for a launch
            # of ours with the job, or for a process that holds its lock.
            is_ours = row.record.open == self.token and name in names_at_work
            row.running = row.record.open is not None and (is_ours or self.sweep.is_running(name))
            if row.running and not was_running:
                self.view.begun(row, self.job_table)
            # Until the retry begins, its attempts are those of the failure.
            waits_for_retry = row.retry == row.record.attempts
            if row.state.ended and not row.running and not waits_for_retry:
                row.is_reported = True
                self.view.ended(row, self.job_table, str(self.sweep.run_dir(name).log))
                self.write_result()
        self.view.update(self.job_table)

    def _may_run(self, planned_job: PlannedJob) -> bool:
        """Tell whether a job is short of its planned step, and may run again in this start.

        It may not if it finished or ran out of its `training.max_seconds`. A job that failed may
        only run for a retry, once. A job that runs already may run, too: callers leave it out.
        """
        row = self.job_table.row(planned_job.job)
        record = self.sweep.read_record(planned_job.job.name)
        if row.state.status == "finished" or row.out_of_time:
            return False
        if row.state.status == "failed":
            # `row.retry` holds the attempts that the job had when it failed; None: no retry. Each
            # start of the job adds one to `record.attempts`: if they are equal, it was not retried.
            return row.retry == record.attempts
        if planned_job.stop_at is None:
            return True  # to its end, and it has not ended
        # `record.rungs` holds each step at which the job has stopped. The steps are keys of JSON,
        # so they are texts.
        return str(planned_job.stop_at) not in record.rungs

    def is_unfinished(self, planned_job: PlannedJob) -> bool:
        """Tell whether a job may run, or has only run out of its `training.max_seconds`."""
        return self.job_table.row(planned_job.job).out_of_time or self._may_run(planned_job)

    # Launches
    # ----------------------------------------------------------------------------------------------

    def run_unfinished_jobs(self, plan: Callable[[], Sequence[PlannedJob]]) -> None:
        """Run jobs until all have reached their planned steps, or a stop is requested.

        After a stop request, wait until running jobs have saved and ended, and start no more.

        Args:
            plan: Returns the jobs to run next, which `add` must know. It is called again after each
                launch, and when all its jobs are done, until it returns only jobs that are done.

        Raises:
            OptrunError: The launcher itself fails.
        """
        # Each round ends in one of five ways: leave after a stop request, wait for jobs to stop,
        # return because all is done, start one more launch, or wait for the running ones.
        planned_jobs = plan()
        while True:
            # 1. Take note of what has ended, and ask for the next jobs.
            launch_ended = self._finish_ended_launches()
            self.refresh(job for job, _ in planned_jobs)
            all_done = not any(map(self._may_run, planned_jobs))
            if not self.stop.requested and (launch_ended or all_done):
                planned_jobs = plan()
                all_done = not any(map(self._may_run, planned_jobs))
            # A planned job goes on, even if an earlier trial with the same job was pruned.
            for job, _ in planned_jobs:
                self.job_table.row(job).is_pruned = False
            # 2. Wait for the running jobs, leave, or start a launch.
            if self.stop.requested:
                self._announce_stop()
                if not self._open or self._kill_overdue_jobs():
                    break  # no job runs any more, or even killing has not ended them
                self._ask_to_stop()
            elif all_done and not self._open:
                return
            elif self._start_launch(planned_jobs):
                continue  # there may be devices for another one
            else:
                self.workers.end_idle()  # a waiting job may need their devices
            time.sleep(_POLL_SECONDS)
        self.refresh(job for job, _ in planned_jobs)

    def _finish_ended_launches(self) -> bool:
        """Call `_finish_launch` for each launch that has ended; tell whether there was one."""
        has_ended = False
        for launch in list(self._open):
            code = launch.process.code()
            if code is not None:
                self._finish_launch(launch, code)
                has_ended = True
        return has_ended

    def _ask_to_stop(self) -> None:
        """Ask running jobs to save and end, by a stop file; by one SIGTERM if it cannot be made."""
        try:
            self.sweep.stop_file(self.token).touch()
        except OSError:
            if self._signalled:
                return
            self._signalled = True
            for group in self.workers.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGTERM)

    def _kill_overdue_jobs(self) -> bool:
        """Kill jobs still running 300 s after `hydra.sweeper.timeout`; note the first time.

        Returns:
            Whether to stop waiting for them: 30 s later even killing has not ended them.
        """
        seconds_until_kill = self.stop.patience  # None: there is no timeout
        if seconds_until_kill is None or seconds_until_kill > 0:
            return False
        # 1. Name the jobs, once.
        if not self._killed:
            at_work = (row.job for launch in self._open for row in launch.batch)
            running = [job.label for job in at_work if self.sweep.is_running(job.name)]
            slow = ", ".join(running) or "a process"
            self.view.note(
                f"{slow}: not stopped {duration(GRACE_SECONDS)} after"
                " hydra.sweeper.timeout was up; killed"
            )
        self._killed = True
        # 2. Kill them, again at each call: a dying job may have started another process.
        for pid in self.workers.pids():
            kill_process_tree(pid)
        return seconds_until_kill < -_GIVE_UP_SECONDS

    def _unsaved_jobs(self) -> list[str]:
        """List the jobs of our launches with unsaved steps: those still training.

        A job that has saved for the last time, and may still draw curves, is left out.
        """
        return [
            name
            for name in self._at_work
            if self.sweep.is_running(name) and self.sweep.state(name).status == "running"
        ]

    def _announce_stop(self) -> None:
        """Print, at the first call only, that running jobs save and end after their step."""
        if self._said_stop:
            return
        self._said_stop = True
        unsaved = len(self._unsaved_jobs())
        if unsaved == 1:
            jobs = ": the running job saves and ends after this step"
        elif unsaved > 1:
            jobs = f": {unsaved} running jobs save and end after this step"
        else:
            jobs = ""
        self.view.note(f"{self.stop.why}{jobs}; a second Ctrl-C ends all at once")

    @property
    def _at_work(self) -> set[str]:
        """Names of the jobs in our open launches."""
        return {row.job.name for launch in self._open for row in launch.batch}

    def _start_launch(self, planned_jobs: Sequence[PlannedJob]) -> bool:
        """Start one launch if a job is waiting and its devices are free; tell whether it did."""
        at_work = self._at_work  # names of jobs in open launches
        for batch in self._choose_batches(planned_jobs, at_work):
            count = max(self.workers.devices_of(job.values) for job, _ in batch)
            # None: too few devices are free for this batch; another one may need fewer.
            process = self.workers.take_or_start(count, busy=self._devices_of_others(at_work))
            if process is not None:
                self._send_jobs(process, batch)
                return True
        return False

    def _devices_of_others(self, at_work: set[str]) -> set[str]:
        """Collect the devices of running jobs of other sweep processes.

        Workers of a killed sweep still use them while they save.
        """
        devices: set[str] = set()
        for row in self.job_table.running:
            if row.job.name not in at_work:
                devices.update(row.record.devices)
        return devices

    def _choose_batches(
        self, planned_jobs: Sequence[PlannedJob], at_work: set[str]
    ) -> Iterator[Sequence[PlannedJob]]:
        """Yield the batches of jobs to launch now; each batch is one launch.

        Jobs that run, here or in another process, and jobs that may not run are left out. The
        first case that applies:

        1. Workers on devices run one job each: every job is a batch, in the order given.
        2. Without devices one launch runs at a time: nothing before it has ended.
        3. If the worker of a job died, the first such job is a batch alone, so that it cannot end
           others with it.
        4. Else the batch is the first `max_batch_size` jobs. Two trials may share one job: it is in
           the batch once, with the step of the later trial.
        """
        waiting = (
            planned_job
            for planned_job in planned_jobs
            if planned_job.job.name not in at_work
            and self._may_run(planned_job)
            and not self.sweep.is_running(planned_job.job.name)
        )
        # 1. One job for each worker.
        if self.workers.has_devices:
            yield from ([planned_job] for planned_job in waiting)
            return
        # 2. One launch at a time.
        if self._open:
            return
        by_name = {planned_job.job.name: planned_job for planned_job in waiting}
        distinct_jobs = list(by_name.values())
        # 3. A job whose worker died.
        for planned_job in distinct_jobs:
            if self.job_table.row(planned_job.job).worker_died:
                yield [planned_job]
                return
        # 4. As many as fit into a launch.
        if distinct_jobs:
            yield distinct_jobs[: self.options.max_batch_size]

    def _read_progress(self, row: JobRow) -> tuple[object, ...]:
        """Return values of a job that change once a worker begins, continues or ends it."""
        record = self.sweep.read_record(row.job.name)
        state = self.sweep.state(row.job.name)
        return (
            record.attempts,
            state.status,
            state.step,
            len(record.rungs),
            self.sweep.is_running(row.job.name),
        )

    def _send_jobs(
        self, process: launching.LaunchProcess, planned_jobs: Sequence[PlannedJob]
    ) -> None:
        """Write the jobs of a launch to a JSON file, and send its path to a process.

        The launch is open from then on.
        """
        self._launches += 1
        batch = [self.job_table.row(planned_job.job) for planned_job in planned_jobs]
        spec = self.sweep.spec_file(f"{self.token}-{self._launches}")
        launch = Launch(
            folder=str(self.sweep.path.resolve()),
            token=self.token,
            command=self.command,
            jobs={row.job.name: list(row.job.overrides) for row in batch},
            stop_at={job.name: stop_at for job, stop_at in planned_jobs if stop_at is not None},
            retry={row.job.name: row.retry for row in batch if row.retry is not None},
            devices=process.devices,
        )
        spec.write_text(json.dumps(asdict(launch)), encoding="utf-8")
        self._open.append(_OpenLaunch(process, batch, spec, list(map(self._read_progress, batch))))
        process.send(spec)

    def _finish_launch(self, launch: _OpenLaunch, code: int) -> None:
        """Close an ended launch: read its result, handle its jobs, and give its process back.

        A launch on devices that failed before any job began takes these devices out of the sweep.

        Args:
            launch: The launch.
            code: Its exit code; negative: the signal that ended its process.

        Raises:
            OptrunError: The launcher failed before any job began, and has no devices of its own; or
                three launches in a row ended without a job begun.
        """
        # 1. Why it ended; a full disk stops the sweep. The reason is empty if all went well. The
        # error is what the launcher itself reported, empty without one.
        self._open.remove(launch)
        reported_error = _pop_reported_error(launch.spec)
        reason = reported_error or _explain_exit(code)
        if code == EXIT_STORAGE and not self.stop.requested:
            self.stop.refused = reported_error or "the disk refused."
        # 2. Its jobs: what died is tried again. `_unbegun` counts launches in a row without a begun
        # job, by the values of `_read_progress` before and after.
        self._handle_jobs_without_result(launch.batch, reason)
        has_begun = launch.progress_before != list(map(self._read_progress, launch.batch))
        self._unbegun = 0 if has_begun else self._unbegun + 1
        # 3. Its process: one in which a job failed is retired, so that a new one takes its devices.
        # `broken`: no job could start on these devices, so the sweep uses them no more.
        failed_to_start = bool(reported_error) and not has_begun
        devices = ",".join(launch.process.devices)
        self.workers.give_back(
            launch.process,
            retire=any(self.sweep.state(row.job.name).status == "failed" for row in launch.batch),
            broken=failed_to_start,
        )
        # 4. Give up if the launcher does not work.
        if self.stop.requested:
            return
        if reason and not has_begun and not devices:
            raise OptrunError(
                f"the launcher failed before any job began: {reason} See {self.sweep.log}."
            )
        if failed_to_start:
            self.view.note(f"device {devices} is not used any more: {reason}")
        elif self._unbegun >= _IDLE_LAUNCHES:
            raise OptrunError(
                f"the launcher ended {self._unbegun} times before any job began. {reason} See"
                f" {self.sweep.log}."
            )

    def _handle_jobs_without_result(self, batch: Sequence[JobRow], reason: str) -> None:
        """Mark the jobs of an ended launch that have no result: their worker or their time is gone.

        A job whose worker died while it ran is tried once more, see `_retry_alone`. A job that used
        up its `training.max_seconds` gets `out_of_time`. Does nothing after a stop request. A job
        that another process holds is left to it.

        Args:
            batch: The jobs of the launch.
            reason: How the launch ended, for the message of a job whose worker died.
        """
        if self.stop.requested:
            return
        for row in batch:
            try:
                with self.sweep.locked_record(row.job.name) as record:
                    row.state = self.sweep.state(row.job.name)
                    # A worker that lives to the end of a job takes the token of the sweep process
                    # out of the record. It is still there: the worker died.
                    if record.open == self.token:
                        record.open = None
                        self.sweep.write_record(row.job.name, record)
                        self._retry_alone(row, was_alone=len(batch) == 1, reason=reason)
                    elif row.state.status == "interrupted" and "time budget" in row.state.message:
                        # The message of a run that used up `training.max_seconds`.
                        row.out_of_time = True
            except LockedError:
                continue  # still running, in another process

    def _retry_alone(self, row: JobRow, *, was_alone: bool, reason: str) -> None:
        """Give a job one more try after its worker died, alone in a launch; then fail it.

        Args:
            row: The job; nothing happens if it has ended.
            was_alone: Whether it was the only job of its launch.
            reason: How the launch ended, for the message.
        """
        from optrun.sweeper.worker import write_failure

        if row.state.ended:
            return
        job = row.job
        # The metrics may be a second ahead of the summary.
        step = max(row.state.step, self.sweep.steps_done(job.name))
        # 1. It died in its second try, when it was alone: it is to blame, and fails.
        if was_alone and row.worker_died:
            row.worker_died = False
            failure = (
                f"the process of this job died twice, last after step {step}:"
                f" {reason or 'no reason given.'} Was it killed for its memory? Try a smaller"
                " training.per_device_train_batch_size with more"
                " training.gradient_accumulation_steps."
            )
            write_failure(self.sweep, job.name, failure, job.values, job.overrides, self.command)
            return
        # 2. It died for the first time, perhaps with another job: `_choose_batches` runs it alone.
        row.worker_died = True
        self.view.note(
            f"the worker of {job.label} died after step {step}; the job runs once more, alone"
        )

    def prune(self, jobs: Iterable[Job], rung: int) -> None:
        """Mark the unfinished jobs of a pruned trial as stopped at a rung, in table and record.

        A job that another sweep process is running stays unmarked.

        Args:
            jobs: The jobs of the trial.
            rung: Optimizer steps at which it is pruned.
        """
        for row in map(self.job_table.row, jobs):
            if row.state.ended or row.is_pruned:
                continue
            try:
                with self.sweep.locked_record(row.job.name) as record:
                    record.stopped_at = rung
                    self.sweep.write_record(row.job.name, record)
            except LockedError:
                continue
            row.is_pruned = True
            self.view.note(f"pruned at step {rung}: {row.job.label}")
            self.write_result()

    def close(self) -> None:
        """Ask running jobs to save and end, and wait for the processes of all launches.

        The stop file is deleted, but not after a stop request: the queue of a cluster may still
        hold jobs, which look for it when they start.
        """
        self._ask_to_stop()
        self.workers.close(self.stop.patience)
        if not self.stop.requested:
            self.sweep.stop_file(self.token).unlink(missing_ok=True)

    # How it ended
    # ----------------------------------------------------------------------------------------------

    def exit_code(self) -> int:
        """Return the exit code of the sweep, by the first case that applies.

        74: the disk refused a write. 75: the sweep stopped, or a job has not ended; the same
        command continues it. 1: some jobs failed. 0: all jobs finished or were pruned.
        """
        states = [row.state for row in self.job_table.rows.values() if not row.is_pruned]
        if self.stop.refused:
            return EXIT_STORAGE
        if self.stop.requested or any(not state.ended for state in states):
            return EXIT_STOPPED_EARLY
        if any(state.status == "failed" for state in states):
            return EXIT_FAILED
        return EXIT_DONE

    def write_result(self) -> None:
        """Write the searched keys, the command line and the state of every job to `sweep.json`."""
        rows: list[dict[str, object]] = [
            {
                "name": row.job.name,
                "config_digest": row.job.digest,
                "overrides": list(row.job.overrides),
                "status": "stopped at a rung" if row.is_pruned else row.state.status,
                "global_step": row.state.step,
                "max_steps": row.state.total,
                "metric": row.state.metric,
                "best": row.state.best,
                "message": row.state.message,
                "devices": row.record.devices,
                "log": f"{row.job.name}/{self.sweep.run_dir(row.job.name).log.name}",
            }
            for row in self.job_table.rows.values()
        ]
        # The report of an unfinished sweep proposes the command again, with its own folder.
        words = [word for word in self.command.argv if not word.startswith("hydra.sweep.dir=")]
        result = {"format": 1, "tuned": [*self.tuned], "command": words, "jobs": rows}
        replace_text(
            self.sweep.result, json.dumps(to_json(result), indent=2, ensure_ascii=False) + "\n"
        )
