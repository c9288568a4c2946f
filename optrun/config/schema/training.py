"""How long, how large, how precise; names as in `transformers.TrainingArguments`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from optrun.base.errors import ConfigError
from optrun.config.schema.checks import Checked
from optrun.config.schema.ranges import (
    MOST,
    Count,
    Fraction,
    NotNegative,
    Seconds,
    matching,
    number,
    whole_number,
)

MOST_PER_DEVICE = 16
"""Default of `per_device_train_batch_size`, as in `conf/training/default.yaml`; its upper bound if
it follows from the global batch."""


Precision = StrEnum("Precision", ["fp32", "bf16", "fp16"])
"""Arithmetic of forward and backward; weights and optimizer stay float32."""

OnNonfinite = StrEnum("OnNonfinite", ["stop", "skip", "rollback"])
"""What happens when a loss or gradient norm is NaN or inf."""


@dataclass(kw_only=True)
class TrainingConfig(Checked):
    """The one choice, `default`."""

    GROUP = "training."
    name: str
    max_steps: Count | None
    """Optimizer steps. If it is set, the num_train_epochs of a file does not count; on the command
    line give one of the two."""
    num_train_epochs: Annotated[
        float, number(f"a number above 0, {MOST:,} or less", lambda x: 0 < x <= MOST)
    ]
    """Passes over the training examples."""
    per_device_train_batch_size: Count | None
    """Examples of a micro-batch.

    If only `global_batch_size` is given, it follows from that and the ranks, and is null until they
    are known."""
    per_device_eval_batch_size: Count
    gradient_accumulation_steps: Count
    """Micro-batches of an optimizer step, weighted by their tokens or examples: k micro-batches
    equal one big batch."""
    logging_steps: Count
    eval_steps: Count | None
    """Null: at the end of each epoch. The end of training is always evaluated."""
    label_smoothing_factor: Fraction
    """Share of each target that is spread evenly over all classes or tokens, in [0, 1); as in
    transformers.
    """
    precision: Precision
    compile: bool
    """torch.compile the model."""
    gradient_checkpointing: bool
    """Recompute activations in the backward pass: less memory, more time."""
    group_by_length: bool
    """Examples of like length share a step: less padding, the same examples in an epoch."""
    dataloader_num_workers: Annotated[
        int, whole_number("a whole number from 0 to 1,024", lambda x: 0 <= x <= 1024)
    ]
    """Worker processes; more than 1,024 would take the memory of the machine."""
    dataloader_timeout: NotNegative
    """Seconds to wait for a worker's batch before the run ends with an error; 0: no limit."""
    global_batch_size: Count | None
    """Examples of an optimizer step, over all ranks; null: per device times accumulation times
    ranks."""
    nproc_per_node: Annotated[str, matching("auto|0*[1-9][0-9]*", "1 or more, or auto")]
    """Ranks on each machine where `distributed` is not `none`: a number, or `auto`: one a GPU, or
    one on the CPU."""
    device: str
    """`auto` (cuda, then mps, then cpu) or a torch device such as `cuda:1`."""
    max_seconds: Seconds | None
    """Time budget; when it is spent everything is saved and the run exits with 75."""
    on_nonfinite: OnNonfinite
    """`stop`: save what is needed to look at it, exit 3.

    `skip`: leave the update out, count it, go on. `rollback`: go
    back to the last checkpoint that `checkpoint.save_steps` asked for, and pass over the data up to
    the bad batch.
    """
    max_nonfinite_skips: Count
    """`skip` gives up after this many in a row."""
    max_rollbacks: Count
    """`rollback` gives up after this many in a run."""
    early_stopping_patience: Count | None
    """End after this many evaluations in a row without improvement of the main metric
    (`checkpoint.metric`).
    """
    early_stopping_threshold: NotNegative
    """What improves is better than the best by more than this."""
    chunked_loss: Annotated[str, matching("auto|[Tt]rue|[Ff]alse", "auto, true or false")] = "false"
    """Losses of tokens from hidden states, a few rows of logits at a time; auto: where a
    micro-batch of data.max_length would have a GiB of float32 logits or more."""

    def __post_init__(self) -> None:
        """Refuse impossible global batches, and a threshold without early stopping."""
        super().__post_init__()
        # Examples of an optimizer step that each rank has at least.
        least = (self.per_device_train_batch_size or 1) * self.gradient_accumulation_steps
        if self.global_batch_size is not None and self.global_batch_size % least:
            raise self._impossible_global_batch(1, MOST_PER_DEVICE)  # with any number of ranks
        threshold = self.early_stopping_threshold
        if threshold and self.early_stopping_patience is None:
            raise ConfigError(
                f"training.early_stopping_threshold={threshold:g}: nothing stops early without "
                "training.early_stopping_patience; give both."
            )

    def step_over(self, ranks: int, most: int = MOST_PER_DEVICE) -> tuple[int, int]:
        """Return the size of a micro-batch, and the micro-batches of a step over all ranks.

        With a global batch and no given size, it is the largest size up to `most` that divides the
        examples of a rank; accumulation follows, unless it was given as more than 1. A global batch
        of 96 on 4 ranks gives (12, 8): the 24 examples of a rank are 2 micro-batches of 12.

        Args:
            ranks: The number of ranks.
            most: Largest micro-batch if `per_device_train_batch_size` is null.

        Raises:
            ConfigError: No size and accumulation make `training.global_batch_size` on these ranks.
        """
        given_size = self.per_device_train_batch_size
        accumulation = self.gradient_accumulation_steps
        global_batch = self.global_batch_size
        if global_batch is None:
            return given_size or most, accumulation * ranks
        examples_of_rank, remainder = divmod(global_batch, ranks)
        if remainder:
            raise self._impossible_global_batch(ranks, most)
        sizes = range(most, 0, -1) if given_size is None else [given_size]
        for size in sizes:
            micro_batches, remainder = divmod(examples_of_rank, size)
            if remainder == 0 and accumulation in (1, micro_batches):
                return size, micro_batches * ranks
        raise self._impossible_global_batch(ranks, most)

    def _impossible_global_batch(self, ranks: int, most: int) -> ConfigError:
        """Build the error for an impossible global batch on these ranks; see `step_over`."""
        size = self.per_device_train_batch_size
        accumulation = self.gradient_accumulation_steps
        factors = []
        if size is not None:
            factors.append(f"training.per_device_train_batch_size={size}")
        if ranks > 1:
            factors.append(f"{ranks} ranks")
        if accumulation > 1:
            factors.append(f"training.gradient_accumulation_steps={accumulation}")
        bound = ""
        if size is None and accumulation > 1:
            bound = f", with micro-batches of at most {most} examples"
        return ConfigError(
            f"training.global_batch_size={self.global_batch_size}: expected a multiple of"
            f" {' times '.join(factors)}{bound}. Accumulation follows from it: leave"
            " training.gradient_accumulation_steps at 1."
        )


SCHEMAS: dict[str, type[TrainingConfig]] = {"default": TrainingConfig}
