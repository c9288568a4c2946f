"""Adam's update on lists of tensors, with everything that its descendants here vary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optrun.optimizer.kernels import compiled
from optrun.optimizer.kernels.choice import Update, pick, take_step
from optrun.optimizer.kernels.triton import launch
from optrun.optimizer.numerics import bias_correction, first_moment_, moments_, second_moment_

WAYS = ("triton", "compiled", "loop")
"""Kernels besides foreach that compute Adam, the preferred one first."""


def adam(params: list[Tensor], *lists: list[Tensor], foreach: bool | None, **numbers: Any) -> None:
    """Step in place, by the kernel that `foreach` means; arguments as in `_single_tensor_adam`."""
    kernel = pick(foreach, params[0].device.type, WAYS)
    updates: dict[str, Update] = {
        "loop": _single_tensor_adam,
        "foreach": _multi_tensor_adam,
        "compiled": compiled.adam,
        "triton": launch.adam,
    }
    take_step(updates, kernel, (params, *lists), numbers)


def _single_tensor_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    steps: list[int],
    lrs: list[float],
    keeps: list[float],
    beta1: float,
    beta2: float,
    eps: float,
    l2s: Sequence[float] = (),
    loss_scales: Sequence[float] = (),
    nesterov: bool = False,
    eps_before_correction: bool = False,
) -> None:
    """Step one tensor after another, t counting from 1.

        g = g / loss_scale + l2 w
        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        w = keep w
        w = w - lr / (1 - b1^t) n / (sqrt(v) / sqrt(1 - b2^t) + eps)
        n = m, or b1 m + (1 - b1) g with nesterov (m already new)

    Args:
        params: Local pieces, float32 or float64, one device; updated in place.
        grads: The same shapes and dtype.
        exp_avgs: First moments, in place.
        exp_avg_sqs: Second moments, in place.
        steps: t of each tensor.
        lrs: Learning rate of each.
        keeps: What decoupled decay leaves of w, of each.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the corrected square root.
        l2s: Coupled coefficient of each; none where it is empty.
        loss_scales: What each gradient is divided by; 1 where it is empty.
        nesterov: Look one step ahead along the moment.
        eps_before_correction: Add eps to the raw sqrt(v) instead, as MindSpore does.

    Source: Kingma & Ba 2015, arXiv:1412.6980, Algorithm 1.
    """
    for i, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        if l2s or loss_scales:
            grad = prepared(param, grad, l2=l2s[i] if l2s else 0.0, loss_scale=loss_scales[i] if loss_scales else 1.0)
        first_moment_(exp_avg, grad, beta1)
        second_moment_(exp_avg_sq, grad, beta2)
        if keeps[i] != 1.0:
            param.mul_(keeps[i])
        direction = exp_avg.lerp(grad, 1 - beta1) if nesterov else exp_avg
        denom, scale = exp_avg_sq.sqrt(), -lrs[i] / bias_correction(beta1, steps[i])
        root = math.sqrt(bias_correction(beta2, steps[i]))
        if eps_before_correction:
            scale *= root
        else:
            denom.div_(root)
        param.addcdiv_(direction, denom.add_(eps), value=scale)


def prepared(param: Tensor, grad: Tensor, *, l2: float, loss_scale: float) -> Tensor:
    """Return a gradient divided by its scale and decayed: grad / loss_scale + l2 * param.

    Example:
        >>> prepared(torch.tensor([2.0]), torch.tensor([4.0]), l2=0.5, loss_scale=2.0)
        tensor([3.])
    """
    if loss_scale != 1.0:
        grad = grad / loss_scale
    return grad + param * l2 if l2 else grad


def _multi_tensor_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    steps: list[int],
    lrs: list[float],
    keeps: list[float],
    beta1: float,
    beta2: float,
    eps: float,
    l2s: Sequence[float] = (),
    loss_scales: Sequence[float] = (),
    nesterov: bool = False,
    eps_before_correction: bool = False,
) -> None:
    """Step as `_single_tensor_adam`."""
    if any(loss_scale != 1.0 for loss_scale in loss_scales):
        grads = list(torch._foreach_div(grads, list(loss_scales)))
    if any(l2s):
        grads = list(torch._foreach_add(grads, torch._foreach_mul(params, list(l2s))))
    moments_(exp_avgs, exp_avg_sqs, grads, beta1=beta1, beta2=beta2)
    if any(keep != 1.0 for keep in keeps):
        torch._foreach_mul_(params, keeps)
    directions = torch._foreach_lerp(exp_avgs, grads, 1 - beta1) if nesterov else exp_avgs
    denoms = torch._foreach_sqrt(exp_avg_sqs)
    scales = [-lr / bias_correction(beta1, step) for lr, step in zip(lrs, steps, strict=True)]
    roots = [math.sqrt(bias_correction(beta2, step)) for step in steps]
    if eps_before_correction:
        scales = [scale * root for scale, root in zip(scales, roots, strict=True)]
    else:
        torch._foreach_div_(denoms, roots)
    torch._foreach_add_(denoms, eps)
    torch._foreach_addcdiv_(params, directions, denoms, scales)
