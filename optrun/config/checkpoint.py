"""When everything is saved, and what is kept."""

from dataclasses import dataclass
from enum import Enum

from optrun.config.checks import expect, expect_not_negative, expect_positive


class Mode(Enum):
    """Which direction of a metric is better."""

    min = "min"
    max = "max"


@dataclass(kw_only=True)
class CheckpointConfig:
    """Choices: `default`, `none`."""

    name: str
    enabled: bool
    save_steps: int | None
    """Optimizer steps between saves; null: only at the end and when stopped."""
    keep_last: int
    """Newest checkpoints kept."""
    keep_best: int
    """Best checkpoints kept beside them, by `metric`."""
    metric: str | None
    """Metric that says which is best, such as `eval/loss`; null: the task's own."""
    mode: Mode | None
    """Null: the direction that belongs to the metric."""

    def __post_init__(self) -> None:
        """Refuse a retention that keeps nothing."""
        expect_positive("checkpoint.save_steps", self.save_steps)
        expect(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "1 or more", "The newest is always kept.")
        expect_not_negative("checkpoint.keep_best", self.keep_best)


SCHEMAS: dict[str, type[CheckpointConfig]] = {"default": CheckpointConfig, "none": CheckpointConfig}
