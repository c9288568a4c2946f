"""Norms of gradients over all processes, and scaling of gradients in place.

DTensors are read as their local shards. The norm of a DTensor would become that of the local shard
when it is converted to a Python number, and would take one collective per tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

ShardKey = tuple[object, tuple[int, ...]]
"""Device mesh, and its dimensions over which a gradient is sharded."""
_KIND = operator.attrgetter("device", "dtype")
_LAYOUT = operator.attrgetter("layout")
_GRADIENT = operator.attrgetter("grad")


@dataclass
class Gradients:
    """The gradients of a step, at least one."""

    values: list[Tensor]
    """What to measure and to scale in place: each gradient, its local shard, or the values of its
    sparse rows."""
    shards: dict[ShardKey, list[int]] = field(default_factory=dict)
    """Positions in `values` of sharded gradients."""
    sparse: bool = False
    """Whether a gradient is sparse: only some of its rows have values, the others are 0."""

    def __post_init__(self) -> None:
        """Group the values by device and dtype, for one foreach call each."""
        kinds = list(map(_KIND, self.values))
        distinct = list(dict.fromkeys(kinds))
        self.batches: list[tuple[Sequence[int], list[Tensor]]]
        """(positions in `values`, the tensors there) for each device and dtype."""
        self.batches = [(range(len(kinds)), self.values)]
        if len(distinct) > 1:
            self.batches = []
            for one in distinct:
                positions = [at for at, kind in enumerate(kinds) if kind == one]
                self.batches.append((positions, [self.values[at] for at in positions]))


def gradients_of(params: Iterable[Tensor]) -> Gradients | None:
    """Collect the gradients of parameters, to measure and scale them; None if there are none.

    A sparse gradient is coalesced first, so that repeated rows count as their sum. A DTensor with
    partial sums is summed over the processes. Both replace `grad` of the parameter.
    """
    params = list(params)
    grads = [grad for grad in map(_GRADIENT, params) if grad is not None]
    if not grads:
        return None
    # 1. The usual case, checked by maps in C: no DTensor, no sparse gradient.
    are_plain = set(map(type, grads)) == {Tensor} and set(map(_LAYOUT, grads)) == {torch.strided}
    if are_plain:
        return Gradients(grads)
    # 2. Else replace each such gradient by its local values. Positions are those in `grads`.
    shards: dict[ShardKey, list[int]] = {}
    sparse = False
    with_gradient = (param for param in params if param.grad is not None)
    for position, param in enumerate(with_gradient):
        grad = grads[position]
        if isinstance(grad, DTensor):
            grad = param.grad = _sum_partials(grad)
            sharded_dims = tuple(
                dim
                for dim, placement in enumerate(grad.placements)
                if not isinstance(placement, Replicate)
            )
            if sharded_dims:  # the norm needs a sum over these dimensions of the mesh
                shards.setdefault((grad.device_mesh, sharded_dims), []).append(position)
            grads[position] = grad.to_local()
        elif grad.is_sparse:
            sparse = True
            grad = param.grad = grad.coalesce()
            grads[position] = grad._values()
    return Gradients(grads, shards, sparse)


def _sum_partials(grad: DTensor) -> DTensor:
    """Sum a gradient over mesh dimensions with partial sums; a gradient without any is returned."""
    if not any(isinstance(placement, Partial) for placement in grad.placements):
        return grad
    placements = [Replicate() if isinstance(p, Partial) else p for p in grad.placements]
    return grad.redistribute(placements=placements)


def norms(gradients: Gradients) -> Tensor:
    """Compute the L2 norm of each gradient, over all of its shards.

    One call of `torch._foreach_norm` per device and dtype; one all-reduce per mesh and sharded
    dimension of it, over squares in float64.

    Returns:
        Shape (n,), on the device of the first gradient; float64 if any gradient is, else float32.
    """
    device = gradients.values[0].device
    dtype = torch.float32
    if any(values[0].dtype is torch.float64 for _, values in gradients.batches):
        dtype = torch.float64
    # 1. The norms of the local values, in the order of the gradients. A single batch has them in
    # this order; those of several batches are put into it.
    length_at: dict[int, Tensor] = {}
    for positions, values in gradients.batches:
        lengths = torch.stack(torch._foreach_norm(values, 2, dtype=dtype))
        lengths = lengths.to(device, non_blocking=True)
        if len(gradients.batches) > 1:
            length_at.update(zip(positions, lengths.unbind(), strict=True))
    if length_at:
        lengths = torch.stack([length_at[position] for position in sorted(length_at)])
    # 2. Sum the squares of sharded gradients over the processes. `dims` are the dimensions of the
    # mesh over which the gradients at `positions` are sharded.
    for (mesh, dims), positions in gradients.shards.items():
        indices = torch.tensor(positions, device=device)
        squares = lengths[indices].double().square()
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))  # type: ignore[attr-defined]
        lengths = lengths.index_copy(0, indices, squares.sqrt().to(dtype))
    return lengths


def scale_(gradients: Gradients, factors: Sequence[Tensor]) -> None:
    """Multiply each gradient by its factor, in place; 16-bit gradients by a float32 factor.

    Args:
        gradients: To be scaled.
        factors: Tensors of shape (): one for each gradient, or one for all of them.
    """
    for positions, values in gradients.batches:
        device = values[0].device
        dtype = values[0].dtype
        if dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32
        if len(factors) == 1:
            torch._foreach_mul_(values, factors[0].to(device, dtype))
        else:
            torch._foreach_mul_(values, [factors[at].to(device, dtype) for at in positions])
