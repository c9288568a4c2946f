"""Gradients as plain tensors.

What can be scaled in place, and norms that are global wherever the tensors lie.

Source of the two traps avoided here: the norm of a DTensor reads as the norm of the local shard
once it becomes a Python number, and one reduction per tensor makes many small collectives.
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
"""Device mesh, and its dimensions over which a gradient is cut into pieces."""
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
    """The positions of gradients that are cut into pieces."""
    sparse: bool = False
    """Whether of some gradients only some rows have values; the others are 0."""

    def __post_init__(self) -> None:
        """Group the values by device and dtype, for one foreach call each."""
        kinds = list(map(_KIND, self.values))
        distinct = list(dict.fromkeys(kinds))
        self.together: list[tuple[Sequence[int], list[Tensor]]]
        """Positions, and the values there."""
        self.together = [(range(len(kinds)), self.values)]
        if len(distinct) > 1:
            positions = [[at for at, kind in enumerate(kinds) if kind == one] for one in distinct]
            self.together = [(some, [self.values[at] for at in some]) for some in positions]


def gradients_of(params: Iterable[Tensor]) -> Gradients | None:
    """Prepare the gradients of parameters to be measured; None if none has one.

    A sparse gradient is coalesced first, so that repeated rows count as their sum. A DTensor whose
    pieces are partial sums is summed first.
    """
    params = list(params)
    grads = [grad for grad in map(_GRADIENT, params) if grad is not None]
    if not grads:
        return None
    if set(map(type, grads)) == {Tensor} and set(map(_LAYOUT, grads)) == {torch.strided}:
        return Gradients(grads)
    shards: dict[ShardKey, list[int]] = {}
    sparse = False
    with_gradient = (param for param in params if param.grad is not None)
    for at, param in enumerate(with_gradient):
        grad = grads[at]
        if isinstance(grad, DTensor):
            grad = param.grad = _summed(grad)
            cut = tuple(
                dim
                for dim, placement in enumerate(grad.placements)
                if not isinstance(placement, Replicate)
            )
            if cut:
                shards.setdefault((grad.device_mesh, cut), []).append(at)
            grads[at] = grad.to_local()
        elif grad.is_sparse:
            sparse = True
            grad = param.grad = grad.coalesce()
            grads[at] = grad._values()
    return Gradients(grads, shards, sparse)


def _summed(grad: DTensor) -> DTensor:
    """Sum the pieces of a gradient that are partial sums."""
    if not any(isinstance(placement, Partial) for placement in grad.placements):
        return grad
    summed = [Replicate() if isinstance(at, Partial) else at for at in grad.placements]
    return grad.redistribute(placements=summed)


def norms(gradients: Gradients) -> Tensor:
    """Compute the L2 norm of each gradient, over all of its pieces.

    One pass of `torch._foreach_norm` per device and dtype, one all-reduce per mesh dimension that
    cuts; gradients in half precision are measured in float32.

    Returns:
        Shape (n,), float64 where a gradient is, else float32; on the device of the first gradient.
    """
    home = gradients.values[0].device
    wide = torch.float32
    if any(values[0].dtype is torch.float64 for _, values in gradients.together):
        wide = torch.float64
    by_position: dict[int, Tensor] = {}
    for positions, values in gradients.together:
        lengths = torch.stack(torch._foreach_norm(values, 2, dtype=wide))
        lengths = lengths.to(home, non_blocking=True)
        if len(gradients.together) > 1:
            by_position.update(zip(positions, lengths.unbind(), strict=True))
    if by_position:
        lengths = torch.stack([by_position[at] for at in sorted(by_position)])
    for (mesh, dims), positions in gradients.shards.items():
        rows = torch.tensor(positions, device=home)
        squares = lengths[rows].double().square()
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))  # type: ignore[attr-defined]
        lengths = lengths.index_copy(0, rows, squares.sqrt().to(wide))
    return lengths


def scale_(gradients: Gradients, factors: Sequence[Tensor]) -> None:
    """Multiply each gradient by its factor, in place.

    Args:
        gradients: To be scaled.
        factors: One of shape () for each, or one for all of them.
    """
    for positions, values in gradients.together:
        device = values[0].device
        dtype = values[0].dtype
        if dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32
        if len(factors) == 1:
            torch._foreach_mul_(values, factors[0].to(device, dtype))
        else:
            torch._foreach_mul_(values, [factors[at].to(device, dtype) for at in positions])
