"""Name the kernel that steps an optimizer.

`optrun explain` shows it, and checkpoints record it: a resume is exact by the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from optrun.base.errors import ConfigError
from optrun.base.options import Group
from optrun.base.plain import PlainMapping
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.kernels import library
from optrun.optimizer.kernels.choice import VARIABLE
from optrun.optimizer.kernels.triton.availability import why_not


def kernel_of(optimizer: Optimizer, device: str, *, sharded: bool = False) -> str:
    """Name the kernel of an optimizer's step.

    Args:
        optimizer: Any torch optimizer; of a `Composite` all members count.
        device: Type of the device that its parameters will be on.
        sharded: Whether parameters will be DTensors.

    Returns:
        Name as in `OPTRUN_KERNEL`; several, joined by commas, if groups differ; "torch" for an
        optimizer whose update is torch's or another library's.

    Raises:
        ConfigError: `OPTRUN_KERNEL` is no kernel, or one that is not there.
    """
    names = {
        _kernel_of_group(stepper, group, device, sharded=sharded)
        for stepper, group in _steppers(optimizer)
    }
    return ", ".join(sorted(names))


def refuse_different(kernels: Sequence[str]) -> None:
    """Refuse ranks with different kernels: replicas would differ in their last bits.

    Args:
        kernels: Result of `kernel_of` on each rank.

    Raises:
        ConfigError: They are not all equal; it names each rank with its kernel.
    """
    if len(set(kernels)) > 1:
        kernel_of_ranks = ", ".join(f"rank {rank}: {kernel}" for rank, kernel in enumerate(kernels))
        raise ConfigError(
            f"The ranks would step by different kernels ({kernel_of_ranks}), so that replicas"
            f" would differ in their last bits. Set {VARIABLE}=NAME on all ranks to a kernel that"
            " each of them has; `optrun explain` says why one is missing on a machine."
        )


def _steppers(optimizer: Optimizer) -> list[tuple[Any, PlainMapping]]:
    """List each group beside its stepper: the optimizer, or one of its members."""
    members = getattr(optimizer, "members", {})
    return [
        (members.get(group.get("optimizer"), optimizer), group) for group in optimizer.param_groups
    ]


def _kernel_of_group(stepper: object, group: Group, device: str, *, sharded: bool) -> str:
    """Name the kernel of a group: one of `Formula`, else `torch`, `foreach` or `loop`."""
    if hasattr(stepper, "kernel"):
        return str(stepper.kernel(group, device, sharded=sharded))
    ancestors = type(stepper).__mro__
    below_torch = ancestors[: ancestors.index(Optimizer)]
    has_step_of_torch = any(cls.__module__.startswith("torch.") for cls in below_torch)
    if NamedOptimizer not in below_torch or has_step_of_torch:
        return "torch"
    if group.get("foreach"):
        return "foreach"
    return "loop"


def kernel_row(optimizer: Optimizer, device: str, *, sharded: bool = False) -> str:
    """Write the row of `optrun explain`: the kernel, and why the fastest one is missing, if so.

    Arguments as in `kernel_of`.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> kernel_row(torch.optim.SGD([weight]), "cpu")
        "torch's own"
    """
    kernel = kernel_of(optimizer, device, sharded=sharded)
    if kernel == "torch":
        return "torch's own"
    if device == "cpu":
        fastest = "compiled"
        fallback = "loop"
        reason = library.library().missing
    else:
        fastest = "Triton"
        fallback = "foreach"
        reason = why_not(device)
    kernels = {
        _kernel_of_group(stepper, group, device, sharded=sharded)
        for stepper, group in _steppers(optimizer)
        if isinstance(stepper, BatchOptimizer)
        and group.get("foreach") is None
        and fastest.lower() in stepper.FORMULA.kernels(sharded=sharded)
    }
    if reason and fallback in kernels:
        return f"{kernel}; the {fastest} one: {reason}"
    return kernel
