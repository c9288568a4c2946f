"""How long, how large, how precise; names as in `transformers.TrainingArguments`."""

from dataclasses import dataclass
from enum import Enum

from optrun.base.errors import ConfigError
from optrun.config.schema.checks import (
    MOST,
    expect,
    expect_count,
    expect_fraction,
    expect_not_negative,
    expect_positive,
)

_MOST_WORKERS = 1024
"""Processes; more were not meant, and would take the memory of the machine."""
MOST_PER_DEVICE = 16
"""Examples of a micro-batch at most where nobody says how many; `conf/training/default.yaml` has the same number."""


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
    per_device_train_batch_size: int | None
    """Examples of a micro-batch. With `global_batch_size` a value that nobody gave is an upper bound, and null until
    the ranks are known."""
    per_device_eval_batch_size: int
    gradient_accumulation_steps: int
    """Micro-batches of an optimizer step, weighted by their tokens or examples: k micro-batches equal one big batch."""
    logging_steps: int
    eval_steps: int | None
    """Null: at the end of each epoch. The end of training is always evaluated."""
    label_smoothing_factor: float
    """Share of each target that is spread evenly over all classes or tokens, in [0, 1); as in transformers."""
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
    global_batch_size: int | None
    """Examples of an optimizer step, over all ranks; null: per device times accumulation times ranks."""
    nproc_per_node: str
    """Ranks on each machine where `distributed` is not `none`: a number, or `auto`: one a GPU, or one on the CPU."""
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
    profile: int | None
    """Optimizer steps of this start to profile, after two that are not: a trace and a table in extra/."""
    peak_flops: float | None
    """FLOP/s of one device at its best, for perf/mfu; null: what is known of the GPU at hand."""
    noise_scale: bool
    """Measure perf/noise_scale, the batch beyond which a larger one stops paying (McCandlish et al. 2018), from the
    gradients of two micro-batches or more."""
    early_stopping_patience: int | None
    """End after this many evaluations in a row without improvement of the main metric (`checkpoint.metric`)."""
    early_stopping_threshold: float
    """What improves is better than the best by more than this."""

    def __post_init__(self) -> None:
        """Refuse sizes of nothing."""
        expect(self.max_steps is None or self.max_steps > 0, "training.max_steps", self.max_steps, "1 or more, or null")
        expect_positive("training.num_train_epochs", self.num_train_epochs)
        expect(self.num_train_epochs <= MOST, "training.num_train_epochs", self.num_train_epochs, f"{MOST:,} or less")
        for key in (
            "max_steps",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "global_batch_size",
            "logging_steps",
            "eval_steps",
            "max_nonfinite_skips",
            "max_rollbacks",
            "early_stopping_patience",
            "profile",
        ):
            expect_count(f"training.{key}", getattr(self, key))
        self._check_ranks()
        expect_fraction("training.label_smoothing_factor", self.label_smoothing_factor)
        expect_positive("training.max_seconds", self.max_seconds)
        expect_positive("training.peak_flops", self.peak_flops)
        workers = self.dataloader_num_workers
        expect(
            0 <= workers <= _MOST_WORKERS, "training.dataloader_num_workers", workers, f"from 0 to {_MOST_WORKERS:,}"
        )
        expect_not_negative("training.dataloader_timeout", self.dataloader_timeout)
        self._check_early_stopping()

    def _check_ranks(self) -> None:
        ranks, key = self.nproc_per_node, "training.nproc_per_node"
        expect(ranks == "auto" or (ranks.isdecimal() and int(ranks) > 0), key, ranks, "1 or more, or auto")
        least = (self.per_device_train_batch_size or 1) * self.gradient_accumulation_steps
        if self.global_batch_size is not None and self.global_batch_size % least:
            self.step_over(1)  # which refuses it, whatever the number of ranks

    def step_over(self, ranks: int, most: int = MOST_PER_DEVICE) -> tuple[int, int]:
        """Say how large the micro-batches of an optimizer step are, and how many there are over all ranks.

        Args:
            ranks: How many there are.
            most: Examples of a micro-batch at most, where `per_device_train_batch_size` is null.

        Raises:
            ConfigError: `training.global_batch_size` cannot be made by so many ranks.
        """
        micro, accumulation = self.per_device_train_batch_size, self.gradient_accumulation_steps
        whole = self.global_batch_size
        if whole is None:
            return micro or most, accumulation * ranks
        sizes = range(most, 0, -1) if micro is None else [micro]
        for size in sizes if whole % ranks == 0 else ():
            each, left = divmod(whole // ranks, size)
            if not left and accumulation in (1, each):
                return size, each * ranks
        factors = [] if micro is None else [f"training.per_device_train_batch_size={micro}"]
        factors += [f"{ranks} ranks"] if ranks > 1 else []
        factors += [f"training.gradient_accumulation_steps={accumulation}"] if accumulation > 1 else []
        bound = f", with micro-batches of at most {most} examples" if micro is None and accumulation > 1 else ""
        raise ConfigError(
            f"training.global_batch_size={whole}: expected a multiple of {' times '.join(factors)}{bound}. "
            "Accumulation follows from it: leave training.gradient_accumulation_steps at 1."
        )

    def expect_micro_batches(self, ranks: int) -> None:
        """Refuse to measure the noise between micro-batches where a step has one.

        Raises:
            ConfigError: `training.noise_scale` is on, and one rank takes one micro-batch.
        """
        if self.noise_scale and self.step_over(ranks)[1] < 2:
            raise ConfigError(
                "training.noise_scale=true: a step has one micro-batch, and the noise is what differs between several. "
                "Give training.gradient_accumulation_steps=2, or training.global_batch_size above "
                "training.per_device_train_batch_size, or several ranks."
            )

    def _check_early_stopping(self) -> None:
        key, threshold = "training.early_stopping_threshold", self.early_stopping_threshold
        expect(0 <= threshold < float("inf"), key, threshold, "a number, 0 or more")
        if threshold and self.early_stopping_patience is None:
            raise ConfigError(
                f"{key}={threshold:g}: nothing stops early without training.early_stopping_patience; give both."
            )


SCHEMAS: dict[str, type[TrainingConfig]] = {"default": TrainingConfig}
