"""The object that carries curves to the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from optrun.scheduler.curves import Curve
from optrun.scheduler.plateau import Plateau


class Scheduler:
    """Sets each group's lr to base times curve, and weight decay where that has a curve of its own.

    The base of a group is `initial_lr`, the lr it was built with, scale included, so that ratios between groups stay.
    Optimizer step e, counted from 0, is made with `curve(e)`.

    Attributes:
        name: What drives the learning rate, for messages.
        global_step: Optimizer steps done.
        metric: Name of the metric that `observe` wants; None where none is watched.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = Scheduler(optimizer, [lambda global_step: 0.5**global_step], name="halving")
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.05]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        curves: Sequence[Curve],
        *,
        name: str,
        weight_decay_curves: Sequence[Curve] | Literal["lr"] | None = None,
        plateaus: Sequence[Plateau | None] | None = None,
        metric: str | None = None,
    ) -> None:
        """Set every group to its values for step 0 and mark the optimizer as driven.

        Args:
            optimizer: Any torch optimizer.
            curves: One per group.
            name: What `set_lr` names when it refuses.
            weight_decay_curves: One per group, multipliers of the decay it was built with; "lr": the group's multiplier
                of the lr, plateau included; None leaves it alone.
            plateaus: One per group, or None for a group whose lr does not look at the metric.
            metric: What the plateaus watch.

        Raises:
            ValueError: A group's lr or weight decay is a function of the step already.
        """
        self.optimizer = optimizer
        self.name = name
        self.metric = metric
        self.global_step = 0
        self._curves = list(curves)
        self._weight_decay_curves = weight_decay_curves
        self._plateaus = list(plateaus) if plateaus is not None else [None] * len(self._curves)
        _refuse_functions(optimizer, name, weight_decay=weight_decay_curves is not None)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
            if self._weight_decay_curves is not None:
                group.setdefault("initial_weight_decay", float(group.get("weight_decay", 0.0)))
        optimizer._lr_driven_by = name  # type: ignore[attr-defined]
        self._apply()

    def step(self, metric: float | None = None) -> None:
        """One optimizer step was made: set the values for the next.

        Args:
            metric: The watched metric, where it was evaluated at this step; as `observe`.

        Raises:
            ValueError: A metric for a schedule that watches none.
        """
        self.global_step += 1
        if metric is not None:
            self.observe(metric)
        else:
            self._apply()

    def observe(self, metric: float) -> None:
        """Take an evaluation in, without a step.

        Raises:
            ValueError: This schedule watches no metric.
        """
        if self.metric is None:
            raise ValueError(f"scheduler={self.name} watches no metric, got {metric}. Only scheduler=plateau does.")
        for plateau in self._plateaus:
            if plateau is not None:
                plateau.observe(metric)
        self._apply()

    def multiplier(self, global_step: int, group_index: int = 0) -> float:
        """What the lr of a group is multiplied by at a step, as far as it is known now."""
        plateau = self._plateaus[group_index]
        reduced = 1.0 if plateau is None else plateau.multiplier
        return self._curves[group_index](global_step) * reduced

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group for the step that comes next."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands; JSON-able. The curves are configuration and not in it."""
        return {
            "name": self.name,
            "metric": self.metric,
            "global_step": self.global_step,
            "last_lr": self.get_last_lr(),
            "plateaus": [None if plateau is None else plateau.state_dict() for plateau in self._plateaus],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`: the lr follows from the step and the curves given here.

        Raises:
            ValueError: It is no such state, or belongs to another number of groups.
        """
        for key in ("global_step", "plateaus"):
            if key not in state:
                raise ValueError(f"this is no scheduler's state: it has no key {key!r}, but {list(state)[:6]}.")
        plateaus = state["plateaus"]
        if len(plateaus) != len(self._plateaus):
            raise ValueError(
                f"scheduler state has {len(plateaus)} parameter groups, the optimizer has {len(self._plateaus)}."
            )
        self.global_step = int(state["global_step"])
        for plateau, saved in zip(self._plateaus, plateaus, strict=True):
            if plateau is not None and saved is not None:
                plateau.load_state_dict(saved)
        self._apply()

    def _apply(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            multiplier = self.multiplier(self.global_step, index)
            _set(group, "lr", group["initial_lr"] * multiplier)
            decays = self._weight_decay_curves
            if decays is not None and "weight_decay" in group:
                scale = multiplier if isinstance(decays, str) else decays[index](self.global_step)
                _set(group, "weight_decay", group["initial_weight_decay"] * scale)


def _set(group: dict[str, Any], key: str, value: float) -> None:
    """In place where the optimizer keeps a tensor, as compiled and captured steps want it."""
    if isinstance(group[key], Tensor):
        with torch.no_grad():
            group[key].fill_(value)
    else:
        group[key] = value


def _refuse_functions(optimizer: Optimizer, name: str, *, weight_decay: bool) -> None:
    """An lr that is a function of the step already would be overwritten here."""
    functions = getattr(optimizer, "_functions", [])
    for key in ("lr", "weight_decay") if weight_decay else ("lr",):
        if any(key in of_group for of_group in functions):
            raise ValueError(
                f"scheduler={name}: {key} of a parameter group is a function of the step already; "
                "give a number, or build no scheduler for it."
            )
