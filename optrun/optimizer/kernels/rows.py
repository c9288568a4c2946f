"""The numbers of each tensor that kernels which go by addresses take: the arguments of the loops, made ready."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from optrun.optimizer.lamb_rule import LambRule
from optrun.optimizer.numerics import bias_correction

NUMBERS: dict[str, float] = {
    "scale": 0.0,
    "keep": 1.0,
    "beta1": 0.0,
    "beta2": 0.0,
    "eps": 0.0,
    "eps_gradient": 0.0,
    "eps_denominator": 0.0,
    "root": 1.0,
    "first": 1.0,
    "l1": 0.0,
    "l2": 0.0,
    "decay": 0.0,
    "unscale": 1.0,
    "adapt": 0.0,
    "nesterov": 0.0,
    "min_norm": 0.0,
    "max_norm": math.inf,
    "eps_ratio": 0.0,
    "min_ratio": 0.0,
    "max_ratio": math.inf,
}
"""Fields of `Numbers` in step.c, which says what they are, in its order; and what they are where a formula has none."""

EPS = {"decayed": "eps", "gradient": "eps_gradient", "denominator": "eps_denominator"}
"""Adamax's eps by the form that says where it is added."""

Rows = list[dict[str, float]]
"""Of each tensor, all of `NUMBERS`."""


def of_adam(
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
) -> Rows:
    """Collect the numbers of `adam_update._single_tensor_adam`, from its keywords."""
    rows = []
    corrections = {step: (bias_correction(beta1, step), math.sqrt(bias_correction(beta2, step))) for step in set(steps)}
    for i, (step, lr, keep) in enumerate(zip(steps, lrs, keeps, strict=True)):
        correction, root = corrections[step]
        scale = lr / correction
        rows.append(
            {
                **NUMBERS,
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
    return rows


def of_adamax(
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
) -> Rows:
    """Collect the numbers of `adamax._single_tensor_adamax`, from its keywords."""
    return [
        {
            **NUMBERS,
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


def of_lamb(
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
) -> Rows:
    """Collect the numbers of `lamb._single_tensor_lamb` from its keywords, if `lamb.ways` names the kernel."""
    shared = {
        **NUMBERS,
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
    corrections = {step: rule.corrections(beta1, beta2, step) for step in set(steps)}
    for i, step in enumerate(steps):
        correction1, correction2, lr_factor = corrections[step]
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
    return rows
