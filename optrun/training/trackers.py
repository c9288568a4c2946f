"""TensorBoard, Weights & Biases, trackio and MLflow behind one interface, `Tracker`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_dir import TRACKING, RunDir
from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.plain import PlainMapping
from optrun.base.reading import read_json
from optrun.config import registry
from optrun.config.kind import kind_of
from optrun.config.schema.tracking import SCHEMAS, TrackingConfig

_MLFLOW_PARAMS = 100
"""Most parameters of one request to MLflow."""
_MLFLOW_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


@dataclass(frozen=True)
class TrackedRun:
    """The facts of a run for a tracker."""

    run_dir: Path
    name: str | None
    """`run_name`; None: the user gave none."""
    config: Mapping[str, object]
    """The resolved configuration, flat, with dotted names."""
    start: int
    """Optimizer steps done before this start. Later steps that an earlier process logged are
    obsolete."""

    @property
    def extra_dir(self) -> Path:
        """The folder in which a plugin's tracker may write files; it is created.

        `optrun verify` reports its files elsewhere in the run directory as damage.
        """
        folder = RunDir(self.run_dir).extra
        folder.mkdir(exist_ok=True)
        return folder

    def identity(self, tracker: str) -> str | None:
        """Return the id under which a tracker knows this run; None at the first start.

        Raises:
            UnreadableFileError: `tracking.json` of the run cannot be read.
        """
        return self._saved_identities().get(tracker)

    def remember(self, tracker: str, identity: str) -> None:
        """Save the id under which a tracker knows this run, for `identity` at the next start."""
        content = json.dumps({**self._saved_identities(), tracker: identity}, indent=2) + "\n"
        replace_text(self.run_dir / TRACKING, content)

    def _saved_identities(self) -> dict[str, str]:
        """Read the id of this run by tracker; empty before the first start."""
        path = self.run_dir / TRACKING
        try:
            return {str(name): str(identity) for name, identity in dict(read_json(path)).items()}
        except FileNotFoundError:
            return {}
        except (TypeError, ValueError) as error:
            raise UnreadableFileError(
                f"{path}: expected a tracker's name and its identity. {error}"
            ) from error


class Tracker(Protocol):
    """A tracker; constructed with a `TrackedRun` and the fields of its schema as keywords."""

    def log(self, record: PlainMapping) -> None:
        """Send one line of `metrics.jsonl`."""

    def close(self, status: str) -> None:
        """Flush at the end of the run; status: `finished`, `interrupted` or `failed`."""


class NoTracker(Tracker):
    """`tracking=none`: sends nothing anywhere."""

    def __init__(self, run: TrackedRun) -> None:
        """Ignore the run."""


class TensorboardTracker:
    """Writes event files into `tensorboard/` of the run directory.

    TensorBoard hides what an earlier process wrote for steps after `run.start`.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = run.start + 1 if run.start else None
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge_step)

    def log(self, record: PlainMapping) -> None:
        """Write one scalar for each number of the record."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, int(record["step"]))

    def close(self, status: str) -> None:  # noqa: ARG002
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """Logs to Weights & Biases; a resumed run continues under its id."""

    def __init__(self, run: TrackedRun, project: str, mode: str | None) -> None:
        self._library = importlib.import_module("wandb")
        identity = run.identity("wandb") or uuid.uuid4().hex[:8]
        self._library.init(
            project=project,
            config=dict(run.config),
            resume="allow",
            id=identity,
            name=run.name,
            dir=str(run.run_dir),
            mode=mode,
        )
        run.remember("wandb", identity)

    def log(self, record: PlainMapping) -> None:
        """Send the numbers of one record."""
        self._library.log(scalars(record), step=int(record["step"]))

    def close(self, status: str) -> None:
        """Flush; the exit code there is 0 for a finished run, else 1."""
        self._library.finish(exit_code=0 if status == "finished" else 1)


class TrackioTracker(WandbTracker):
    """Logs to trackio, which has the interface of wandb but knows a run by its name.

    The name is that of the run, or of its folder, with a random suffix; a resumed run keeps it.

    Raises:
        ConfigError: A `mode` is given.
    """

    def __init__(self, run: TrackedRun, project: str, mode: str | None) -> None:
        if mode is not None:
            raise ConfigError(f"tracking.mode={mode}: trackio has no modes; leave it null.")
        self._library = importlib.import_module("trackio")
        name = run.identity("trackio")
        if name is None:
            name = f"{run.name or run.run_dir.name}-{uuid.uuid4().hex[:8]}"
        self._library.init(project=project, config=dict(run.config), resume="allow", name=name)
        run.remember("trackio", name)

    def close(self, status: str) -> None:  # noqa: ARG002
        """Flush; trackio keeps no exit code."""
        self._library.finish()


class MlflowTracker:
    """Logs to MLflow: to `tracking_uri`, else into `mlflow.db` (sqlite) of the run directory."""

    def __init__(self, run: TrackedRun, tracking_uri: str | None, experiment: str) -> None:
        self._library = importlib.import_module("mlflow")
        local_file = (run.run_dir / "mlflow.db").resolve()
        self._library.set_tracking_uri(tracking_uri or f"sqlite:///{local_file}")
        self._library.set_experiment(experiment)
        identity = run.identity("mlflow")
        if identity is not None:
            # MLflow has the parameters of this run, and refuses to change them.
            self._library.start_run(run_id=identity)
            return
        started = self._library.start_run(run_name=run.name or run.run_dir.name)
        run.remember("mlflow", str(started.info.run_id))
        parameters = [
            (re.sub(r"[^\w\-./ :]", "_", name), str(value)[:500])
            for name, value in run.config.items()
        ]
        for begin in range(0, len(parameters), _MLFLOW_PARAMS):
            self._library.log_params(dict(parameters[begin : begin + _MLFLOW_PARAMS]))

    def log(self, record: PlainMapping) -> None:
        """Send the numbers of one record."""
        self._library.log_metrics(scalars(record), step=int(record["step"]))

    def close(self, status: str) -> None:
        """End the MLflow run as FINISHED, KILLED (interrupted) or FAILED."""
        self._library.end_run(_MLFLOW_STATUS.get(status, "FAILED"))


@dataclass(eq=False)
class FaultTolerantTracker:
    """A tracker whose failure does not end the run: it is noted, and nothing more is sent."""

    tracker: Tracker
    """The tracker, which may raise any exception."""
    name: str
    """The choice in `tracking=`, for the note."""
    note: Callable[[str], None]
    """Shows the note."""
    has_failed: bool = False
    """Whether a call has failed."""

    def log(self, record: PlainMapping) -> None:
        """Send a record, unless an earlier call failed."""
        self._send_once(lambda: self.tracker.log(record))

    def close(self, status: str) -> None:
        """Close the tracker, unless an earlier call failed."""
        self._send_once(lambda: self.tracker.close(status))

    def _send_once(self, send: Callable[[], None]) -> None:
        """Call a method of the tracker; note its first failure, and then do nothing."""
        if self.has_failed:
            return
        try:
            send()
        except Exception as error:  # each library has errors of its own
            self.has_failed = True
            self.note(
                f"tracking={self.name} failed ({type(error).__name__}: {error}) and gets nothing"
                " more; the run continues, and metrics.jsonl has everything."
            )


def require_tracker(config: TrackingConfig) -> None:
    """Refuse a tracker if its package is not installed, without importing it.

    Raises:
        ConfigError: With the command that installs it.
    """
    kind_of("tracking", SCHEMAS, config)
    if config.package is not None and importlib.util.find_spec(config.package) is None:
        raise _not_installed(config.package)


def build_tracker(
    config: TrackingConfig,
    run_dir: Path,
    run_name: str | None,
    values: Mapping[str, object],
    *,
    start: int = 0,
    note: Callable[[str], None] | None = None,
) -> Tracker:
    """Build the tracker of `tracking=`.

    Args:
        config: The choice.
        run_dir: Where local trackers write, and where the id of the run in a tracker is saved.
        run_name: `run_name`; None: the user gave none.
        values: The resolved configuration, flat, with dotted names.
        start: Optimizer steps done before this start of the run.
        note: Shows the failure of a tracker during the run; None: it goes to the log.

    Returns:
        The tracker; a later failure of it does not end the run.

    Raises:
        ConfigError: Its package is not installed, or it cannot start.
    """
    # 1. What its constructor gets: the facts of the run, and the fields of the schema.
    kind = kind_of("tracking", SCHEMAS, config)
    run = TrackedRun(run_dir, run_name, values, start)
    options = {
        field.name: getattr(config, field.name) for field in fields(config) if field.name != "name"
    }

    # 2. Start it. Each library has errors of its own.
    try:
        tracker: Tracker = registry.choices("tracker")[kind].load()(run, **options)
    except ConfigError:
        raise
    except Exception as error:
        # Its own package is missing; an import that fails inside of the package is another error.
        if isinstance(error, ImportError) and error.name == config.package:
            raise _not_installed(kind) from error
        raise ConfigError(
            f"tracking={kind}: cannot start: {type(error).__name__}:"
            f" {' '.join(str(error).split())[:300]}. tracking=none trains without it."
        ) from error

    # 3. From now on a failure of it does not end the run.
    if kind == "none":
        return tracker
    return FaultTolerantTracker(tracker, kind, note or logging.getLogger("optrun").warning)


def _not_installed(package: str) -> ConfigError:
    """Build the error for a missing package, with the command that installs it."""
    return ConfigError(
        f"tracking={package}: the package {package} is not installed. pip install"
        f" 'optrun[{package}]'"
    )


def scalars(record: Mapping[str, object]) -> dict[str, float]:
    """Select the numbers of a record except `step` and `time`, as floats; booleans are numbers."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }
