"""Adamax as Paddle computes it: torch's adds eps to |g|, this one to the decayed maximum.

Torch's has no L1.
"""

from __future__ import annotations

from typing import Literal

import torch

from optrun.base.options import Group, Scalars
from optrun.config.schema.optimizer import AdamaxConfig
from optrun.optimizer.base import Numeric, Params
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.batches import Batch
from optrun.optimizer.kernels.choice import Formula
from optrun.optimizer.numerics import (
    add_coupled_decay,
    add_coupled_decays,
    bias_correction,
    decay_param_,
    first_moment_,
)


def _single_tensor_adamax(batch: Batch) -> None:
    """Take the step of `Adamax` in place, one tensor after another.

        g = g + l2 w + l1 sign(w)
        m = b1 m + (1 - b1) g
        u = max(b2 u, |g|), with eps added to b2 u, to |g|, or to u in the next line, by `eps_form`
        w = keep w - lr / (1 - b1^t) m / u

    l1, l2, keep, lr and t (`step`) are scalars of the batch.
    """
    beta1, beta2 = batch.options["betas"]
    eps = batch.options["eps"]
    form = batch.options["eps_form"]
    for param, grad, exp_avg, exp_inf, scalars in batch.tensors():
        grad = add_coupled_decay(grad, param, l1=scalars["l1"], l2=scalars["l2"])
        first_moment_(exp_avg, grad, beta1)
        size = grad.abs()
        exp_inf.mul_(beta2)
        if form == "decayed":
            exp_inf.add_(eps)
        elif form == "gradient":
            size.add_(eps)
        torch.maximum(exp_inf, size, out=exp_inf)
        denom = exp_inf.add(eps) if form == "denominator" else exp_inf
        decay_param_(param, scalars["keep"])
        scale = -scalars["lr"] / bias_correction(beta1, scalars["step"])
        param.addcdiv_(exp_avg, denom, value=scale)


def _multi_tensor_adamax(batch: Batch) -> None:
    """Compute `_single_tensor_adamax` by foreach operations, each over all tensors at once."""
    beta1, beta2 = batch.options["betas"]
    eps = batch.options["eps"]
    form = batch.options["eps_form"]
    params, grads, exp_avgs, exp_infs = batch.lists
    # 1. g = g + l2 w + l1 sign(w), then m
    grads = add_coupled_decays(
        grads, params, l1s=batch.scalar_list("l1"), l2s=batch.scalar_list("l2")
    )
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    # 2. u = max(b2 u, |g|), with eps added to one of the two or to the divisor
    torch._foreach_mul_(exp_infs, beta2)
    sizes = torch._foreach_abs(grads)
    if form != "denominator":
        torch._foreach_add_(exp_infs if form == "decayed" else sizes, eps)
    torch._foreach_maximum_(exp_infs, sizes)
    denoms = torch._foreach_add(exp_infs, eps) if form == "denominator" else exp_infs
    # 3. w = keep w - lr / (1 - b1^t) m / u
    batch.decay_params()
    scales = [-scalars["lr"] / bias_correction(beta1, scalars["step"]) for scalars in batch.scalars]
    torch._foreach_addcdiv_(params, exp_avgs, denoms, scales)


class Adamax(BatchOptimizer):
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
        eps: Added to the decayed maximum, inside the max, >= 0. With 0, an entry whose gradient has
            always been 0 becomes 0/0, NaN.
        weight_decay: c, >= 0; may be a function of the step.
        weight_decay_mode: "l2", "l1" (both coupled: part of the gradient) or "decoupled".
        eps_form: "decayed": as above, Paddle's. "gradient": u = max(b2 u, |g| + eps), torch's and
            optax's. "denominator": u = max(b2 u, |g|), and w moves by m / (u + eps), Keras's.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel
            there is, or the one that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).

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
    FORMULA = Formula(_single_tensor_adamax, _multi_tensor_adamax, "adamax")
    STATE = ("exp_avg", "exp_inf")

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Numeric = 0.0,
        weight_decay_mode: Literal["l1", "l2", "decoupled"] = "l2",
        foreach: bool | None = None,
        *,
        eps_form: Literal["decayed", "gradient", "denominator"] = "decayed",
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "weight_decay_mode": weight_decay_mode,
                "foreach": foreach,
                "eps_form": eps_form,
            },
        )

    def _scalars(self, group: Group, traits: None, counters: Scalars) -> Scalars:
        """Return `lr`, and the weight decay as `keep`, `l1` or `l2` by the mode of the group.

        The two others have no effect: 1 for `keep`, 0 for `l1` and `l2`. With an lr of 0.1 and a
        decay of 0.5: keep 0.95 under "decoupled", l1 0.5 under "l1", l2 0.5 under "l2".
        """
        mode = group["weight_decay_mode"]
        scalars = super()._scalars(group, traits, counters)
        if mode != "decoupled":
            scalars["keep"] = 1.0
        for coupled in ("l1", "l2"):
            scalars[coupled] = group["weight_decay"] if mode == coupled else 0.0
        return scalars
