"""Functions of whole matrices, on matrices of which each process holds a piece.

Each matrix is brought together on one rank alone, and what comes of it is cut again: two
collectives for many matrices, however many there are, the work and the memory divided among the
ranks, and the same bits as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optrun.optimizer.numerics import sharding_of

Function = Callable[[int, Tensor], Tensor]
"""From a matrix's index and the whole matrix to a tensor of the same shape and dtype."""


def on_whole(
    function: Function, pieces: Sequence[Tensor], params: Sequence[Tensor]
) -> list[Tensor]:
    """Apply a function of full matrices to sharded matrices, and return the shards of the results.

    A matrix that is sharded over one mesh dimension is gathered on one rank, its owner, and the
    result is scattered. One that is sharded over several is gathered on every rank.

    Args:
        function: The same on every rank; called on each rank for some of the matrices.
        pieces: This process's shards, of one device and dtype.
        params: Tensors that are sharded as the pieces are, the same on every rank: DTensors, or
            plain tensors that are whole.

    Example:
        >>> pieces, like = [torch.tensor([[3.0, 4.0]])], [torch.ones(1, 2)]
        >>> on_whole(lambda _, whole: whole / whole.norm(), pieces, like)
        [tensor([[0.6000, 0.8000]])]
    """
    out = list(pieces)
    together: dict[tuple[DeviceMesh, int], list[int]] = {}
    for index, (piece, param) in enumerate(zip(pieces, params, strict=True)):
        if not isinstance(param, DTensor) or not sharding_of(param).groups:
            out[index] = function(index, piece)
            continue
        mesh = param.device_mesh
        placements = param.placements
        cut = [
            dim
            for dim in range(mesh.ndim)
            if not placements[dim].is_replicate() and mesh.size(dim) > 1
        ]
        if len(cut) == 1 and type(placements[cut[0]]) is Shard:
            together.setdefault((mesh, cut[0]), []).append(index)
        else:  # cut over several dimensions of the mesh: each rank brings it together for itself
            matrix = DTensor.from_local(
                piece, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
            ).full_tensor()
            result = function(index, matrix)
            pieces_of_result = distribute_tensor(result, mesh, placements, src_data_rank=None)
            out[index] = pieces_of_result.to_local()
    for (mesh, dim), indices in together.items():
        axes = [params[index].placements[dim].dim % params[index].dim() for index in indices]  # type: ignore[attr-defined]
        matrices = [
            _ShardedMatrix(index, pieces[index], params[index].shape, axis)
            for index, axis in zip(indices, axes, strict=True)
        ]
        for index, piece in zip(
            indices, _map_on_owners(function, matrices, mesh, dim), strict=True
        ):
            out[index] = piece
    return out


class _ShardedMatrix:
    """A matrix of which each rank has one piece, cut as torch.chunk does."""

    def __init__(self, index: int, piece: Tensor, shape: torch.Size, axis: int) -> None:
        self.index = index
        self.piece = piece
        self.shape = shape
        self.axis = axis

    def shapes(self, ranks: int) -> list[list[int]]:
        """Return the shape of each rank's piece; the last ones may be short or empty."""
        length = self.shape[self.axis]
        most = -(-length // ranks)
        lengths = [max(0, min(most, length - rank * most)) for rank in range(ranks)]
        return [
            [*self.shape[: self.axis], length, *self.shape[self.axis + 1 :]] for length in lengths
        ]


def _map_on_owners(
    function: Function, matrices: Sequence[_ShardedMatrix], mesh: DeviceMesh, dim: int
) -> list[Tensor]:
    """Send the pieces of every matrix to its owner, and the pieces of its result back."""
    ranks = mesh.size(dim)
    me = mesh.get_local_rank(dim)
    group = mesh.get_group(dim)
    shapes = [matrix.shapes(ranks) for matrix in matrices]

    def count(at: int, rank: int) -> int:
        return torch.Size(shapes[at][rank]).numel()

    owned = _assign_owners([matrix.shape.numel() for matrix in matrices], ranks)
    order = list(chain.from_iterable(owned))
    counts_here = [count(at, me) for at in order]
    send_counts = [sum(count(at, me) for at in matrices_of_rank) for matrices_of_rank in owned]
    receive_counts = [sum(count(at, rank) for at in owned[me]) for rank in range(ranks)]

    send = torch.cat([matrices[at].piece.reshape(-1) for at in order])
    received = send.new_empty(sum(receive_counts))
    dist.all_to_all_single(received, send, receive_counts, send_counts, group=group)
    from_ranks = []
    for rank, part in enumerate(received.split(receive_counts)):
        from_ranks.append(part.split([count(at, rank) for at in owned[me]]))
    results: list[list[Tensor]] = [[] for _ in range(ranks)]
    for position, at in enumerate(owned[me]):
        axis = matrices[at].axis
        pieces_of_matrix = [
            part[position].view(shapes[at][rank]) for rank, part in enumerate(from_ranks)
        ]
        result = function(matrices[at].index, torch.cat(pieces_of_matrix, dim=axis))
        lengths = [shape[axis] for shape in shapes[at]]
        for rank, piece in enumerate(result.split(lengths, dim=axis)):
            results[rank].append(piece.reshape(-1))
    send_back = torch.cat(list(chain.from_iterable(results))) if owned[me] else received
    returned = send_back.new_empty(sum(send_counts))
    dist.all_to_all_single(returned, send_back, send_counts, receive_counts, group=group)
    parts = returned.split(counts_here)
    pieces = {at: part.view(shapes[at][me]) for at, part in zip(order, parts, strict=True)}
    return [pieces[at] for at in range(len(matrices))]


def _assign_owners(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign matrices to ranks: the largest first, each to the least busy rank.

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
