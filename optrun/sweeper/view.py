"""Show a sweep: a line when a job begins or ends, and on a terminal a live status of all jobs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from optrun.base.errors import printable
from optrun.base.formatting import duration
from optrun.sweeper.folder import JobState, Record
from optrun.sweeper.jobs import Job


@dataclass
class JobRow:
    """State of a job in this start of the sweep."""

    job: Job
    state: JobState
    record: Record = field(default_factory=Record)
    running: bool = False
    is_pruned: bool = False
    """Whether the pruner stopped it at a rung."""
    worker_died: bool = False
    """Whether its worker died, and it is tried once more, alone."""
    retry: int | None = None
    """The attempts it had when it failed, if it is to be tried again; None: it is not. Once the
    retry has begun, `record.attempts` is larger."""
    out_of_time: bool = False
    """Whether its `training.max_seconds` is spent; the next start goes on with it."""
    is_reported: bool = False
    """Whether its end was shown."""

    @property
    def left(self) -> bool:
        """Whether the job has neither ended nor stopped at a rung, and is not running."""
        return not (self.state.ended or self.running or self.is_pruned)

    @property
    def on_devices(self) -> str:
        """The CUDA devices that the job last had; empty if it was not pinned."""
        if self.record.devices:
            return f"on {','.join(self.record.devices)}"
        return ""


@dataclass
class JobTable:
    """States of all jobs of the sweep."""

    rows: dict[str, JobRow] = field(default_factory=dict)
    """All jobs that are known, by name."""
    expected: int = 0
    """Jobs in all, those not proposed yet among them."""

    def row(self, job: Job) -> JobRow:
        """Find the row of a job."""
        return self.rows[job.name]

    def count(self, *status: str) -> int:
        """Count the jobs with one of some statuses."""
        return sum(row.state.status in status for row in self.rows.values())

    @property
    def done(self) -> int:
        """Number of jobs that have ended or stopped at a rung."""
        return sum(row.state.ended or row.is_pruned for row in self.rows.values())

    @property
    def total(self) -> int:
        """Number of jobs."""
        return max(self.expected, len(self.rows))

    @property
    def left(self) -> int:
        """Number of jobs that have neither ended nor stopped at a rung, and are not running."""
        return self.total - len(self.rows) + sum(row.left for row in self.rows.values())

    @property
    def running(self) -> list[JobRow]:
        """Jobs that a process is running."""
        return [
            row
            for row in self.rows.values()
            if row.running and not (row.state.ended or row.is_pruned)
        ]

    def counts(self) -> str:
        """Write the number of jobs in each state as one line; each job counts once.

        Such as `2 of 8 finished · 1 running · 0 failed · 5 left (1 interrupted, 4 not started)`.
        """
        rows = self.rows.values()
        n_pruned = sum(row.is_pruned and not row.state.ended for row in rows)
        n_interrupted = sum(row.left and row.state.status != "new" for row in rows)
        n_left = self.left
        counts = [
            f"{self.count('finished')} of {self.total} finished",
            f"{len(self.running)} running",
            f"{self.count('failed')} failed",
        ]
        if n_pruned:
            counts.append(f"{n_pruned} stopped at a rung")
        details = ""
        if n_interrupted:
            details = f" ({n_interrupted} interrupted)"
            if n_left > n_interrupted:
                details = f" ({n_interrupted} interrupted, {n_left - n_interrupted} not started)"
        counts.append(f"{n_left} left{details}")
        return " · ".join(counts)

    def steps(self) -> tuple[int, int]:
        """Count the optimizer steps done, and the planned steps of all jobs."""
        states = [row.state for row in self.rows.values()]
        done = sum(state.step for state in states)
        return done, sum(state.total or state.step for state in states)

    def best_line(self) -> str:
        """Describe the job with the best metric, failed jobs aside; empty without a value."""
        best_value: float | None = None
        line = ""
        for row in self.rows.values():
            value = row.state.best
            if value is None or row.state.status == "failed":
                continue
            if best_value is None or row.state.better(value, best_value):
                best_value = value
                line = f"best {row.state.metric} {value:.5g}: {row.job.label}"
        return line


@dataclass
class Eta:
    """Estimates the time left from the durations of jobs in this start."""

    clock: Callable[[], float] = time.monotonic
    """Seconds, monotonic."""
    ended: int = 0

    def __post_init__(self) -> None:
        """Start the clock."""
        self.begun = self.clock()

    def __call__(self, job_table: JobTable) -> float | None:
        """Estimate the seconds left; None until a job has ended or one is half done.

        Before that, most of the time went into starting the jobs.
        """
        states = [row.state for row in job_table.running]
        shares = [min(1.0, state.step / state.total) for state in states if state.total]
        if not self.ended and max(shares, default=0) < 0.5:
            return None
        partial = sum(shares)
        seconds_per_job = (self.clock() - self.begun) / (self.ended + partial)
        return seconds_per_job * (job_table.left + len(job_table.running) - partial)


class View:
    """Prints one line per event, and a live status below them on a terminal.

    The status has the counts, the best job and the time left. Without it a line says which job
    begins.

    Args:
        console: Where lines are printed.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.eta = Eta()
        self._status = None
        if console.is_terminal and console.is_interactive:
            self._status = console.status("sweep")
            self._status.start()

    def note(self, text: str) -> None:
        """Print a note."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def begun(self, row: JobRow, job_table: JobTable) -> None:
        """Print which job begins, unless a live status counts it."""
        if self._status is None:
            self.note(event_line(row, job_table, self.eta(job_table), ""))

    def ended(self, row: JobRow, job_table: JobTable, log: str) -> None:
        """Print how a job ended."""
        self.eta.ended += 1
        self.note(event_line(row, job_table, self.eta(job_table), log))

    def update(self, job_table: JobTable) -> None:
        """Show the states of all jobs on a terminal."""
        if self._status is not None:
            seconds_left = self.eta(job_table)
            to_go = "" if seconds_left is None else f"{duration(seconds_left)} to go"
            pieces = [job_table.counts(), job_table.best_line(), to_go]
            self._status.update(Text(printable(" · ".join(filter(None, pieces)))))

    def stop(self) -> None:
        """Remove the live display; printed lines stay."""
        if self._status is not None:
            self._status.stop()


def event_line(row: JobRow, job_table: JobTable, seconds_left: float | None, log: str) -> str:
    """Write the beginning or the end of a job as one line.

    Such as `[3/8] finished    lr=2e-3  best eval/loss 2.5  step 600  41.4 s  5 to go, 3 min`: its
    number, status and label; of a failed job the message and its log, else the best value with step
    and time; the devices; and how many jobs are left.

    Args:
        row: The job.
        job_table: All jobs.
        seconds_left: Estimate for the jobs left; None: unknown.
        log: Path of the job's log.
    """
    state = row.state
    to_go = job_table.left + len(job_table.running)
    total = str(job_table.total)
    status = "running" if row.running else state.status
    pieces = [f"[{job_table.done:>{len(total)}}/{total}] {status:<11} {row.job.label}"]
    if status == "failed":
        pieces.append(f"{short(state.message)}  ({log})")
    elif state.best is not None:
        pieces.append(
            f"best {state.metric} {state.best:.5g}  step {state.step:,}  {duration(state.seconds)}"
        )
    if row.on_devices:
        pieces.append(row.on_devices)
    if to_go:
        estimate = "" if seconds_left is None else f", {duration(seconds_left)}"
        pieces.append(f"{to_go} to go{estimate}")
    return "  ".join(pieces)


def short(message: str, limit: int = 160) -> str:
    """Cut a message to its first sentences, or else to `limit` characters.

    Example:
        >>> short("step 2: loss nan. Try a smaller lr.", 20)
        'step 2: loss nan.'
    """
    if len(message) <= limit:
        return message
    cut = message[:limit].rfind(". ")
    if cut > 0:
        return message[: cut + 1]
    return message[: limit - 3] + "..."
