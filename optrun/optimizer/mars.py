"""MARS-AdamW: AdamW on gradients from which the step before takes out some of the noise.

torch has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from optrun.base.options import Group, Scalars
from optrun.config.schema.optimizer import MarsConfig
from optrun.optimizer.adam_update import ADAM
from optrun.optimizer.base import Numeric, Params
from optrun.optimizer.batch_optimizer import BatchOptimizer
from optrun.optimizer.batches import Batch
from optrun.optimizer.kernels.choice import Formula, Update
from optrun.optimizer.numerics import Sharding, norms

PART_SIZE = 2**20
"""Elements of the tensors that the loop steps at once: their corrected gradients are new tensors,
which take memory."""


def _single_tensor_mars(batch: Batch) -> None:
    """Take the step of `Mars` in place, by Adam's loop over parts of some `PART_SIZE` elements."""
    _step_in_parts(batch, ADAM.loop, foreach=False)


def _multi_tensor_mars(batch: Batch) -> None:
    """Compute `_single_tensor_mars` by foreach operations, each over all tensors at once."""
    assert ADAM.foreach is not None
    _step_in_parts(batch, ADAM.foreach, foreach=True)


def _step_in_parts(batch: Batch, adam: Update, *, foreach: bool) -> None:
    """Take Adam's step on corrected gradients, then on tensors without correction.

    Tensors that are not corrected take `betas_1d`. Each gradient is then copied into `last_grad`,
    also of tensors that are not corrected, since `optimize_1d` may change.

    Args:
        batch: The tensors; `corrected` and `strength` are scalars of each.
        adam: Takes Adam's step on a batch, by the loop or by foreach operations.
        foreach: Whether to step all tensors at once by foreach operations; else in parts.
    """
    for corrected in (True, False):  # first the tensors with correction, then the others
        options = batch.options
        if not corrected:
            options = {**options, "betas": options["betas_1d"]}
        for part in _split_into_parts(batch, corrected=corrected, one_part=foreach):
            grads = part.grads
            # Adam has no such state. The optimizer keeps it: only the part's own dict loses it.
            last_grads = part.state.pop("last_grad")
            if corrected:
                part.grads = correct_grads(  # new tensors: `grads` stays as it is
                    grads,
                    last_grads,
                    foreach=foreach,
                    shardings=part.shardings,
                    strengths=part.scalar_list("strength"),
                )
            adam(replace(part, options=options))
            torch._foreach_copy_(last_grads, grads)


def _split_into_parts(batch: Batch, *, corrected: bool, one_part: bool) -> Iterator[Batch]:
    """Yield the tensors that are (or are not) corrected, by the scalar `corrected` of each tensor.

    They come in one part, or in parts of about `PART_SIZE` elements, which bound the memory of
    temporary tensors. Without such tensors nothing is yielded.
    """
    indices: list[int] = []
    elements = 0
    for i, scalars in enumerate(batch.scalars):
        if scalars["corrected"] != corrected:
            continue
        indices.append(i)
        elements += batch.params[i].numel()
        if elements >= PART_SIZE and not one_part:
            yield batch.subset(indices)
            indices = []
            elements = 0
    if indices:
        yield batch.subset(indices)


class Mars(BatchOptimizer):
    """Scaled stochastic recursive momentum.

    Matrices take AdamW's step on a corrected gradient, vectors on their own.

    One step of one tensor of two or more dimensions, t counting the gradients it has had from 1:

        c = g + gamma b1 / (1 - b1) (g - g')
        c = c / |c|    where |c| > 1
        m = b1 m + (1 - b1) c
        v = b2 v + (1 - b2) c^2
        w = w (1 - lr weight_decay)
        w = w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    g' is the gradient of the step before, g itself at first. It is of other examples than g: the
    paper's approximate form, which costs no second backward. A tensor of fewer dimensions has c = g
    and `betas_1d`, unless `optimize_1d`. |c| is the norm of the whole tensor. Moments and g' are
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
        foreach: True: torch's multi-tensor operations; False: the loop; None: the fastest kernel
            there is, or the one that `OPTRUN_KERNEL` names (`optrun.optimizer.kernels`).

    Raises:
        TypeError: For an argument of a wrong type or an unknown group key.
        ValueError: For a value out of range.

    Source: Yuan et al. 2024, arXiv:2411.10438, Algorithms 1 and 2 with an approximate gradient,
    whose x_0 is x_1: no correction at first, where the authors' code has g' = 0. That vectors go by
    AdamW, and these decays, is their code.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
        >>> optimizer = Mars([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.tensor([[0.5, -0.5]])
        >>> optimizer.step()
        >>> weight.data
        tensor([[0.9000, 2.1000]])
    """

    OPTIONS = MarsConfig
    FORMULA = Formula(_single_tensor_mars, _multi_tensor_mars, "mars", norms=True)
    STATE = ("exp_avg", "exp_avg_sq", "last_grad")
    NEEDS_FULL_TENSORS = True

    def __init__(
        self,
        params: Params,
        lr: Numeric = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: Numeric = 0.01,
        gamma: float = 0.025,
        optimize_1d: bool = False,
        betas_1d: tuple[float, float] = (0.9, 0.95),
        foreach: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "gamma": gamma,
                "optimize_1d": optimize_1d,
                "betas_1d": betas_1d,
                "foreach": foreach,
            },
        )

    def _traits(self, group: Group, name: str, param: Tensor) -> bool:
        """Tell whether a parameter has two or more dimensions."""
        del group, name
        return param.dim() >= 2

    def _scalars(self, group: Group, traits: bool, counters: Scalars) -> Scalars:
        """Return `lr`, `keep`, the `strength` of the correction, and whether it is `corrected`.

        The strength is gamma b1 / (1 - b1); 0 in the first step, which has no last gradient.
        """
        beta1 = group["betas"][0]
        is_first = counters["step"] == 1
        return {
            **super()._scalars(group, traits, counters),
            "strength": 0.0 if is_first else group["gamma"] * beta1 / (1 - beta1),
            "corrected": group["optimize_1d"] or traits,
        }


def correct_grads(
    grads: list[Tensor],
    last_grads: list[Tensor],
    *,
    foreach: bool,
    shardings: list[Sharding],
    strengths: list[float],
) -> list[Tensor]:
    """Return corrected gradients c = g + strength (g - g'), scaled down to norm 1 if it is larger.

    A c whose norm is NaN is not scaled, so that a NaN spoils no other entry.

    Args:
        grads: g, the local shards of gradients on one device, float32 or float64.
        last_grads: g', the gradients of the step before; the same shapes and dtype.
        foreach: Use foreach operations, with one collective for the norms of all tensors.
        shardings: The processes with the other shards of each tensor.
        strengths: gamma b1 / (1 - b1) of each tensor.

    Example:
        >>> grads, last_grads = [torch.tensor([3.0, 0.0])], [torch.tensor([3.0, 4.0])]
        >>> options = {"shardings": [Sharding(())], "strengths": [1.0]}
        >>> correct_grads(grads, last_grads, foreach=False, **options)
        [tensor([ 0.6000, -0.8000])]
    """
    # g + strength (g - g') is g' + (1 + strength) (g - g'), which lerp computes.
    weights = [1 + strength for strength in strengths]
    if foreach:
        corrected = list(torch._foreach_lerp(last_grads, grads, weights))
    else:
        corrected = list(map(torch.lerp, last_grads, grads, weights))
    grad_norms = norms(corrected, shardings, foreach=foreach)
    divisors = torch.where(grad_norms > 1, grad_norms, 1.0)  # 1 also for NaN
    torch._foreach_div_(corrected, list(divisors.unbind()))
    return corrected
