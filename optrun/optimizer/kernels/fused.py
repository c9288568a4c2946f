"""The papers' functions by torch's fused Adam, for CPUs without a compiled kernel; arguments as in the loops.

torch's kernel takes one learning rate, one decay and one eps a call: tensors that share them share a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optrun.optimizer.lamb_rule import LambRule
from optrun.optimizer.numerics import bias_correction

CHUNK = 2**16
"""Elements that LAMB computes at once: five pieces of that size stay in the cache between its operations."""


def adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    steps: list[int],
    lrs: list[float],
    keeps: list[float],
    l2s: Sequence[float] = (),
    loss_scales: Sequence[float] = (),
    beta1: float,
    beta2: float,
    eps: float,
    eps_before_correction: bool = False,
    nesterov: bool = False,
) -> None:
    """As `adam_update._single_tensor_adam`, without nesterov."""
    assert not nesterov
    if any(scale != 1.0 for scale in loss_scales):
        grads = [grad / scale for grad, scale in zip(grads, loss_scales, strict=True)]
    calls: dict[tuple[int, float, float, float], list[int]] = {}
    for i, key in enumerate(zip(steps, lrs, keeps, l2s or [0.0] * len(params), strict=True)):
        calls.setdefault(key, []).append(i)
    for (step, lr, keep, l2), members in calls.items():
        of_these = [[tensors[i] for i in members] for tensors in (params, grads, exp_avgs, exp_avg_sqs)]
        if keep != 1.0 and not lr:
            torch._foreach_mul_(of_these[0], keep)
        # eps beside the raw sqrt(v) is eps / sqrt(1 - b2^t) beside the corrected one.
        beside = eps / math.sqrt(bias_correction(beta2, step)) if eps_before_correction else eps
        _fused(
            torch._fused_adam_ if l2 else torch._fused_adamw_,
            of_these,
            step,
            lr=lr,
            weight_decay=l2 or ((1.0 - keep) / lr if lr else 0.0),
            beta1=beta1,
            beta2=beta2,
            eps=beside,
        )


def _fused(update: Callable[..., None], lists: Sequence[list[Tensor]], step: int, **numbers: float) -> None:
    counts = [torch.tensor(float(step))] * len(lists[0])
    update(*lists, [], counts, **numbers, amsgrad=False, maximize=False)


def lamb(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    steps: list[int],
    lrs: list[float],
    weight_decays: list[float],
    adapt: list[bool],
    l1s: list[float],
    l2s: list[float],
    keeps: list[float],
    beta1: float,
    beta2: float,
    eps: float,
    rule: LambRule,
    **_: Any,
) -> Tensor:
    """As `lamb._single_tensor_lamb` where `lamb.ways` says that it can.

    A tensor's direction is made and measured chunk by chunk; it takes the room of one largest tensor.
    """
    ratios = []
    room = torch.empty(max(param.numel() for param in params), dtype=params[0].dtype)
    for i, tensors in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        param = tensors[0].view(-1)
        update = room[: param.numel()]
        squares = torch.zeros(2, dtype=torch.float64)
        pieces = (tensor.view(-1).split(CHUNK) for tensor in tensors)
        for piece, w, g, m, v in zip(update.split(CHUNK), *pieces, strict=True):
            if l2s[i]:
                g = g + w * l2s[i]
            if l1s[i]:
                g = g + w.sign() * l1s[i]
            # At the rate -1 AdamW leaves (1 + its decay) times where it began, plus Adam's direction.
            piece.copy_(w) if weight_decays[i] else piece.zero_()
            one = [[piece], [g], [m], [v]]
            decay = weight_decays[i] - 1.0 if weight_decays[i] else 0.0
            _fused(torch._fused_adamw_, one, steps[i], lr=-1.0, weight_decay=decay, beta1=beta1, beta2=beta2, eps=eps)
            if keeps[i] != 1.0:
                w.mul_(keeps[i])
            if adapt[i]:
                squares += torch.stack([torch.linalg.vector_norm(w), torch.linalg.vector_norm(piece)]).double().square()
        ratio = torch.ones((), dtype=param.dtype)
        if adapt[i]:
            param_norm, update_norm = squares.sqrt().to(param.dtype)
            ratio = rule.trust_ratios(param_norm, update_norm, eps)
        param.addcmul_(update, ratio, value=-lrs[i])
        ratios.append(ratio)
    return torch.stack(ratios)
