"""Functions that several papers share: moments, bias correction, norms, trust ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter


@dataclass(frozen=True)
class Sharding:
    """The processes with the shards of a tensor."""

    groups: tuple[dist.ProcessGroup, ...]
    """One group for each mesh dimension over which the tensor is sharded; empty if it is not."""

    @property
    def ranks(self) -> int:
        """Number of shards of the tensor; 1 if it is not sharded."""
        return math.prod(group.size() for group in self.groups)


def sharding_of(tensor: Tensor) -> Sharding:
    """Return the process groups of a tensor's shards; none unless it is a DTensor.

    Raises:
        ValueError: For a DTensor with `Partial` placements, whose shards have still to be summed.
    """
    if not isinstance(tensor, DTensor):
        return Sharding(())
    mesh = tensor.device_mesh
    groups = []
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError(f"a parameter is placed as {placement}: expected Shard or Replicate.")
        if not isinstance(placement, Replicate) and mesh.size(dim) > 1:
            groups.append(mesh.get_group(dim))
    return Sharding(tuple(groups))


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, with the same storage; any other tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def place_like(grad: Tensor, param: Tensor) -> Tensor:
    """Redistribute the gradient of a DTensor if it has other placements than its parameter.

    Any other gradient is returned itself.
    """
    if (
        isinstance(grad, DTensor)
        and isinstance(param, DTensor)
        and grad.placements != param.placements
    ):
        return grad.redistribute(placements=param.placements)
    return grad


def stores_its_values(tensor: Tensor) -> bool:
    """Tell whether a tensor's values are the bytes in its memory.

    False for a lazy negation, torch's lazy zeros, and subclasses such as DTensor.

    Example:
        >>> stores_its_values(torch.ones(2))
        True
        >>> stores_its_values(torch.ones(2, dtype=torch.complex64).conj().imag)
        False
    """
    return type(tensor) in (Tensor, Parameter) and not (tensor.is_neg() or tensor._is_zerotensor())


def norms(
    tensors: Sequence[Tensor], shardings: Sequence[Sharding], *, foreach: bool = False
) -> Tensor:
    """Compute L2 norms of full tensors from the shards of this process.

    The square of a full norm is the sum of the squared norms of the shards. These are summed in
    float64, with one all-reduce for all tensors that are sharded over the same processes.

    Args:
        tensors: Local shards on one device, of one dtype, float32 or float64; any shapes, empty
            ones, too.
        shardings: The processes with the other shards of each.
        foreach: Use torch's foreach kernels.

    Returns:
        Shape (n,), in the tensors' dtype.

    Example:
        >>> norms([torch.tensor([3.0, 4.0]), torch.tensor(2.0)], [Sharding(())] * 2)
        tensor([5., 2.])
    """
    if foreach:
        norm_list = list(torch._foreach_norm(list(tensors)))
    else:
        norm_list = [torch.linalg.vector_norm(tensor) for tensor in tensors]
    local_norms = torch.stack(norm_list)
    # A dict keeps the order of the tensors, so every rank calls the collectives in the same order.
    groups_of_shards = dict.fromkeys(sharding.groups for sharding in shardings if sharding.groups)
    if not groups_of_shards:
        return local_norms
    squares = local_norms.double().square()
    for groups in groups_of_shards:
        indices = torch.tensor(
            [i for i, sharding in enumerate(shardings) if sharding.groups == groups],
            device=squares.device,
        )
        sums = squares.index_select(0, indices)
        for group in groups:  # one for each mesh dimension over which these tensors are sharded
            dist.all_reduce(sums, group=group)
        squares.index_copy_(0, indices, sums)
    return squares.sqrt().to(local_norms.dtype)


def bias_correction(beta: float, step: int) -> float:
    """Return 1 - beta ** step, the factor by which a moment that began at 0 is too small.

    Args:
        beta: Decay of the moment, in [0, 1).
        step: Number of this step, from 1.

    Source: Kingma & Ba 2015, arXiv:1412.6980, section 3.

    Example:
        >>> round(bias_correction(0.9, 2), 10)
        0.19
    """
    return float(1.0 - beta**step)


def first_moment_(exp_avg: Tensor, grad: Tensor, beta: float) -> Tensor:
    """Update exp_avg = beta * exp_avg + (1 - beta) * grad, in place.

    Example:
        >>> first_moment_(torch.tensor([1.0]), torch.tensor([3.0]), beta=0.5)
        tensor([2.])
    """
    return exp_avg.lerp_(grad, 1 - beta)


def second_moment_(exp_avg_sq: Tensor, grad: Tensor, beta: float) -> Tensor:
    """Update exp_avg_sq = beta * exp_avg_sq + (1 - beta) * grad ** 2, in place.

    Example:
        >>> second_moment_(torch.tensor([1.0]), torch.tensor([3.0]), beta=0.5)
        tensor([5.])
    """
    return exp_avg_sq.mul_(beta).addcmul_(grad, grad, value=1 - beta)


def decay_param_(param: Tensor, keep: float) -> None:
    """Multiply a parameter by the factor that weight decay leaves of it, in place, unless it is 1.

    Example:
        >>> weight = torch.tensor([2.0])
        >>> decay_param_(weight, 0.75)
        >>> weight
        tensor([1.5000])
    """
    if keep != 1.0:
        param.mul_(keep)


def add_coupled_decay(grad: Tensor, param: Tensor, *, l1: float, l2: float) -> Tensor:
    """Return grad + l2 * param + l1 * sign(param): coupled weight decay, part of the gradient.

    Example:
        >>> add_coupled_decay(torch.tensor([1.0]), torch.tensor([-4.0]), l1=0.25, l2=0.5)
        tensor([-1.2500])
    """
    if l2:
        grad = grad + param * l2
    if l1:
        grad = grad + param.sign() * l1
    return grad


def add_coupled_decays(
    grads: list[Tensor], params: list[Tensor], *, l1s: Sequence[float], l2s: Sequence[float]
) -> list[Tensor]:
    """Do `add_coupled_decay` for many tensors by foreach operations; return new gradients.

    Args:
        grads: Gradients; returned themselves if all coefficients are 0.
        params: Their parameters.
        l1s: Coefficient of sign(param) for each; empty: 0 for all.
        l2s: Coefficient of param for each.
    """
    if any(l2s):
        grads = list(torch._foreach_add(grads, torch._foreach_mul(params, l2s)))
    if any(l1s):
        signs = torch._foreach_sign(params)
        grads = list(torch._foreach_add(grads, torch._foreach_mul(signs, l1s)))
    return grads


def moments_(
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    grads: list[Tensor],
    *,
    beta1: float,
    beta2: float,
) -> None:
    """Update both moments of many tensors in place, as `first_moment_` and `second_moment_` do."""
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)


def trust_ratio(param_norm: Tensor, update_norm: Tensor) -> Tensor:
    """Compute LAMB's trust ratio, the factor on the step of each tensor.

    Args:
        param_norm: L2 norms of parameter tensors; any shape.
        update_norm: L2 norms of their Adam directions plus weight decay; the same shape.

    Returns:
        param_norm / update_norm, unitless; 1 where either norm is 0, so that a zero-initialised
        tensor can move, and where the update's norm is NaN, so that bad entries of a gradient spoil
        no others. Not clamped.

    Source: You et al. 2020, arXiv:1904.00962, Algorithm 2, with phi the identity.

    Example:
        >>> trust_ratio(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 1.0]))
        tensor([0.5000, 1.0000])
    """
    usable = (param_norm > 0) & (update_norm > 0)
    return torch.where(usable, param_norm / update_norm, 1.0)
