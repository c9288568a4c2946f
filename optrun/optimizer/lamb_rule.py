"""What tells the dialects of LAMB apart: one rule for all tensors of a batch. Pure; numbers and norms in and out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from optrun.optimizer.numerics import bias_correction, trust_ratio


@dataclass(frozen=True, slots=True)
class LambRule:
    """Everything about a LAMB step that is no number of a tensor's own; the defaults are `Lamb`'s formula.

    What each field means stands at the arguments of `Lamb` that have its name.
    """

    bias_correction: str = "moments"
    grad_averaging: bool = True
    normalize_grad: bool = False
    eps_root: float = 0.0
    caution: bool = False
    min_param_norm: float = 0.0
    max_param_norm: float | None = None
    min_trust: float = 0.0
    max_trust: float | None = None
    eps_in_trust: bool = False

    def corrections(self, beta1: float, beta2: float, step: int) -> tuple[float, float, float]:
        """Return what a step divides both moments by, and what it multiplies the learning rate with.

        Args:
            beta1: Decay of the first moment.
            beta2: Decay of the second moment.
            step: t, from 1.

        Example:
            >>> LambRule().corrections(0.5, 0.75, 1), LambRule(bias_correction="lr").corrections(0.5, 0.75, 1)
            ((0.5, 0.25, 1.0), (1.0, 1.0, 1.0))
        """
        if self.bias_correction == "none":
            return 1.0, 1.0, 1.0
        correction1, correction2 = bias_correction(beta1, step), bias_correction(beta2, step)
        if self.bias_correction == "moments":
            return correction1, correction2, 1.0
        return 1.0, 1.0, (math.sqrt(correction2) if self.bias_correction == "lr" else 1.0) / correction1

    def trust_ratios(self, param_norms: Tensor, update_norms: Tensor, eps: float) -> Tensor:
        """Bound the trust ratios of tensors that are adapted.

        Args:
            param_norms: |w|, any shape.
            update_norms: |r|, the same shape.
            eps: The optimizer's; counts with `eps_in_trust` alone.

        Returns:
            phi(|w|) / |r| within its bounds; exactly 1, not bounded, where phi(|w|) or |r| is 0 or |r| is NaN.

        Source: You et al. 2020, arXiv:1904.00962, section 3: phi(z) = min(max(z, gamma_l), gamma_u). The bounds of the
        ratio itself are DeepSpeed's `min_coeff` and `max_coeff`; an upper one of 1 is LAMBC, Fong et al. 2020,
        arXiv:2011.13584.

        Example:
            >>> LambRule(max_trust=1.0).trust_ratios(torch.tensor([4.0, 1.0, 0.0]), torch.tensor([2.0, 2.0, 2.0]), 0.0)
            tensor([1.0000, 0.5000, 1.0000])
        """
        if self.min_param_norm > 0 or self.max_param_norm is not None:
            param_norms = param_norms.clamp(self.min_param_norm, self.max_param_norm)
        divisors = (
            torch.where(update_norms > 0, update_norms + eps, update_norms) if self.eps_in_trust else update_norms
        )
        ratios = trust_ratio(param_norms, divisors)
        if self.min_trust > 0 or self.max_trust is not None:
            moved = (param_norms > 0) & (update_norms > 0)
            ratios = torch.where(moved, ratios.clamp(self.min_trust, self.max_trust), ratios)
        return ratios
