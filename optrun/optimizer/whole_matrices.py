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

    | a matrix is sharded over | is computed |
    | --- | --- |
    | no mesh dimension | by the rank itself |
    | one mesh dimension | by one rank, its owner, which gathers it and scatters the result |
    | several, or not as `torch.chunk` cuts it | by every rank, which gathers it |

    A collective: all ranks call it with the same matrices in the same order.

    Args:
        function: The same on every rank; called on each rank for some of the matrices.
        pieces: This process's shards, of one device and dtype.
        params: Parameters that are sharded as `pieces` are: DTensors, or plain tensors that are not
            sharded.

    Example:
        >>> shards, like = [torch.tensor([[3.0, 4.0]])], [torch.ones(1, 2)]
        >>> on_whole(lambda _, matrix: matrix / matrix.norm(), shards, like)
        [tensor([[0.6000, 0.8000]])]
    """
    results = list(pieces)
    by_mesh_dim: dict[tuple[DeviceMesh, int], list[_ShardedMatrix]] = {}
    for index, (shard, param) in enumerate(zip(pieces, params, strict=True)):
        if not isinstance(param, DTensor) or not sharding_of(param).groups:
            results[index] = function(index, shard)  # this process has the full matrix
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
            # One mesh dimension: collected first, since all such matrices take two collectives.
            axis = placement.dim % param.dim()
            matrix = _ShardedMatrix(index, shard, param.shape, axis)
            by_mesh_dim.setdefault((mesh, sharded_dims[0]), []).append(matrix)
        else:
            # Several: every rank gathers the matrix, computes the result, and keeps its shard.
            sharded = DTensor.from_local(
                shard, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
            )
            full_result = function(index, sharded.full_tensor())
            result = distribute_tensor(full_result, mesh, placements, src_data_rank=None)
            results[index] = result.to_local()
    for (mesh, dim), matrices in by_mesh_dim.items():
        shards = _apply_on_owners(function, matrices, mesh, dim)
        for matrix, result_shard in zip(matrices, shards, strict=True):
            results[matrix.index] = result_shard
    return results


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
        """Return the shape of each rank's shard, as torch.chunk cuts a matrix.

        The first shards have length / ranks entries of the axis, rounded up; the last ones may be
        shorter or empty: 5 rows over 4 ranks are cut into 2, 2, 1 and 0 rows.
        """
        length = self.shape[self.axis]
        longest = -(-length // ranks)
        shapes = []
        for rank in range(ranks):
            shape = list(self.shape)
            shape[self.axis] = max(0, min(longest, length - rank * longest))
            shapes.append(torch.Size(shape))
        return shapes


def _apply_on_owners(
    function: Function, matrices: Sequence[_ShardedMatrix], mesh: DeviceMesh, dim: int
) -> list[Tensor]:
    """Gather each matrix on its owner, apply the function, and scatter the results.

    Below, `i` is an index into `matrices`, and `owned[rank]` lists those that a rank owns. With two
    ranks and three matrices of two rows: if rank 0 owns [1, 0] and rank 1 owns [2], rank 0, which
    has the first row of each,

    1. sends its row of matrix 2 to rank 1, and gets the second rows of 1 and 0;
    2. computes the results of 1 and 0;
    3. sends the second rows of these to rank 1, and gets the first row of the result of 2.

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
    shapes = [matrix.shapes(ranks) for matrix in matrices]  # shapes[i][rank]: of the rank's shard
    owned = _assign_owners([matrix.shape.numel() for matrix in matrices], ranks)
    owned_here = owned[rank_here]

    # 1. Send the shards of this rank to the owners. `shards_of_ranks[rank]` are that rank's shards
    # of the matrices owned here, in the order of `owned_here`.
    like = matrices[0].shard
    shards_to_send = [[matrices[i].shard for i in owned_by_rank] for owned_by_rank in owned]
    shapes_to_receive = [[shapes[i][rank] for i in owned_here] for rank in range(ranks)]
    shards_of_ranks = _exchange(shards_to_send, shapes_to_receive, group, like)

    # 2. Apply the function to the full matrices that this rank owns, and cut the results into the
    # shards of all ranks.
    results_for_ranks: list[list[Tensor]] = [[] for _ in range(ranks)]
    for i, *shards in zip(owned_here, *shards_of_ranks, strict=True):
        axis = matrices[i].axis
        result = function(matrices[i].index, torch.cat(shards, dim=axis))
        lengths = [shape[axis] for shape in shapes[i]]
        for rank, shard in enumerate(result.split(lengths, dim=axis)):
            results_for_ranks[rank].append(shard)

    # 3. Send the shards of the results back. This rank gets one of each matrix, grouped by owner.
    result_shapes = [[shapes[i][rank_here] for i in owned_by_rank] for owned_by_rank in owned]
    results_of_ranks = _exchange(results_for_ranks, result_shapes, group, like)
    order = chain.from_iterable(owned)  # of the matrices in the results
    result_of = dict(zip(order, chain.from_iterable(results_of_ranks), strict=True))
    return [result_of[i] for i in range(len(matrices))]


def _exchange(
    tensors: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[torch.Size]],
    group: dist.ProcessGroup,
    like: Tensor,
) -> list[list[Tensor]]:
    """Send tensors to each rank of a group, and return the tensors that each rank sent here.

    One collective, `all_to_all_single`. It takes one flat tensor, with the values for rank 0 first,
    then for rank 1, ...; and so does it return one.

    Args:
        tensors: For each rank, the tensors to send to it.
        shapes: For each rank, the shapes of the tensors that it sends here.
        group: The ranks.
        like: A tensor with the dtype and device of all tensors, since there may be none to send.
    """
    # 1. Put all values to send into one flat tensor; `cat` needs at least one.
    flat_tensors = [tensor.reshape(-1) for tensor in chain.from_iterable(tensors)]
    send = torch.cat([like.new_empty(0), *flat_tensors])
    send_numels = [sum(map(Tensor.numel, to_rank)) for to_rank in tensors]
    # 2. Exchange the values. The collective takes how many go to, and come from, each rank.
    numels_to_receive = [list(map(torch.Size.numel, from_rank)) for from_rank in shapes]
    receive_numels = list(map(sum, numels_to_receive))
    received = send.new_empty(sum(receive_numels))
    dist.all_to_all_single(received, send, receive_numels, send_numels, group=group)
    # 3. Cut the received values into tensors, in the order of `shapes`.
    values = iter(received.split(list(chain.from_iterable(numels_to_receive))))
    return [[next(values).view(shape) for shape in from_rank] for from_rank in shapes]


def _assign_owners(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign matrices to ranks: the largest first, each to the rank with the fewest elements yet.

    Returns:
        The indices of the matrices of each rank.

    Example:
        >>> _assign_owners([10, 40, 20, 30], 2)
        [[1, 0], [3, 2]]
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    largest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for index in largest_first:
        rank = load.index(min(load))
        owned[rank].append(index)
        load[rank] += sizes[index]
    return owned
