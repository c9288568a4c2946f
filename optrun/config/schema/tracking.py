"""Trackers: other destinations of metrics beside `metrics.jsonl`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from optrun.config import registry


@dataclass(kw_only=True)
class TrackingConfig:
    """Base class of the choices of this group."""

    package: ClassVar[str | None] = None
    """Package of Python's that it needs, and the extra of optrun that installs it."""

    name: str


@dataclass(kw_only=True)
class NoTrackingConfig(TrackingConfig):
    """Nowhere."""


@dataclass(kw_only=True)
class TensorboardConfig(TrackingConfig):
    """Event files in the run directory, folder `tensorboard`."""

    package = "tensorboard"


@dataclass(kw_only=True)
class ProjectConfig(TrackingConfig):
    """wandb and trackio."""

    project: str
    mode: str | None
    """`offline`, `online`, ...; null: the library's own default."""


@dataclass(kw_only=True)
class WandbConfig(ProjectConfig):
    """`tracking=wandb`."""

    package = "wandb"


@dataclass(kw_only=True)
class TrackioConfig(ProjectConfig):
    """`tracking=trackio`."""

    package = "trackio"


@dataclass(kw_only=True)
class MlflowConfig(TrackingConfig):
    """mlflow."""

    package = "mlflow"

    tracking_uri: str | None
    """Null: a sqlite file in the run directory."""
    experiment: str


SCHEMAS: Mapping[str, type[TrackingConfig]] = registry.add_builtin(
    "tracker",
    {
        "none": (NoTrackingConfig, "optrun.training.trackers:NoTracker"),
        "tensorboard": (TensorboardConfig, "optrun.training.trackers:TensorboardTracker"),
        "wandb": (WandbConfig, "optrun.training.trackers:WandbTracker"),
        "trackio": (TrackioConfig, "optrun.training.trackers:TrackioTracker"),
        "mlflow": (MlflowConfig, "optrun.training.trackers:MlflowTracker"),
    },
)
