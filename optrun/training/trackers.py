"""TensorBoard, Weights & Biases, trackio and MLflow behind one small interface."""

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
from typing import Any, Protocol

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_dir import TRACKING, RunDir
from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.plain import PlainMapping
from optrun.base.reading import read_json
from optrun.config import registry
from optrun.config.kind import kind_of
from optrun.config.schema.tracking import SCHEMAS, TrackingConfig

_MLFLOW_PARAMS = 100
"""How many parameters MLflow takes in one request."""


_MLFLOW_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


@dataclass(frozen=True)
class TrackedRun:
    """The facts of a run for a tracker."""

    run_dir: Path
    name: str | None
    """For people; None: the user gave none."""
    config: Mapping[str, object]
    """The resolved configuration, flat, with dotted names."""
    start: int
    """Optimizer steps done before; what an earlier process logged after them is void."""

    @property
    def extra_dir(self) -> Path:
        """Folder for files of a tracker from outside.

        Others in the run directory count as damage.
        """
        folder = RunDir(self.run_dir).extra
        folder.mkdir(exist_ok=True)
        return folder

    def identity(self, tracker: str) -> str | None:
        """Return the tracker's identity of this run, from an earlier start.

        None: none yet.
        """
        return self._saved_identities().get(tracker)

    def remember(self, tracker: str, identity: str) -> None:
        """Keep an identity for the next start."""
        content = json.dumps({**self._saved_identities(), tracker: identity}, indent=2) + "\n"
        replace_text(self.run_dir / TRACKING, content)

    def _saved_identities(self) -> dict[str, str]:
        """Read the saved identity of this run in each tracker; empty before the first."""
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
    """A class of a row of kind `tracker`.

    It is made with a `TrackedRun` and the fields of its schema.
    """

    def log(self, record: PlainMapping) -> None: ...
    def close(self, status: str) -> None: ...


class NoTracker:
    """`tracking=none`: `metrics.jsonl` alone."""

    def __init__(self, run: TrackedRun) -> None:
        """Nothing is kept."""

    def log(self, record: PlainMapping) -> None:
        """Do nothing."""

    def close(self, status: str) -> None:
        """Do nothing."""


class TensorboardTracker:
    """Event files in `tensorboard/` of the run directory.

    What an earlier process wrote too much is hidden.
    """

    def __init__(self, run: TrackedRun) -> None:
        _need("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        purge_step = run.start + 1 if run.start else None
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge_step)

    def log(self, record: PlainMapping) -> None:
        """Add one scalar per value."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, int(record["step"]))

    def close(self, status: str) -> None:  # noqa: ARG002
        """Flush."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases; a resumed run goes on under its id."""

    def __init__(self, run: TrackedRun, project: str, mode: str | None) -> None:
        self._library = _need("wandb")
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
        """Send one record."""
        self._library.log(scalars(record), step=int(record["step"]))

    def close(self, status: str) -> None:
        """Flush, and tell how it ended."""
        self._library.finish(exit_code=0 if status == "finished" else 1)


class TrackioTracker:
    """trackio. It knows a run by its name, and a resumed run keeps that name."""

    def __init__(self, run: TrackedRun, project: str, mode: str | None) -> None:
        if mode is not None:
            raise ConfigError(f"tracking.mode={mode}: trackio has no modes; leave it null.")
        self._library = _need("trackio")
        identity = (
            run.identity("trackio") or f"{run.name or run.run_dir.name}-{uuid.uuid4().hex[:8]}"
        )
        self._library.init(project=project, config=dict(run.config), resume="allow", name=identity)
        run.remember("trackio", identity)

    def log(self, record: PlainMapping) -> None:
        """Send one record."""
        self._library.log(scalars(record), step=int(record["step"]))

    def close(self, status: str) -> None:  # noqa: ARG002
        """Flush."""
        self._library.finish()


class MlflowTracker:
    """An MLflow run, in a sqlite file of the run directory where no server is named."""

    def __init__(self, run: TrackedRun, tracking_uri: str | None, experiment: str) -> None:
        self._library = _need("mlflow")
        self._library.set_tracking_uri(
            tracking_uri or f"sqlite:///{(run.run_dir / 'mlflow.db').resolve()}"
        )
        self._library.set_experiment(experiment)
        identity = run.identity("mlflow")
        if identity is not None:
            self._library.start_run(
                run_id=identity
            )  # its parameters stand already and may not change
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
        """Send one record."""
        self._library.log_metrics(scalars(record), step=int(record["step"]))

    def close(self, status: str) -> None:
        """End the run with its outcome."""
        self._library.end_run(_MLFLOW_STATUS.get(status, "FAILED"))


class Tolerant:
    """A tracker whose failure does not end the run: a note says so once, and nothing more is sent.

    Args:
        tracker: What may fail: a server that is gone, a full disk.
        name: Of the choice, for the message.
        note: Takes the message.
    """

    def __init__(self, tracker: Tracker, name: str, note: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._name = name
        self._note = note
        self._gone = False

    def log(self, record: PlainMapping) -> None:
        """Pass on a record."""
        self._send_once(lambda: self._tracker.log(record))

    def close(self, status: str) -> None:
        """Pass on the end."""
        self._send_once(lambda: self._tracker.close(status))

    def _send_once(self, send: Callable[[], None]) -> None:
        """Send to the tracker; after one failure note it, and send nothing more."""
        if self._gone:
            return
        try:
            send()
        except Exception as error:  # each library has errors of its own
            self._gone = True
            self._note(
                f"tracking={self._name} failed ({type(error).__name__}: {error}) and gets nothing"
                " more; the run goes on, and metrics.jsonl has everything."
            )


def require_tracker(config: TrackingConfig) -> None:
    """Refuse a tracker with a missing package, before anything is loaded.

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
        run_dir: Where local trackers write, and where a run's identity in them is kept.
        run_name: A name for people.
        values: The resolved configuration, flat, with dotted names.
        start: Optimizer steps done before.
        note: Takes the message of a tracker that fails later; None: the log.

    Raises:
        ConfigError: Its package is not installed, or it cannot start.
    """
    kind = kind_of("tracking", SCHEMAS, config)
    run = TrackedRun(run_dir, run_name, values, start)
    options = {
        field.name: getattr(config, field.name) for field in fields(config) if field.name != "name"
    }
    try:
        tracker: Tracker = registry.choices("tracker")[kind].load()(run, **options)
    except ConfigError:
        raise
    except Exception as error:  # each library has errors of its own
        raise ConfigError(
            f"tracking={kind}: cannot start: {type(error).__name__}:"
            f" {' '.join(str(error).split())[:300]}. tracking=none trains without it."
        ) from error
    if kind == "none":
        return tracker
    return Tolerant(tracker, kind, note or logging.getLogger("optrun").warning)


def _need(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _not_installed(package) from error


def _not_installed(package: str) -> ConfigError:
    return ConfigError(
        f"tracking={package}: the package {package} is not installed. pip install"
        f" 'optrun[{package}]'"
    )


def scalars(record: Mapping[str, object]) -> dict[str, float]:
    """Select the numbers of a record, as trackers take them: without `step` and `time`."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }
