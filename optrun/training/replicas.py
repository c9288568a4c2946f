"""Compare the weights of ranks that hold the same ones, at each save."""

from __future__ import annotations

import socket

import torch
from torch.distributed.tensor import DTensor

from optrun.base.errors import OptrunError
from optrun.distributed.world import World

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by the bytes of an element."""


def refuse_different_weights(model: torch.nn.Module, world: World, step: int) -> None:
    """Refuse ranks whose weights should be equal and are not; all ranks must call this.

    Under `ddp` all ranks are compared, under `fsdp` those that hold the same shard (HSDP). Each
    tensor is compared by the sum of its bits, see `_bit_sums`.

    Args:
        model: The model in training.
        world: The ranks; with one rank nothing is done.
        step: Optimizer steps done, for the message.

    Raises:
        OptrunError: With the first rank and tensor that differ.
    """
    if world.size == 1:
        return
    # 1. The bit sum of each tensor, and which shard this rank holds: [] for the whole model.
    params = dict(model.named_parameters())
    sums = dict(zip(params, _bit_sums(list(params.values())), strict=True))
    shard: list[int] = []
    for param in params.values():
        if isinstance(param, DTensor):  # all have the same mesh
            shard = _shard_coordinates(param)
            break

    # 2. Compare each rank with the first one that holds the same shard.
    first_rank_of_shard: dict[tuple[int, ...], int] = {}
    ranks = world.gather_objects((shard, socket.gethostname(), sums))
    for rank, (rank_shard, host, rank_sums) in enumerate(ranks):
        first = first_rank_of_shard.setdefault(tuple(rank_shard), rank)  # this one, if it is new
        _, first_host, first_sums = ranks[first]
        different = [name for name in first_sums if rank_sums.get(name) != first_sums[name]]
        if different:
            raise OptrunError(
                f"rank {rank} on {host} has other weights than rank {first} on {first_host} after"
                f" step {step}; the first tensor is {different[0]}. This step is not saved. Check"
                " that machine's memory, device and libraries; the run continues from the last"
                " checkpoint with resume=auto."
            )


def _shard_coordinates(param: DTensor) -> list[int]:
    """Return the coordinates of this rank's shard in its mesh, without replicated dimensions."""
    coordinate = param.device_mesh.get_coordinate() or ()
    return [
        at
        for at, placement in zip(coordinate, param.placements, strict=True)
        if not placement.is_replicate()
    ]


@torch.no_grad()
def _bit_sums(tensors: list[torch.Tensor]) -> list[int]:
    """Sum the elements of each tensor, read as integers of the same size, modulo 2**64.

    The sums are computed on the tensors' device, with one copy to the host. For a DTensor only this
    rank's shard is summed. A complex element counts as two.

    Example: the bits of 1.0 and 2.0 in float32.
        >>> _bit_sums([torch.tensor([1.0, 2.0])]) == [0x3F800000 + 0x40000000]
        True
    """
    sums = []
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.reshape(-1)
        # No integer is as wide as a complex number: read it as its real and imaginary parts.
        if local.is_complex():
            local = torch.view_as_real(local).reshape(-1)
        sums.append(local.view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64))
    if sums:  # `stack` refuses none
        return [int(value) for value in torch.stack(sums).tolist()]
    return []
