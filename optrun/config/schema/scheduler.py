"""How the learning rate moves from step to step; every choice is a multiplier of the peak `lr`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from optrun.config import registry
from optrun.config.schema.checks import Checked
from optrun.config.schema.ranges import (
    Count,
    Fraction,
    InnerShare,
    NotNegative,
    Positive,
    Steps,
    WholeNumber,
    number,
)

WsdShape = StrEnum("WsdShape", ["linear", "cosine", "one_minus_sqrt", "square", "exponential"])
"""How `wsd` comes down; x runs from 0 to 1."""

Boundary = StrEnum("Boundary", ["paddle", "keras"])
"""Which value a boundary step has: the next one (Paddle, torch, MindSpore) or still the last one
(Keras)."""

PlateauMode = StrEnum("PlateauMode", ["min", "max"])
"""Whether less or more of the metric is better."""

ThresholdMode = StrEnum("ThresholdMode", ["rel", "abs"])
"""Whether the threshold is a share of the best value or a difference to it."""


@dataclass(kw_only=True)
class SchedulerConfig(Checked):
    """What every schedule has."""

    GROUP = "scheduler."
    name: str
    num_warmup_steps: WholeNumber | None
    """Steps of the linear climb from 0 (at step 0) to the peak. Not together with warmup_ratio."""
    warmup_ratio: Fraction | None
    """The same as a share of the run; rounded up to whole steps."""

    def __post_init__(self) -> None:
        """Refuse two answers to one question."""
        super().__post_init__()
        self._expect_one_of("num_warmup_steps", "warmup_ratio")

    def _expect_one_of(self, steps: str, share: str) -> None:
        """Refuse a length in steps beside the same length as a share."""
        value = getattr(self, steps)
        is_single = value is None or getattr(self, share) is None
        self.expect(
            is_single, share, f"null, because scheduler.{steps}={value} is set", "Give one of them."
        )


@dataclass(kw_only=True)
class ConstantConfig(SchedulerConfig):
    """Warm-up, then the peak."""


@dataclass(kw_only=True)
class FloorConfig(SchedulerConfig):
    """Schedules with a lowest learning rate."""

    min_lr: NotNegative
    """Absolute, for a group of scale 1; a group of scale s has s * min_lr, so that layer ratios
    stay."""


@dataclass(kw_only=True)
class LinearConfig(FloorConfig):
    """From the peak to min_lr in a straight line over the rest of the run."""


@dataclass(kw_only=True)
class CosineConfig(FloorConfig):
    """From the peak to min_lr along a half cosine, once or several times."""

    decay_steps: Count | None
    """Steps from the peak to the end, min_lr after that; null: the rest of the run."""
    num_cycles: Count
    """How often it comes down."""
    restarts: bool
    """Between two descents: true jumps back to the peak, false climbs back along the same cosine.
    """
    cycle_mult: Positive
    """Length of a cycle by the length of the one before; other than 1 only with restarts."""
    cycle_decay: Positive
    """Peak of a cycle by the peak of the one before; other than 1 only with restarts."""

    def __post_init__(self) -> None:
        """Refuse restarts without cycles."""
        super().__post_init__()
        for key in ("cycle_mult", "cycle_decay"):
            has_effect = getattr(self, key) == 1 or (self.restarts and self.num_cycles > 1)
            self.expect(has_effect, key, "1 without restarts of two or more cycles")


@dataclass(kw_only=True)
class PolynomialConfig(FloorConfig):
    """min_lr + (peak - min_lr) * (1 - step / decay_steps) ** power."""

    power: Positive
    decay_steps: Count | None
    """Null: the rest of the run."""
    cycle: bool
    """Once at the end, stretch decay_steps to its next multiple and go on (Keras)."""

    def __post_init__(self) -> None:
        """Refuse cycles without a length."""
        super().__post_init__()
        self.expect(
            not self.cycle or self.decay_steps is not None,
            "cycle",
            "false while scheduler.decay_steps is null, since the run ends where the first cycle"
            " does",
        )


@dataclass(kw_only=True)
class InverseSqrtConfig(FloorConfig):
    """Linear climb over the warm-up, then sqrt(num_warmup_steps / step).

    PaddleNLP's InverseSquareRootSchedule.

    The curve is nothing without a warm-up: where neither num_warmup_steps nor warmup_ratio is given
    it takes a tenth of the run.
    """

    num_warmup_steps: Count | None
    warmup_ratio: InnerShare | None


@dataclass(kw_only=True)
class NoamConfig(InverseSqrtConfig):
    """d_model ** -0.5 * min(step ** -0.5, step * num_warmup_steps ** -1.5); Vaswani et al. 2017."""

    d_model: Count | None
    """Width of the model: `lr` is then the factor in front, not the peak.

    Null: scaled so that `lr` is the peak.
    """


@dataclass(kw_only=True)
class WsdConfig(FloorConfig):
    """Warm-up, stable, decay: the peak for most of the run, then down to min_lr at its end."""

    num_decay_steps: Count | None
    """Length of the decay. Not together with decay_ratio; with neither, a tenth of the run."""
    decay_ratio: Annotated[float, number("a number in (0, 1]", lambda x: 0 < x <= 1)] | None
    """The same as a share of the run; rounded up to whole steps."""
    decay_shape: WsdShape

    def __post_init__(self) -> None:
        """Refuse two lengths of one decay, and a geometric decay to 0."""
        super().__post_init__()
        self._expect_one_of("num_decay_steps", "decay_ratio")
        self.expect(
            self.decay_shape is not WsdShape.exponential or self.min_lr > 0,
            "min_lr",
            "a number above 0 with scheduler.decay_shape=exponential, which comes down by equal"
            " factors",
        )


@dataclass(kw_only=True)
class StepConfig(FloorConfig):
    """gamma ** (step // step_size), steps counted from the end of the warm-up."""

    step_size: Count
    gamma: Positive


@dataclass(kw_only=True)
class MultistepConfig(FloorConfig):
    """Times gamma at each milestone."""

    milestones: Steps | None
    """Steps of the run (warm-up included), one or more; null: at one half and at three quarters of
    it."""
    gamma: Positive
    boundary: Boundary

    def __post_init__(self) -> None:
        """Refuse no milestone."""
        super().__post_init__()
        self.expect(self.milestones != [], "milestones", "at least one step")


@dataclass(kw_only=True)
class PiecewiseConfig(SchedulerConfig):
    """A list of multipliers: one per step, or one per stretch between boundaries."""

    values: list[float]
    """Multipliers of `lr`; for absolute rates set lr=1.0."""
    boundaries: Steps | None
    """Steps of the run where the next value begins, one fewer than values.

    Null: one value per step; a list shorter
    than the run is refused."""
    boundary: Boundary

    def __post_init__(self) -> None:
        """Refuse lists of inconsistent lengths."""
        super().__post_init__()
        self.expect(bool(self.values), "values", "at least one number")
        self.expect(
            all(0 <= value < math.inf for value in self.values), "values", "numbers of 0 or more"
        )
        self.expect(
            self.boundaries is None or len(self.boundaries) == len(self.values) - 1,
            "boundaries",
            f"{len(self.values) - 1} steps for {len(self.values)} values, or null for one value per"
            " step",
        )


@dataclass(kw_only=True)
class ExponentialConfig(FloorConfig):
    """decay_rate ** (step / decay_steps), steps counted from the end of the warm-up."""

    decay_rate: Positive
    decay_steps: Count | None
    """Null: the rest of the run."""
    staircase: bool
    """Round the exponent down to whole numbers."""


@dataclass(kw_only=True)
class InverseTimeConfig(ExponentialConfig):
    """1 / (1 + decay_rate * step / decay_steps), steps counted from the end of the warm-up."""


@dataclass(kw_only=True)
class PlateauConfig(FloorConfig):
    """Times factor whenever the metric has not improved for more than `patience` evaluations.

    As torch's.
    """

    metric: str
    """Name in metrics.jsonl that is watched."""
    mode: PlateauMode
    factor: InnerShare
    patience: WholeNumber
    """Evaluations without improvement that are let pass."""
    threshold: NotNegative
    """Improvement that counts."""
    threshold_mode: ThresholdMode
    cooldown: WholeNumber
    """Evaluations after a reduction that are not counted."""


SCHEMAS: Mapping[str, type[SchedulerConfig]] = registry.add_builtin(
    "scheduler",
    {
        "constant": (ConstantConfig, "optrun.scheduler.builders:constant"),
        "linear": (LinearConfig, "optrun.scheduler.builders:linear"),
        "cosine": (CosineConfig, "optrun.scheduler.builders:cosine"),
        "polynomial": (PolynomialConfig, "optrun.scheduler.builders:polynomial"),
        "inverse_sqrt": (InverseSqrtConfig, "optrun.scheduler.builders:inverse_sqrt"),
        "wsd": (WsdConfig, "optrun.scheduler.builders:wsd"),
        "noam": (NoamConfig, "optrun.scheduler.builders:noam"),
        "step": (StepConfig, "optrun.scheduler.builders:step"),
        "multistep": (MultistepConfig, "optrun.scheduler.builders:multistep"),
        "piecewise": (PiecewiseConfig, "optrun.scheduler.builders:piecewise"),
        "exponential": (ExponentialConfig, "optrun.scheduler.builders:exponential"),
        "inverse_time": (InverseTimeConfig, "optrun.scheduler.builders:inverse_time"),
        "plateau": (PlateauConfig, "optrun.scheduler.builders:constant"),
    },
)
