"""Lion: the sign of an interpolated momentum, one moment in the state. torch has no Lion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from optrun.config.schema.optimizer import LionConfig
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.batches import gather
from optrun.optimizer.numerics import first_moment_


class Lion(NamedOptimizer):
    """Evolved sign momentum: every entry of a tensor moves by lr, whatever the size of its gradient.

    One step of one parameter tensor:

        c = b1 m + (1 - b1) g
        w = w (1 - lr weight_decay)
        w = w - lr sign(c)
        m = b2 m + (1 - b2) g

    The moment is float32 at least. An lr that suits AdamW is some 3 to 10 times too large here, and its weight decay as
    many times too small.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: b1 of the interpolation and b2 of the moment, each in [0, 1).
        weight_decay: Decoupled, >= 0; may be a function of the step.
        foreach: Fused kernels: True, False, or None for wherever they are the faster.

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range.

    Source: Chen et al. 2023, arXiv:2302.06675, Algorithm 2.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = Lion([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.tensor([0.5, -0.001])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.9000, 2.1000])
    """

    OPTIONS = LionConfig
    ORDER = "lr betas weight_decay foreach"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"lr": 1e-4}
    STATE: ClassVar[tuple[str, ...]] = ("exp_avg",)

    @staticmethod
    def _numbers(group: Mapping[str, Any], _param: Tensor) -> dict[str, Any]:
        return {"lrs": group["lr"], "keeps": 1.0 - group["lr"] * group["weight_decay"]}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for batch in gather(self, slots=self.STATE, shared=("betas", "foreach"), per_tensor=self._numbers):
            beta1, beta2 = batch.options["betas"]
            lion(
                batch.params,
                batch.grads,
                batch.state["exp_avg"],
                foreach=batch.foreach,
                beta1=beta1,
                beta2=beta2,
                **batch.numbers,
            )
            batch.done()
        return loss


def lion(params: list[Tensor], *lists: list[Tensor], foreach: bool, **numbers: Any) -> None:
    """Step in place, by fused kernels or tensor by tensor; arguments as in `_single_tensor_lion`."""
    update = _multi_tensor_lion if foreach else _single_tensor_lion
    update(params, *lists, **numbers)


def _single_tensor_lion(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    *,
    lrs: list[float],
    keeps: list[float],
    beta1: float,
    beta2: float,
) -> None:
    """Compute the formula of `Lion`, one tensor after another.

    Args:
        params: Local pieces, float32 or float64, one device; updated in place.
        grads: The same shapes and dtype.
        exp_avgs: Moments, in place.
        lrs: Learning rate of each.
        keeps: What decay leaves of w, of each.
        beta1: Of the interpolation.
        beta2: Decay of the moment.
    """
    for i, (param, grad, exp_avg) in enumerate(zip(params, grads, exp_avgs, strict=True)):
        if keeps[i] != 1.0:
            param.mul_(keeps[i])
        param.add_(exp_avg.lerp(grad, 1 - beta1).sign_(), alpha=-lrs[i])
        first_moment_(exp_avg, grad, beta2)


def _multi_tensor_lion(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    *,
    lrs: list[float],
    keeps: list[float],
    beta1: float,
    beta2: float,
) -> None:
    """Step as `_single_tensor_lion`."""
    if any(keep != 1.0 for keep in keeps):
        torch._foreach_mul_(params, keeps)
    updates = torch._foreach_lerp(exp_avgs, grads, 1 - beta1)
    torch._foreach_sign_(updates)
    torch._foreach_mul_(updates, lrs)
    torch._foreach_sub_(params, updates)
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta2)
