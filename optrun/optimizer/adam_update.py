"""Adam's update of a batch, with the options of all optimizers here built on it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optrun.optimizer.batches import Batch
from optrun.optimizer.kernels.choice import Formula
from optrun.optimizer.numerics import (
    add_coupled_decay,
    add_coupled_decays,
    bias_correction,
    decay_param_,
    first_moment_,
    moments_,
    second_moment_,
)


def _single_tensor_adam(batch: Batch) -> None:
    """Take Adam's step in place, one tensor after another.

        g = g / loss_scale + l2 w
        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        w = keep w
        w = w - lr / (1 - b1^t) n / (sqrt(v) / sqrt(1 - b2^t) + eps)

    n is m, or with nesterov b1 m + (1 - b1) g with the new m. t is the scalar `step`, from 1. With
    `eps_form="mindspore"` eps is added to the uncorrected sqrt(v).

    Args:
        batch: Options `betas` and `eps`, and for some classes `nesterov` and `eps_form`. Scalars
            `step`, `lr` and `keep`, and for some classes `l2` and `loss_scale`.

    Source: Kingma & Ba 2015, arXiv:1412.6980, Algorithm 1.
    """
    options = batch.options
    beta1, beta2 = options["betas"]
    for param, grad, exp_avg, exp_avg_sq, scalars in batch.tensors():
        grad = unscale_and_decay(
            param, grad, l2=scalars.get("l2", 0.0), loss_scale=scalars.get("loss_scale", 1.0)
        )
        first_moment_(exp_avg, grad, beta1)
        second_moment_(exp_avg_sq, grad, beta2)
        decay_param_(param, scalars["keep"])
        direction = exp_avg
        if options.get("nesterov"):
            direction = exp_avg.lerp(grad, 1 - beta1)
        denom = exp_avg_sq.sqrt()
        scale = -scalars["lr"] / bias_correction(beta1, scalars["step"])
        root = math.sqrt(bias_correction(beta2, scalars["step"]))
        if options.get("eps_form") == "mindspore":  # root n / (sqrt(v) + eps)
            scale *= root
        else:
            denom.div_(root)
        param.addcdiv_(direction, denom.add_(options["eps"]), value=scale)


def unscale_and_decay(param: Tensor, grad: Tensor, *, l2: float, loss_scale: float) -> Tensor:
    """Return a gradient without its loss scale and with L2 decay: grad / loss_scale + l2 * param.

    Example:
        >>> unscale_and_decay(torch.tensor([2.0]), torch.tensor([4.0]), l2=0.5, loss_scale=2.0)
        tensor([3.])
    """
    if loss_scale != 1.0:
        grad = grad / loss_scale
    return add_coupled_decay(grad, param, l1=0.0, l2=l2)


def _multi_tensor_adam(batch: Batch) -> None:
    """Compute `_single_tensor_adam` by foreach operations, each over all tensors at once."""
    options = batch.options
    beta1, beta2 = options["betas"]
    params, grads, exp_avgs, exp_avg_sqs = batch.lists
    loss_scales = [scalars.get("loss_scale", 1.0) for scalars in batch.scalars]
    l2s = [scalars.get("l2", 0.0) for scalars in batch.scalars]
    # 1. g = g / loss_scale + l2 w, then m and v
    if any(loss_scale != 1.0 for loss_scale in loss_scales):
        grads = list(torch._foreach_div(grads, loss_scales))
    grads = add_coupled_decays(grads, params, l1s=(), l2s=l2s)
    moments_(exp_avgs, exp_avg_sqs, grads, beta1=beta1, beta2=beta2)
    # 2. w = keep w
    batch.decay_params()
    # 3. w = w - lr / (1 - b1^t) n / (sqrt(v) / sqrt(1 - b2^t) + eps)
    directions = exp_avgs
    if options.get("nesterov"):
        directions = list(torch._foreach_lerp(exp_avgs, grads, 1 - beta1))
    denoms = torch._foreach_sqrt(exp_avg_sqs)
    scales = [-scalars["lr"] / bias_correction(beta1, scalars["step"]) for scalars in batch.scalars]
    roots = [math.sqrt(bias_correction(beta2, step)) for step in batch.scalar_list("step")]
    if options.get("eps_form") == "mindspore":  # root n / (sqrt(v) + eps)
        scales = [scale * root for scale, root in zip(scales, roots, strict=True)]
    else:
        torch._foreach_div_(denoms, roots)
    torch._foreach_add_(denoms, options["eps"])
    torch._foreach_addcdiv_(params, directions, denoms, scales)


ADAM = Formula(_single_tensor_adam, _multi_tensor_adam, "adam")
