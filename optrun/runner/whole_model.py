"""A sharded model made whole again, to be continued from and published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optrun.distributed.shard import is_sharded, model_class, whole_tensors
from optrun.model.weights import load_model_tensors, model_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def whole_model(model: PreTrainedModel) -> PreTrainedModel | None:
    """Gather a sharded model; every rank takes part.

    Args:
        model: As it was trained.

    Returns:
        On rank 0 a model on the CPU with all weights, or the model itself where it is no sharded one; else None.
    """
    if not is_sharded(model):
        return model
    import copy

    import torch
    import torch.distributed as dist

    tensors = whole_tensors(model_tensors(model).items())
    if dist.get_rank():
        return None
    sharded: Any = model
    kind: Any = model_class(model)
    with torch.random.fork_rng(devices=[]):
        whole: PreTrainedModel = kind(copy.deepcopy(sharded.config))
    load_model_tensors(whole, tensors)
    whole.train(sharded.training)
    return whole
