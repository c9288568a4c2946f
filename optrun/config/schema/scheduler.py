"""How the learning rate moves from step to step; every choice is a multiplier of the peak `lr`."""

import itertools
from dataclasses import dataclass
from enum import Enum

from optrun.config import registry
from optrun.config.schema.checks import expect, expect_count, expect_fraction, expect_not_negative, expect_positive


class WeightDecayCurve(Enum):
    """How weight decay moves; a group without decay stays without."""

    linear = "linear"
    cosine = "cosine"
    lr = "lr"


class WsdShape(Enum):
    """How `wsd` comes down; x runs from 0 to 1."""

    linear = "linear"
    cosine = "cosine"
    one_minus_sqrt = "one_minus_sqrt"
    square = "square"
    exponential = "exponential"


class Boundary(Enum):
    """Which value a boundary step has: the next one (Paddle, torch, MindSpore) or still the last one (Keras)."""

    paddle = "paddle"
    keras = "keras"


class PlateauMode(Enum):
    """Whether less or more of the metric is better."""

    min = "min"
    max = "max"


class ThresholdMode(Enum):
    """Whether the threshold is a share of the best value or a difference to it."""

    rel = "rel"
    abs = "abs"


@dataclass(kw_only=True)
class SchedulerConfig:
    """What every schedule has."""

    name: str
    num_warmup_steps: int | None
    """Steps of the linear climb from 0 (at step 0) to the peak. Not together with warmup_ratio."""
    warmup_ratio: float | None
    """The same as a share of the run, in [0, 1); rounded up to whole steps."""
    weight_decay_curve: WeightDecayCurve | None
    """How each group's weight decay moves over the run: `linear`, `cosine`, or `lr` (with the learning rate's own
    multiplier). Null: it stays."""
    weight_decay_final_ratio: float | None
    """Weight decay at the end by weight decay at the start; for `linear` and `cosine`."""

    def __post_init__(self) -> None:
        """Refuse two answers to one question."""
        expect(
            self.num_warmup_steps is None or self.warmup_ratio is None,
            "scheduler.warmup_ratio",
            self.warmup_ratio,
            f"null, because scheduler.num_warmup_steps={self.num_warmup_steps} is set",
            "Give one of them.",
        )
        expect_not_negative("scheduler.num_warmup_steps", self.num_warmup_steps)
        expect_fraction("scheduler.warmup_ratio", self.warmup_ratio)
        expect_not_negative("scheduler.weight_decay_final_ratio", self.weight_decay_final_ratio)
        needed = self.weight_decay_curve in (WeightDecayCurve.linear, WeightDecayCurve.cosine)
        curve = self.weight_decay_curve.value if self.weight_decay_curve else None
        expect(
            (self.weight_decay_final_ratio is not None) == needed,
            "scheduler.weight_decay_final_ratio",
            self.weight_decay_final_ratio,
            f"{'a number' if needed else 'null'} with scheduler.weight_decay_curve={curve}",
        )


@dataclass(kw_only=True)
class ConstantConfig(SchedulerConfig):
    """Warm-up, then the peak."""


@dataclass(kw_only=True)
class FloorConfig(SchedulerConfig):
    """Schedules that come down, and the value below which they do not go."""

    min_lr: float
    """Absolute, for a group of scale 1; a group of scale s has s * min_lr, so that layer ratios stay."""

    def __post_init__(self) -> None:
        """Refuse a negative floor."""
        super().__post_init__()
        expect_not_negative("scheduler.min_lr", self.min_lr)


@dataclass(kw_only=True)
class LinearConfig(FloorConfig):
    """From the peak to min_lr in a straight line over the rest of the run."""


@dataclass(kw_only=True)
class CosineConfig(FloorConfig):
    """From the peak to min_lr along a half cosine, once or several times."""

    decay_steps: int | None
    """Steps from the peak to the end, min_lr after that; null: the rest of the run."""
    num_cycles: int
    """How often it comes down."""
    restarts: bool
    """Between two descents: true jumps back to the peak, false climbs back along the same cosine."""
    cycle_mult: float
    """Length of a cycle by the length of the one before; other than 1 only with restarts."""
    cycle_decay: float
    """Peak of a cycle by the peak of the one before; other than 1 only with restarts."""

    def __post_init__(self) -> None:
        """Refuse cycles that are none."""
        super().__post_init__()
        expect_positive("scheduler.decay_steps", self.decay_steps)
        expect_positive("scheduler.num_cycles", self.num_cycles)
        for key in ("cycle_mult", "cycle_decay"):
            value = getattr(self, key)
            expect_positive(f"scheduler.{key}", value)
            expect(
                value == 1 or (self.restarts and self.num_cycles > 1),
                f"scheduler.{key}",
                value,
                "1 without restarts of two or more cycles",
            )


@dataclass(kw_only=True)
class PolynomialConfig(FloorConfig):
    """min_lr + (peak - min_lr) * (1 - step / decay_steps) ** power."""

    power: float
    decay_steps: int | None
    """Null: the rest of the run."""
    cycle: bool
    """Once at the end, stretch decay_steps to its next multiple and go on (Keras)."""

    def __post_init__(self) -> None:
        """Refuse powers that do not come down."""
        super().__post_init__()
        expect_positive("scheduler.power", self.power)
        expect_positive("scheduler.decay_steps", self.decay_steps)
        expect(
            not self.cycle or self.decay_steps is not None,
            "scheduler.cycle",
            self.cycle,
            "false while scheduler.decay_steps is null, since the run ends where the first cycle does",
        )


@dataclass(kw_only=True)
class InverseSqrtConfig(FloorConfig):
    """Linear climb over the warm-up, then sqrt(num_warmup_steps / step); PaddleNLP's InverseSquareRootSchedule.

    The curve is nothing without a warm-up: where neither num_warmup_steps nor warmup_ratio is given it takes a tenth
    of the run.
    """

    def __post_init__(self) -> None:
        """Refuse a warm-up of 0 steps."""
        super().__post_init__()
        expect_positive("scheduler.num_warmup_steps", self.num_warmup_steps)
        expect_positive("scheduler.warmup_ratio", self.warmup_ratio)


@dataclass(kw_only=True)
class NoamConfig(InverseSqrtConfig):
    """d_model ** -0.5 * min(step ** -0.5, step * num_warmup_steps ** -1.5); Vaswani et al. 2017."""

    d_model: int | None
    """Width of the model: `lr` is then the factor in front, not the peak. Null: scaled so that `lr` is the peak."""

    def __post_init__(self) -> None:
        """Refuse a width of nothing."""
        super().__post_init__()
        expect_positive("scheduler.d_model", self.d_model)


@dataclass(kw_only=True)
class WsdConfig(FloorConfig):
    """Warm-up, stable, decay: the peak for most of the run, then down to min_lr at its end."""

    num_decay_steps: int | None
    """Length of the decay. Not together with decay_ratio; with neither, a tenth of the run."""
    decay_ratio: float | None
    """The same as a share of the run, in (0, 1]; rounded up to whole steps."""
    decay_shape: WsdShape

    def __post_init__(self) -> None:
        """Refuse two lengths of one decay, and a geometric decay to 0."""
        super().__post_init__()
        expect_positive("scheduler.num_decay_steps", self.num_decay_steps)
        expect(
            self.decay_ratio is None or 0 < self.decay_ratio <= 1,
            "scheduler.decay_ratio",
            self.decay_ratio,
            "a number in (0, 1]",
        )
        expect(
            self.num_decay_steps is None or self.decay_ratio is None,
            "scheduler.decay_ratio",
            self.decay_ratio,
            f"null, because scheduler.num_decay_steps={self.num_decay_steps} is set",
            "Give one of them.",
        )
        expect(
            self.decay_shape is not WsdShape.exponential or self.min_lr > 0,
            "scheduler.min_lr",
            self.min_lr,
            "a number above 0 with scheduler.decay_shape=exponential, which comes down by equal factors",
        )


@dataclass(kw_only=True)
class StepConfig(FloorConfig):
    """gamma ** (step // step_size), steps counted from the end of the warm-up."""

    step_size: int
    gamma: float

    def __post_init__(self) -> None:
        """Refuse steps of no length."""
        super().__post_init__()
        expect_count("scheduler.step_size", self.step_size)
        expect_positive("scheduler.gamma", self.gamma)


@dataclass(kw_only=True)
class MultistepConfig(FloorConfig):
    """Times gamma at each milestone."""

    milestones: list[int] | None
    """Steps of the run (warm-up included), rising; null: at one half and at three quarters of it."""
    gamma: float
    boundary: Boundary

    def __post_init__(self) -> None:
        """Refuse milestones out of order."""
        super().__post_init__()
        if self.milestones is not None:
            expect(bool(self.milestones), "scheduler.milestones", self.milestones, "at least one step")
            _check_rising("scheduler.milestones", self.milestones)
        expect_positive("scheduler.gamma", self.gamma)


@dataclass(kw_only=True)
class PiecewiseConfig(SchedulerConfig):
    """A list of multipliers: one per step, or one per stretch between boundaries."""

    values: list[float]
    """Multipliers of `lr`; for absolute rates set lr=1.0."""
    boundaries: list[int] | None
    """Steps of the run where the next value begins, one fewer than values. Null: one value per step; a list shorter
    than the run is refused."""
    boundary: Boundary

    def __post_init__(self) -> None:
        """Refuse lists that do not fit together."""
        super().__post_init__()
        expect(bool(self.values), "scheduler.values", self.values, "at least one number")
        expect(min(self.values) >= 0, "scheduler.values", self.values, "numbers of 0 or more")
        if self.boundaries is not None:
            _check_rising("scheduler.boundaries", self.boundaries)
            expect(
                len(self.boundaries) == len(self.values) - 1,
                "scheduler.boundaries",
                self.boundaries,
                f"{len(self.values) - 1} steps for {len(self.values)} values, or null for one value per step",
            )


@dataclass(kw_only=True)
class ExponentialConfig(FloorConfig):
    """decay_rate ** (step / decay_steps), steps counted from the end of the warm-up."""

    decay_rate: float
    decay_steps: int | None
    """Null: the rest of the run."""
    staircase: bool
    """Round the exponent down to whole numbers."""

    def __post_init__(self) -> None:
        """Refuse rates that are not positive."""
        super().__post_init__()
        expect_positive("scheduler.decay_rate", self.decay_rate)
        expect_positive("scheduler.decay_steps", self.decay_steps)


@dataclass(kw_only=True)
class InverseTimeConfig(ExponentialConfig):
    """1 / (1 + decay_rate * step / decay_steps), steps counted from the end of the warm-up."""


@dataclass(kw_only=True)
class PlateauConfig(FloorConfig):
    """Times factor whenever the metric has not improved for more than `patience` evaluations; as torch's."""

    metric: str
    """Name in metrics.jsonl that is watched."""
    mode: PlateauMode
    factor: float
    patience: int
    """Evaluations without improvement that are let pass."""
    threshold: float
    """Improvement that counts."""
    threshold_mode: ThresholdMode
    cooldown: int
    """Evaluations after a reduction that are not counted."""

    def __post_init__(self) -> None:
        """Refuse a factor that does not reduce."""
        super().__post_init__()
        expect(0 < self.factor < 1, "scheduler.factor", self.factor, "a number in (0, 1)")
        expect_not_negative("scheduler.patience", self.patience)
        expect_not_negative("scheduler.threshold", self.threshold)
        expect_not_negative("scheduler.cooldown", self.cooldown)


def _check_rising(key: str, steps: list[int]) -> None:
    rising = all(before < after for before, after in itertools.pairwise(steps))
    expect(rising and all(step >= 0 for step in steps), key, steps, "rising steps of 0 or more")


SCHEMAS: dict[str, type[SchedulerConfig]] = registry.own(
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
