"""TensorBoard, Weights & Biases, trackio and MLflow behind one small interface."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from optrun.config.tracking import MlflowConfig, ProjectConfig, TrackingConfig
from optrun.errors import ConfigError


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
    """Event files in `tensorboard/` of the run directory."""

    def __init__(self, run_dir: Path) -> None:
        _need("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, record: Mapping[str, Any]) -> None:
        """One scalar per value."""
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, int(record["step"]))

    def close(self, status: str) -> None:  # noqa: ARG002
        """Flush."""
        self._writer.close()


class ProjectTracker:
    """Weights & Biases, or trackio, whose calls are the same."""

    def __init__(
        self, library: str, config: ProjectConfig, run_dir: Path, run_name: str | None, values: Mapping[str, Any]
    ) -> None:
        self._library = _need(library, library)
        options: dict[str, Any] = {"project": config.project, "name": run_name, "config": dict(values)}
        if library == "wandb":
            options |= {"dir": str(run_dir), "mode": config.mode}
        elif config.mode is not None:
            raise ConfigError(f"tracking.mode={config.mode}: trackio has no modes; leave it null.")
        self._library.init(**options)

    def log(self, record: Mapping[str, Any]) -> None:
        """One call per record."""
        self._library.log(_scalars(record), step=int(record["step"]))

    def close(self, status: str) -> None:  # noqa: ARG002
        """Flush."""
        self._library.finish()


class MlflowTracker:
    """An MLflow run, in a sqlite file of the run directory where no server is named."""

    def __init__(self, config: MlflowConfig, run_dir: Path, run_name: str | None, values: Mapping[str, Any]) -> None:
        self._library = _need("mlflow", "mlflow")
        self._library.set_tracking_uri(config.tracking_uri or f"sqlite:///{(run_dir / 'mlflow.db').resolve()}")
        self._library.set_experiment(config.experiment)
        self._library.start_run(run_name=run_name)
        self._library.log_params({name: str(value)[:500] for name, value in values.items()})

    def log(self, record: Mapping[str, Any]) -> None:
        """One call per record."""
        self._library.log_metrics(_scalars(record), step=int(record["step"]))

    def close(self, status: str) -> None:
        """End the run with its outcome."""
        self._library.end_run("FINISHED" if status == "finished" else "KILLED" if status == "interrupted" else "FAILED")


def _need(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"tracking={extra}: the package {module} is not installed. pip install 'optrun[{extra}]'") from error


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }


def build_tracker(config: TrackingConfig, run_dir: Path, run_name: str | None, values: Mapping[str, Any]) -> Tracker:
    """The tracker of `tracking=`.

    Args:
        config: The choice.
        run_dir: Where local trackers write.
        run_name: A name for people.
        values: The resolved configuration, flat, with dotted names.

    Raises:
        ConfigError: Its package is not installed.
    """
    if config.name == "tensorboard":
        return TensorboardTracker(run_dir)
    if isinstance(config, ProjectConfig):
        return ProjectTracker(config.name, config, run_dir, run_name, values)
    if isinstance(config, MlflowConfig):
        return MlflowTracker(config, run_dir, run_name, values)
    return NoTracker()
