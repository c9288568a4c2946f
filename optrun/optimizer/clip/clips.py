"""Clip gradients in place, and return their total norm before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from optrun.optimizer.clip.gradients import Gradients, gradients_of, norms, scale_

Rule = Callable[[Gradients, Tensor | None], None]
"""(gradients, their norms, shape (n,)) -> None; changes the gradients in place.

The norms are None if an earlier rule has changed the gradients."""


class Clip:
    """Clip gradients in place; called between the backward pass and the step.

    Gradients must be unscaled: with a `GradScaler`, call `scaler.unscale_(optimizer)` before.
    """

    def __init__(self, name: str, rules: Sequence[Rule]) -> None:
        """Keep the rules in their order.

        Args:
            name: Name of the choice.
            rules: Applied one after the other; none only measures.
        """
        self.name = name
        self._rules = list(rules)

    def __call__(self, optimizer: Optimizer) -> Tensor:
        """Clip the gradients of every group in place.

        Returns:
            L2 norm of all gradients together before anything was changed; shape (), float32 or
            float64, on the gradients' device, 0 without gradients. It is not read here: no
            synchronisation.

        Raises:
            ValueError: A sparse gradient under a value clip whose interval leaves out 0.
        """
        return self.clip_params(
            chain.from_iterable(group["params"] for group in optimizer.param_groups)
        )

    @torch.no_grad()
    def clip_params(self, params: Iterable[Tensor]) -> Tensor:
        """Clip the gradients of some parameters in place; return their total norm before.

        As `__call__`: a tensor of shape (), which is not read here; 0 if no parameter has a
        gradient.
        """
        gradients = gradients_of(params)
        if gradients is None:
            return torch.zeros(())
        lengths = norms(gradients)
        total_norm: Tensor = torch.linalg.vector_norm(lengths)
        # The first rule may use these norms; later rules find changed gradients.
        measured: Tensor | None = lengths
        for rule in self._rules:
            rule(gradients, measured)
            measured = None
        return total_norm


def clip_by_value(min_value: float, max_value: float) -> Rule:
    """Make a rule to clip each element of a gradient to [min_value, max_value].

    The rule raises ValueError for a sparse gradient if the interval leaves out 0.
    """

    def rule(gradients: Gradients, _: Tensor | None) -> None:
        if not min_value <= 0 <= max_value and gradients.sparse:
            raise ValueError(
                f"clip=value to [{min_value}, {max_value}]: a sparse gradient cannot be clipped to"
                " an interval without 0, because its empty rows are 0. Widen the interval."
            )
        for _positions, values in gradients.batches:
            torch._foreach_clamp_min_(values, min_value)
            torch._foreach_clamp_max_(values, max_value)

    return rule


def clip_by_norm(max_norm: float, eps: float) -> Rule:
    """Make a rule to scale each gradient g by min(1, max_norm / (norm of g + eps)).

    The rule changes gradients in place. Their norms are computed if they are not passed to it.
    """

    def rule(gradients: Gradients, measured: Tensor | None) -> None:
        lengths = norms(gradients) if measured is None else measured
        factors = (max_norm / (lengths + eps)).clamp(max=1.0)
        scale_(gradients, factors.unbind())

    return rule


def clip_by_global_norm(max_norm: float, eps: float) -> Rule:
    """Make a rule to scale all gradients by min(1, max_norm / (their total norm + eps)).

    The rule changes gradients in place. Their norms are computed if they are not passed to it.
    """

    def rule(gradients: Gradients, measured: Tensor | None) -> None:
        lengths = norms(gradients) if measured is None else measured
        total_norm = torch.linalg.vector_norm(lengths)
        factor = (max_norm / (total_norm + eps)).clamp(max=1.0)
        scale_(gradients, [factor])

    return rule
