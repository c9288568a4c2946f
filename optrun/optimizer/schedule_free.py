"""Schedule-Free AdamW: an average of all weights so far in place of a schedule. torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optrun.base.options import Group, ParamGroup, Scalars, State
from optrun.config.schema.optimizer import ScheduleFreeConfig
from optrun.optimizer.base import Numeric, Params
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.batches import Batch
from optrun.optimizer.kernels.choice import Formula
from optrun.optimizer.numerics import bias_correction, local, second_moment_


def _single_tensor_schedule_free(batch: Batch) -> None:
    """Take the step of `ScheduleFreeAdamW` in place, one tensor after another.

    Parameters hold y. The average x is not stored, so it is replaced in the formulas by
    x = (y - (1 - b1') z) / b1', where b1' is the b1 of the step before. That gives

        y = (1 - mix) y + mix z - scale d
        z = z - lr d
        mix = 1 - (1 - c) b1 / b1'
        scale = lr (1 - b1 (1 - c))

    where d is the direction of `ScheduleFreeAdamW`, and c the weight of this step in the average.
    """
    _, beta2 = batch.options["betas"]
    eps = batch.options["eps"]
    for param, grad, z, exp_avg_sq, scalars in batch.tensors():
        second_moment_(exp_avg_sq, grad, beta2)
        denom = (exp_avg_sq / bias_correction(beta2, scalars["step"])).sqrt_().add_(eps)
        direction = grad / denom
        if scalars["decay"]:
            direction.add_(param, alpha=scalars["decay"])
        param.lerp_(z, scalars["mix"]).sub_(direction, alpha=scalars["scale"])
        z.sub_(direction, alpha=scalars["lr"])


def _multi_tensor_schedule_free(batch: Batch) -> None:
    """Compute `_single_tensor_schedule_free` by foreach operations, each over all tensors."""
    _, beta2 = batch.options["betas"]
    params, grads, zs, exp_avg_sqs = batch.lists
    # 1. d = g / (sqrt(v / (1 - b2^t)) + eps) + decay y
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    denoms = torch._foreach_div(
        exp_avg_sqs, [bias_correction(beta2, step) for step in batch.scalar_list("step")]
    )
    torch._foreach_sqrt_(denoms)
    torch._foreach_add_(denoms, batch.options["eps"])
    directions = torch._foreach_div(grads, denoms)
    del denoms
    if any(batch.scalar_list("decay")):
        torch._foreach_add_(directions, torch._foreach_mul(params, batch.scalar_list("decay")))
    # 2. y = (1 - mix) y + mix z - scale d, and z = z - lr d
    torch._foreach_lerp_(params, zs, batch.scalar_list("mix"))
    torch._foreach_sub_(params, torch._foreach_mul(directions, batch.scalar_list("scale")))
    torch._foreach_mul_(directions, batch.scalar_list("lr"))
    torch._foreach_sub_(zs, directions)


class ScheduleFreeAdamW(BatchOptimizer):
    """Gradients are taken at y, between the weights z of a plain AdamW and the average x of them.

    One step of one parameter tensor, t counting the gradients it has had from 1:

        v = b2 v + (1 - b2) g^2                              g the gradient at y
        d = g / (sqrt(v / (1 - b2^t)) + eps) + weight_decay y
        z = z - lr d
        x = (1 - c) x + c z        c = s_t / (s_1 + ... + s_t)
        y = (1 - b1) z + b1 x      s_t = t^r (largest lr so far)^weight_lr_power

    The parameters hold y while it trains and x after `eval()`, which is what belongs into
    evaluations and published models; `train()` takes y back. x is not stored: it is (y - (1 - b1)
    z) / b1. A run of optrun calls both where they are due. A loop of your own calls them around
    evaluations and saves, as with the schedulefree package.

    Its lr stays where it is: `scheduler=constant`, with a warm-up.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: b1, the share of x in y, in (0, 1), and decay of the second moment, in [0, 1).
            Another b1 from some step on, as torch's OneCycleLR sets it, moves y between the same x
            and z.
        eps: Added to the square root of the corrected second moment, >= 0.
        weight_decay: Decoupled, taken at y, >= 0; may be a function of the step.
        r: Power of t in the average's weights, >= 0; 0 weighs all steps of one lr alike.
        weight_lr_power: Power of the lr in them, >= 0; so steps of a warm-up count for less.
        master_weights: Keep a float32 copy of 16-bit parameters in the state and round it into
            them: the late steps of an average are smaller than what 16 bits hold.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel
            there is, or the one that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range.

    Source: Defazio et al. 2024, arXiv:2405.15682, Algorithm 1, with t^r as in the authors' package.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = ScheduleFreeAdamW([weight], lr=0.1, weight_decay=0.0)
        >>> for _ in range(2):
        ...     weight.grad = torch.tensor([0.5, -0.5])
        ...     optimizer.step()
        >>> optimizer.eval()
        >>> weight.data
        tensor([0.8500, 2.1500])
    """

    OPTIONS = ScheduleFreeConfig
    FORMULA = Formula(_single_tensor_schedule_free, _multi_tensor_schedule_free, "schedule_free")
    MOMENTS = ("z", "exp_avg_sq")
    COUNTERS = ("step", "weight_sum", "lr_max", "beta1")
    STATE = ("z", "exp_avg_sq", "weight_sum", "lr_max", "beta1")

    def __init__(
        self,
        params: Params,
        lr: Numeric = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Numeric = 0.01,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        master_weights: bool = False,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "r": r,
                "weight_lr_power": weight_lr_power,
                "master_weights": master_weights,
                "foreach": foreach,
            },
        )

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group as in `NamedOptimizer`; it begins with its parameters as weights to train."""
        super().add_param_group(param_group)
        self.param_groups[-1]["train_mode"] = True

    @torch.no_grad()
    def eval(self) -> None:
        """Put x into the parameters, unless it is there already.

        These are the weights to evaluate and publish.
        """
        self._exchange(train_mode=False)

    @torch.no_grad()
    def train(self) -> None:
        """Put y back into the parameters, unless it is there already.

        Rounds, where `eval` did.
        """
        self._exchange(train_mode=True)

    def _exchange(self, *, train_mode: bool) -> None:
        """Put y into the parameters, to train, or x, to evaluate; skip groups that have it already.

        A parameter that was never stepped stays as it is: x and y are equal.
        """
        for group in self.param_groups:
            if group["train_mode"] == train_mode:
                continue
            group["train_mode"] = train_mode
            for param in group["params"]:
                state = self.state.get(param)
                if state:
                    _exchange_weights(param, state, train_mode=train_mode)

    def _new_state(self, group: Group, param: Tensor) -> State:
        """Create the state: z as a copy of the parameter, and the counters of the average."""
        state = super()._new_state(group, param)
        state["z"].copy_(param)
        return {**state, "weight_sum": 0.0, "lr_max": 0.0, "beta1": group["betas"][0]}

    def _scalars(self, group: Group, traits: None, counters: Scalars) -> Scalars:
        """Return the scalars of `_single_tensor_schedule_free`, and the counters after this step.

        c = s_t / (s_1 + ... + s_t) with s_t = t^r (largest lr so far)^weight_lr_power; c is 0 if
        s_t is 0. The sum and the largest lr are counters. With the b1 of this step and b1' of the
        step before, another counter, `mix` is 1 - (1 - c) b1 / b1', `scale` lr (1 - b1 (1 - c)).
        """
        del traits
        lr = group["lr"]
        beta1, _ = group["betas"]
        lr_max = max(lr, counters["lr_max"])
        # s_t, the weight of this step in the average.
        weight = counters["step"] ** group["r"] * lr_max ** group["weight_lr_power"]
        weight_sum = counters["weight_sum"] + weight
        c = weight / weight_sum if weight else 0.0
        return {
            "weight_sum": weight_sum,
            "lr_max": lr_max,
            "beta1": beta1,
            "lr": lr,
            "decay": group["weight_decay"],
            "mix": 1.0 - (1.0 - c) * beta1 / counters["beta1"],
            "scale": lr * (1.0 - beta1 * (1.0 - c)),
        }

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter with a gradient; return the result of `closure`, or None.

        Raises:
            RuntimeError: The parameters hold the weights to evaluate, see `eval`.
        """
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError(
                "the parameters hold the weights to evaluate: call optimizer.train() before step()."
            )
        return super().step(closure)


def _exchange_weights(param: Tensor, state: State, *, train_mode: bool) -> None:
    """Replace x by y in a parameter, to train, or y by x, to evaluate.

    y = b1 x + (1 - b1) z and x = (1 / b1) y + (1 - 1 / b1) z, where b1 is that of the last step. A
    master weight always holds y; then nothing is computed back from the 16-bit parameter.

    Args:
        param: Changed in place.
        state: Its state, not empty.
        train_mode: Whether to put y into it; else x.
    """
    z = local(state["z"])
    weights = local(param)
    beta1 = state["beta1"]
    if "master_weight" in state:  # it holds y, whatever the parameter holds
        y = local(state["master_weight"])
        weights.copy_(y if train_mode else y.lerp(z, 1 - 1 / beta1))
        return
    # Share of the weights that the parameter holds now; a share above 1 extrapolates, away from z.
    share = beta1 if train_mode else 1 / beta1
    weights.copy_(weights.to(z.dtype).lerp(z, 1 - share))
