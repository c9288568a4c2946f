"""LAMB: Adam's direction, rescaled tensor by tensor to the size of the weights. torch has no LAMB."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from optrun.config.schema.optimizer import LambConfig
from optrun.config.schema.ranges import in_order
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.batches import gather
from optrun.optimizer.decay import decay_scale, note_peak
from optrun.optimizer.kernels import compiled
from optrun.optimizer.kernels.choice import Update, pick, take_step
from optrun.optimizer.kernels.triton import launch
from optrun.optimizer.lamb_rule import LambRule
from optrun.optimizer.numerics import Sharding, first_moment_, moments_, norms, second_moment_

RULE = tuple(field.name for field in fields(LambRule))
LEAST_KEPT = 1e-3
"""Caution scales what it leaves up by at most 1 / this: Liang et al. 2024, arXiv:2411.16085."""


class Lamb(NamedOptimizer):
    """Layer-wise adaptive moments, as in Paddle and in the TensorFlow Model Garden.

    One step of one parameter tensor, t counting from 1:

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay w
        w = w - lr k r,    k = |w| / |r| where adapted and both norms are above 0, else 1

    Moments are float32 at least. A sparse gradient counts as a dense one with zero rows. After a step `trust_ratios`
    holds each k. Other packages' LAMBs differ by the options from `bias_correction` on, whose defaults are the formula
    above; `optrun.optimizer.dialect_options` has them by the name of the package.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: Decay of first and second moment, each in [0, 1).
        eps: Added to the square root of the corrected second moment, >= 0.
        weight_decay: Coefficient inside r, hence inside its norm; a negative one is applied too. May be a function of
            the step.
        exclude_from_weight_decay: Regular expressions; names in which one is found are not decayed.
        exclude_from_layer_adaptation: Likewise for k = 1.
        always_adapt: A tensor that is not decayed has k = 1, as in Paddle, unless this is set. The Model Garden adapts
            without decay: set it, and list what it excludes from decay under `exclude_from_layer_adaptation` too.
        master_weights: Keep a float32 copy of 16-bit parameters in the state and round it into them.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel there is, or the one
            that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).
        step_count: "parameter": t counts the gradients this parameter has had, as in Paddle; "optimizer": t counts the
            optimizer's steps, as in the Model Garden.
        l1: Coefficient of a coupled term added to the gradient: l1 sign(w), >= 0.
        l2: Likewise l2 w, >= 0.
        unmatched_patterns: "error", or "ignore" for patterns that match no name.
        bias_correction: "moments": as above. Otherwise r has the moments as they are, and lr is multiplied, outside the
            norms: by sqrt(1 - b2^t) / (1 - b1^t) with "lr", 1 / (1 - b1^t) with "lr_first", nothing with "none".
        grad_averaging: False: m = b1 m + g.
        normalize_grad: Divide each tensor's gradient by its norm first, as LANS does.
        eps_root: Added under the square root, >= 0.
        caution: Drop entries of Adam's direction whose sign is not the gradient's, and scale the others up by as much.
        weight_decay_mode: "adapted": inside r, as above. Otherwise w loses a part of itself before the norms are taken:
            lr weight_decay with "decoupled", weight_decay with "fixed", lr / peak weight_decay with "scheduled",
            lr^2 / base weight_decay with "corrected"; peak is the rate that the group's schedule began with, base the
            optimizer's `lr`, whatever rate the group has.
        min_param_norm: Lower bound of |w| in k, >= 0.
        max_param_norm: Upper bound of |w| in k; None: none.
        min_trust: Lower bound of k, >= 0, where both norms are above 0.
        max_trust: Upper bound of k; None: none.
        eps_in_trust: Add eps to |r| in k, too.

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range, bounds that cross, a pattern that matches nothing, or patterns over
            unnamed parameters.

    Source: You et al. 2020, arXiv:1904.00962, Algorithm 2, phi the identity. The bias correction is 1 - b^t, where
    Paddle's documentation prints b^t.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = Lamb([("weight", weight)], lr=0.1, weight_decay=0.01)
        >>> weight.grad = torch.tensor([1.0, -1.0])
        >>> optimizer.step()
        >>> round(optimizer.trust_ratios["weight"], 3)
        3.551
    """

    OPTIONS = LambConfig
    ORDER = (
        "lr betas eps weight_decay exclude_from_weight_decay exclude_from_layer_adaptation always_adapt "
        "master_weights foreach step_count l1 l2 unmatched_patterns"
    )
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"lr": 1e-3}
    OPTIMIZER_WIDE: ClassVar[frozenset[str]] = frozenset({"unmatched_patterns"})
    STATE: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def _resolve(self) -> None:
        self._ratios: list[tuple[list[str], Tensor]] = []
        for group, functions in zip(self.param_groups, self._functions, strict=True):
            in_order(group, LambConfig.BOUNDS)
            note_peak(group, functions, self.defaults["lr"])
        must_match = self.defaults["unmatched_patterns"] == "error"
        self._undecayed = self._excluded("exclude_from_weight_decay", must_match=must_match)
        self._unadapted: set[Tensor] = self._excluded("exclude_from_layer_adaptation", must_match=must_match)

    @property
    def trust_ratios(self) -> dict[str, float]:
        """Every k of the last step, by parameter name; reading it waits for the device."""
        return {
            name: ratio for names, ratios in self._ratios for name, ratio in zip(names, ratios.tolist(), strict=True)
        }

    def adapted(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Tell whether the trust ratio applies to a parameter of a group."""
        decayed = group["weight_decay"] > 0 and self.decays(param)
        return param not in self._unadapted and (decayed or group["always_adapt"])

    def _numbers(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        decay = group["weight_decay"] if self.decays(param) else 0.0
        inside = group["weight_decay_mode"] == "adapted"
        return {
            "lrs": group["lr"],
            "weight_decays": decay if inside else 0.0,
            "keeps": 1.0 if inside else 1.0 - decay * decay_scale(group),
            "numels": param.numel(),
            "adapt": self.adapted(param, group),
            "l1s": group["l1"],
            "l2s": group["l2"],
        }

    def kernel(self, group: Mapping[str, Any], device: str, *, whole: bool = True) -> str:
        """Name the kernel that steps a group on a type of device; `whole`: no tensor is sharded."""
        rule = LambRule(**{key: group[key] for key in RULE})
        return pick(group["foreach"], device, ways(rule, whole=whole))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ratios = []
        batches = gather(
            self,
            slots=self.STATE,
            shared=("betas", "eps", "foreach", *RULE),
            per_tensor=self._numbers,
            sparse=lambda _: "densify",
        )
        for batch in batches:
            beta1, beta2 = batch.options["betas"]
            ratios = lamb(
                batch.params,
                batch.grads,
                batch.state["exp_avg"],
                batch.state["exp_avg_sq"],
                foreach=batch.options["foreach"],
                steps=batch.steps,
                shardings=batch.shardings,
                beta1=beta1,
                beta2=beta2,
                eps=batch.options["eps"],
                rule=LambRule(**{key: batch.options[key] for key in RULE}),
                **batch.numbers,
            )
            batch.done()
            self._ratios.append((batch.names, ratios))
        return loss


def ways(rule: LambRule, *, whole: bool) -> tuple[str, ...]:
    """Return the kernels that compute a dialect, the preferred one first; foreach computes every one.

    Args:
        rule: The dialect.
        whole: No tensor has pieces on other ranks; where one has, foreach needs one collective for all norms.
    """
    if not whole:
        return ("foreach", "loop")
    if not rule.grad_averaging or rule.normalize_grad or rule.eps_root or rule.caution:
        return ("loop",)
    return ("triton", "compiled", "loop")


def lamb(
    params: list[Tensor],
    *lists: list[Tensor],
    foreach: bool | None,
    shardings: list[Sharding],
    rule: LambRule,
    **numbers: Any,
) -> Tensor:
    """Step in place, by the kernel that `foreach` means; arguments as in `_single_tensor_lamb`."""
    whole = not any(sharding.groups for sharding in shardings)
    updates: dict[str, Update] = {
        "loop": _single_tensor_lamb,
        "foreach": _multi_tensor_lamb,
        "compiled": compiled.lamb,
        "triton": launch.lamb,
    }
    kernel = pick(foreach, params[0].device.type, ways(rule, whole=whole))
    ratios: Tensor = take_step(updates, kernel, (params, *lists), {"shardings": shardings, "rule": rule, **numbers})
    return ratios


def _single_tensor_lamb(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    steps: list[int],
    shardings: list[Sharding],
    lrs: list[float],
    weight_decays: list[float],
    adapt: list[bool],
    l1s: list[float],
    l2s: list[float],
    keeps: list[float],
    numels: list[int],
    beta1: float,
    beta2: float,
    eps: float,
    rule: LambRule,
) -> Tensor:
    """Compute the formula of `Lamb`, one tensor after another.

    Args:
        params: Local pieces, float32 or float64, one device; updated in place.
        grads: The same shapes and dtype.
        exp_avgs: First moments, in place.
        exp_avg_sqs: Second moments, in place.
        steps: t of each tensor, from 1.
        shardings: Where the rest of each tensor lies.
        lrs: Learning rate of each.
        weight_decays: Decay inside the trust ratio, of each.
        adapt: Whether k applies, of each.
        l1s: Coupled coefficients of sign(w), of each.
        l2s: Coupled coefficients of w, of each.
        keeps: What decay outside the trust ratio leaves of w, of each.
        numels: Entries of each whole tensor, of which this process may hold a part.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Outside the square root.
        rule: What differs from dialect to dialect.

    Returns:
        k of each tensor, shape (n,), in the dtype of the parameters.
    """
    ratios = []
    for i, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        if rule.normalize_grad:
            grad = grad / _divisors(norms([grad], [shardings[i]]))[0]
        if l2s[i]:
            grad = grad + param * l2s[i]
        if l1s[i]:
            grad = grad + param.sign() * l1s[i]
        if rule.grad_averaging:
            first_moment_(exp_avg, grad, beta1)
        else:
            exp_avg.mul_(beta1).add_(grad)
        second_moment_(exp_avg_sq, grad, beta2)
        correction1, correction2, lr_factor = rule.corrections(beta1, beta2, steps[i])
        if rule.eps_root:
            denom = exp_avg_sq.div(correction2).add_(rule.eps_root).sqrt_().add_(eps)
        else:
            denom = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(eps)
        update = torch.div(exp_avg, denom, out=denom).div_(correction1)
        if rule.caution:
            mask = (update * grad > 0).to(update.dtype)
            kept = norms([mask], [shardings[i]])[0].square() / max(numels[i], 1)
            update.mul_(mask.div_(kept.clamp_(min=LEAST_KEPT)))
        if weight_decays[i]:
            update.add_(param, alpha=weight_decays[i])
        if keeps[i] != 1.0:
            param.mul_(keeps[i])
        if adapt[i]:
            param_norm, update_norm = norms([param, update], [shardings[i]] * 2)
            ratio = rule.trust_ratios(param_norm, update_norm, eps)
        else:
            ratio = torch.ones((), dtype=param.dtype, device=param.device)
        ratios.append(ratio)
        param.sub_(update.mul_(ratio * (lrs[i] * lr_factor)))
    return torch.stack(ratios)


def _multi_tensor_lamb(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    steps: list[int],
    shardings: list[Sharding],
    lrs: list[float],
    weight_decays: list[float],
    adapt: list[bool],
    l1s: list[float],
    l2s: list[float],
    keeps: list[float],
    numels: list[int],
    beta1: float,
    beta2: float,
    eps: float,
    rule: LambRule,
) -> Tensor:
    """Step as `_single_tensor_lamb`; all norms of all tensors in one collective."""
    if rule.normalize_grad:
        grads = list(torch._foreach_div(grads, list(_divisors(norms(grads, shardings, foreach=True)).unbind())))
    if any(l2s):
        grads = list(torch._foreach_add(grads, torch._foreach_mul(params, l2s)))
    if any(l1s):
        grads = list(torch._foreach_add(grads, torch._foreach_mul(torch._foreach_sign(params), l1s)))
    if rule.grad_averaging:
        moments_(exp_avgs, exp_avg_sqs, grads, beta1=beta1, beta2=beta2)
    else:
        torch._foreach_mul_(exp_avgs, beta1)
        torch._foreach_add_(exp_avgs, grads)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    corrections = [rule.corrections(beta1, beta2, step) for step in steps]
    if rule.eps_root:
        denoms = torch._foreach_div(exp_avg_sqs, [correction2 for _, correction2, _ in corrections])
        torch._foreach_add_(denoms, rule.eps_root)
        torch._foreach_sqrt_(denoms)
    else:
        denoms = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_div_(denoms, [math.sqrt(correction2) for _, correction2, _ in corrections])
    torch._foreach_add_(denoms, eps)
    updates = torch._foreach_div(exp_avgs, denoms)
    torch._foreach_div_(updates, [correction1 for correction1, _, _ in corrections])
    del denoms
    if rule.caution:
        masks = [(update * grad > 0).to(update.dtype) for update, grad in zip(updates, grads, strict=True)]
        sizes = torch.tensor([max(numel, 1) for numel in numels], dtype=masks[0].dtype, device=masks[0].device)
        kept = norms(masks, shardings, foreach=True).square().div_(sizes).clamp_(min=LEAST_KEPT)
        torch._foreach_div_(masks, list(kept.unbind()))
        torch._foreach_mul_(updates, masks)
        del masks
    decayed = [i for i, weight_decay in enumerate(weight_decays) if weight_decay]
    if decayed:
        decay = torch._foreach_mul([params[i] for i in decayed], [weight_decays[i] for i in decayed])
        torch._foreach_add_([updates[i] for i in decayed], decay)
        del decay
    if any(keep != 1.0 for keep in keeps):
        torch._foreach_mul_(params, keeps)
    ratios = torch.ones(len(params), dtype=params[0].dtype, device=params[0].device)
    adapted = [i for i, flag in enumerate(adapt) if flag]
    if adapted:
        both = [params[i] for i in adapted] + [updates[i] for i in adapted]
        together = norms(both, [shardings[i] for i in adapted] * 2, foreach=True)
        found = rule.trust_ratios(together[: len(adapted)], together[len(adapted) :], eps)
        if len(adapted) == len(params):
            ratios = found
        else:
            ratios[torch.tensor(adapted, device=ratios.device)] = found
    rates = [lr * lr_factor for lr, (_, _, lr_factor) in zip(lrs, corrections, strict=True)]
    scales = ratios * torch.tensor(rates, dtype=ratios.dtype, device=ratios.device)
    torch._foreach_mul_(updates, list(scales.unbind()))
    torch._foreach_sub_(params, updates)
    return ratios


def _divisors(grad_norms: Tensor) -> Tensor:
    """Return the norms to divide by: 1 for a gradient that is 0 everywhere."""
    return torch.where(grad_norms > 0, grad_norms, torch.ones_like(grad_norms))
