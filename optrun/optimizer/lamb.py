"""LAMB: Adam's direction, rescaled tensor by tensor to the size of the weights.

torch has no LAMB.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from optrun.base.options import Group, Scalars
from optrun.config.schema.optimizer import LambConfig
from optrun.config.schema.ranges import in_order
from optrun.optimizer.base import Numeric, Params
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.batches import Batch
from optrun.optimizer.decay import decay_scale, keep_base_lr
from optrun.optimizer.kernels.choice import Formula
from optrun.optimizer.lamb_rule import corrections, trust_ratios
from optrun.optimizer.numerics import (
    add_coupled_decay,
    add_coupled_decays,
    decay_param_,
    first_moment_,
    moments_,
    norms,
    second_moment_,
)

DecayMode = Literal["adapted", "decoupled", "fixed", "scheduled", "corrected"]
"""Where LAMB decays, see `Lamb`."""


def _single_tensor_lamb(batch: Batch) -> Tensor:
    """Take the step of `Lamb` in place, one tensor after another.

        g = g + l2 w + l1 sign(w)
        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
        w = keep w
        w = w - lr k r    with the trust ratio k if the scalar `adapt` is true, else k = 1

    `corrections` may replace both bias corrections by a factor on lr.

    Returns:
        k of each tensor, shape (n,), in the dtype of the parameters.
    """
    options = batch.options
    beta1, beta2 = options["betas"]
    ratios = []
    for tensors, sharding in zip(batch.tensors(), batch.shardings, strict=True):
        param, grad, exp_avg, exp_avg_sq, scalars = tensors
        grad = add_coupled_decay(grad, param, l1=options["l1"], l2=options["l2"])
        first_moment_(exp_avg, grad, beta1)
        second_moment_(exp_avg_sq, grad, beta2)
        correction1, correction2, lr_factor = corrections(options, scalars["step"])
        denom = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(options["eps"])
        update = torch.div(exp_avg, denom, out=denom).div_(correction1)
        if scalars["decay"]:
            update.add_(param, alpha=scalars["decay"])
        decay_param_(param, scalars["keep"])
        ratio = torch.ones((), dtype=param.dtype, device=param.device)
        if scalars["adapt"]:  # the norms are those of the full tensors, over all shards
            ratio = trust_ratios(options, *norms([param, update], [sharding] * 2))
        ratios.append(ratio)
        param.sub_(update.mul_(ratio * (scalars["lr"] * lr_factor)))
    return torch.stack(ratios)


def _multi_tensor_lamb(batch: Batch) -> Tensor:
    """Compute `_single_tensor_lamb` by foreach operations, each over all tensors at once."""
    options = batch.options
    beta1, beta2 = options["betas"]
    params, grads, exp_avgs, exp_avg_sqs = batch.lists
    count = len(params)
    grads = add_coupled_decays(
        grads, params, l1s=[options["l1"]] * count, l2s=[options["l2"]] * count
    )
    moments_(exp_avgs, exp_avg_sqs, grads, beta1=beta1, beta2=beta2)
    # 1. Compute the updates r = (m / (1 - b1^t)) / (sqrt(v) / sqrt(1 - b2^t) + eps) + decay w.
    corrections_of_tensors = [corrections(options, step) for step in batch.scalar_list("step")]
    # Divisors of the first moments, of the second moments, and factors on lr.
    corrections1, corrections2, lr_factors = zip(*corrections_of_tensors, strict=True)
    denoms = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denoms, list(map(math.sqrt, corrections2)))
    torch._foreach_add_(denoms, options["eps"])
    updates = torch._foreach_div(exp_avgs, denoms)
    torch._foreach_div_(updates, corrections1)
    del denoms  # before the decay takes memory
    _add_decays_(updates, params, batch.scalar_list("decay"))
    # 2. Decay the weights; then scale the updates by lr and trust ratios, and subtract them.
    batch.decay_params()
    ratios = _trust_ratios_of_tensors(batch, updates)
    rates = list(map(operator.mul, batch.scalar_list("lr"), lr_factors))
    scales = ratios * torch.tensor(rates, dtype=ratios.dtype, device=ratios.device)
    torch._foreach_mul_(updates, list(scales.unbind()))
    torch._foreach_sub_(params, updates)
    return ratios


def _add_decays_(
    updates: Sequence[Tensor], params: Sequence[Tensor], decays: Sequence[float]
) -> None:
    """Add decay * param to each update, in place; only where the decay is not 0."""
    decayed = [i for i, decay in enumerate(decays) if decay]
    if decayed:
        terms = torch._foreach_mul([params[i] for i in decayed], [decays[i] for i in decayed])
        torch._foreach_add_([updates[i] for i in decayed], terms)


def _trust_ratios_of_tensors(batch: Batch, updates: Sequence[Tensor]) -> Tensor:
    """Return the trust ratio of each tensor, shape (n,); 1 if its scalar `adapt` is false.

    The norms of all parameters and updates take one collective.
    """
    params = batch.params
    ratios = torch.ones(len(params), dtype=params[0].dtype, device=params[0].device)
    adapted = [i for i, adapt in enumerate(batch.scalar_list("adapt")) if adapt]
    if adapted:
        # One list for one collective; a parameter and its update are sharded alike.
        params_then_updates = [params[i] for i in adapted] + [updates[i] for i in adapted]
        shardings = [batch.shardings[i] for i in adapted]
        param_norms, update_norms = norms(params_then_updates, shardings * 2, foreach=True).chunk(2)
        indices = torch.tensor(adapted, device=ratios.device)
        ratios[indices] = trust_ratios(batch.options, param_norms, update_norms)
    return ratios


class Lamb(BatchOptimizer):
    """Layer-wise adaptive moments, as in Paddle and in the TensorFlow Model Garden.

    One step of one parameter tensor, t counting from 1:

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
        w = w - lr k r,    k = |w| / |r| where adapted and both norms are above 0, else 1

    Moments are float32 at least. A sparse gradient counts as a dense one with zero rows. After a
    step `trust_ratios` holds each k. Other packages' LAMBs differ by the options from
    `bias_correction` on, whose defaults are the formula above; `optrun.optimizer.dialect_options`
    has them by the name of the package.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: Decay of first and second moment, each in [0, 1).
        eps: Added to the square root of the corrected second moment, >= 0.
        weight_decay: Coefficient inside r, hence inside its norm; a negative one is applied too.
            May be a function of the step.
        exclude_from_weight_decay: Regular expressions; names in which one is found are not decayed.
        exclude_from_layer_adaptation: Likewise for k = 1.
        always_adapt: A tensor that is not decayed has k = 1, as in Paddle, unless this is set. The
            Model Garden adapts without decay: set it, and list what it excludes from decay under
            `exclude_from_layer_adaptation` too.
        master_weights: Keep a float32 copy of 16-bit parameters in the state and round it into
            them.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel
            there is, or the one that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).
        step_count: "parameter": t counts the gradients this parameter has had, as in Paddle;
            "optimizer": t counts the optimizer's steps, as in the Model Garden.
        l1: Coefficient of a coupled term added to the gradient: l1 sign(w), >= 0.
        l2: Likewise l2 w, >= 0.
        unmatched_patterns: "error", or "ignore" for patterns that match no name.
        bias_correction: "moments": as above. Otherwise r has the moments as they are, and lr is
            multiplied, outside the norms: by sqrt(1 - b2^t) / (1 - b1^t) with "lr", 1 / (1 - b1^t)
            with "lr_first", nothing with "none".
        weight_decay_mode: "adapted": inside r, as above. Otherwise w loses a part of itself before
            the norms are taken: lr weight_decay with "decoupled", weight_decay with "fixed", lr /
            peak weight_decay with "scheduled", lr^2 / base weight_decay with "corrected"; peak is
            the rate that the group's schedule began with, base the optimizer's `lr`, whatever rate
            the group has.
        max_param_norm: Upper bound of |w| in k; None: none.
        min_trust: Lower bound of k, >= 0, where both norms are above 0.
        max_trust: Upper bound of k; None: none.
        eps_in_trust: Add eps to |r| in k, too.

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range, bounds that cross, a pattern that matches nothing, or
            patterns over unnamed parameters.

    Source: You et al. 2020, arXiv:1904.00962, Algorithm 2, phi the identity. The bias correction is
    1 - b^t, where Paddle's documentation prints b^t.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = Lamb([("weight", weight)], lr=0.1, weight_decay=0.01)
        >>> weight.grad = torch.tensor([1.0, -1.0])
        >>> optimizer.step()
        >>> round(optimizer.trust_ratios["weight"], 3)
        3.551
    """

    OPTIONS = LambConfig
    FORMULA = Formula(_single_tensor_lamb, _multi_tensor_lamb, "lamb", norms=True)
    OPTIMIZER_WIDE = frozenset({"unmatched_patterns"})
    RULES = ("exclude_from_weight_decay", "exclude_from_layer_adaptation")
    NEEDS_FULL_TENSORS = True
    STATE = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: Numeric = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: Numeric = 0.01,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        always_adapt: bool = False,
        master_weights: bool = False,
        foreach: bool | None = None,
        step_count: Literal["parameter", "optimizer"] = "parameter",
        l1: float = 0.0,
        l2: float = 0.0,
        unmatched_patterns: Literal["error", "ignore"] = "error",
        *,
        bias_correction: Literal["moments", "lr", "lr_first", "none"] = "moments",
        weight_decay_mode: DecayMode = "adapted",
        max_param_norm: float | None = None,
        min_trust: float = 0.0,
        max_trust: float | None = None,
        eps_in_trust: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "exclude_from_weight_decay": exclude_from_weight_decay,
                "exclude_from_layer_adaptation": exclude_from_layer_adaptation,
                "always_adapt": always_adapt,
                "master_weights": master_weights,
                "foreach": foreach,
                "step_count": step_count,
                "l1": l1,
                "l2": l2,
                "unmatched_patterns": unmatched_patterns,
                "bias_correction": bias_correction,
                "weight_decay_mode": weight_decay_mode,
                "max_param_norm": max_param_norm,
                "min_trust": min_trust,
                "max_trust": max_trust,
                "eps_in_trust": eps_in_trust,
            },
        )

    def _resolve(self) -> None:
        """Check the bounds of each group, and store the names excluded from decay and adaptation.

        Also keeps the base lr in groups whose decay needs it, and forgets the last trust ratios.
        """
        self._ratios = ()
        for group in self.param_groups:
            in_order(group, LambConfig.BOUNDS)
            keep_base_lr(group, group.get("functions", ()), self.defaults["lr"])
        must_match = self.defaults["unmatched_patterns"] == "error"
        self._undecayed = self._find_excluded_names(
            "exclude_from_weight_decay", must_match=must_match
        )
        self._unadapted: set[str] = self._find_excluded_names(
            "exclude_from_layer_adaptation", must_match=must_match
        )

    @property
    def trust_ratios(self) -> dict[str, float]:
        """Every k of the last step, by parameter name; reading it waits for the device."""
        ratio_of: dict[str, float] = {}
        for names, ratios in self._ratios:
            ratio_of.update(zip(names, ratios.tolist(), strict=True))
        return ratio_of

    def adapted(self, name: str, group: Group) -> bool:
        """Tell whether the trust ratio applies to a parameter of a group, by its name."""
        decays = group["weight_decay"] > 0 and self.decays(name)
        return name not in self._unadapted and (decays or group["always_adapt"])

    def _traits(self, group: Group, name: str, param: Tensor) -> tuple[bool, bool]:
        """Tell whether the patterns let a parameter decay, and whether they let it adapt."""
        del group, param
        return self.decays(name), name not in self._unadapted

    def _scalars(self, group: Group, traits: tuple[bool, bool], counters: Scalars) -> Scalars:
        """Return the scalars `lr`, `decay`, `keep` and `adapt`.

        In the mode "adapted" the decay times the weights is added to the update, within the trust
        ratio. In all other modes `keep` multiplies the weights. `adapt` tells whether the trust
        ratio applies; without decay it does so only under `always_adapt`.
        """
        del counters
        decays, may_adapt = traits
        decay = group["weight_decay"] if decays else 0.0
        is_within_ratio = group["weight_decay_mode"] == "adapted"
        return {
            "lr": group["lr"],
            "decay": decay if is_within_ratio else 0.0,
            "keep": 1.0 if is_within_ratio else 1.0 - decay * decay_scale(group),
            "adapt": may_adapt and (decay > 0 or group["always_adapt"]),
        }

    def _sparse_policy(self, _group: Group) -> str:
        """Take a sparse gradient as a dense one, since norms are of the full tensor."""
        return "densify"
