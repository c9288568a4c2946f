"""When everything is saved, and what is kept."""

from dataclasses import dataclass
from enum import Enum

from optrun.config.schema.checks import expect, expect_count, expect_not_negative


class Mode(Enum):
    """Which direction of a metric is better."""

    min = "min"
    max = "max"


# Written as a call because one of its words is Python's too.
OnStorageError = Enum("OnStorageError", {"continue": "continue", "stop": "stop"})
"""What happens when a checkpoint or a metrics line cannot be written."""


class OnOtherOptimizer(Enum):
    """What happens on resume when the optimizer is not the one whose state was saved."""

    refuse = "refuse"
    reset = "reset"


class Checksum(Enum):
    """Algorithms of `optrun.artifacts.checksum`."""

    xxh3 = "xxh3"
    sha256 = "sha256"


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
    on_storage_error: OnStorageError
    """`continue`: training goes on with a warning and tries again to save. `stop`: exit 74."""
    on_other_optimizer: OnOtherOptimizer
    """On resume, where the saved optimizer state does not fit: `refuse` it by name, or `reset`: start it anew."""
    checksum: Checksum
    """Of the tensor files: `xxh3` is as fast as the disk and finds damage; `sha256` takes longer than the writing, and
    nobody can make another file that has the same."""
    allow_nonfinite: bool
    """Save and resume weights that hold NaN or infinity."""

    def __post_init__(self) -> None:
        """Refuse a retention that keeps nothing."""
        expect_count("checkpoint.save_steps", self.save_steps)
        expect(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "1 or more", "The newest is always kept.")
        expect_not_negative("checkpoint.keep_best", self.keep_best)


SCHEMAS: dict[str, type[CheckpointConfig]] = {"default": CheckpointConfig, "none": CheckpointConfig}
