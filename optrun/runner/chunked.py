"""Whether a run computes its losses in chunks, without the logits of a whole micro-batch."""

from __future__ import annotations

from functools import partial
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


def configure_chunked_loss(
    task: Task, model: PreTrainedModel, config: RunConfig, world: World = ALONE
) -> str | None:
    """Make a model compute its loss in chunks if configured, or if that saves enough memory.

    With `auto`, chunks are used if the logits of a micro-batch would take 1 GiB or more, and if the
    model and the task allow them.

    Args:
        task: Task of the run; `chunked` is set in place.
        model: The model on its device, not sharded yet; its forward pass is replaced in place.
        config: Has `training.chunked_loss` and the size of a micro-batch.
        world: The ranks. Only rank 0 tries it, since the others may have no weights yet.

    Returns:
        A note for the user, or None.

    Raises:
        ConfigError: Chunks are configured, and the task or the model does not allow them.
    """
    # 1. Is it configured, and has the model an output head, whose product is the logits?
    mode = config.training.chunked_loss.lower()
    head = model.get_output_embeddings() if config.task.CHUNKED_LOSS else None
    weight = getattr(head, "weight", None)
    if mode == "false" or weight is None:
        return None
    # 2. Does it save enough? Logits are float32: examples x tokens x vocabulary x 4 bytes.
    texts = config.training.per_device_train_batch_size or MOST_PER_DEVICE
    if isinstance(config.task, PreferenceConfig):
        texts *= 2  # a pair has a chosen and a rejected text
    logits_bytes = 4 * texts * config.data.max_length * len(weight)  # (vocabulary, width)
    if mode == "auto" and logits_bytes < LEAST:
        return None
    # 3. Do task and model allow it? None: they do.
    why = _why_not_chunked(task, model, world)
    if why is None:
        task.chunked = True
        ChunkedForward(model, shift=task.shift)  # puts itself in place of `model.forward`
        return (
            f"{KEY}={mode}: the logits of a micro-batch, up to {size(logits_bytes)}, are computed a"
            " part at a time"
        )
    reason = (
        f"{KEY}={mode}: {type(model).__name__} computes all logits of a micro-batch, up to"
        f" {size(logits_bytes)}: {why}"
    )
    if mode == "true":
        raise ConfigError(f"{reason}. Leave {KEY}=auto, or set it to false.")
    return reason


def _why_not_chunked(task: Task, model: PreTrainedModel, world: World) -> str | None:
    """Say why task or model do not allow chunks; None: they do. Rank 0 tries it with the model."""
    if not vars(type(task)).get("chunks_loss"):  # not inherited: a subclass may read logits
        return f"{type(task).__name__} does not say chunks_loss = True"
    return world.call_on_main(partial(why_not_chunked, model, shift=task.shift))
