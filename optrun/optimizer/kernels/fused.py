"""The papers' functions by torch's fused Adam, for CPUs without a compiled kernel; arguments as in the loops.

torch's kernel takes one learning rate, one decay and one eps a call: tensors that share them share a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optrun.optimizer.lamb_rule import LambRule
from optrun.optimizer.numerics import bias_correction

CHUNK = 2**17
"""Elements that LAMB computes at once on each thread: five pieces of that size stay in the cache."""
ROOM = 2**22
"""Most elements of a direction that LAMB keeps: new memory in every step costs more than to compute it again."""
SMALL = 2**14
"""Elements up to which a tensor costs more in calls than in time for its elements."""


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
    """Step as `adam_update._single_tensor_adam`, without nesterov."""
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
            torch.tensor(float(step)),
            lr=lr,
            weight_decay=l2 or ((1.0 - keep) / lr if lr else 0.0),
            beta1=beta1,
            beta2=beta2,
            eps=beside,
        )


def _fused(update: Callable[..., None], lists: Sequence[list[Tensor]], step: Tensor, **numbers: float) -> None:
    update(*lists, [], [step] * len(lists[0]), **numbers, amsgrad=False, maximize=False)


def lamb(*lists: list[Tensor], small: Callable[..., Tensor], **numbers: Any) -> Tensor:
    """Step as `lamb._single_tensor_lamb` if `lamb.ways` says that it can.

    Args:
        *lists: Parameters, gradients, first and second moments.
        small: `lamb._multi_tensor_lamb`, for small tensors.
        **numbers: Keywords of both.
    """
    sizes = [param.numel() for param in lists[0]]
    ratios = torch.ones(len(sizes), dtype=lists[0][0].dtype)
    for wave in _waves(sizes):
        ratios[wave] = small(*([tensors[i] for i in wave] for tensors in lists), **_of(wave, numbers))
    room = torch.empty(min(ROOM, max(sizes)), dtype=ratios.dtype)
    for i, size in enumerate(sizes):
        if size > SMALL:
            ratios[i] = _lamb_of_one(i, lists, room, **numbers)
    return ratios


def _of(chosen: Sequence[int], numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: [value[i] for i in chosen] if isinstance(value, list) else value for key, value in numbers.items()}


def _waves(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield indices of small tensors, as many at a time as stay in the cache.

    Example:
        >>> list(_waves([SMALL, SMALL + 1, 7, *[SMALL] * 7]))
        [[0, 2, 3, 4, 5, 6, 7, 8], [9]]
    """
    wave: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if size > SMALL:
            continue
        if total + size > 8 * SMALL:
            yield wave
            wave, total = [], 0
        wave.append(i)
        total += size
    if wave:
        yield wave


def _lamb_of_one(
    i: int,
    lists: Sequence[list[Tensor]],
    room: Tensor,
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
) -> float:
    """Take the step of one tensor: measure its direction chunk by chunk, then move it by what is kept of that.

    Where there is no room to keep it, the direction is computed again. Returns the trust ratio.
    """
    param, size, length = lists[0][i].view(-1), lists[0][i].numel(), min(CHUNK * torch.get_num_threads(), ROOM)
    pieces = list(zip(*(tensors[i].view(-1).split(length) for tensors in lists), strict=True))
    kept = size <= room.numel()
    directions = room[:size].split(length) if kept else [room[: w.numel()] for w, *_rest in pieces]
    count = torch.tensor(float(steps[i]) if rule.bias_correction == "moments" else math.inf)  # 1 - b^inf: no correction
    decay, betas = weight_decays[i] - 1.0 if weight_decays[i] else 0.0, {"beta1": beta1, "beta2": beta2, "eps": eps}
    squares = []
    for (w, g, m, v), direction in zip(pieces, directions, strict=True):
        if l2s[i]:
            g = g + w * l2s[i]
        if l1s[i]:
            g = g + w.sign() * l1s[i]
        # At the rate -1 AdamW leaves (1 + its decay) times where it began, plus Adam's direction.
        direction.copy_(w) if weight_decays[i] else direction.zero_()
        _fused(torch._fused_adamw_, [[direction], [g], [m], [v]], count, lr=-1.0, weight_decay=decay, **betas)
        if keeps[i] != 1.0:
            w.mul_(keeps[i])
        if adapt[i]:  # a dot product is twice as fast as a norm, and in float32 closer to the exact one
            squares += [torch.dot(w, w), torch.dot(direction, direction)]
    ratio = 1.0
    if adapt[i]:
        param_norm, update_norm = torch.stack(squares).double().view(-1, 2).sum(0).sqrt().to(param.dtype)
        ratio = rule.trust_ratios(param_norm, update_norm, eps).item()
    correction1, correction2, lr_factor = rule.corrections(beta1, beta2, steps[i])
    rate, root = lrs[i] * lr_factor * ratio, math.sqrt(correction2)
    if kept:
        param.add_(room[:size], alpha=-rate)
        return ratio
    for (w, _g, m, v), denom in zip(reversed(pieces), reversed(directions), strict=True):  # the last are in the cache
        torch.sqrt(v, out=denom).add_(eps * root)
        if weight_decays[i]:
            w.mul_(1.0 - rate * weight_decays[i])
        w.addcdiv_(m, denom, value=-rate * root / correction1)
    return ratio
