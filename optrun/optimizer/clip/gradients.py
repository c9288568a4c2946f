"""Gradients as plain tensors.

What can be scaled in place, and norms that are global wherever the tensors lie.

Source of the two traps avoided here: the norm of a DTensor reads as the norm of the local shard
once it becomes a Python number, and one reduction per tensor makes many small collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

ShardKey = tuple[object, tuple[int, ...]]
"""Device mesh, and its dimensions over which a gradient is cut into pieces; (None, ()) for a plain
tensor."""


class Gradient(NamedTuple):  # made for each tensor at each step, a third of a dataclass's time
    """One gradient.

    Attributes:
        values: What to measure and to scale in place: the gradient, its local shard, or the values
            of its sparse rows.
        shards: Where the other pieces of it are.
        sparse: Only some rows have values; the others are 0.
    """

    values: Tensor
    shards: ShardKey
    sparse: bool


def gradient_of(param: Tensor) -> Gradient | None:
    """Prepare the gradient of a parameter to be measured; None if it has none.

    A sparse gradient is coalesced first, so that repeated rows count as their sum. A DTensor whose
    pieces are partial sums is summed first.
    """
    grad = param.grad
    if grad is None:
        return None
    if isinstance(grad, DTensor):
        if any(isinstance(placement, Partial) for placement in grad.placements):
            summed = [Replicate() if isinstance(at, Partial) else at for at in grad.placements]
            grad = grad.redistribute(placements=summed)
            param.grad = grad
        cut = tuple(
            dim
            for dim, placement in enumerate(grad.placements)
            if not isinstance(placement, Replicate)
        )
        return Gradient(grad.to_local(), (grad.device_mesh, cut), sparse=False)
    if grad.is_sparse:
        if not grad.is_coalesced():
            grad = grad.coalesce()
            param.grad = grad
        return Gradient(grad._values(), (None, ()), sparse=True)
    return Gradient(grad, (None, ()), sparse=False)


def norms(gradients: Sequence[Gradient]) -> Tensor:
    """Compute the L2 norm of each gradient, over all of its pieces.

    One pass of `torch._foreach_norm` per device and dtype, one all-reduce per mesh dimension that
    cuts; gradients in half precision are measured in float32.

    Args:
        gradients: At least one.

    Returns:
        Shape (n,), float64 where a gradient is, else float32; on the device of the first gradient.
    """
    home = gradients[0].values.device
    wide = torch.float32
    if any(entry.values.dtype is torch.float64 for entry in gradients):
        wide = torch.float64
    out: list[Tensor | None] = [None] * len(gradients)
    for positions in by_device_and_dtype(gradients):
        values = [gradients[at].values for at in positions]
        norms_there = torch._foreach_norm(values, 2, dtype=wide)
        for at, norm in zip(positions, norms_there, strict=True):
            out[at] = norm if values[0].device == home else norm.to(home, non_blocking=True)
    lengths = torch.stack([norm for norm in out if norm is not None])
    by_shards: dict[ShardKey, list[int]] = {}
    for at, entry in enumerate(gradients):
        if entry.shards[1]:
            by_shards.setdefault(entry.shards, []).append(at)
    for (mesh, dims), positions in by_shards.items():
        rows = torch.tensor(positions, device=home)
        squares = lengths[rows].double().square()
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))  # type: ignore[attr-defined]
        lengths = lengths.index_copy(0, rows, squares.sqrt().to(wide))
    return lengths


def by_device_and_dtype(gradients: Sequence[Gradient]) -> list[list[int]]:
    """Group the positions of gradients by device and dtype, for one foreach call each."""
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for at, entry in enumerate(gradients):
        together.setdefault((entry.values.device, entry.values.dtype), []).append(at)
    return list(together.values())


def scale_(gradients: Sequence[Gradient], factors: Sequence[Tensor]) -> None:
    """Multiply each gradient by its factor, in place.

    Args:
        gradients: To be scaled.
        factors: One of shape () for each, or one for all of them.
    """
    shared = len(factors) == 1
    for positions in by_device_and_dtype(gradients):
        values = [gradients[at].values for at in positions]
        device = values[0].device
        dtype = values[0].dtype
        if dtype in (torch.float16, torch.bfloat16):
            dtype = torch.float32
        if shared:
            torch._foreach_mul_(values, factors[0].to(device, dtype))
        else:
            torch._foreach_mul_(values, [factors[at].to(device, dtype) for at in positions])
