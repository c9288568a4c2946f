"""Newton-Schulz iterations for Muon: torch's, and the same in float32 for CPUs without bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim._muon import (
    _zeropower_via_newtonschulz,  # torch offers no other door to its arithmetic
)

_SMALL = 4096
"""Entries below which torch's products in bfloat16 cost no more than those in float32 and the
rounding.
"""


def orthogonalize(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Bring the singular values of a matrix near to 1, as `torch.optim.Muon` does it (Jordan 2024).

    With X_0 = update / |update|, in bfloat16, `steps` times: A = X X', X = a X + (b A + c A A) X.

    A GPU does so with torch's own function, as does a CPU with vectors of 512 bits. On x86 with
    AVX2 and no more, a product of bfloat16 takes 10 to 40 times as long as one of float32. There,
    products of larger matrices are made in float32 and rounded to bfloat16, which is what torch's
    are: sums in float32, rounded. Only the order of the sums is another one.

    Args:
        update: Shape (m, n), bfloat16; may be overwritten.
        coefficients: a, b and c.
        steps: Iterations, below 100.
        eps: Least norm to divide by.

    Returns:
        Shape (m, n), bfloat16.
    """
    if not _without_bfloat16(update) or update.numel() < _SMALL:
        return _zeropower_via_newtonschulz(update, coefficients, steps, eps)
    return by_float32(update, coefficients, steps, eps)


def by_float32(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Orthogonalize as `orthogonalize`, each product in float32 and then rounded to bfloat16."""
    a, b, c = coefficients
    tall = update.size(0) > update.size(1)
    x = update.T if tall else update
    x = x.div(x.norm().clamp(min=eps)).float()
    for _ in range(steps):
        gram = _rounded(x @ x.T)
        x = _rounded(
            torch.addmm(x, _rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a)
        )
    x = x.to(torch.bfloat16)
    if tall:
        return x.T
    return x


def _without_bfloat16(tensor: Tensor) -> bool:
    """Tell whether a tensor is on a CPU whose vectors have no arithmetic for bfloat16."""
    return tensor.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def _rounded(value: Tensor) -> Tensor:
    """Round a float32 tensor to bfloat16, and return it in float32."""
    return value.to(torch.bfloat16).float()
