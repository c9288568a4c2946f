"""How long, how large, how precise; names as in `transformers.TrainingArguments`."""

from dataclasses import dataclass
from enum import Enum

from optrun.config.schema.checks import expect, expect_count, expect_not_negative, expect_positive
from optrun.errors import ConfigError


class Precision(Enum):
    """Arithmetic of forward and backward; weights and optimizer stay float32."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class OnNonfinite(Enum):
    """What happens when a loss or gradient norm is NaN or inf."""

    stop = "stop"
    skip = "skip"
    rollback = "rollback"


@dataclass(kw_only=True)
class TrainingConfig:
    """The one choice, `default`."""

    name: str
    max_steps: int | None
    """Optimizer steps; where it is set it decides, whatever num_train_epochs says."""
    num_train_epochs: float
    """Passes over the training examples."""
    per_device_train_batch_size: int
    """Examples of a micro-batch."""
    per_device_eval_batch_size: int
    gradient_accumulation_steps: int
    """Micro-batches of an optimizer step, weighted by their tokens or examples: k micro-batches equal one big batch."""
    logging_steps: int
    eval_steps: int | None
    """Null: at the end of each epoch. The end of training is always evaluated."""
    precision: Precision
    compile: bool
    """torch.compile the model."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, more time."""
    group_by_length: bool
    """Examples of like length share a step: less padding, the same examples in an epoch."""
    dataloader_num_workers: int
    dataloader_timeout: float
    """Seconds to wait for a worker's batch before the run ends with an error; 0: without end."""
    device: str
    """`auto` (cuda, then mps, then cpu) or a torch device such as `cuda:1`."""
    max_seconds: float | None
    """Time budget; when it is spent everything is saved and the run exits with 75."""
    on_nonfinite: OnNonfinite
    """`stop`: save what is needed to look at it, exit 3. `skip`: leave the update out, count it, go on. `rollback`: go
    back to the last checkpoint that `checkpoint.save_steps` asked for, and pass over the data up to the bad batch."""
    max_nonfinite_skips: int
    """`skip` gives up after this many in a row."""
    max_rollbacks: int
    """`rollback` gives up after this many in a run."""
    early_stopping_patience: int | None
    """End after this many evaluations in a row without improvement of the main metric (`checkpoint.metric`)."""
    early_stopping_threshold: float
    """What improves is better than the best by more than this."""

    def __post_init__(self) -> None:
        """Refuse sizes of nothing."""
        expect(self.max_steps is None or self.max_steps > 0, "training.max_steps", self.max_steps, "1 or more, or null")
        expect_positive("training.num_train_epochs", self.num_train_epochs)
        for key in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "logging_steps",
            "eval_steps",
            "max_nonfinite_skips",
            "max_rollbacks",
            "early_stopping_patience",
        ):
            expect_count(f"training.{key}", getattr(self, key))
        expect_positive("training.max_seconds", self.max_seconds)
        expect_not_negative("training.dataloader_num_workers", self.dataloader_num_workers)
        expect_not_negative("training.dataloader_timeout", self.dataloader_timeout)
        self._check_early_stopping()

    def _check_early_stopping(self) -> None:
        key, threshold = "training.early_stopping_threshold", self.early_stopping_threshold
        expect(0 <= threshold < float("inf"), key, threshold, "a number, 0 or more")
        if threshold and self.early_stopping_patience is None:
            raise ConfigError(
                f"{key}={threshold:g}: nothing stops early without training.early_stopping_patience; give both."
            )


SCHEMAS: dict[str, type[TrainingConfig]] = {"default": TrainingConfig}
