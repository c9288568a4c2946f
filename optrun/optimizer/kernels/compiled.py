"""The papers' functions by the compiled kernel; arguments as in the loops, of which each takes what it names."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optrun.optimizer.kernels.library import call
from optrun.optimizer.numerics import bias_correction


def adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    steps: list[int],
    lrs: list[float],
    keeps: list[float],
    l2s: list[float],
    loss_scales: list[float],
    beta1: float,
    beta2: float,
    eps: float,
    nesterov: bool,
    eps_before_correction: bool,
) -> None:
    """As `adam_update._single_tensor_adam`."""
    rows = []
    for step, lr, keep, l2, loss_scale in zip(steps, lrs, keeps, l2s, loss_scales, strict=True):
        scale, root = lr / bias_correction(beta1, step), math.sqrt(bias_correction(beta2, step))
        rows.append(
            {
                "scale": scale * root if eps_before_correction else scale,
                "keep": keep,
                "beta1": beta1,
                "beta2": beta2,
                "eps": eps,
                "root": 1.0 if eps_before_correction else 1.0 / root,
                "l2": l2,
                "unscale": 1.0 / loss_scale,
                "nesterov": float(nesterov),
            }
        )
    call("adam", params, grads, exp_avgs, exp_avg_sqs, rows)


def adamax(
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
) -> None:
    """As `adamax._single_tensor_adamax`."""
    rows = [
        {
            "scale": lr / bias_correction(beta1, step),
            "keep": keep,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "l1": l1,
            "l2": l2,
        }
        for step, lr, l1, l2, keep in zip(steps, lrs, l1s, l2s, keeps, strict=True)
    ]
    call("adamax", params, grads, exp_avgs, exp_infs, rows)


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
    beta1: float,
    beta2: float,
    eps: float,
) -> Tensor:
    """As `lamb._single_tensor_lamb`, over tensors that no other rank holds a piece of."""
    rows = [
        {
            "scale": lr,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
            "root": 1.0 / math.sqrt(bias_correction(beta2, step)),
            "first": 1.0 / bias_correction(beta1, step),
            "l1": l1,
            "l2": l2,
            "decay": decay,
            "adapt": float(wanted),
        }
        for step, lr, decay, wanted, l1, l2 in zip(steps, lrs, weight_decays, adapt, l1s, l2s, strict=True)
    ]
    return torch.tensor(call("lamb", params, grads, exp_avgs, exp_avg_sqs, rows), dtype=params[0].dtype)
