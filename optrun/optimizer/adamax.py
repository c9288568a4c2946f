"""Adamax as Paddle computes it: torch's adds eps to |g|, this one to the decayed maximum; torch's has no L1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from optrun.config.schema.optimizer import AdamaxConfig
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.batches import gather
from optrun.optimizer.kernels import compiled
from optrun.optimizer.kernels.choice import Update, pick, take_step
from optrun.optimizer.kernels.triton import launch
from optrun.optimizer.numerics import bias_correction, first_moment_


class Adamax(NamedOptimizer):
    """Adam with the infinity norm in place of the second moment.

    One step of one parameter tensor, t counting the gradients it has had from 1:

        g = g + c w (weight_decay_mode "l2")   or   g + c sign(w) ("l1"),    c = weight_decay
        m = b1 m + (1 - b1) g
        u = max(b2 u + eps, |g|)
        w = w (1 - lr c)    ("decoupled" only)
        w = w - lr / (1 - b1^t) m / u

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: Decay of first moment and of the running maximum, each in [0, 1).
        eps: Added to the decayed maximum, inside the max, >= 0. With 0, an entry whose gradient has always been 0
            becomes 0/0, NaN.
        weight_decay: c, >= 0; may be a function of the step.
        weight_decay_mode: "l2", "l1" (both coupled: part of the gradient) or "decoupled".
        eps_form: "decayed": as above, Paddle's. "gradient": u = max(b2 u, |g| + eps), torch's and optax's.
            "denominator": u = max(b2 u, |g|), and w moves by m / (u + eps), Keras's.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel there is, or the one
            that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range.

    Source: Kingma & Ba 2015, arXiv:1412.6980, Algorithm 2, with Paddle's place for eps.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = Adamax([weight], lr=0.1)
        >>> weight.grad = torch.tensor([0.5, -0.5])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.9000, 2.1000])
    """

    OPTIONS = AdamaxConfig
    ORDER = "lr betas eps weight_decay weight_decay_mode foreach"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"lr": 1e-3}
    STATE: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_inf")

    @staticmethod
    def _numbers(group: Mapping[str, Any], _param: Tensor) -> dict[str, Any]:
        mode, decay = group["weight_decay_mode"], group["weight_decay"]
        return {
            "lrs": group["lr"],
            "l1s": decay if mode == "l1" else 0.0,
            "l2s": decay if mode == "l2" else 0.0,
            "keeps": 1.0 - group["lr"] * decay if mode == "decoupled" else 1.0,
        }

    def kernel(self, group: Mapping[str, Any], device: str, *, whole: bool = True) -> str:
        """Name the kernel that steps a group on a type of device; `whole`: no tensor is sharded."""
        del whole
        return pick(group["foreach"], device, WAYS)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared = ("betas", "eps", "eps_form", "foreach")
        for batch in gather(self, slots=self.STATE, shared=shared, per_tensor=self._numbers):
            beta1, beta2 = batch.options["betas"]
            adamax(
                batch.params,
                batch.grads,
                batch.state["exp_avg"],
                batch.state["exp_inf"],
                foreach=batch.options["foreach"],
                steps=batch.steps,
                beta1=beta1,
                beta2=beta2,
                eps=batch.options["eps"],
                eps_form=batch.options["eps_form"],
                **batch.numbers,
            )
            batch.done()
        return loss


WAYS = ("triton", "compiled", "loop")
"""Kernels besides foreach that compute Adamax, the preferred one first."""


def adamax(params: list[Tensor], *lists: list[Tensor], foreach: bool | None, **numbers: Any) -> None:
    """Step in place, by the kernel that `foreach` means; arguments as in `_single_tensor_adamax`."""
    updates: dict[str, Update] = {
        "loop": _single_tensor_adamax,
        "foreach": _multi_tensor_adamax,
        "compiled": compiled.adamax,
        "triton": launch.adamax,
    }
    take_step(updates, pick(foreach, params[0].device.type, WAYS), (params, *lists), numbers)


def _single_tensor_adamax(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_infs: list[Tensor],
    *,
    steps: list[int],
    lrs: list[float],
    l1s: list[float],
    l2s: list[float],
    keeps: list[float],
    beta1: float,
    beta2: float,
    eps: float,
    eps_form: str,
) -> None:
    """Compute the formula of `Adamax`, one tensor after another.

    Args:
        params: Local pieces, float32 or float64, one device; updated in place.
        grads: The same shapes and dtype.
        exp_avgs: First moments, in place.
        exp_infs: Running maxima, in place.
        steps: t of each tensor, from 1.
        lrs: Learning rate of each.
        l1s: Coupled coefficients of sign(w), of each.
        l2s: Coupled coefficients of w, of each.
        keeps: What decoupled decay leaves of w, of each.
        beta1: Decay of the first moment.
        beta2: Decay of the maximum.
        eps: Keeps the denominator from 0.
        eps_form: Where it is added, see `Adamax`.
    """
    for i, (param, grad, exp_avg, exp_inf) in enumerate(zip(params, grads, exp_avgs, exp_infs, strict=True)):
        if l2s[i]:
            grad = grad + param * l2s[i]
        if l1s[i]:
            grad = grad + param.sign() * l1s[i]
        first_moment_(exp_avg, grad, beta1)
        if eps_form == "decayed":
            torch.maximum(exp_inf.mul_(beta2).add_(eps), grad.abs(), out=exp_inf)
        else:
            torch.maximum(exp_inf.mul_(beta2), grad.abs().add_(eps if eps_form == "gradient" else 0.0), out=exp_inf)
        denom = exp_inf.add(eps) if eps_form == "denominator" else exp_inf
        if keeps[i] != 1.0:
            param.mul_(keeps[i])
        param.addcdiv_(exp_avg, denom, value=-lrs[i] / bias_correction(beta1, steps[i]))


def _multi_tensor_adamax(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_infs: list[Tensor],
    *,
    steps: list[int],
    lrs: list[float],
    l1s: list[float],
    l2s: list[float],
    keeps: list[float],
    beta1: float,
    beta2: float,
    eps: float,
    eps_form: str,
) -> None:
    """Step as `_single_tensor_adamax`."""
    if any(l2s):
        grads = list(torch._foreach_add(grads, torch._foreach_mul(params, l2s)))
    if any(l1s):
        grads = list(torch._foreach_add(grads, torch._foreach_mul(torch._foreach_sign(params), l1s)))
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_infs, beta2)
    sizes = torch._foreach_abs(grads)
    if eps_form != "denominator":
        torch._foreach_add_(exp_infs if eps_form == "decayed" else sizes, eps)
    torch._foreach_maximum_(exp_infs, sizes)
    denoms = torch._foreach_add(exp_infs, eps) if eps_form == "denominator" else exp_infs
    if any(keep != 1.0 for keep in keeps):
        torch._foreach_mul_(params, keeps)
    scales = [-lr / bias_correction(beta1, step) for lr, step in zip(lrs, steps, strict=True)]
    torch._foreach_addcdiv_(params, exp_avgs, denoms, scales)
