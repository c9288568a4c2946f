"""What every kernel of a step is held to.

All options of the optimizers that have kernels, on tensors of odd kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from optrun.optimizer.batch_optimizer import BatchOptimizer
from tests.optimizer_cases import CASES, Case

NAMES = ("body.weight", "body.bias", "gain", "start")


def formula(case: Case, options: Mapping[str, Any]) -> str:
    """The name of the formula among those kernels; empty: they do not have it."""
    built = case.build([(name, torch.nn.Parameter(torch.ones(2, 16))) for name in NAMES], **options)
    return built.FORMULA.name if isinstance(built, BatchOptimizer) else ""


OWN = [(case, options) for case in CASES for options in case.good if formula(case, options)]
OWN += [  # a bound that cuts every ratio
    (next(case for case in CASES if case.name == "lamb"), {"min_trust": 20.0, "always_adapt": True})
]
OWN_IDS = [f"{case.name}-{index}" for index, (case, _) in enumerate(OWN)]
COMPILED = list(dict.fromkeys(case.name for case, _ in OWN))
"""Optimizers that the compiled kernel steps."""
LONG = 2 * 16384 + 37
"""More than two chunks of the compiled kernel."""


def odd(dtype: torch.dtype, long: int = LONG, device: str = "cpu") -> dict[str, torch.nn.Parameter]:
    """Names as in `toy`; what kernels stumble over.

    Several chunks, nothing, a number, a transposed matrix, zeros.
    """
    generator = torch.Generator().manual_seed(0)
    values = {
        "body.weight": torch.randn(long, generator=generator, dtype=torch.float64),
        "body.bias": torch.randn(5, 16, generator=generator, dtype=torch.float64).t(),
        "gain": torch.randn((), generator=generator, dtype=torch.float64),
        "start": torch.zeros(5, dtype=torch.float64),
        "empty": torch.zeros(0, 3, dtype=torch.float64),
    }
    return {name: torch.nn.Parameter(value.to(device, dtype)) for name, value in values.items()}


def set_odd_grads(params: Mapping[str, torch.Tensor], step: int) -> None:
    """One gradient is expanded, as that of a sum; one is missing now and then."""
    generator = torch.Generator().manual_seed(1000 + step)
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param)
    params["start"].grad = params["start"].new_ones(()).expand(5)
    if step == 1:
        params["gain"].grad = None


def ends(
    case: Case,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    steps: int = 4,
    long: int = LONG,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """Weights, state and trust ratios after some steps."""
    params = odd(dtype, long, device)
    groups = [
        {
            "params": [(name, params[name]) for name in ("body.weight", "start")],
            "weight_decay": 0.1,
        },
        {
            "params": [(name, params[name]) for name in ("body.bias", "gain", "empty")],
            "lr_scale": 0.5,
        },
    ]
    optimizer = case.build(groups, **options)
    for step in range(steps):
        set_odd_grads(params, step)
        optimizer.step()
    state = {
        f"{n}/{k}": v
        for n, p in params.items()
        for k, v in optimizer.state[p].items()
        if k != "step"
    }
    ratios = {
        f"{n}/ratio": torch.tensor(k) for n, k in getattr(optimizer, "trust_ratios", {}).items()
    }
    return {**{name: param.detach() for name, param in params.items()}, **state, **ratios}
