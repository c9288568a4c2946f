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
    """Bring the singular values of a matrix near to 1, as `torch.optim.Muon` does (Jordan 2024).

    With X_0 = update / |update|, in bfloat16, `steps` times: A = X X', X = a X + (b A + c A A) X.

    By torch's own function, except for matrices of 4096 or more entries on a CPU with AVX2 alone:
    its bfloat16 products take 10 to 40 times as long as float32 ones. There, products are computed
    in float32 and rounded to bfloat16. torch's are such sums, too, but in another order.

    Args:
        update: Shape (m, n), bfloat16; may be overwritten.
        coefficients: a, b and c.
        steps: Iterations, below 100.
        eps: Least norm to divide by.

    Returns:
        Shape (m, n), bfloat16.
    """
    if update.numel() >= _SMALL and _has_slow_bfloat16(update):
        return by_float32(update, coefficients, steps, eps)
    return _zeropower_via_newtonschulz(update, coefficients, steps, eps)


def by_float32(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Compute `orthogonalize` with float32 products, each rounded to bfloat16.

    A matrix with more rows than columns is transposed first, so that A = X X' is small.
    """
    a, b, c = coefficients
    is_tall = update.size(0) > update.size(1)
    x = update.T if is_tall else update
    x = x.div(x.norm().clamp(min=eps)).float()
    for _ in range(steps):
        gram = _rounded(x @ x.T)
        polynomial = _rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))  # b A + c A A
        x = _rounded(torch.addmm(x, polynomial, x, beta=a))  # a X + polynomial X
    x = x.to(torch.bfloat16)
    return x.T if is_tall else x


def _has_slow_bfloat16(tensor: Tensor) -> bool:
    """Tell whether a tensor is on a CPU with AVX2 alone, which multiplies bfloat16 slowly."""
    return tensor.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"


def _rounded(value: Tensor) -> Tensor:
    """Round a float32 tensor to bfloat16, and return it in float32."""
    return value.to(torch.bfloat16).float()
