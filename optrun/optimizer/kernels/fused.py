"""The papers' functions by torch's fused Adam, for CPUs without a compiled kernel; arguments as in the loops.

torch's kernel takes one learning rate, one decay and one eps a call: tensors that share them share a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from optrun.optimizer.lamb_rule import LambRule
from optrun.optimizer.numerics import bias_correction

CHUNK = 2**17
"""Elements that LAMB computes at once: five pieces of that size stay in the cache between its operations."""
WAVE = 2**20
"""Elements of tensors that LAMB measures before it moves them: as many as are still in the cache then."""
ROOM = 2**22
"""Most elements of a direction that LAMB keeps; to compute one again costs less than to take more memory each step."""


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

    A wave of tensors is measured chunk by chunk, then moved. In between directions are kept, in at most `ROOM`
    elements; that of a larger tensor is computed twice.
    """
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    numbers = {"beta1": beta1, "beta2": beta2, "eps": eps}
    sizes = [param.numel() for param in params]
    room = torch.empty(min(ROOM, sum(sizes)), dtype=params[0].dtype)
    ratios = [1.0] * len(params)
    for wave in _waves(sizes):
        directions = _parts(room, [sizes[i] for i in wave])
        norms: dict[int, list[Tensor]] = {}
        for i, direction in zip(wave, directions, strict=True):
            step = steps[i] if rule.bias_correction == "moments" else math.inf  # 1 - b^inf: no correction
            count = torch.tensor(float(step))
            coupled = {"l1": l1s[i], "l2": l2s[i], "decay": weight_decays[i]}
            for piece in _pieces([tensors[i] for tensors in lists], direction):
                _direct(*piece, count, **coupled, **numbers)
                if keeps[i] != 1.0:
                    piece[0].mul_(keeps[i])
                if adapt[i]:
                    norms.setdefault(i, []).extend(torch._foreach_norm([piece[0], piece[-1]]))
        for i, ratio in zip(norms, _ratios(list(norms.values()), rule, eps), strict=True):
            ratios[i] = ratio
        for i, direction in zip(wave, directions, strict=True):
            correction1, correction2, lr_factor = rule.corrections(beta1, beta2, steps[i])
            rate, root = lrs[i] * lr_factor * ratios[i], math.sqrt(correction2)
            if sizes[i] <= direction.numel():
                params[i].view(-1).add_(direction, alpha=-rate)
                continue
            pieces = list(_pieces([tensors[i] for tensors in lists], direction))
            for w, _g, m, v, denom in reversed(pieces):  # the last ones are still in the cache
                torch.sqrt(v, out=denom).add_(eps * root)
                if weight_decays[i]:
                    w.mul_(1.0 - rate * weight_decays[i])
                w.addcdiv_(m, denom, value=-rate * root / correction1)
    return torch.tensor(ratios, dtype=params[0].dtype)


def _waves(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of tensors in a row that have at most `WAVE` elements together, or of one larger tensor.

    Example:
        >>> list(_waves([WAVE // 2, WAVE // 2, 1, 3 * WAVE]))
        [[0, 1], [2], [3]]
    """
    wave: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if wave and total + size > WAVE:
            yield wave
            wave, total = [], 0
        wave.append(i)
        total += size
    yield wave


def _parts(room: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The room divided among tensors; all of it for one that is larger."""
    if sizes[0] > room.numel():
        return [room]
    return list(room[: sum(sizes)].split(list(sizes)))


def _pieces(tensors: Sequence[Tensor], direction: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Chunks of a parameter, its gradient and moments, with room for the direction: its own, or the same for each."""
    rooms = direction.split(CHUNK) if tensors[0].numel() <= direction.numel() else repeat(direction)
    flat = zip(*(tensor.view(-1).split(CHUNK) for tensor in tensors), strict=True)
    for (w, g, m, v), room in zip(flat, rooms, strict=False):  # a repeated room has no end
        yield w, g, m, v, room[: w.numel()]


def _direct(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    direction: Tensor,
    count: Tensor,
    *,
    l1: float,
    l2: float,
    decay: float,
    **numbers: float,
) -> None:
    """Take the moments of a piece one step on and write its direction: Adam's, and decay times w."""
    if l2:
        g = g + w * l2
    if l1:
        g = g + w.sign() * l1
    # At the rate -1 AdamW leaves (1 + its decay) times where it began, plus Adam's direction.
    direction.copy_(w) if decay else direction.zero_()
    lists = [[direction], [g], [m], [v]]
    own = decay - 1.0 if decay else 0.0
    torch._fused_adamw_(*lists, [], [count], lr=-1.0, weight_decay=own, **numbers, amsgrad=False, maximize=False)


def _ratios(norms: Sequence[Sequence[Tensor]], rule: LambRule, eps: float) -> list[float]:
    """Trust ratios of tensors from the norms of their pieces, those of weights and of directions in turns."""
    if not norms:
        return []
    squares = torch.stack([norm for of_one in norms for norm in of_one]).double().square().view(-1, 2)
    whole = torch.stack([own.sum(0) for own in squares.split([len(of_one) // 2 for of_one in norms])]).sqrt()
    param_norms, update_norms = whole.to(norms[0][0].dtype).unbind(1)
    return list(rule.trust_ratios(param_norms, update_norms, eps).tolist())
