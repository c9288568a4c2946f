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
from optrun.optimizer.kernels.triton.availability import why_unavailable


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
        for stepper, group in _steppers_and_groups(optimizer)
    }
    return ", ".join(sorted(names))


def refuse_different_kernels(kernels: Sequence[str]) -> None:
    """Refuse ranks with different kernels, because replicas would differ in their last bits.

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


def _steppers_and_groups(optimizer: Optimizer) -> list[tuple[Any, PlainMapping]]:
    """List (optimizer, group) pairs: of a `Composite`, the member that steps the group."""
    members = getattr(optimizer, "members", {})
    return [
        (members.get(group.get("optimizer"), optimizer), group) for group in optimizer.param_groups
    ]


def _kernel_of_group(stepper: object, group: Group, device: str, *, sharded: bool) -> str:
    """Name the kernel that steps a group.

    The formula of a `BatchOptimizer` names it. It is "torch" for other libraries' classes and those
    that derive from one of torch's optimizers. Any other `NamedOptimizer`, such as a plugin's, has
    "foreach" or "loop" by the option of the group.

    Args:
        stepper: The optimizer that steps the group; of a `Composite`, the member.
        group: The group.
        device: Type of the device of its parameters.
        sharded: Whether its parameters are DTensors.
    """
    if isinstance(stepper, BatchOptimizer):
        return stepper.FORMULA.kernel(group, device, sharded=sharded)
    # The class and its base classes, up to torch's `Optimizer`, which is left out.
    classes = type(stepper).__mro__
    below_optimizer = classes[: classes.index(Optimizer)]
    derives_from_torchs = any(cls.__module__.startswith("torch.") for cls in below_optimizer)
    if NamedOptimizer not in below_optimizer or derives_from_torchs:
        return "torch"
    if group.get("foreach"):
        return "foreach"
    return "loop"


def kernel_row(optimizer: Optimizer, device: str, *, sharded: bool = False) -> str:
    """Return the row of `optrun explain`: the kernel, and why it is not the fastest one.

    Such as "compiled", or "loop; the compiled one: it is not built: ...". The fastest one is the
    compiled kernel on a CPU, and Triton's elsewhere. The reason is left out if a group takes the
    slower kernel for another cause: its option `foreach` is set, or its formula has no faster
    kernel. Arguments as in `kernel_of`.

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
        reason = library.library().missing  # empty if it is built
    else:
        fastest = "Triton"
        fallback = "foreach"
        reason = why_unavailable(device)
    if not reason:  # the fastest kernel is there
        return kernel
    # Tell the reason only if it decides: some group would take the fastest kernel, but falls back.
    for stepper, group in _steppers_and_groups(optimizer):
        could_be_fastest = (
            isinstance(stepper, BatchOptimizer)
            and group.get("foreach") is None
            and fastest.lower() in stepper.FORMULA.kernels(sharded=sharded)
        )
        if not could_be_fastest:
            continue
        if _kernel_of_group(stepper, group, device, sharded=sharded) == fallback:
            return f"{kernel}; the {fastest} one: {reason}"
    return kernel
