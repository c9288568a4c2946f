"""Checkpoints: the times of saving, and the number kept."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from optrun.config.schema.checks import Checked
from optrun.config.schema.ranges import Count, WholeNumber, at_least

Mode = StrEnum("Mode", ["min", "max"])
"""Which direction of a metric is better."""

OnStorageError = StrEnum("OnStorageError", ["continue", "stop"])
"""What happens when a checkpoint or a metrics line cannot be written."""


OnOtherOptimizer = StrEnum("OnOtherOptimizer", ["refuse", "reset"])
"""What happens on resume when the optimizer is not the one whose state was saved."""


@dataclass(kw_only=True)
class CheckpointConfig(Checked):
    """Choices: `default`, `none`."""

    GROUP = "checkpoint."
    name: str
    enabled: bool
    save_steps: Count | None
    """Optimizer steps between saves; null: only at the end and when stopped."""
    keep_last: Annotated[int, at_least(1, "; the newest is always kept")]
    """Newest checkpoints kept."""
    keep_best: WholeNumber
    """Best checkpoints kept beside them, by `metric`."""
    metric: str | None
    """Metric that says which is best, such as `eval/loss`; null: the task's own."""
    mode: Mode | None
    """Null: the direction that belongs to the metric."""
    on_storage_error: OnStorageError
    """`continue`: training goes on with a warning and tries again to save. `stop`: exit 74."""
    on_other_optimizer: OnOtherOptimizer
    """On resume, where the saved optimizer state does not fit: `refuse` it by name, or `reset`:
    start it anew."""
    allow_nonfinite: bool
    """Save and resume weights that hold NaN or infinity."""


SCHEMAS: dict[str, type[CheckpointConfig]] = {"default": CheckpointConfig, "none": CheckpointConfig}
