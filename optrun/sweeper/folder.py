"""The files of a sweep directory, and the states of its jobs in them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.lock import RunLock, is_held
from optrun.artifacts.metrics import (
    MetricsLog,
    from_json,
    read_metrics,
    read_summary,
    to_json,
    try_read_summary,
)
from optrun.artifacts.objective import is_better
from optrun.artifacts.run_dir import SWEEP, RunDir
from optrun.base.errors import EXIT_NONFINITE, ConfigError, OptrunError
from optrun.base.plain import PlainDict, lookup
from optrun.base.reading import read_json


@dataclass
class Record:
    """Attempts and rungs of a job, kept beside its run directory.

    A rung is a step at which the jobs of a search stop, so that the pruner can compare trials.
    """

    attempts: int = 0
    """How often a worker began or continued it."""
    open: str | None = None
    """Token of the sweep process whose worker runs it; None: no worker runs it, or died in it."""
    rungs: dict[str, float | None] = field(default_factory=dict)
    """Step of a rung that it has reached -> its best value until then, see `SweepDir.best_until`.
    """
    stopped_at: int | None = None
    """The rung at which its trial was pruned."""
    devices: list[str] = field(default_factory=list)
    """CUDA devices of its last attempt, as `CUDA_VISIBLE_DEVICES` names them; empty: not pinned."""


@dataclass
class JobState:
    """State of a job, as its files record it."""

    status: str
    """new, running, interrupted, finished or failed."""
    step: int = 0
    """Optimizer steps done."""
    total: int | None = None
    """Planned optimizer steps; None: not known yet."""
    metric: str | None = None
    """Name of its main metric."""
    mode: str = "min"
    """One of `min` and `max`."""
    best: float | None = None
    """Best value of its main metric."""
    message: str = ""
    """Why it ended; empty if nothing is to be said."""
    seconds: float = 0.0
    """Wall time."""
    exit_code: int | None = None
    """Of the run, once it has ended."""

    @property
    def diverged(self) -> bool:
        """Whether loss, gradient or weights became NaN or inf, and the policy ended the run."""
        return self.status == "failed" and self.exit_code == EXIT_NONFINITE

    @property
    def ended(self) -> bool:
        """Whether the job finished or failed."""
        return self.status in ("finished", "failed")

    def better(self, value: float, other_value: float) -> bool:
        """Tell whether one value of the job's metric is better than another."""
        return is_better(value, other_value, self.mode)


class SweepDir:
    """The directory of a sweep: one folder per job, and shared records in `.sweep`.

    Args:
        path: The sweep directory; made on first use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hidden = path / ".sweep"
        self.result = path / SWEEP
        """Status of every job, JSON."""
        self.study = path / "study.db"
        """Storage of the Optuna study, sqlite."""
        self.log = self.hidden / "launch.log"
        """Output of launchers and jobs, but for their own logs."""
        self.files = self.hidden / "files.json"
        """What the files that jobs read held when they were last looked at, JSON."""
        self.asking = self.hidden / "ask.lock"
        """Held while trials are proposed."""

    def prepare(self) -> None:
        """Make the folders of the sweep.

        Raises:
            ConfigError: A foreign file has the name of a file that a sweep writes.
        """
        if not self.hidden.is_dir():
            self._refuse_foreign()
        (self.hidden / "jobs").mkdir(parents=True, exist_ok=True)

    def _refuse_foreign(self) -> None:
        """Refuse existing files named as those of a sweep, unless a sweep wrote them.

        Raises:
            ConfigError: The message names the file.
        """
        for path in (self.result, self.study):
            if os.path.lexists(path) and not self._is_result():
                raise ConfigError(
                    f"hydra.sweep.dir={self.path}: {path.name} in it was not written by optrun,"
                    " and a sweep writes a file of this name. Move it away, or choose another"
                    " hydra.sweep.dir."
                )

    def _is_result(self) -> bool:
        """Tell whether a sweep wrote the existing `sweep.json`."""
        try:
            result = read_json(self.result)
        except (OSError, ValueError, OptrunError):
            return False
        return isinstance(result, dict) and {"format", "tuned", "jobs"} <= result.keys()

    def run_dir(self, name: str) -> RunDir:
        """Return the run directory of a job."""
        return RunDir(self.path / name)

    def lock_file(self, name: str) -> Path:
        """Return the lock file of a job.

        The process that runs the job holds it.
        """
        return self.hidden / "jobs" / f"{name}.lock"

    def stop_file(self, token: str) -> Path:
        """Return the stop file of a sweep process.

        The file exists once the sweep process wants its workers to save and end.
        """
        return self.hidden / f"stop-{token}"

    def spec_file(self, token: str) -> Path:
        """Return the JSON file with the jobs of a launch."""
        return self.hidden / f"launch-{token}.json"

    # Jobs
    # ----------------------------------------------------------------------------------------------

    def read_record(self, name: str) -> Record:
        """Read the record of a job, or make a new record."""
        try:
            values = read_json(self.hidden / "jobs" / f"{name}.json")
            return Record(**from_json(values))
        except (OSError, ValueError, TypeError):
            return Record()

    def write_record(self, name: str, record: Record) -> None:
        """Replace the record of a job; the caller holds the job's lock."""
        replace_text(self.hidden / "jobs" / f"{name}.json", json.dumps(to_json(asdict(record))))

    @contextlib.contextmanager
    def locked_record(self, name: str) -> Iterator[Record]:
        """Lock a job, and yield its record read under the lock.

        Raises:
            LockedError: Another process holds the lock.
        """
        with RunLock(self.lock_file(name)):
            yield self.read_record(name)

    def is_running(self, name: str) -> bool:
        """Tell whether any process runs a job, even outside of a sweep."""
        return is_held(self.lock_file(name)) or is_held(self.run_dir(name).lock)

    def state(self, name: str) -> JobState:
        """Read the state of a job from its summary.

        Without a summary it is `new`. It is `interrupted`, so that the same command continues it,
        if the summary cannot be read, has an unknown status, or says that a full disk was the
        failure.
        """
        try:
            summary = read_summary(self.run_dir(name).summary)
        except FileNotFoundError:
            return JobState("new")
        except (OSError, ValueError):
            return JobState("interrupted", message="summary.json cannot be read")
        metric = lookup(summary, "main_metric", "name")
        mode = lookup(summary, "main_metric", "mode")
        best = lookup(summary, "metrics", "best", metric, "value")
        status = str(summary.get("status"))
        is_cut_by_disk = status == "failed" and summary.get("disk_refused") is True
        if is_cut_by_disk or status not in ("running", "finished", "failed"):
            status = "interrupted"
        return JobState(
            status=status,
            step=int(summary.get("global_step") or 0),
            total=summary.get("max_steps"),
            metric=metric,
            mode=str(mode or "min"),
            best=float(best) if isinstance(best, int | float) else None,
            message=str(summary.get("message") or ""),
            seconds=float(summary.get("wall_seconds") or 0.0),
            exit_code=summary.get("exit_code"),
        )

    def metrics(self, name: str) -> MetricsLog:
        """Read the metrics of a job; empty without a file."""
        try:
            return read_metrics(self.run_dir(name).metrics)
        except OSError:
            return MetricsLog()

    def summary(self, name: str) -> PlainDict:
        """Read the summary of a job.

        Empty if it is missing, or torn by a killed process.
        """
        return try_read_summary(self.run_dir(name).summary)

    def steps_done(self, name: str) -> int:
        """Return the last optimizer step in a job's metrics."""
        return max((int(record["step"]) for record in self.metrics(name).records), default=0)

    def best_until(self, name: str, step: int) -> float | None:
        """Find the best value of a job's metric after step 0 and up to a step.

        Returns:
            NaN if all values are NaN; None if the metric was not evaluated until then.
        """
        state = self.state(name)
        best: float | None = None
        steps, values = self.metrics(name).series(state.metric or "")
        for evaluated_step, value in zip(steps, values, strict=True):
            is_in_range = 0 < evaluated_step <= step
            if is_in_range and (best is None or state.better(value, best)):
                best = value
        return best
