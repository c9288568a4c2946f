"""MARS-AdamW: AdamW on gradients from which the step before takes out some of the noise. torch has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from optrun.config.schema.optimizer import MarsConfig
from optrun.optimizer.adam_update import WAYS, adam
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.batches import Batch, gather
from optrun.optimizer.kernels.choice import pick
from optrun.optimizer.numerics import Sharding, norms

WAVE = 2**20
"""Elements of which corrected gradients, which are new tensors, are made before Adam's step takes them."""


class Mars(NamedOptimizer):
    """Scaled stochastic recursive momentum: matrices take AdamW's step on a corrected gradient, vectors on their own.

    One step of one tensor of two or more dimensions, t counting the gradients it has had from 1:

        c = g + gamma b1 / (1 - b1) (g - g')        g' the gradient of the step before, g itself at first
        c = c / max(1, |c|)
        m = b1 m + (1 - b1) c
        v = b2 v + (1 - b2) c^2
        w = w (1 - lr weight_decay)
        w = w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    A tensor of fewer dimensions has c = g and `betas_1d`, unless `optimize_1d`. g' is of other examples than g: the
    paper's approximate form, which costs no second backward. |c| is the norm of the whole tensor. Moments and g' are
    float32 at least.

    Args:
        params: Parameters, (name, parameter) pairs, or groups that override any of the following.
        lr: Learning rate, a number >= 0 or a function of the step from 0.
        betas: Decay of first and second moment, each in [0, 1).
        eps: Added to the square root of the corrected second moment, >= 0.
        weight_decay: Decoupled, >= 0; may be a function of the step.
        gamma: Strength of the correction, >= 0.
        optimize_1d: Correct the gradients of vectors and numbers, too.
        betas_1d: Decays for vectors and numbers where they are not corrected.
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel there is, or the one
            that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range.

    Source: Yuan et al. 2024, arXiv:2411.10438, Algorithms 1 and 2 with an approximate gradient, whose x_0 is x_1: no
    correction at first, where the authors' code has g' = 0. That vectors go by AdamW, and these decays, is their code.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
        >>> optimizer = Mars([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.tensor([[0.5, -0.5]])
        >>> optimizer.step()
        >>> weight.data
        tensor([[0.9000, 2.1000]])
    """

    OPTIONS = MarsConfig
    ORDER = "lr betas eps weight_decay gamma optimize_1d betas_1d foreach"
    STATE: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "last_grad")

    def _numbers(self, group: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
        beta1, first = group["betas"][0], self.state[param]["step"] == 1
        return {
            "lrs": group["lr"],
            "keeps": 1.0 - group["lr"] * group["weight_decay"],
            "strengths": 0.0 if first else group["gamma"] * beta1 / (1 - beta1),
            "corrected": group["optimize_1d"] or param.dim() >= 2,
        }

    def kernel(self, group: Mapping[str, Any], device: str, *, whole: bool = True) -> str:
        """Name the kernel that steps a group on a type of device; `whole`: no tensor is sharded."""
        del whole
        return pick(group["foreach"], device, WAYS)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shared = ("betas", "betas_1d", "eps", "foreach")
        for batch in gather(self, slots=self.STATE, shared=shared, per_tensor=self._numbers):
            corrected = batch.numbers.pop("corrected")
            for flag in (True, False):
                for wave in _waves(batch, [i for i, own in enumerate(corrected) if own == flag]):
                    _step_some(batch, wave, corrected=flag)
            batch.done()
        return loss


def _waves(batch: Batch, indices: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield tensors of a batch whose corrected gradients are there at once: all with foreach, few without."""
    wave: list[int] = []
    total = 0
    for i in indices:
        wave.append(i)
        total += batch.params[i].numel()
        if total >= WAVE and not batch.foreach:
            yield wave
            wave, total = [], 0
    if wave:
        yield wave


def _step_some(batch: Batch, indices: Sequence[int], *, corrected: bool) -> None:
    """Step some tensors of a batch as AdamW, on corrected gradients or on their own."""

    def some(values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in indices]

    grads, last_grads = some(batch.grads), some(batch.state["last_grad"])
    strengths, shardings = some(batch.numbers["strengths"]), some(batch.shardings)
    beta1, beta2 = batch.options["betas" if corrected else "betas_1d"]
    directions = grads
    if corrected:
        directions = corrected_grads(grads, last_grads, foreach=batch.foreach, shardings=shardings, strengths=strengths)
    adam(
        some(batch.params),
        directions,
        some(batch.state["exp_avg"]),
        some(batch.state["exp_avg_sq"]),
        foreach=batch.options["foreach"],
        steps=some(batch.steps),
        lrs=some(batch.numbers["lrs"]),
        keeps=some(batch.numbers["keeps"]),
        beta1=beta1,
        beta2=beta2,
        eps=batch.options["eps"],
    )
    torch._foreach_copy_(last_grads, grads)


def corrected_grads(
    grads: list[Tensor],
    last_grads: list[Tensor],
    *,
    foreach: bool,
    shardings: list[Sharding],
    strengths: list[float],
) -> list[Tensor]:
    """Correct gradients for less variance, to norm 1 at most.

    Args:
        grads: Local pieces, float32 or float64, one device.
        last_grads: Of the step before; the same shapes and dtype.
        foreach: By fused kernels, all norms of all tensors in one collective.
        shardings: Where the rest of each tensor lies.
        strengths: gamma b1 / (1 - b1), of each.

    Returns:
        New tensors: c = g + strength (g - g'), over max(1, |c|).

    Example:
        >>> grads, last_grads = [torch.tensor([3.0, 0.0])], [torch.tensor([3.0, 4.0])]
        >>> corrected_grads(grads, last_grads, foreach=False, shardings=[Sharding(())], strengths=[1.0])
        [tensor([ 0.6000, -0.8000])]
    """
    if not foreach:
        found = []
        for grad, last_grad, sharding, strength in zip(grads, last_grads, shardings, strengths, strict=True):
            corrected = last_grad.lerp(grad, 1 + strength)
            found.append(corrected.div_(norms([corrected], [sharding])[0].clamp(min=1.0)))
        return found
    found = list(torch._foreach_lerp(last_grads, grads, [1 + strength for strength in strengths]))
    torch._foreach_div_(found, list(norms(found, shardings, foreach=True).clamp(min=1.0).unbind()))
    return found
