"""The examples of an optimizer step belong to the run.

Ranks divide them, and another number of ranks changes none.
"""

from __future__ import annotations

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
WHOLE = "training.global_batch_size"


@dataclass
class SettledBatch:
    """The batch sizes with which the ranks make an optimizer step."""

    request: Request
    """With the numbers that follow from the ranks."""
    micro_batch_size: int
    """Examples of a micro-batch."""
    micro_batches: int
    """Of a step, over all ranks."""
    derived: Mapping[str, str] = field(default_factory=dict)
    """Keys that nobody gave and whose values follow from the ranks, with what that means."""
    examples: tuple[int, int] | None = None
    """Of a step, in the checkpoint and now; None: no checkpoint says how many."""


def settle_batch(
    request: Request, saved: CheckpointMetadata | None, ranks: int, *, branches: bool = False
) -> SettledBatch:
    """Decide the micro-batch size and the number of micro-batches per optimizer step.

    A resumed run keeps the examples per step of its checkpoint, unless a batch size was changed or
    typed.

    Args:
        request: Configuration and command line.
        saved: Metadata of the checkpoint to continue from; None: from the start.
        ranks: Number of ranks.
        branches: Whether a branch begins at the checkpoint.

    Raises:
        ConfigError: The ranks cannot share a step; the message lists the numbers that could.
    """
    training = request.config.training
    plan = {} if saved is None else saved.plan
    if saved is None or "accumulation" not in plan:
        micro, count = training.step_over(ranks)
        return _settled(request, micro, training.gradient_accumulation_steps, count)
    most = int(plan["batch_size"])
    global_batch = int(plan["batch_size"]) * int(plan["accumulation"])
    if _asks_for_another_batch(request, saved, branches=branches):
        micro, count = training.step_over(ranks, most)
        settled = _settled(request, micro, training.gradient_accumulation_steps, count)
        settled.examples = (global_batch, micro * count)
        return settled
    typed = () if branches else request.overrides
    typed_micro = training.per_device_train_batch_size if is_typed(MICRO, typed) else None
    accumulation = training.gradient_accumulation_steps if is_typed(ACCUMULATION, typed) else 1
    kept_config = replace(
        training,
        global_batch_size=global_batch,
        per_device_train_batch_size=typed_micro,
        gradient_accumulation_steps=1,
    )
    try:
        micro, count = replace(kept_config, gradient_accumulation_steps=accumulation).step_over(
            ranks, most
        )
    except ConfigError as error:
        raise ConfigError(_refusal(kept_config, ranks, accumulation, most)) from error
    per_rank = count // ranks
    follows = training.global_batch_size is not None and training.gradient_accumulation_steps in (
        1,
        per_rank,
    )
    settled = _settled(
        request, micro, training.gradient_accumulation_steps if follows else per_rank, count
    )
    before = f"{global_batch} examples a step, as before"
    settled.derived = {
        ACCUMULATION: before,
        MICRO: before if micro == most else f"{before}; dropout is drawn otherwise",
    }
    settled.examples = (global_batch, global_batch)
    return settled


def _asks_for_another_batch(request: Request, saved: CheckpointMetadata, *, branches: bool) -> bool:
    """Tell whether somebody asks for a batch other than the checkpoint's.

    In a branch every changed value counts. In a resumed run only a value that is typed and
    differs from the checkpoint's counts: when ranks start again, their configuration still has the
    values of the first start, not those derived since.
    """
    before = saved.config.get("training", {})
    now = request.values["training"]
    for key in (MICRO, ACCUMULATION, WHOLE):
        name = key.partition(".")[2]
        follows_from_global_batch = key == MICRO and now.get(name) is None
        if follows_from_global_batch or now.get(name) == before.get(name):
            continue
        if branches or any(is_typed(typed, request.overrides) for typed in (key, "training")):
            return True
    return False


def _settled(request: Request, micro: int, accumulation: int, count: int) -> SettledBatch:
    """Put the sizes of a batch into a request.

    Args:
        request: Left unchanged.
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
    return SettledBatch(
        replace(request, config=replace(config, training=training), values=values), micro, count
    )


def _fits(count: int, global_batch: int, micro: int | None, accumulation: int, most: int) -> bool:
    """Tell whether so many ranks can share the examples of a step evenly."""
    step = count * (micro or 1) * accumulation
    if global_batch % step:
        return False
    if micro is not None or accumulation == 1:
        return True
    return global_batch // step <= most


def _refusal(training: TrainingConfig, ranks: int, accumulation: int, most: int) -> str:
    """Write the message for ranks that cannot share a step.

    It lists the numbers of ranks that could, and the nearest global batches that these ranks could
    share.

    Args:
        training: Its global batch is the checkpoint's; its micro-batch is None unless typed.
        ranks: Number of ranks, which cannot share the step.
        accumulation: The typed accumulation; 1 if none was typed.
        most: Most examples of a micro-batch.
    """
    global_batch = training.global_batch_size
    micro = training.per_device_train_batch_size
    assert global_batch is not None
    parts = [] if micro is None else [f"{MICRO}={micro}"]
    if accumulation > 1:
        parts.append(f"{ACCUMULATION}={accumulation}")
    fit = [
        str(count)
        for count in range(1, global_batch + 1)
        if _fits(count, global_batch, micro, accumulation, most)
    ]
    with_parts = f" with {' and '.join(parts)}" if parts else ""
    expected = ""
    if fit:
        expected = f"{', '.join(fit[:-1])}{' or ' if fit[:-1] else ''}{fit[-1]} ranks, or "
    lower = max(global_batch // ranks, 1) * ranks
    upper = -(-global_batch // ranks) * ranks
    alternatives = " or ".join(f"{WHOLE}={number}" for number in sorted({lower, upper}))
    return (
        f"{WHOLE}={global_batch}: {ranks} ranks cannot share the {global_batch} examples of a step"
        f" evenly{with_parts}, and a run that continues keeps its batch. Expected"
        f" {expected}another batch from here on: {alternatives}."
    )


def describe_open_size(request: Request, settled: SettledBatch, ranks: int) -> str | None:
    """Describe the micro-batch that follows from the global batch.

    None if its size was given, or is the usual one.
    """
    micro = settled.micro_batch_size
    global_batch = request.config.training.global_batch_size
    if request.config.training.per_device_train_batch_size is not None or micro == MOST_PER_DEVICE:
        return None
    return f"{MICRO}={micro}: follows from {WHOLE}={global_batch} on {plural(ranks, 'rank')}"


def requested_changes(changes: Changes, derived: Collection[str]) -> Changes:
    """Return the changes made by somebody, without those derived from the ranks."""
    return {key: pair for key, pair in changes.items() if key not in derived}
