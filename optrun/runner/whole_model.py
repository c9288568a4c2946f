"""A sharded model made whole again, to be continued from and published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from optrun.artifacts.metadata import CheckpointMetadata
from optrun.distributed.shard import whole_tensors
from optrun.model.weights import load_model_tensors, model_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def whole_model(model: PreTrainedModel, constants: CheckpointMetadata) -> PreTrainedModel | None:
    """Gather a sharded model; every rank takes part.

    Args:
        model: As it was trained.
        constants: Say its class.

    Returns:
        On rank 0 a model on the CPU with all weights, or the model itself where it is no sharded one; else None.
    """
    if not isinstance(model, FSDPModule):
        return model
    import copy

    import torch
    import torch.distributed as dist

    tensors = whole_tensors(model_tensors(model).items())
    if dist.get_rank():
        return None
    sharded: Any = model
    kind = next(base for base in type(model).__mro__ if base.__name__ == constants.model_class)
    with torch.random.fork_rng(devices=[]):
        whole: PreTrainedModel = kind(copy.deepcopy(sharded.config))
    load_model_tensors(whole, tensors)
    whole.train(sharded.training)
    return whole
