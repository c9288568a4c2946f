"""Compare the replicated weights of several ranks at each save.

Ranks that part are found within one interval.
"""

from __future__ import annotations

import hashlib
import json
import socket

import torch
from torch.distributed.tensor import DTensor

from optrun.base.errors import OptrunError
from optrun.distributed.world import World

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_different_weights(model: torch.nn.Module, world: World, step: int) -> None:
    """Refuse ranks with different weights; all of them take part.

    Ranks that hold the same part of the model are compared: all of them under `ddp`, those of one
    shard under HSDP.

    Args:
        model: As it is trained.
        world: The ranks.
        step: Optimizer steps done, for the message.

    Raises:
        OptrunError: With the first tensor and rank that differ.
    """
    if world.size == 1:
        return
    params = dict(model.named_parameters())
    sums = _sums([param.detach() for param in params.values()])
    shard_places = [
        _shard_coordinates(param) for param in params.values() if isinstance(param, DTensor)
    ][:1]
    digest = hashlib.sha256(json.dumps([list(params), sums]).encode()).hexdigest()
    every = world.gather_objects((shard_places, digest))
    for rank, theirs in enumerate(every):
        first = next(at for at, ours in enumerate(every) if ours[0] == theirs[0])
        if theirs == every[first]:
            continue
        ranks = world.gather_objects(
            (socket.gethostname(), sums if world.rank in (first, rank) else [])
        )
        _, first_sums = ranks[first]
        host, rank_sums = ranks[rank]
        name = next(
            (
                name
                for name, *pair in zip(params, first_sums, rank_sums, strict=True)
                if pair[0] != pair[1]
            ),
            "names",
        )
        raise OptrunError(
            f"rank {rank} on {host} has other weights than rank {first} on {ranks[first][0]} after"
            f" step {step}; the first tensor is {name}. Nothing is saved of it. Look at that"
            " machine's memory, device and libraries; the run goes on from the last checkpoint"
            " with resume=auto."
        )


def _shard_coordinates(param: DTensor) -> list[int]:
    """Describe the piece of a tensor on this rank."""
    coordinate = param.device_mesh.get_coordinate() or ()
    return [
        at
        for at, placement in zip(coordinate, param.placements, strict=True)
        if not placement.is_replicate()
    ]


def _sums(tensors: list[torch.Tensor]) -> list[int]:
    """Sum the bits of each tensor as whole numbers, where it lies; one transfer for all."""
    sums = []
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).reshape(-1)
        if local.is_complex():
            local = torch.view_as_real(local).reshape(-1)
        sums.append(local.view(_WORDS[local.element_size()]).sum(dtype=torch.int64))
    if sums:
        return [int(value) for value in torch.stack(sums).tolist()]
    return []
