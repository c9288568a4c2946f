"""Check the Triton kernels on a device by small steps of each optimizer, against the loops.

If the check fails, other kernels step tensors on that device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from optrun.base.errors import first_line
from optrun.optimizer.classes import class_of

OPTIMIZERS = ("lamb", "adamax", "adamwdl", "lion", "schedule_free", "ademamix", "mars")
"""One for each formula."""
SIZES = (9001, 5, 0)
"""More than a chunk, and not of whole blocks; less than a block; nothing."""
STEPS = 2
NEAR = 1e-5
"""How far float32 may be from the loop in float64."""


def trial(device: torch.device) -> str:
    """Compare small steps by the Triton kernels on a device with the loop.

    Returns:
        Empty if they agree; else what is wrong: an error such as a missing compiler, values that
        differ from the loop's, or bits that differ between two calls.
    """
    try:
        for name in OPTIMIZERS:
            problem = _compare_with_loop(name, device)
            if problem:
                return problem
    except Exception as error:  # of the compiler, the linker, the driver: there are other kernels
        return f"they fail there: {type(error).__name__}: {first_line(error)}"
    return ""


@torch.no_grad()
def _compare_with_loop(name: str, device: torch.device) -> str:
    """Say how the Triton steps of one optimizer are wrong; empty if they are right.

    They are compared with the same steps by `loop`, the kernel that steps one tensor after another
    in plain torch, in float64, with a tolerance of `NEAR`. A second call has to give the same bits.
    """
    # Weights and state tensors after the steps, in one order.
    truth = _tensors_after_steps(name, "loop", torch.float64, device)
    first = _tensors_after_steps(name, "triton", torch.float32, device)
    second = _tensors_after_steps(name, "triton", torch.float32, device)
    for tensor, true in zip(first, truth, strict=True):
        if not torch.allclose(tensor.double(), true, rtol=NEAR, atol=NEAR):
            return f"they compute another {name} there"
    if not all(map(torch.equal, first, second)):
        return f"they compute other bits of {name} there the second time"
    return ""


def _tensors_after_steps(
    name: str, kernel: str, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return weights and state tensors of an optimizer after `STEPS` steps by a kernel.

    The weights come first, then the state of each parameter; the start and the gradients are the
    same for each kernel and dtype.

    Args:
        name: Name of the optimizer.
        kernel: Name of the kernel, such as `loop`.
        dtype: Dtype of the parameters.
        device: Their device.
    """
    params = [Parameter(_make_cosine(size, 0).to(device, dtype)) for size in SIZES]
    build: Any = class_of(name)
    optimizer = build(params, lr=0.01, weight_decay=0.1)
    for step in range(1, STEPS + 1):
        for param in params:
            param.grad = _make_cosine(param.numel(), step).to(device, dtype)
        for batch in optimizer.gather():
            optimizer.FORMULA.step_by(kernel, batch)
    tensors = [param.detach() for param in params]
    for param in params:
        state = optimizer.state[param]
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors


def _make_cosine(size: int, phase: int) -> Tensor:
    """Make a cosine of `size` float32 values on the CPU, shifted by `phase`."""
    wave = torch.linspace(0.0, 9.0, size, dtype=torch.float32, device="cpu")
    return wave.add(phase).cos()
