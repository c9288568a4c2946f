"""TensorBoard, Weights & Biases, trackio and MLflow behind one small interface."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from optrun.artifacts.atomic import replace_text
from optrun.artifacts.run_dir import TRACKING
from optrun.config.kind import kind_of
from optrun.config.schema.tracking import SCHEMAS, MlflowConfig, ProjectConfig, TrackingConfig
from optrun.errors import ConfigError

_MLFLOW_PARAMS = 100
"""How many parameters MLflow takes in one request."""


_MLFLOW_STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class Tracker(Protocol):
    """Takes records and ends."""

    def log(self, record: Mapping[str, Any]) -> None: ...
    def close(self, status: str) -> None: ...


class NoTracker:
    """`tracking=none`: `metrics.jsonl` alone."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def close(self, status: str) -> None:
        """Nothing."""


class TensorboardTracker:
    """Event files in `tensorboard/` of the run directory.

    Args:
        run_dir: The run.
        start: Steps done before; what an earlier process wrote after them is hidden.
    """

    def __init__(self, run_dir: Path, start: int) -> None:
        _need("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=start + 1 if start else None)

    def log(self, record: Mapping[str, Any]) -> None:
        """One scalar per value."""
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, int(record["step"]))

    def close(self, status: str) -> None:  # noqa: ARG002
        """Flush."""
        self._writer.close()


class ProjectTracker:
    """Weights & Biases, or trackio, whose calls are the same. A resumed run goes on under its identity."""

    def __init__(
        self, library: str, config: ProjectConfig, run_dir: Path, run_name: str | None, values: Mapping[str, Any]
    ) -> None:
        if library == "trackio" and config.mode is not None:
            raise ConfigError(f"tracking.mode={config.mode}: trackio has no modes; leave it null.")
        self._library = _need(library, library)
        self._name = library
        known = _identity(run_dir)
        identity = known.get(library) or uuid.uuid4().hex[:8]
        options: dict[str, Any] = {"project": config.project, "config": dict(values), "resume": "allow"}
        if library == "wandb":
            options |= {"id": identity, "name": run_name, "dir": str(run_dir), "mode": config.mode}
        else:  # trackio knows a run by its name
            identity = known.get(library) or f"{run_name or run_dir.name}-{identity}"
            options["name"] = identity
        self._library.init(**options)
        _remember(run_dir, library, identity)

    def log(self, record: Mapping[str, Any]) -> None:
        """One call per record."""
        self._library.log(_scalars(record), step=int(record["step"]))

    def close(self, status: str) -> None:
        """Flush; Weights & Biases also hears how it ended."""
        if self._name == "wandb":
            self._library.finish(exit_code=0 if status == "finished" else 1)
        else:
            self._library.finish()


class MlflowTracker:
    """An MLflow run, in a sqlite file of the run directory where no server is named."""

    def __init__(self, config: MlflowConfig, run_dir: Path, run_name: str | None, values: Mapping[str, Any]) -> None:
        self._library = _need("mlflow", "mlflow")
        self._library.set_tracking_uri(config.tracking_uri or f"sqlite:///{(run_dir / 'mlflow.db').resolve()}")
        self._library.set_experiment(config.experiment)
        identity = _identity(run_dir).get("mlflow")
        if identity is not None:
            self._library.start_run(run_id=identity)  # its parameters stand already and may not change
            return
        run = self._library.start_run(run_name=run_name or run_dir.name)
        _remember(run_dir, "mlflow", str(run.info.run_id))
        named = [(re.sub(r"[^\w\-./ :]", "_", name), str(value)[:500]) for name, value in values.items()]
        for begin in range(0, len(named), _MLFLOW_PARAMS):
            self._library.log_params(dict(named[begin : begin + _MLFLOW_PARAMS]))

    def log(self, record: Mapping[str, Any]) -> None:
        """One call per record."""
        self._library.log_metrics(_scalars(record), step=int(record["step"]))

    def close(self, status: str) -> None:
        """End the run with its outcome."""
        self._library.end_run(_MLFLOW_STATUS.get(status, "FAILED"))


class Tolerant:
    """A tracker whose failure does not end the run: it is told once, and nothing more is sent.

    Args:
        tracker: What may fail: a server that is gone, a full disk.
        name: Of the choice, for the message.
        complain: Takes the message.
    """

    def __init__(self, tracker: Tracker, name: str, complain: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._name = name
        self._complain = complain
        self._gone = False

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass on a record."""
        self._try(lambda: self._tracker.log(record))

    def close(self, status: str) -> None:
        """Pass on the end."""
        self._try(lambda: self._tracker.close(status))

    def _try(self, send: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            send()
        except Exception as error:  # each library has errors of its own
            self._gone = True
            self._complain(
                f"tracking={self._name} failed ({type(error).__name__}: {error}) and gets nothing more; the run goes "
                "on, and metrics.jsonl has everything."
            )


def require_tracker(config: TrackingConfig) -> None:
    """Refuse a tracker whose package is missing, before anything is loaded.

    Raises:
        ConfigError: With the command that installs it.
    """
    kind = kind_of("tracking", SCHEMAS, config)
    if kind != "none" and importlib.util.find_spec(kind) is None:
        raise _not_installed(kind, kind)


def build_tracker(
    config: TrackingConfig,
    run_dir: Path,
    run_name: str | None,
    values: Mapping[str, Any],
    *,
    start: int = 0,
    complain: Callable[[str], None] | None = None,
) -> Tracker:
    """The tracker of `tracking=`.

    Args:
        config: The choice.
        run_dir: Where local trackers write, and where a run's identity in them is kept.
        run_name: A name for people.
        values: The resolved configuration, flat, with dotted names.
        start: Steps done before.
        complain: Takes the message of a tracker that fails later; None: the log.

    Raises:
        ConfigError: Its package is not installed, or it cannot start.
    """
    kind = kind_of("tracking", SCHEMAS, config)
    if kind == "none":
        return NoTracker()
    try:
        tracker = _start(kind, config, run_dir, run_name, values, start)
    except ConfigError:
        raise
    except Exception as error:  # each library has errors of its own
        raise ConfigError(
            f"tracking={kind}: cannot start: {type(error).__name__}: {' '.join(str(error).split())[:300]}. "
            "tracking=none trains without it."
        ) from error
    return Tolerant(tracker, kind, complain or logging.getLogger("optrun").warning)


def _start(
    kind: str, config: TrackingConfig, run_dir: Path, run_name: str | None, values: Mapping[str, Any], start: int
) -> Tracker:
    if kind == "tensorboard":
        return TensorboardTracker(run_dir, start)
    if isinstance(config, ProjectConfig):
        return ProjectTracker(kind, config, run_dir, run_name, values)
    if isinstance(config, MlflowConfig):
        return MlflowTracker(config, run_dir, run_name, values)
    raise ConfigError(f"tracking={kind}: no adapter for this choice.")


def _need(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _not_installed(module, extra) from error


def _not_installed(module: str, extra: str) -> ConfigError:
    return ConfigError(f"tracking={extra}: the package {module} is not installed. pip install 'optrun[{extra}]'")


def _identity(run_dir: Path) -> dict[str, str]:
    """Under which identity each tracker knows this run."""
    place = run_dir / TRACKING
    if not place.is_file():
        return {}
    known: dict[str, str] = json.loads(place.read_text(encoding="utf-8"))
    return known


def _remember(run_dir: Path, library: str, identity: str) -> None:
    replace_text(run_dir / TRACKING, json.dumps({**_identity(run_dir), library: identity}, indent=2) + "\n")


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }
