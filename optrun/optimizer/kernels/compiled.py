"""The papers' functions by the compiled kernel; arguments as in the loops, of which each takes what it names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optrun.optimizer.kernels.library import call
from optrun.optimizer.lamb_rule import LambRule
from optrun.optimizer.numerics import bias_correction

EPS = {"decayed": "eps", "gradient": "eps_gradient", "denominator": "eps_denominator"}
"""Adamax's eps by the form that says where it is added."""


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
    nesterov: bool = False,
    eps_before_correction: bool = False,
) -> None:
    """As `adam_update._single_tensor_adam`."""
    rows = []
    for i, (step, lr, keep) in enumerate(zip(steps, lrs, keeps, strict=True)):
        scale, root = lr / bias_correction(beta1, step), math.sqrt(bias_correction(beta2, step))
        rows.append(
            {
                "scale": scale * root if eps_before_correction else scale,
                "keep": keep,
                "beta1": beta1,
                "beta2": beta2,
                "eps": eps,
                "root": 1.0 if eps_before_correction else 1.0 / root,
                "l2": l2s[i] if l2s else 0.0,
                "unscale": 1.0 / loss_scales[i] if loss_scales else 1.0,
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
    eps_form: str,
) -> None:
    """As `adamax._single_tensor_adamax`."""
    rows = [
        {
            "scale": lr / bias_correction(beta1, step),
            "keep": keep,
            "beta1": beta1,
            "beta2": beta2,
            EPS[eps_form]: eps,
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
    keeps: list[float],
    beta1: float,
    beta2: float,
    eps: float,
    rule: LambRule,
    **_: Any,
) -> Tensor:
    """As `lamb._single_tensor_lamb` where `lamb.ways` says that it can."""
    shared = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "min_norm": rule.min_param_norm,
        "max_norm": math.inf if rule.max_param_norm is None else rule.max_param_norm,
        "eps_ratio": eps if rule.eps_in_trust else 0.0,
        "min_ratio": rule.min_trust,
        "max_ratio": math.inf if rule.max_trust is None else rule.max_trust,
    }
    rows = []
    for i, step in enumerate(steps):
        correction1, correction2, lr_factor = rule.corrections(beta1, beta2, step)
        rows.append(
            {
                **shared,
                "scale": lrs[i] * lr_factor,
                "keep": keeps[i],
                "root": 1.0 / math.sqrt(correction2),
                "first": 1.0 / correction1,
                "l1": l1s[i],
                "l2": l2s[i],
                "decay": weight_decays[i],
                "adapt": float(adapt[i]),
            }
        )
    return torch.tensor(call("lamb", params, grads, exp_avgs, exp_avg_sqs, rows), dtype=params[0].dtype)
