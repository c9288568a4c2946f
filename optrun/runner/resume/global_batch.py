"""Decide the batch sizes of a run for its number of ranks.

A resumed run keeps the examples of an optimizer step; another number of ranks only divides them
differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.base.errors import ConfigError
from optrun.base.formatting import plural
from optrun.config.batch import MICRO
from optrun.config.request import Request
from optrun.config.schema.training import MOST_PER_DEVICE, TrainingConfig
from optrun.config.tokens import is_typed
from optrun.runner.resume.config_diff import Changes

ACCUMULATION = "training.gradient_accumulation_steps"
GLOBAL = "training.global_batch_size"


@dataclass
class BatchSizes:
    """The batch sizes of an optimizer step on these ranks."""

    request: Request
    """The request, with these batch sizes in its configuration."""
    micro_batch_size: int
    """Examples of a micro-batch."""
    micro_batches: int
    """Micro-batches of a step, over all ranks."""
    derived: Mapping[str, str] = field(default_factory=dict)
    """Keys that follow from the ranks, and were not typed -> what a change of them means."""
    examples: tuple[int, int] | None = None
    """Examples of a step in the checkpoint and now; None: no checkpoint records them."""


def decide_batch_sizes(
    request: Request, saved: CheckpointMetadata | None, ranks: int, *, branches: bool = False
) -> BatchSizes:
    """Decide the size of a micro-batch, and how many of them make an optimizer step.

    A new run has the configured sizes. A resumed run keeps the examples per step of its checkpoint,
    unless the user requests others: if the checkpoint has 2 micro-batches of 8 examples, then

    - on 1 rank a step has 2 micro-batches of 8,
    - on 4 ranks it has 4 micro-batches of 4,
    - on 3 ranks it is refused.

    Args:
        request: Configuration and command line; not changed.
        saved: Metadata of the checkpoint to continue from; None: from the start.
        ranks: Number of ranks.
        branches: Whether a branch starts from the checkpoint.

    Returns:
        The sizes, with a copy of the request that has them in its configuration.

    Raises:
        ConfigError: The ranks cannot share a step; the message lists the numbers that could.
    """
    # `step_over` returns the examples of a micro-batch, and the micro-batches of a step over all
    # ranks. It raises ConfigError if a global batch cannot be divided so.
    training = request.config.training
    configured_accumulation = training.gradient_accumulation_steps
    # 1. A new run: the configured sizes.
    if saved is None or "accumulation" not in saved.plan:
        micro, micro_batches = training.step_over(ranks)
        return _with_batch_sizes(request, micro, configured_accumulation, micro_batches)

    # 2. The user requests another batch than the checkpoint's.
    micro_before = int(saved.plan["batch_size"])
    examples_before = micro_before * int(saved.plan["accumulation"])
    if _requests_other_batch(request, saved, branches=branches):
        micro, micro_batches = training.step_over(ranks, micro_before)
        sizes = _with_batch_sizes(request, micro, configured_accumulation, micro_batches)
        sizes.examples = (examples_before, micro * micro_batches)
        return sizes

    # 3. The examples of the checkpoint, divided over these ranks. Typed sizes are kept; a size that
    # is not typed is left open by None, an accumulation by 1. In a branch all are left open: step 2
    # has dealt with changed ones.
    typed = () if branches else request.overrides
    typed_micro = training.per_device_train_batch_size if is_typed(MICRO, typed) else None
    same_batch = replace(
        training,
        global_batch_size=examples_before,
        per_device_train_batch_size=typed_micro,
        gradient_accumulation_steps=configured_accumulation if is_typed(ACCUMULATION, typed) else 1,
    )
    try:
        micro, micro_batches = same_batch.step_over(ranks, micro_before)
    except ConfigError as error:
        raise ConfigError(_describe_uneven_batch(same_batch, ranks, micro_before)) from error

    # 4. How the configuration says it: by the micro-batches of each rank. If it has a global batch
    # size and an accumulation of 1, this stays: it means there, too, that it follows.
    accumulation = micro_batches // ranks
    if training.global_batch_size is not None and configured_accumulation == 1:
        accumulation = 1
    sizes = _with_batch_sizes(request, micro, accumulation, micro_batches)
    before = f"{examples_before} examples a step, as before"
    sizes.derived = {
        ACCUMULATION: before,
        MICRO: before if micro == micro_before else f"{before}; dropout is drawn otherwise",
    }
    sizes.examples = (examples_before, examples_before)
    return sizes


def _requests_other_batch(request: Request, saved: CheckpointMetadata, *, branches: bool) -> bool:
    """Tell whether the user requests another batch than the checkpoint's.

    A request is a changed micro-batch, accumulation or global batch. In a resumed run it must also
    be typed: on another number of ranks optrun changes the micro-batch by itself. For example, a
    run of 2 ranks x 8 examples that resumes on 1 rank with 16 has another value and no request. In
    a branch every changed value counts.

    Args:
        request: Configuration and command line.
        saved: Metadata of the checkpoint.
        branches: Whether a branch starts from the checkpoint.
    """
    before = saved.config.get("training", {})
    now = request.values["training"]
    for key in (MICRO, ACCUMULATION, GLOBAL):
        name = key.partition(".")[2]
        if now.get(name) == before.get(name):
            continue
        if key == MICRO and now.get(name) is None:
            continue  # null: it follows from the global batch
        # Typed by itself, or with its group `training`.
        if branches or any(is_typed(typed, request.overrides) for typed in (key, "training")):
            return True
    return False


def _with_batch_sizes(
    request: Request, micro: int, accumulation: int, micro_batches: int
) -> BatchSizes:
    """Put the sizes of a batch into a copy of a request, and return both together.

    Args:
        request: Configuration and command line.
        micro: Examples of a micro-batch.
        accumulation: The value for `training.gradient_accumulation_steps`: micro-batches of each
            rank, or 1 to let them follow from a global batch.
        micro_batches: Micro-batches of an optimizer step, over all ranks.

    Returns:
        The sizes with nothing in `derived`, and None in `examples`.
    """
    config = request.config
    training = replace(
        config.training, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation
    )
    numbers = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    values = {**request.values, "training": {**request.values["training"], **numbers}}
    return BatchSizes(
        replace(request, config=replace(config, training=training), values=values),
        micro,
        micro_batches,
    )


def _describe_uneven_batch(training: TrainingConfig, ranks: int, most: int) -> str:
    """Write the message for a number of ranks that cannot share a step evenly.

    It lists the numbers of ranks that could, and the nearest global batches that these ranks could
    share: for 16 examples on 3 ranks "Expected 1, 2, 4, 8 or 16 ranks, or another batch from here
    on: training.global_batch_size=15 or training.global_batch_size=18."

    Args:
        training: Its global batch is the checkpoint's; its micro-batch is None unless typed, its
            accumulation 1 unless typed.
        ranks: Number of ranks, which cannot share the step.
        most: Most examples of a micro-batch.
    """
    global_batch = training.global_batch_size
    micro = training.per_device_train_batch_size
    accumulation = training.gradient_accumulation_steps
    assert global_batch is not None
    # What the user typed.
    typed = [] if micro is None else [f"{MICRO}={micro}"]
    if accumulation > 1:
        typed.append(f"{ACCUMULATION}={accumulation}")
    with_typed = f" with {' and '.join(typed)}" if typed else ""
    # Numbers of ranks that could share the step: for others `step_over` raises.
    fit = []
    for count in range(1, global_batch + 1):
        with contextlib.suppress(ConfigError):
            training.step_over(count, most)
            fit.append(str(count))
    expected = ""
    if fit:
        expected = f"{', '.join(fit[:-1])}{' or ' if fit[:-1] else ''}{fit[-1]} ranks, or "
    # Batches that these ranks could share: the multiples of `ranks` next to the global batch.
    lower = max(global_batch // ranks, 1) * ranks
    upper = -(-global_batch // ranks) * ranks  # rounded up
    alternatives = " or ".join(f"{GLOBAL}={number}" for number in sorted({lower, upper}))
    return (
        f"{GLOBAL}={global_batch}: {ranks} ranks cannot share the {global_batch} examples of a step"
        f" evenly{with_typed}, and a run that continues keeps its batch. Expected"
        f" {expected}another batch from here on: {alternatives}."
    )


def describe_derived_micro_batch(request: Request, sizes: BatchSizes, ranks: int) -> str | None:
    """Describe a micro-batch size that follows from the global batch, in a note for the user.

    Args:
        request: What the user configured.
        sizes: The batch sizes of the run.
        ranks: Number of ranks.

    Returns:
        A note such as "training.per_device_train_batch_size=4: follows from
        training.global_batch_size=16 on 4 ranks"; None if the size is configured, or is the default
        one.
    """
    micro = sizes.micro_batch_size
    global_batch = request.config.training.global_batch_size
    if request.config.training.per_device_train_batch_size is not None or micro == MOST_PER_DEVICE:
        return None
    return f"{MICRO}={micro}: follows from {GLOBAL}={global_batch} on {plural(ranks, 'rank')}"


def requested_changes(changes: Changes, derived: Collection[str]) -> Changes:
    """Return the changes of the user, without the ones derived from the ranks."""
    return {key: pair for key, pair in changes.items() if key not in derived}
