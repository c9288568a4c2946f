"""AdEMAMix: Adam with a second, slow momentum that remembers thousands of steps. torch has none."""

from __future__ import annotations

import math

import torch

from optrun.base.options import Group, Scalars
from optrun.config.schema.optimizer import AdEMAMixConfig
from optrun.optimizer.base import Numeric, Params
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.batches import Batch
from optrun.optimizer.kernels.choice import Formula
from optrun.optimizer.numerics import (
    bias_correction,
    decay_param_,
    first_moment_,
    moments_,
    second_moment_,
)


def _single_tensor_ademamix(batch: Batch) -> None:
    """Take the step of `AdEMAMix` in place, one tensor after another.

        m1 = b1 m1 + (1 - b1) g
        m2 = beta3 m2 + (1 - beta3) g
        v = b2 v + (1 - b2) g^2
        w = keep w - lr (m1 / (1 - b1^t) + alpha m2) / (sqrt(v / (1 - b2^t)) + eps)

    The scalars `beta3` and `alpha` are those of the step's warm-up, `keep` is 1 - lr weight_decay.
    t is the scalar `step`, from 1.
    """
    beta1, beta2, _ = batch.options["betas"]
    eps = batch.options["eps"]
    for param, grad, exp_avg, exp_avg_slow, exp_avg_sq, scalars in batch.tensors():
        first_moment_(exp_avg, grad, beta1)
        first_moment_(exp_avg_slow, grad, scalars["beta3"])
        second_moment_(exp_avg_sq, grad, beta2)
        decay_param_(param, scalars["keep"])
        correction1 = bias_correction(beta1, scalars["step"])
        correction2 = bias_correction(beta2, scalars["step"])
        denom = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(eps)
        mixed = (exp_avg / correction1).add_(exp_avg_slow, alpha=scalars["alpha"])
        param.addcdiv_(mixed, denom, value=-scalars["lr"])


def _multi_tensor_ademamix(batch: Batch) -> None:
    """Compute `_single_tensor_ademamix` by foreach operations, each over all tensors at once."""
    beta1, beta2, _ = batch.options["betas"]
    eps = batch.options["eps"]
    params, grads, exp_avgs, exp_avg_slows, exp_avg_sqs = batch.lists
    steps = batch.scalar_list("step")
    # 1. m1, v and m2
    moments_(exp_avgs, exp_avg_sqs, grads, beta1=beta1, beta2=beta2)
    torch._foreach_lerp_(exp_avg_slows, grads, [1 - beta3 for beta3 in batch.scalar_list("beta3")])
    # 2. w = keep w
    batch.decay_params()
    # 3. w = w - lr (m1 / (1 - b1^t) + alpha m2) / (sqrt(v) / sqrt(1 - b2^t) + eps)
    denoms = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denoms, [math.sqrt(bias_correction(beta2, step)) for step in steps])
    torch._foreach_add_(denoms, eps)
    mixed = torch._foreach_div(exp_avgs, [bias_correction(beta1, step) for step in steps])
    torch._foreach_add_(mixed, torch._foreach_mul(exp_avg_slows, batch.scalar_list("alpha")))
    torch._foreach_addcdiv_(params, mixed, denoms, [-lr for lr in batch.scalar_list("lr")])


def warm_alpha(step: int, *, alpha: float, warmup_steps: int | None) -> float:
    """Return the weight of the slow moment at a step; it grows linearly from 0 to `alpha`.

    Args:
        step: Number of the step, from 1.
        alpha: Weight after the warm-up.
        warmup_steps: Length of the warm-up; None or 0: none.

    Example:
        >>> [warm_alpha(step, alpha=5.0, warmup_steps=4) for step in (1, 2, 4, 9)]
        [1.25, 2.5, 5.0, 5.0]
    """
    if warmup_steps:
        return alpha * min(1.0, step / warmup_steps)
    return alpha


def warm_beta3(step: int, *, beta1: float, beta3: float, warmup_steps: int | None) -> float:
    """Return the decay of the slow moment at a step; it grows from `beta1` to `beta3`.

    The half-life of an average with decay b is log(1/2) / log(b) steps. It grows linearly, and so
    does 1 / log(b).

    Args:
        step: Number of the step, from 1.
        beta1: Decay before the warm-up; 0 is a half-life of 0.
        beta3: Decay after the warm-up.
        warmup_steps: Length of the warm-up; None or 0: none, `beta3` at once.

    Source: Pagliardini et al. 2024, arXiv:2409.03137, section 3: exp(log b1 log b3 / ((1 - s) log
    b3 + s log b1)), at most b3, with s = step / warmup_steps.

    Example:
        >>> options = {"beta1": 0.9, "beta3": 0.9999, "warmup_steps": 4}
        >>> [round(warm_beta3(step, **options), 4) for step in (1, 2, 4, 9)]
        [0.9996, 0.9998, 0.9999, 0.9999]
    """
    if not warmup_steps or step >= warmup_steps or beta3 == 0:
        return beta3
    share = step / warmup_steps
    # 1 / log(decay) goes in a straight line from that of beta1 (0 for a beta1 of 0) to that of
    # beta3.
    inverse_log = share / math.log(beta3)
    if beta1:
        inverse_log = (1 - share) / math.log(beta1) + inverse_log
    return min(math.exp(1 / inverse_log), beta3)


class AdEMAMix(BatchOptimizer):
    """AdamW whose direction mixes a fast and a slow average of the gradients.

    One step of one parameter tensor, t counting the gradients it has had from 1:

        m1 = b1 m1 + (1 - b1) g
        m2 = b3(t) m2 + (1 - b3(t)) g
        v = b2 v + (1 - b2) g^2
        w = w (1 - lr weight_decay)
        w = w - lr (m1 / (1 - b1^t) + alpha(t) m2) / (sqrt(v / (1 - b2^t)) + eps)

    alpha(t) and b3(t) climb to alpha and b3 over their warm-ups, see `warm_alpha` and `warm_beta3`;
    in the paper both take the whole run. Three moments in the state, float32 at least.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: Decay of the fast moment, of the second moment, and of the slow moment; each in [0,
            1).
        eps: Added to the square root of the corrected second moment, >= 0.
        weight_decay: Decoupled, >= 0; may be a function of the step.
        alpha: Weight of the slow moment, >= 0; with 0 it is AdamW.
        alpha_warmup_steps: Steps after which alpha(t) is alpha; None or 0: at once.
        beta3_warmup_steps: Steps after which b3(t) is b3; None or 0: at once.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel
            there is, or the one that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range.

    Source: Pagliardini et al. 2024, arXiv:2409.03137, Algorithm 1 and section 3.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = AdEMAMix([weight], lr=0.1, weight_decay=0.0, alpha=0.0)
        >>> weight.grad = torch.tensor([0.5, -0.5])
        >>> optimizer.step()
        >>> weight.data
        tensor([0.9000, 2.1000])
    """

    OPTIONS = AdEMAMixConfig
    FORMULA = Formula(_single_tensor_ademamix, _multi_tensor_ademamix, "ademamix")
    STATE = ("exp_avg", "exp_avg_slow", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: Numeric = 0.01,
        alpha: float = 5.0,
        alpha_warmup_steps: int | None = None,
        beta3_warmup_steps: int | None = None,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "alpha": alpha,
                "alpha_warmup_steps": alpha_warmup_steps,
                "beta3_warmup_steps": beta3_warmup_steps,
                "foreach": foreach,
            },
        )

    def _scalars(self, group: Group, traits: None, counters: Scalars) -> Scalars:
        """Return `lr`, `keep`, and the values of `alpha` and `beta3` at this step."""
        step = counters["step"]
        beta1, _, beta3 = group["betas"]
        return {
            **super()._scalars(group, traits, counters),
            "alpha": warm_alpha(
                step, alpha=group["alpha"], warmup_steps=group["alpha_warmup_steps"]
            ),
            "beta3": warm_beta3(
                step, beta1=beta1, beta3=beta3, warmup_steps=group["beta3_warmup_steps"]
            ),
        }
