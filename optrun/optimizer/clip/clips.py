"""Clips: change gradients in place, and say how long they were all together before."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from optrun.base.errors import ConfigError
from optrun.base.options import ParamGroup
from optrun.config.names import near_names
from optrun.optimizer.clip.gradients import (
    Gradient,
    by_device_and_dtype,
    gradient_of,
    norms,
    scale_,
)

Rule = Callable[[list[Gradient], Tensor | None], None]
"""Changes the gradients that take part; gets their norms, shape (n,), where those are still right.
"""


class Clip:
    """What is called between the backward pass and the step.

    Gradients must be unscaled: with a `GradScaler`, call `scaler.unscale_(optimizer)` before.
    """

    def __init__(self, name: str, rules: Sequence[Rule], *, exclude: Sequence[str] = ()) -> None:
        """Keep the rules in their order.

        Args:
            name: Name of the choice.
            rules: Applied one after the other; none only measures.
            exclude: Regular expressions searched in parameter names; what they match is left alone.
        """
        self.name = name
        self._rules = list(rules)
        self._exclude = [re.compile(pattern) for pattern in exclude]
        self._seen: dict[tuple[str, ...], list[bool]] = {}

    def __call__(self, optimizer: Optimizer) -> Tensor:
        """Clip the gradients of every group in place.

        Args:
            optimizer: Its groups hold the parameters, and their names where patterns are used.

        Returns:
            L2 norm of all gradients together before anything was changed, opted-out ones included;
            shape (), float32 or float64, on the gradients' device, 0 without gradients. It is not
            read here: no synchronisation.

        Raises:
            ConfigError: A pattern in `exclude` matches no parameter, or the parameters have no
                names.
            ValueError: A sparse gradient under a value clip whose interval leaves out 0.
        """
        return self.clip_groups(optimizer.param_groups)

    @torch.no_grad()
    def clip_groups(self, groups: Sequence[ParamGroup]) -> Tensor:
        """Clip parameter groups."""
        taking_part = self._taking_part(groups)
        gradients: list[Gradient] = []
        position = 0
        for group_index, group in enumerate(groups):
            for param in group["params"]:
                entry = gradient_of(param, group_index=group_index, clipped=taking_part[position])
                position += 1
                if entry is not None:
                    gradients.append(entry)
        if not gradients:
            return torch.zeros(())
        lengths = norms(gradients)
        total: Tensor = torch.linalg.vector_norm(lengths)
        chosen = [at for at, entry in enumerate(gradients) if entry.clipped]
        if chosen:
            clipped = [gradients[at] for at in chosen]
            measured: Tensor | None = lengths
            if len(chosen) < len(gradients):
                measured = lengths[torch.tensor(chosen, device=lengths.device)]
            for rule in self._rules:
                rule(clipped, measured)
                measured = None
        return total

    def _taking_part(self, groups: Sequence[ParamGroup]) -> list[bool]:
        """Tell of each parameter whether it takes part, in group order.

        Patterns are searched once for a set of names.
        """
        if not self._exclude:
            return [True] * sum(len(group["params"]) for group in groups)
        if any("param_names" not in group for group in groups):
            raise ConfigError(
                "clip.exclude: the parameters have no names to search. Build the optimizer over"
                " named parameters."
            )
        names = tuple(chain.from_iterable(group["param_names"] for group in groups))
        if names not in self._seen:
            for pattern in self._exclude:
                if not any(pattern.search(name) for name in names):
                    raise ConfigError(
                        f"clip.exclude={pattern.pattern}: matches no parameter."
                        f" {near_names(pattern.pattern, names)}"
                    )
            self._seen = {names: [not self._is_excluded(name) for name in names]}
        return self._seen[names]

    def _is_excluded(self, name: str) -> bool:
        return any(pattern.search(name) for pattern in self._exclude)


def clip_by_value(min_value: float, max_value: float) -> Rule:
    """Clip g = min(max(g, min_value), max_value), elementwise."""

    def rule(gradients: list[Gradient], _: Tensor | None) -> None:
        if not min_value <= 0 <= max_value and any(entry.sparse for entry in gradients):
            raise ValueError(
                f"clip=value to [{min_value}, {max_value}]: a sparse gradient cannot take it,"
                " because its empty rows are 0 and would have to move. Widen the interval, or"
                " exclude the parameter."
            )
        for positions in by_device_and_dtype(gradients):
            values = [gradients[at].values for at in positions]
            torch._foreach_clamp_min_(values, min_value)
            torch._foreach_clamp_max_(values, max_value)

    return rule


def clip_by_norm(max_norm: float, eps: float) -> Rule:
    """Clip g = g * min(1, max_norm / (norm of g + eps)), each tensor alone."""

    def rule(gradients: list[Gradient], measured: Tensor | None) -> None:
        lengths = norms(gradients) if measured is None else measured
        scale_(gradients, (max_norm / (lengths + eps)).clamp(max=1.0).unbind())

    return rule


def clip_by_global_norm(max_norm: float, eps: float, *, per_group: bool) -> Rule:
    """Clip by the norm of everything or of each parameter group.

    g = g * min(1, max_norm / (norm of all g + eps)).
    """

    def rule(gradients: list[Gradient], measured: Tensor | None) -> None:
        lengths = norms(gradients) if measured is None else measured
        if not per_group:
            total = torch.linalg.vector_norm(lengths)
            scale_(gradients, [(max_norm / (total + eps)).clamp(max=1.0)])
            return
        members: dict[int, list[int]] = {}
        for at, entry in enumerate(gradients):
            members.setdefault(entry.group_index, []).append(at)
        for positions in members.values():
            rows = torch.tensor(positions, device=lengths.device)
            total = torch.linalg.vector_norm(lengths[rows])
            scale_([gradients[at] for at in positions], [(max_norm / (total + eps)).clamp(max=1.0)])

    return rule
