"""Lion: the sign of an interpolated momentum, one moment in the state. torch has no Lion."""

from __future__ import annotations

import torch

from optrun.config.schema.optimizer import LionConfig
from optrun.optimizer.base import Numeric, Params
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.batches import Batch
from optrun.optimizer.kernels.choice import Formula
from optrun.optimizer.numerics import decay_param_, first_moment_


def _single_tensor_lion(batch: Batch) -> None:
    """Take the step of `Lion` in place, one tensor after another.

    w = keep w - lr sign(b1 m + (1 - b1) g), then m = b2 m + (1 - b2) g.
    """
    beta1, beta2 = batch.options["betas"]
    for param, grad, exp_avg, scalars in batch.tensors():
        decay_param_(param, scalars["keep"])
        param.add_(exp_avg.lerp(grad, 1 - beta1).sign_(), alpha=-scalars["lr"])
        first_moment_(exp_avg, grad, beta2)


def _multi_tensor_lion(batch: Batch) -> None:
    """Compute `_single_tensor_lion` by foreach operations, each over all tensors at once."""
    beta1, beta2 = batch.options["betas"]
    params, grads, exp_avgs = batch.lists
    # w = keep w - lr sign(b1 m + (1 - b1) g), then m
    batch.decay_params()
    updates = torch._foreach_lerp(exp_avgs, grads, 1 - beta1)
    torch._foreach_sign_(updates)
    torch._foreach_mul_(updates, batch.scalar_list("lr"))
    torch._foreach_sub_(params, updates)
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta2)


class Lion(BatchOptimizer):
    """Evolved sign momentum.

    Every entry of a tensor moves by lr, whatever the size of its gradient.

    One step of one parameter tensor:

        c = b1 m + (1 - b1) g
        w = w (1 - lr weight_decay)
        w = w - lr sign(c)
        m = b2 m + (1 - b2) g

    The moment is float32 at least. An lr that suits AdamW is some 3 to 10 times too large here, and
    its weight decay as many times too small.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: b1 of the interpolation and b2 of the moment, each in [0, 1).
        weight_decay: Decoupled, >= 0; may be a function of the step.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel
            there is, or the one that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).

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
    FORMULA = Formula(_single_tensor_lion, _multi_tensor_lion, "lion")
    STATE = ("exp_avg",)

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: Numeric = 0.1,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "weight_decay": weight_decay,
                "foreach": foreach,
            },
        )
