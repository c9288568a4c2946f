"""A model cut over ranks: where its tensors lie."""

from __future__ import annotations

import torch
from torch import nn

from optrun.distributed.shard import _allocate


def test_buffers_are_where_the_model_computes_and_not_where_shards_rest() -> None:
    """As on rank 0, whose buffers `fully_shard` moves to the device, with `cpu_offload`, too."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    _allocate(model, torch.device("cpu"), torch.device("meta"))
    assert {param.device.type for param in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
