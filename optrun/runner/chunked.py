"""Whether a run computes its losses in chunks, without the logits of a whole micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.base.formatting import size
from optrun.config.schema.chat_tasks import PreferenceConfig
from optrun.config.schema.run import RunConfig
from optrun.config.schema.training import MOST_PER_DEVICE
from optrun.distributed.world import ALONE, World
from optrun.model.chunked_loss import ChunkedForward, why_not_chunked
from optrun.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "training.chunked_loss"
LEAST = 2**30
"""Bytes of a micro-batch's logits, in float32, from which `auto` computes them in chunks: alike on
every machine."""


def settle_chunked_loss(
    task: Task, model: PreTrainedModel, config: RunConfig, world: World = ALONE
) -> str | None:
    """Make a model compute its loss in chunks if configured, or if that saves enough memory.

    Args:
        task: Task of the run; changed in place: it is told whether losses come in chunks.
        model: The model on its device, not sharded yet; changed in place.
        config: Says whether chunks are wanted, and how large a micro-batch is.
        world: The ranks. Only the first tries it, since the others may have no weights yet.

    Returns:
        A note for the user, or None.

    Raises:
        ConfigError: Chunks are configured, and the task or the model does not allow them.
    """
    mode = config.training.chunked_loss.lower()
    head = model.get_output_embeddings() if config.task.CHUNKED_LOSS else None
    weight = getattr(head, "weight", None)
    if mode == "false" or weight is None:
        return None
    texts = (config.training.per_device_train_batch_size or MOST_PER_DEVICE) * (
        1 + isinstance(config.task, PreferenceConfig)
    )
    needed = 4 * texts * config.data.max_length * len(weight)
    if mode == "auto" and needed < LEAST:
        return None
    why: str | None = f"{type(task).__name__} does not say chunks_loss = True"
    if vars(type(task)).get("chunks_loss"):  # a subclass may read logits
        why = world.broadcast(
            world.agree(lambda: why_not_chunked(model, shift=task.shift) if world.is_main else None)
        )
    if why is None:
        task.chunked = True
        ChunkedForward(model, shift=task.shift)
        return (
            f"{KEY}={mode}: the logits of a micro-batch, up to {size(needed)}, are computed a part"
            " at a time"
        )
    reason = (
        f"{KEY}={mode}: {type(model).__name__} computes all logits of a micro-batch, up to"
        f" {size(needed)}: {why}"
    )
    if mode == "true":
        raise ConfigError(f"{reason}. Leave {KEY}=auto, or take false.")
    return reason
