"""The process that keeps a sweep together: it launches what is missing, watches, and starts again what was cut."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
from optrun.base.reading import read_text
from optrun.config.schema.sweeper import SweeperConfig
from optrun.sweeper import launch as launching
from optrun.sweeper.command import SweepCommand
from optrun.sweeper.folder import JobState, SweepDir
from optrun.sweeper.jobs import Job
from optrun.sweeper.objectives import objectives_of
from optrun.sweeper.result import write_result
from optrun.sweeper.stall import StallWatch, end_holder
from optrun.sweeper.stop import GRACE_SECONDS, Stop, end_family
from optrun.sweeper.view import Board, PlainView
from optrun.sweeper.workers import Workers

_POLL_SECONDS = 0.2
_IDLE_LAUNCHES = 3
_GIVE_UP_SECONDS = 30.0
"""A process that is killed and does not end waits for a disk or a device; it is left behind."""


class Goal(NamedTuple):
    """How far a job is to get."""

    job: Job
    stop_at: int | None = None
    """Optimizer steps; None: its end."""


@dataclass(frozen=True)
class _OpenLaunch:
    server: launching.Server
    batch: Sequence[Job]
    spec: Path
    before: list[tuple[object, ...]]
    """Where its jobs stood."""

    @property
    def names(self) -> list[str]:
        return [job.name for job in self.batch]


class Driver:
    """Brings jobs to their end, or to a rung.

    Args:
        sweep: The sweep directory.
        command: What started the sweep.
        options: Of the sweeper.
        workers: The processes that launchers run in.
        view: Shows progress.
        stop: Requests by signal.
        sleep: Waits that many seconds.
        tuned: Keys that the report takes for tuned, whatever they are.
    """

    def __init__(
        self,
        sweep: SweepDir,
        command: SweepCommand,
        options: SweeperConfig,
        workers: Workers,
        view: PlainView,
        stop: Stop,
        sleep: Callable[[float], None] = time.sleep,
        tuned: Sequence[str] = (),
    ) -> None:
        self.sweep = sweep
        self.command = command
        self.options = options
        self.workers = workers
        self.view = view
        self.stop = stop
        self.sleep = sleep
        self.tuned = tuned
        self.board = Board()
        self.token = secrets.token_hex(6)
        self._open: list[_OpenLaunch] = []
        self._launches = 0
        self._unbegun = 0
        """Launches in a row that came back without a job begun."""
        self._waits = False
        stop.groups = workers.pids
        stop.at_work = self._unsaved
        self._told_of_stop = False
        self._signalled = False
        self._killed = False
        self._watch = StallWatch(sweep, options.stall_seconds, stop.clock)
        self.failed_before: list[Job] = []
        """Jobs that failed in an earlier start, and are left so."""
        self._retry: dict[str, int] = {}
        self._suspects: list[str] = []
        self._stalled: set[str] = set()
        """Jobs that were killed for want of progress, and whose launch has not come back yet."""
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
            self.board.devices[job.name] = record.devices
            if state.status == "failed" and self.options.retry_failed:
                self._retry[job.name] = record.attempts
            elif state.ended:
                self._announced.add(job.name)
                self.failed_before += [job] if state.status == "failed" else []
            if record.stopped_at is not None and not state.ended:
                self.board.resting.add(job.name)

    def refresh(self, jobs: Iterable[Job] | None = None) -> None:
        """Read where the jobs stand, and show those that ended."""
        at_work = self._at_work
        for job in self.board.jobs if jobs is None else jobs:
            name = job.name
            if name in self._announced:
                continue
            record = self.sweep.read_record(name)
            state = self.board.states[name] = self.sweep.state(name)
            ours = record.open == self.token and name in at_work
            running = record.open is not None and (ours or self.sweep.held(name))
            self.board.devices[name] = record.devices
            (self.board.running.add if running else self.board.running.discard)(name)
            if state.ended and not running and self._retry.get(name) != record.attempts:
                self._announced.add(name)
                self.view.ended(job, state, self.board, str(self.sweep.run(name).log))
                self.write_result()
        self.view.update(self.board)

    def _wanted(self, goal: Goal) -> bool:
        """Whether a job is to be worked on in this start, to get where it is wanted."""
        job, stop_at = goal
        state = self.board.states[job.name]
        record = self.sweep.read_record(job.name)
        if state.status == "finished" or job.name in self.out_of_time:
            return False
        if state.status == "failed":
            return self._retry.get(job.name) == record.attempts
        return stop_at is None or str(stop_at) not in record.rungs

    def is_short_of(self, goal: Goal) -> bool:
        """Whether a job is still to get where it is wanted, in this start or, if its time is up, in the next one."""
        return goal.job.name in self.out_of_time or self._wanted(goal)

    # What is done ---------------------------------------------------------------------------------------------------

    def advance(self, jobs: Sequence[Job], stop_at: int | None = None) -> None:
        """Bring jobs to their end or to a rung, whoever does the work; a failed job has got as far as it will.

        Args:
            jobs: Known to the sweep by `add`.
            stop_at: Optimizer steps; None: the end.

        Raises:
            OptrunError: The launcher itself fails.
        """
        goals = [Goal(job, stop_at) for job in jobs]
        self.pursue(lambda: goals)

    def pursue(self, plan: Callable[[], Sequence[Goal]]) -> None:
        """Bring jobs to where a plan wants them; it is asked again whenever a launch has ended, until nothing is left.

        Args:
            plan: Of jobs known to the sweep by `add`.

        Raises:
            OptrunError: The launcher itself fails.
        """
        goals = plan()
        while True:
            landed = [(launch, code) for launch in self._open if (code := launch.server.code()) is not None]
            for launch, code in landed:
                self._land(launch, code)
            if not self.stop.requested and (landed or not any(map(self._wanted, goals))):
                goals = plan()
            for job, _ in goals:
                self.board.resting.discard(job.name)
            self.refresh(job for job, _ in goals)
            self._end_stalled()
            if self.stop.requested:
                self._tell_of_stop()
                if not self._open or self._is_given_up():
                    break
                self._ask_to_stop()
            elif not self._open and not any(map(self._wanted, goals)):
                self.workers.stop_waiting()
                return
            elif self._start(goals):
                continue
            else:
                self.workers.tidy()
            self.sleep(_POLL_SECONDS)
        self.refresh(job for job, _ in goals)

    def _ask_to_stop(self) -> None:
        """Let jobs at work save and end: by a file that they look for, or by a signal if the disk takes none."""
        try:
            self.sweep.stop(self.token).touch()
        except OSError:
            for group in self.workers.pids() if not self._signalled else ():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGTERM)
            self._signalled = True

    def _is_given_up(self) -> bool:
        """Kill the jobs that have not stopped long after the limit of time; whether even that did not end them."""
        patience = self.stop.patience
        if patience is None or patience > 0:
            return False
        if not self._killed:
            slow = ", ".join(job.label for launch in self._open for job in launch.batch if self.sweep.held(job.name))
            self.view.note(f"{slow}: not stopped {duration(GRACE_SECONDS)} after hydra.sweeper.timeout was up; killed")
        self._killed = True
        for pid in self.workers.pids():
            end_family(pid)
        return patience < -_GIVE_UP_SECONDS

    def _end_stalled(self) -> None:
        """Kill jobs of this sweep process that have made no progress for too long."""
        for server, job in [(launch.server, job) for launch in self._open for job in launch.batch]:
            if job.name not in self.board.running or self.sweep.read_record(job.name).open != self.token:
                self._watch.forget(job.name)
            elif silent := self._watch(job.name):
                self._watch.forget(job.name)
                elsewhere = end_holder(self.sweep.lock(job.name), server.pid)
                if elsewhere:
                    self.view.note(f"{job.label}: made no progress for {duration(silent)}; {elsewhere}: end it there")
                else:
                    self._stalled.add(job.name)
                    self.board.stalled[job.name] = silent

    def _unsaved(self) -> list[str]:
        """Jobs that a process of this sweep trains right now; one that saved itself may still draw its curves."""
        held = [name for launch in self._open for name in launch.names if self.sweep.held(name)]
        return [name for name in held if self.sweep.state(name).status == "running"]

    def _tell_of_stop(self) -> None:
        """Answer the first request to stop at once: what follows takes as long as a step and a save."""
        if self._told_of_stop:
            return
        self._told_of_stop = True
        held = len(self._unsaved())
        jobs = "the job at work saves and ends" if held == 1 else f"{held} jobs at work save and end"
        self.view.note(
            f"{self.stop.why}{f': {jobs} after this step' if held else ''}; a second Ctrl-C ends all at once"
        )

    @property
    def _at_work(self) -> set[str]:
        """Names of the jobs that were handed to a process of this sweep."""
        return {name for launch in self._open for name in launch.names}

    def _start(self, goals: Sequence[Goal]) -> bool:
        """Start a launch if there is a job for one, and a process with the devices that the job takes."""
        missing: int | None = None
        for batch in self._batches(goals, self._at_work):
            devices = max(self.workers.devices_of(job.values) for job, _ in batch)
            if missing is not None and devices >= missing:
                continue
            server = self.workers.take(devices, wait=not self._open)
            if server is not None:
                self._waits = False
                self._send(server, batch)
                return True
            missing = devices
            if missing <= 1:
                break
        if missing is None:
            self.workers.stop_waiting()
        elif not self._open and not self._waits and (holders := self.workers.holders):
            self._waits = True  # said once
            self.view.note(f"waiting for devices in use by others: {holders}")
        return False

    def _batches(self, goals: Sequence[Goal], at_work: set[str]) -> Iterator[Sequence[Goal]]:
        """Jobs of one launch each; those that other processes hold may be left behind, so they are looked at again."""
        free = (
            goal
            for goal in goals
            if goal.job.name not in at_work and self._wanted(goal) and not self.sweep.held(goal.job.name)
        )
        if self.workers.one_job_each:
            yield from ([goal] for goal in free)
        elif not self._open:
            found = list({goal.job.name: goal for goal in free}.values())  # two trials may be one job
            suspects = [goal for goal in found if goal.job.name in self._suspects]
            if found:
                yield suspects[:1] or found[: self.options.max_batch_size]

    def _mark(self, job: Job) -> tuple[object, ...]:
        record, state = self.sweep.read_record(job.name), self.sweep.state(job.name)
        return record.attempts, state.status, state.step, len(record.rungs), self.sweep.held(job.name)

    def _send(self, server: launching.Server, goals: Sequence[Goal]) -> None:
        """Begin a launch in a process."""
        self._launches += 1
        batch = [goal.job for goal in goals]
        spec = self.sweep.spec(f"{self.token}-{self._launches}")
        launch = launching.Launch(
            folder=str(self.sweep.path.resolve()),
            token=self.token,
            command=self.command,
            names=[job.name for job in batch],
            overrides=[list(job.overrides) for job in batch],
            stop_at={job.name: stop_at for job, stop_at in goals if stop_at is not None},
            retry=self._retry,
            devices=server.lease.visible if server.lease else [],
        )
        launching.write_spec(spec, launch)
        self._open.append(_OpenLaunch(server, batch, spec, [self._mark(job) for job in batch]))
        server.send(spec)

    def _land(self, launch: _OpenLaunch, code: int) -> None:
        """Take note of how a launch ended.

        Raises:
            OptrunError: The launcher itself fails.
        """
        self._open.remove(launch)
        launch.spec.unlink(missing_ok=True)
        why, error = "", launching.error_file(launch.spec)
        refused = error.is_file()
        if refused:
            why = read_text(error).strip().splitlines()[0]
            error.unlink()
        elif code:
            end = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            why = f"its process {end}."
        if code == EXIT_STORAGE and not self.stop.requested:
            self.stop.refused = why if refused else "the disk refused."
        self._account(launch.batch, why)
        begun = launch.before != [self._mark(job) for job in launch.batch]
        self._unbegun = 0 if begun else self._unbegun + 1
        pinned = launch.server.lease
        self.workers.give_back(
            launch.server,
            fresh=any(self.sweep.state(name).status == "failed" for name in launch.names),
            broken=refused and not begun,
        )
        if self.stop.requested:
            return
        if why and not begun and pinned is None:
            raise OptrunError(f"the launcher failed before any job began: {why} See {self.sweep.log}.")
        if refused and not begun and pinned is not None:
            self.view.note(f"device {','.join(pinned.visible)} is left out: {why}")
        elif self._unbegun >= _IDLE_LAUNCHES:
            raise OptrunError(
                f"the launcher came back {self._unbegun} times without a job begun. {why} See {self.sweep.log}."
            )

    def _account(self, batch: Sequence[Job], why: str) -> None:
        """Find jobs whose worker died, and jobs that stopped because their time was up."""
        if self.stop.requested:
            return
        stalled = self._stalled & {job.name for job in batch}
        self._stalled -= stalled
        for job in batch:
            try:
                with self.sweep.working_on(job.name) as record:
                    died = record.open == self.token
                    state = self.sweep.state(job.name)
                    if died:
                        record.open = None
                        self.sweep.write_record(job.name, record)
                        if not stalled or job.name in stalled:  # else it was killed together with those that stalled
                            self._suspect(job, state, alone=len(batch) == 1, why=why, stalled=bool(stalled))
                    elif state.status == "interrupted" and "time budget" in state.message:
                        self.out_of_time.add(job.name)
            except LockedError:
                continue  # at work still, in a process of its own

    def _suspect(self, job: Job, state: JobState, *, alone: bool, why: str, stalled: bool) -> None:
        """A worker died, or was killed: the job is tried once more, alone; if that ends so, too, it is its result."""
        from optrun.sweeper.worker import record_failure

        if state.ended:
            return
        step = max(state.step, self.sweep.steps_done(job.name))  # the summary may be a second behind
        if stalled:
            end = f"made no progress for {duration(self.board.stalled[job.name])} after step {step}, and was killed"
            told = f"{job.label}: {end}"
            failure = f"{end}, when it was tried once more. hydra.sweeper.stall_seconds=SECONDS gives it longer."
        else:
            told = f"the worker of {job.label} died after step {step}"
            failure = (
                f"the process of this job died twice, last after step {step}: {why or 'no reason given.'} Killed for "
                "memory? Try a smaller training.per_device_train_batch_size with more "
                "training.gradient_accumulation_steps."
            )
        if alone and job.name in self._suspects:
            self._suspects.remove(job.name)
            record_failure(self.sweep, job.name, failure, job.values, job.overrides, self.command)
            return
        if job.name not in self._suspects:
            self._suspects.append(job.name)
        self.view.note(f"{told}; tried once more, alone")

    def stop_at_rung(self, jobs: Iterable[Job], rung: int, why: str) -> None:
        """Stop what has not ended of some jobs at a rung; one that later survives there goes on from its checkpoint."""
        for job in jobs:
            if self.board.states[job.name].ended or job.name in self.board.resting:
                continue
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
        """Let the launching processes end; those that are at work still save their jobs first."""
        self._ask_to_stop()
        self.workers.close(self.stop.patience)
        if not self.stop.requested:  # else a queue may still hold jobs that look for it
            self.sweep.stop(self.token).unlink(missing_ok=True)

    # How it ended ---------------------------------------------------------------------------------------------------

    def exit_code(self) -> int:
        """0: all are finished or rest at a rung; 1: some failed; 74: the disk refused; 75: stopped, and saved."""
        states = [self.board.states[job.name] for job in self.board.jobs if job.name not in self.board.resting]
        if self.stop.refused:
            return EXIT_STORAGE
        if self.stop.requested or any(not state.ended for state in states):
            return EXIT_STOPPED_EARLY
        return EXIT_FAILED if any(state.status == "failed" for state in states) else EXIT_DONE

    def steps(self) -> tuple[int, int]:
        """Optimizer steps done, and those that all jobs would take to their end."""
        states = list(self.board.states.values())
        return sum(state.step for state in states), sum(state.total or state.step for state in states)

    def write_result(self) -> None:
        """Write `sweep.json` anew."""
        write_result(self.sweep, self.board, self.tuned, objectives_of(self.options.objectives))
