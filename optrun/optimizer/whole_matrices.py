"""Apply functions of full matrices, such as Newton-Schulz, to sharded matrices.

Each matrix is gathered on one rank, and its result is scattered: two collectives for any number of
matrices. The work and the memory are divided among the ranks, and the bits are those of one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optrun.optimizer.numerics import sharding_of

Function = Callable[[int, Tensor], Tensor]
"""(index of a matrix, full matrix) -> a tensor of the same shape and dtype."""


def on_whole(
    function: Function, pieces: Sequence[Tensor], params: Sequence[Tensor]
) -> list[Tensor]:
    """Apply a function of full matrices to sharded matrices, and return the shards of the results.

    A matrix that is sharded over one mesh dimension is gathered on one rank, its owner, and the
    result is scattered. One that is sharded over several is gathered on every rank. One that is not
    sharded is computed where it is.

    Args:
        function: The same on every rank; called on each rank for some of the matrices.
        pieces: This process's shards, of one device and dtype.
        params: Tensors that are sharded as `pieces` are, the same on every rank: DTensors, or plain
            tensors that are not sharded.

    Example:
        >>> shards, like = [torch.tensor([[3.0, 4.0]])], [torch.ones(1, 2)]
        >>> on_whole(lambda _, matrix: matrix / matrix.norm(), shards, like)
        [tensor([[0.6000, 0.8000]])]
    """
    out = list(pieces)
    by_mesh: dict[tuple[DeviceMesh, int], list[_ShardedMatrix]] = {}
    for index, (shard, param) in enumerate(zip(pieces, params, strict=True)):
        if not isinstance(param, DTensor) or not sharding_of(param).groups:
            out[index] = function(index, shard)
            continue
        mesh = param.device_mesh
        placements = param.placements
        sharded_dims = [
            dim
            for dim in range(mesh.ndim)
            if not placements[dim].is_replicate() and mesh.size(dim) > 1
        ]
        placement = placements[sharded_dims[0]]
        if len(sharded_dims) == 1 and type(placement) is Shard:
            axis = placement.dim % param.dim()
            matrix = _ShardedMatrix(index, shard, param.shape, axis)
            by_mesh.setdefault((mesh, sharded_dims[0]), []).append(matrix)
        else:
            full = DTensor.from_local(
                shard, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
            ).full_tensor()
            result = distribute_tensor(function(index, full), mesh, placements, src_data_rank=None)
            out[index] = result.to_local()
    for (mesh, dim), matrices in by_mesh.items():
        results = _map_on_owners(function, matrices, mesh, dim)
        for matrix, result_shard in zip(matrices, results, strict=True):
            out[matrix.index] = result_shard
    return out


@dataclass(eq=False)
class _ShardedMatrix:
    """A matrix that is sharded along one of its axes, as torch.chunk cuts it."""

    index: int
    """Its index among all matrices."""
    shard: Tensor
    """The shard of this rank."""
    shape: torch.Size
    """Shape of the full matrix."""
    axis: int
    """The axis that is sharded."""

    def shapes(self, ranks: int) -> list[torch.Size]:
        """Return the shape of each rank's shard; the last ones may be short or empty."""
        length = self.shape[self.axis]
        longest = -(-length // ranks)
        shapes = []
        for rank in range(ranks):
            shape = list(self.shape)
            shape[self.axis] = max(0, min(longest, length - rank * longest))
            shapes.append(torch.Size(shape))
        return shapes


def _map_on_owners(
    function: Function, matrices: Sequence[_ShardedMatrix], mesh: DeviceMesh, dim: int
) -> list[Tensor]:
    """Gather each matrix on its owner, apply the function, and scatter the results.

    Positions below are indices into `matrices`. `owned[rank]` are the matrices of a rank, and what
    a rank sends is ordered by owner.

    Args:
        function: See `on_whole`.
        matrices: All sharded over dimension `dim` of `mesh`.
        mesh: Processes that hold the shards.
        dim: The dimension of the mesh.

    Returns:
        This rank's shard of each result, in the order of `matrices`.
    """
    ranks = mesh.size(dim)
    rank_here = mesh.get_local_rank(dim)
    group = mesh.get_group(dim)
    shapes = [matrix.shapes(ranks) for matrix in matrices]
    owned = _assign_owners([matrix.shape.numel() for matrix in matrices], ranks)
    owned_here = owned[rank_here]
    order = list(chain.from_iterable(owned))
    counts_here = [shapes[at][rank_here].numel() for at in order]
    send_counts = [sum(shapes[at][rank_here].numel() for at in ats) for ats in owned]
    receive_counts = [sum(shapes[at][rank].numel() for at in owned_here) for rank in range(ranks)]

    # 1. Send the shards of this rank to the owners.
    send = torch.cat([matrices[at].shard.reshape(-1) for at in order])
    received = send.new_empty(sum(receive_counts))
    dist.all_to_all_single(received, send, receive_counts, send_counts, group=group)
    shards_of_ranks = []
    for rank, values in enumerate(received.split(receive_counts)):
        shards_of_ranks.append(values.split([shapes[at][rank].numel() for at in owned_here]))

    # 2. Apply the function to the full matrices that this rank owns.
    results_for_ranks: list[list[Tensor]] = [[] for _ in range(ranks)]
    for position, at in enumerate(owned_here):
        axis = matrices[at].axis
        shards = [shards_of_ranks[rank][position].view(shapes[at][rank]) for rank in range(ranks)]
        result = function(matrices[at].index, torch.cat(shards, dim=axis))
        lengths = [shape[axis] for shape in shapes[at]]
        for rank, shard in enumerate(result.split(lengths, dim=axis)):
            results_for_ranks[rank].append(shard.reshape(-1))

    # 3. Send the shards of the results back.
    send_back = torch.cat(list(chain.from_iterable(results_for_ranks))) if owned_here else received
    returned = send_back.new_empty(sum(send_counts))
    dist.all_to_all_single(returned, send_back, send_counts, receive_counts, group=group)
    results: dict[int, Tensor] = {}
    for at, values in zip(order, returned.split(counts_here), strict=True):
        results[at] = values.view(shapes[at][rank_here])
    return [results[at] for at in range(len(matrices))]


def _assign_owners(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign matrices to ranks: the largest first, each to the rank with the fewest elements.

    Returns:
        The indices of the matrices of each rank.

    Example:
        >>> _assign_owners([10, 40, 20, 30], 2)
        [[1, 0], [3, 2]]
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        rank = load.index(min(load))
        owned[rank].append(at)
        load[rank] += sizes[at]
    return owned
