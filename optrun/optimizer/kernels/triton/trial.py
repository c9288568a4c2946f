"""One small step of each formula on a device, held against the formula.

Where that fails, other kernels step there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optrun.optimizer.kernels.rows import NUMBERS
from optrun.optimizer.kernels.triton import launch

SIZES = (9001, 5, 0)
"""More than a chunk, and not of whole blocks; less than a block; nothing."""
NEAR = 1e-5
"""How far float32 may be from the formula in float64."""
ROW = {
    **NUMBERS,
    **dict.fromkeys(("scale", "eps", "eps_gradient", "eps_denominator", "l1", "l2", "decay"), 0.01),
    **dict.fromkeys(("keep", "beta1", "beta2"), 0.9),
    **dict.fromkeys(("root", "first", "unscale", "adapt", "nesterov"), 1.0),
}


def trial(device: torch.device) -> str:
    """Step tensors on a device, twice.

    Returns:
        Empty, or what is wrong: a compiler that is missing, other numbers than the formula's, other
        bits the second time.
    """
    try:
        return next(
            (wrong for formula in launch.FORMULAS if (wrong := _wrong(formula, device))), ""
        )
    except Exception as error:  # of the compiler, the linker, the driver: there are other kernels
        return (
            f"they fail there: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        )


def _wrong(formula: str, device: torch.device) -> str:
    lists = [[_wave(size, phase).to(device) for size in SIZES] for phase in range(4)]
    truth = [
        _formula(formula, *(tensor.double() for tensor in own)) for own in zip(*lists, strict=True)
    ]
    again = [[tensor.clone() for tensor in tensors] for tensors in lists]
    for each in (lists, again):
        grads = [grad.data_ptr() for grad in each[1]]
        launch.Table(formula, each).step(grads, [ROW], [0] * len(SIZES))
    for (param, _, first, second), wanted in zip(zip(*lists, strict=True), truth, strict=True):
        for tensor, true in zip((param, first, second), wanted, strict=True):
            if not torch.allclose(tensor.double(), true, rtol=NEAR, atol=NEAR):
                return f"they compute another {formula} there"
    for tensors, repeated in zip(lists, again, strict=True):
        if not all(
            torch.equal(tensor, same) for tensor, same in zip(tensors, repeated, strict=True)
        ):
            return f"they compute other bits of {formula} there the second time"
    return ""


def _wave(size: int, phase: int) -> Tensor:
    """Make numbers of both signs; those of the last list, which are second moments, of one."""
    wave = torch.linspace(0.0, 9.0, size, dtype=torch.float32, device="cpu").add(phase).cos()
    return wave.square() if phase == 3 else wave


def _formula(
    formula: str, w: Tensor, g: Tensor, m: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, first moment, and second moment or maximum after a step with the numbers of `ROW`."""
    x = ROW
    g = g + x["l2"] * w + (x["l1"] * w.sign() if formula != "adam" else 0.0)
    m = x["beta1"] * m + (1 - x["beta1"]) * g
    if formula == "adamax":
        v = torch.maximum(x["beta2"] * v + x["eps"], g.abs() + x["eps_gradient"])
        return x["keep"] * w - x["scale"] * m / (v + x["eps_denominator"]), m, v
    v = x["beta2"] * v + (1 - x["beta2"]) * g * g
    if formula == "adam":
        m_next = x["beta1"] * m + (1 - x["beta1"]) * g
        return x["keep"] * w - x["scale"] * m_next / (v.sqrt() + x["eps"]), m, v
    direction = m / (v.sqrt() + x["eps"]) + x["decay"] * w
    ratio = x["keep"] * w.norm() / direction.norm() if w.numel() else 1.0
    return x["keep"] * w - x["scale"] * ratio * direction, m, v
