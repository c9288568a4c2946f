"""Where metrics go besides `metrics.jsonl`."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class TrackingConfig:
    """What every choice has."""

    name: str


@dataclass(kw_only=True)
class NoTrackingConfig(TrackingConfig):
    """Nowhere."""


@dataclass(kw_only=True)
class TensorboardConfig(TrackingConfig):
    """Event files in the run directory, folder `tensorboard`."""


@dataclass(kw_only=True)
class ProjectConfig(TrackingConfig):
    """wandb and trackio."""

    project: str
    mode: str | None
    """`offline`, `online`, ...; null: the library's own default."""


@dataclass(kw_only=True)
class WandbConfig(ProjectConfig):
    """`tracking=wandb`."""


@dataclass(kw_only=True)
class TrackioConfig(ProjectConfig):
    """`tracking=trackio`."""


@dataclass(kw_only=True)
class MlflowConfig(TrackingConfig):
    """mlflow."""

    tracking_uri: str | None
    """Null: a sqlite file in the run directory."""
    experiment: str


SCHEMAS: dict[str, type[TrackingConfig]] = {
    "none": NoTrackingConfig,
    "tensorboard": TensorboardConfig,
    "wandb": WandbConfig,
    "trackio": TrackioConfig,
    "mlflow": MlflowConfig,
}
