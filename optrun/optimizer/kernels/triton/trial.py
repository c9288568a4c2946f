"""One small step of each formula on a device, held against the formula.

Where that fails, other kernels step there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from optrun.optimizer.kernels.rows import NUMBERS, Row
from optrun.optimizer.kernels.triton import launch

Tensors = tuple[Tensor, ...]
SIZES = (9001, 5, 0)
"""More than a chunk, and not of whole blocks; less than a block; nothing."""
NEAR = 1e-5
"""How far float32 may be from the formula in float64."""
SMALL = ("scale", "eps", "eps_gradient", "eps_denominator", "l1", "l2", "decay", "rate", "alpha")
ROW = {
    **NUMBERS,
    **dict.fromkeys(SMALL, 0.01),
    **dict.fromkeys(("keep", "beta1", "beta2", "beta3", "mix", "strength"), 0.9),
    **dict.fromkeys(("root", "first", "unscale", "adapt", "nesterov"), 1.0),
}
BOUNDED_ROW = {**ROW, "min_norm": 1.0, "max_norm": 1.0, "max_ratio": 1.0}
"""MARS's, whose ratio is 1 over the norm of the corrected gradient, at most 1."""


def trial(device: torch.device) -> str:
    """Step tensors on a device, twice.

    Returns:
        Empty, or what is wrong: a compiler that is missing, other numbers than the formula's, other
        bits the second time.
    """
    try:
        for formula in FORMULAS:
            problem = _problem(formula, device)
            if problem:
                return problem
    except Exception as error:  # of the compiler, the linker, the driver: there are other kernels
        first_line = str(error).strip().partition("\n")[0]
        return f"they fail there: {type(error).__name__}: {first_line}"
    return ""


def _problem(formula: str, device: torch.device) -> str:
    """Say what is wrong with one formula; empty if nothing is."""
    row = BOUNDED_ROW if formula == "mars" else ROW
    step = FORMULAS[formula]
    lists = [[_wave(size, phase).to(device) for size in SIZES] for phase in range(5)]
    truths = [
        step(row, *(tensor.double() for tensor in tensors)) for tensors in zip(*lists, strict=True)
    ]
    again = [[tensor.clone() for tensor in tensors] for tensors in lists]
    for each in (lists, again):
        grads = [grad.data_ptr() for grad in each[1]]
        launch.Table(formula, each).step(grads, [row], [0] * len(SIZES))
    for (param, _, *states), truth in zip(zip(*lists, strict=True), truths, strict=True):
        for tensor, true in zip((param, *states), truth, strict=False):
            if not torch.allclose(tensor.double(), true, rtol=NEAR, atol=NEAR):
                return f"they compute another {formula} there"
    for tensors, repeated in zip(lists, again, strict=True):
        if not all(map(torch.equal, tensors, repeated)):
            return f"they compute other bits of {formula} there the second time"
    return ""


def _wave(size: int, phase: int) -> Tensor:
    """Make numbers of both signs; of one sign from the second state on, as second moments are."""
    wave = torch.linspace(0.0, 9.0, size, dtype=torch.float32, device="cpu").add(phase).cos()
    return wave.square() if phase >= 3 else wave


def _mean(moment: Tensor, grad: Tensor, beta: float) -> Tensor:
    return beta * moment + (1 - beta) * grad


def _adam(x: Row, w: Tensor, g: Tensor, m: Tensor, v: Tensor, *_: Tensor) -> Tensors:
    g = g + x["l2"] * w
    m = _mean(m, g, x["beta1"])
    v = _mean(v, g * g, x["beta2"])
    direction = _mean(m, g, x["beta1"]) / (v.sqrt() + x["eps"])
    return x["keep"] * w - x["scale"] * direction, m, v


def _adamax(x: Row, w: Tensor, g: Tensor, m: Tensor, v: Tensor, *_: Tensor) -> Tensors:
    g = g + x["l2"] * w + x["l1"] * w.sign()
    m = _mean(m, g, x["beta1"])
    v = torch.maximum(x["beta2"] * v + x["eps"], g.abs() + x["eps_gradient"])
    return x["keep"] * w - x["scale"] * m / (v + x["eps_denominator"]), m, v


def _lamb(x: Row, w: Tensor, g: Tensor, m: Tensor, v: Tensor, *_: Tensor) -> Tensors:
    g = g + x["l2"] * w + x["l1"] * w.sign()
    m = _mean(m, g, x["beta1"])
    v = _mean(v, g * g, x["beta2"])
    direction = m / (v.sqrt() + x["eps"]) + x["decay"] * w
    ratio = x["keep"] * w.norm() / direction.norm() if w.numel() else 1.0
    return x["keep"] * w - x["scale"] * ratio * direction, m, v


def _lion(x: Row, w: Tensor, g: Tensor, m: Tensor, *_: Tensor) -> Tensors:
    direction = _mean(m, g, x["beta1"]).sign()
    return x["keep"] * w - x["scale"] * direction, _mean(m, g, x["beta2"])


def _schedule_free(x: Row, w: Tensor, g: Tensor, z: Tensor, v: Tensor, *_: Tensor) -> Tensors:
    v = _mean(v, g * g, x["beta2"])
    direction = g / (v.sqrt() + x["eps"]) + x["decay"] * w
    return w.lerp(z, x["mix"]) - x["scale"] * direction, z - x["rate"] * direction, v


def _ademamix(x: Row, w: Tensor, g: Tensor, m: Tensor, slow: Tensor, v: Tensor) -> Tensors:
    m = _mean(m, g, x["beta1"])
    slow = _mean(slow, g, x["beta3"])
    v = _mean(v, g * g, x["beta2"])
    direction = (m + x["alpha"] * slow) / (v.sqrt() + x["eps"])
    return x["keep"] * w - x["scale"] * direction, m, slow, v


def _mars(x: Row, w: Tensor, g: Tensor, m: Tensor, v: Tensor, last: Tensor) -> Tensors:
    c = g + x["strength"] * (g - last)
    c = c / c.norm().clamp(min=1.0)
    m = _mean(m, c, x["beta1"])
    v = _mean(v, c * c, x["beta2"])
    return x["keep"] * w - x["scale"] * m / (v.sqrt() + x["eps"]), m, v, g


FORMULAS: dict[str, Callable[..., Tensors]] = {
    "adam": _adam,
    "adamax": _adamax,
    "lamb": _lamb,
    "lion": _lion,
    "schedule_free": _schedule_free,
    "ademamix": _ademamix,
    "mars": _mars,
}
"""From numbers, weight, gradient and three kinds of state, of which some have fewer, to the weight
and the state after a step."""
