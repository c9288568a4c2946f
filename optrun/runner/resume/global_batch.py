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
    """Decide the micro-batch size and the number of micro-batches per optimizer step.

    A resumed run keeps the examples per step of its checkpoint, unless the user requests others.

    Args:
        request: Configuration and command line.
        saved: Metadata of the checkpoint to continue from; None: from the start.
        ranks: Number of ranks.
        branches: Whether a branch starts from the checkpoint.

    Raises:
        ConfigError: The ranks cannot share a step; the message lists the numbers that could.
    """
    training = request.config.training
    # 1. A new run: the configured sizes.
    if saved is None or "accumulation" not in saved.plan:
        micro, count = training.step_over(ranks)
        return _with_batch_sizes(request, micro, training.gradient_accumulation_steps, count)
    # 2. The user requests another batch than the checkpoint's.
    most = int(saved.plan["batch_size"])
    global_batch = most * int(saved.plan["accumulation"])
    if _requests_other_batch(request, saved, branches=branches):
        micro, count = training.step_over(ranks, most)
        sizes = _with_batch_sizes(request, micro, training.gradient_accumulation_steps, count)
        sizes.examples = (global_batch, micro * count)
        return sizes
    # 3. The examples of the checkpoint, divided over these ranks. Typed sizes are kept.
    typed = () if branches else request.overrides
    typed_micro = training.per_device_train_batch_size if is_typed(MICRO, typed) else None
    accumulation = training.gradient_accumulation_steps if is_typed(ACCUMULATION, typed) else 1
    same_batch = replace(
        training,
        global_batch_size=global_batch,
        per_device_train_batch_size=typed_micro,
        gradient_accumulation_steps=accumulation,
    )
    try:
        micro, count = same_batch.step_over(ranks, most)
    except ConfigError as error:
        raise ConfigError(_describe_uneven_batch(same_batch, ranks, most)) from error
    per_rank = count // ranks
    configured = training.gradient_accumulation_steps
    # With a global batch size an accumulation of 1 means that it follows from the ranks.
    keeps_configured = training.global_batch_size is not None and configured in (1, per_rank)
    sizes = _with_batch_sizes(request, micro, configured if keeps_configured else per_rank, count)
    before = f"{global_batch} examples a step, as before"
    sizes.derived = {
        ACCUMULATION: before,
        MICRO: before if micro == most else f"{before}; dropout is drawn otherwise",
    }
    sizes.examples = (global_batch, global_batch)
    return sizes


def _requests_other_batch(request: Request, saved: CheckpointMetadata, *, branches: bool) -> bool:
    """Tell whether the user requests another batch than the checkpoint's.

    In a branch every changed value counts. In a resumed run a value counts only if the user also
    typed it: on other numbers of ranks optrun changes the micro-batch by itself. For example, a run
    of 2 ranks x 8 examples that resumes on 1 rank with 16 has another value and no request. A
    micro-batch that is left to follow from the global batch never counts.
    """
    before = saved.config.get("training", {})
    now = request.values["training"]
    for key in (MICRO, ACCUMULATION, GLOBAL):
        name = key.partition(".")[2]
        follows_from_global_batch = key == MICRO and now.get(name) is None
        if follows_from_global_batch or now.get(name) == before.get(name):
            continue
        if branches or any(is_typed(typed, request.overrides) for typed in (key, "training")):
            return True
    return False


def _with_batch_sizes(request: Request, micro: int, accumulation: int, count: int) -> BatchSizes:
    """Return a copy of a request with the sizes of a batch in its configuration.

    Args:
        request: Configuration and command line.
        micro: Examples of a micro-batch.
        accumulation: `training.gradient_accumulation_steps`, micro-batches of each rank.
        count: Micro-batches of an optimizer step, over all ranks.
    """
    config = request.config
    training = replace(
        config.training, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation
    )
    numbers = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    values = {**request.values, "training": {**request.values["training"], **numbers}}
    return BatchSizes(
        replace(request, config=replace(config, training=training), values=values), micro, count
    )


def _describe_uneven_batch(training: TrainingConfig, ranks: int, most: int) -> str:
    """Write the message for a number of ranks that cannot share a step evenly.

    It lists the numbers of ranks that could, and the nearest global batches that these ranks could
    share.

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
    typed = [] if micro is None else [f"{MICRO}={micro}"]
    if accumulation > 1:
        typed.append(f"{ACCUMULATION}={accumulation}")
    fit = []
    for count in range(1, global_batch + 1):
        with contextlib.suppress(ConfigError):
            training.step_over(count, most)
            fit.append(str(count))
    with_typed = f" with {' and '.join(typed)}" if typed else ""
    expected = ""
    if fit:
        expected = f"{', '.join(fit[:-1])}{' or ' if fit[:-1] else ''}{fit[-1]} ranks, or "
    lower = max(global_batch // ranks, 1) * ranks
    upper = -(-global_batch // ranks) * ranks
    alternatives = " or ".join(f"{GLOBAL}={number}" for number in sorted({lower, upper}))
    return (
        f"{GLOBAL}={global_batch}: {ranks} ranks cannot share the {global_batch} examples of a step"
        f" evenly{with_typed}, and a run that continues keeps its batch. Expected"
        f" {expected}another batch from here on: {alternatives}."
    )


def describe_derived_micro_batch(request: Request, sizes: BatchSizes, ranks: int) -> str | None:
    """Describe a micro-batch size derived from the global batch.

    None if the size is configured, or is the default.
    """
    micro = sizes.micro_batch_size
    global_batch = request.config.training.global_batch_size
    if request.config.training.per_device_train_batch_size is not None or micro == MOST_PER_DEVICE:
        return None
    return f"{MICRO}={micro}: follows from {GLOBAL}={global_batch} on {plural(ranks, 'rank')}"


def requested_changes(changes: Changes, derived: Collection[str]) -> Changes:
    """Return the changes of the user, without the ones derived from the ranks."""
    return {key: pair for key, pair in changes.items() if key not in derived}
