"""Bias correction and trust ratio of LAMB, by the options in which packages differ."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optrun.base.options import Options
from optrun.optimizer.numerics import bias_correction, trust_ratio


def corrections(options: Options, step: int) -> tuple[float, float, float]:
    """Return the divisors of the first and second moment in a step, and the factor on lr.

    | `bias_correction` | divisors | factor on lr |
    | --- | --- | --- |
    | "moments" | 1 - b1^t, 1 - b2^t | 1 |
    | "lr" | 1, 1 | sqrt(1 - b2^t) / (1 - b1^t) |
    | "lr_first" | 1, 1 | 1 / (1 - b1^t) |
    | "none" | 1, 1 | 1 |

    Args:
        options: `betas` and `bias_correction` of `Lamb`.
        step: t, from 1.

    Example:
        >>> corrections({"betas": (0.5, 0.75), "bias_correction": "moments"}, 1)
        (0.5, 0.25, 1.0)
        >>> corrections({"betas": (0.5, 0.75), "bias_correction": "lr"}, 1)
        (1.0, 1.0, 1.0)
    """
    form = options["bias_correction"]
    beta1, beta2 = options["betas"]
    if form == "none":
        return 1.0, 1.0, 1.0
    correction1 = bias_correction(beta1, step)
    correction2 = bias_correction(beta2, step)
    if form == "moments":
        return correction1, correction2, 1.0
    if form == "lr":
        return 1.0, 1.0, math.sqrt(correction2) / correction1
    return 1.0, 1.0, 1.0 / correction1


def trust_ratios(options: Options, param_norms: Tensor, update_norms: Tensor) -> Tensor:
    """Compute the bounded trust ratios of adapted tensors.

    Args:
        options: Bounds, `eps` and `eps_in_trust` of `Lamb`.
        param_norms: |w|, any shape.
        update_norms: |r|, the same shape.

    Returns:
        phi(|w|) / |r| within its bounds; exactly 1, not bounded, where phi(|w|) or |r| is 0 or |r|
        is NaN.

    Source: You et al. 2020, arXiv:1904.00962, section 3: phi(z) = min(z, gamma_u).
    The bounds of the ratio itself are DeepSpeed's `min_coeff` and `max_coeff`; an upper one of 1 is
    LAMBC, Fong et al. 2020, arXiv:2011.13584.

    Example:
        >>> from optrun.config.schema.optimizer import LambConfig
        >>> from optrun.config.schema.ranges import defaults
        >>> bounded = {**defaults(LambConfig), "max_trust": 1.0}
        >>> trust_ratios(bounded, torch.tensor([4.0, 1.0, 0.0]), torch.tensor([2.0, 2.0, 2.0]))
        tensor([1.0000, 0.5000, 1.0000])
    """
    if options["max_param_norm"] is not None:
        param_norms = param_norms.clamp(max=options["max_param_norm"])
    divisors = update_norms
    if options["eps_in_trust"]:  # a norm of 0 stays 0, so that the ratio is 1 there
        divisors = torch.where(update_norms > 0, update_norms + options["eps"], update_norms)
    ratios = trust_ratio(param_norms, divisors)  # 1 where a norm is 0 or NaN
    if options["min_trust"] > 0 or options["max_trust"] is not None:
        both_positive = (param_norms > 0) & (update_norms > 0)
        bounded = ratios.clamp(options["min_trust"], options["max_trust"])
        ratios = torch.where(both_positive, bounded, ratios)
    return ratios
