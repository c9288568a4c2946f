"""How `optrun -m` makes jobs: the choices of `hydra/sweeper`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from optrun.base.errors import ConfigError
from optrun.config.schema.checks import Checked, expect
from optrun.config.schema.ranges import Count, Seconds, at_least

Sampler = StrEnum("Sampler", ["auto", "tpe", "random", "qmc"])
"""Who proposes the next trial; names as in Optuna, but `auto`: a Sobol sequence, and TPE once it
has a start."""

Pruner = StrEnum("Pruner", ["none", "asha", "hyperband"])
"""Who stops the weaker trials of a search: Optuna's SuccessiveHalvingPruner or HyperbandPruner."""


@dataclass(kw_only=True)
class ConfirmConfig:
    """The confirmation after a sweep, in the same command; any key asks for it."""

    seeds: Any
    """Fresh seeds, such as `5-9` or [5, 6, 7]; null: as many as find the difference, 20 at most."""
    power: float | None
    """Chance with which the difference is found; null: 0.8."""
    difference: float | None
    """The smallest that matters, in units of the metric; null: `matters`, or one standard deviation
    between seeds."""
    baseline: str | None
    """The contender that the others are compared with; null: each is asked whether it could be the
    best."""

    @property
    def asked(self) -> bool:
        """Whether anything was said about it."""
        return any(value is not None for value in vars(self).values())


@dataclass(kw_only=True)
class SweeperConfig(Checked):
    """Base class of both sweepers."""

    GROUP = "hydra.sweeper."
    name: str
    params: dict[str, Any]
    """Key to values, written as on the command line, such as `lr: 1e-3,2e-3`; the command line
    wins."""
    search: dict[str, Any]
    """Optimizer to keys and values that are tried with it alone; on the command line
    `search.NAME.KEY=VALUES`."""
    confirm: ConfirmConfig
    """Confirm what was chosen on fresh seeds, in the same command."""
    timeout: Seconds | None
    """Seconds of wall clock for the whole command; then the running jobs save and end, and the same
    line goes on. A job that has not ended 300 s later is killed."""
    retry_failed: bool
    """Whether jobs that failed before are tried once more."""
    max_batch_size: Count | None
    """Jobs handed to the launcher at a time; null: all."""
    devices: Any
    """CUDA devices to use side by side, each job pinned to its own: `auto`, or a list of indices,
    UUIDs, MIG names."""

    def __post_init__(self) -> None:
        """Refuse invalid devices."""
        super().__post_init__()
        self._check_devices()

    def _check_devices(self) -> None:
        """Refuse anything but null, `auto` or a list of distinct devices."""
        devices = self.devices
        if devices is None:
            return
        key = "hydra.sweeper.devices"
        expected = "auto, or a list of indices and names such as [0,1] or [GPU-UUID,MIG-UUID]"
        if devices != "auto":
            expect(isinstance(devices, list) and len(devices) > 0, key, devices, expected)
            for device in devices:
                is_index = type(device) is int and device >= 0
                is_name = isinstance(device, str) and device.startswith(("GPU-", "MIG-"))
                expect(is_index or is_name, key, devices, expected)
                expect(
                    devices.count(device) == 1,
                    key,
                    devices,
                    f"each device once; {device} stands there twice",
                )
        if self.max_batch_size is not None:
            raise ConfigError(
                f"hydra.sweeper.max_batch_size={self.max_batch_size}: has no effect with"
                f" {key}={devices}, where each device is given one job at a time. Leave one of them"
                " out."
            )


@dataclass(kw_only=True)
class GridConfig(SweeperConfig):
    """Every combination of the values."""

    grids: list[dict[str, Any]]
    """Several grids, each like `params` and each on top of it; the sweep is their union."""


@dataclass(kw_only=True)
class OptunaConfig(SweeperConfig):
    """Trials proposed by Optuna, one better informed than the other."""

    n_trials: Count
    """Trials in all, those of earlier starts among them; optimizers with spaces of their own share
    them equally."""
    n_jobs: Count
    """Trials under way at a time."""
    sampler: Sampler
    seed: int
    """Of the sampler."""
    pruner: Pruner
    """Optuna's pruner, asked at min_resource * reduction_factor^k steps; no trial waits."""
    min_resource: Count | None
    """Steps of the first rung of a pruner."""
    reduction_factor: Annotated[int, at_least(2)]
    """Of so many trials at a rung one goes on, from its checkpoint."""

    @property
    def prunes(self) -> bool:
        """Whether weak trials are stopped before their end."""
        return self.pruner is not Pruner.none

    def __post_init__(self) -> None:
        """Refuse a search of nothing."""
        super().__post_init__()
        self._check_pruner()

    def _check_pruner(self) -> None:
        """Refuse a pruner without a first rung, and a first rung without a pruner."""
        key = "hydra.sweeper.min_resource"
        pruner = f"hydra.sweeper.pruner={self.pruner.value}"
        if self.prunes and self.min_resource is None:
            raise ConfigError(f"{pruner}: at which step is the first rung? Give {key}=STEPS.")
        if not self.prunes and self.min_resource is not None:
            raise ConfigError(
                f"{key}={self.min_resource}: has no effect with {pruner}. Choose asha or hyperband."
            )


SCHEMAS: dict[str, type[SweeperConfig]] = {"grid": GridConfig, "optuna": OptunaConfig}

INSTEAD = {
    "storage": "A study lies in study.db of its sweep; optuna-dashboard opens it there.",
    "stall_seconds": (
        "A job that hangs is killed when hydra.sweeper.timeout of the whole command is up."
    ),
    "n_steps": (
        "hydra.sweeper.n_trials is the budget, and training.max_steps the length of a trial."
    ),
    "rungs": (
        "A search prunes: hydra/sweeper=optuna hydra.sweeper.pruner=asha"
        " hydra.sweeper.min_resource=STEPS."
    ),
    "objectives": (
        "A sweep goes for checkpoint.metric alone; report.csv of its report has score, speed and"
        " memory of every run."
    ),
}
"""Key of `hydra.sweeper` that does not exist -> what to use instead."""
