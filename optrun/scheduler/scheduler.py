"""The object that carries curves to the groups of an optimizer."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from optrun.base.errors import ConfigError
from optrun.base.options import Group, ParamGroup, State, StateDict
from optrun.scheduler.curves import Curve
from optrun.scheduler.plateau import Plateau


@dataclass
class GroupSchedule:
    """What one parameter group follows.

    Attributes:
        lr: Multiplier of its learning rate.
        weight_decay: Multiplier of its weight decay; "lr": that of its lr, plateau included; None
            leaves it alone.
        plateau: Further multiplier of its lr; None where that looks at no metric.
    """

    lr: Curve
    weight_decay: Curve | Literal["lr"] | None = None
    plateau: Plateau | None = None

    def multiplier(self, global_step: int) -> float:
        """Return what the lr is multiplied by at a step, as far as it is known now."""
        return self.lr(global_step) * (1.0 if self.plateau is None else self.plateau.multiplier)

    def decay_multiplier(self, global_step: int) -> float | None:
        """Return what the weight decay is multiplied by; None if it is left alone."""
        if self.weight_decay is None:
            return None
        return (
            self.multiplier(global_step)
            if isinstance(self.weight_decay, str)
            else self.weight_decay(global_step)
        )


class Scheduler(LRScheduler):
    """Sets each group's lr to base times curve, and weight decay where that has a curve of its own.

    The base of a group is `initial_lr`, the lr it was built with, scale included, so that ratios
    between groups stay. Optimizer step e, counted from 0, is made with `curve(e)`. A group that is
    added later joins the schedule at the step it has come to. `last_epoch`, as torch calls it, is
    the number of optimizer steps done.

    Attributes:
        name: What drives the learning rate, for messages.
        metric: Name of the metric that `observe` wants; None where none is watched.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> halving = lambda group: GroupSchedule(lr=lambda step: 0.5**step)
        >>> scheduler = Scheduler(optimizer, halving, name="halving")
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.05]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        follow: Callable[[Group], GroupSchedule],
        *,
        name: str,
        warn_without_metric_at: int | None = None,
    ) -> None:
        """Set every group to its values for step 0 and mark the optimizer as driven.

        Args:
            optimizer: Any torch optimizer.
            follow: From a parameter group to what it follows; asked once for each, also for those
                that come later.
            name: What `set_lr` names when it refuses.
            warn_without_metric_at: Step at which a schedule that watches a metric warns if it has
                seen none; None: never.

        Raises:
            ConfigError: Groups that watch different metrics.
            ValueError: A group's lr or weight decay is a function of the step already.
        """
        self.optimizer = optimizer
        self.name = name
        self.metric: str | None = None
        self._warn_without_metric_at = warn_without_metric_at
        self._follow = follow
        self._schedules: list[GroupSchedule] = []
        self._take_in_groups()
        super().__init__(optimizer)
        _unwrapped(optimizer)._lr_driven_by = name  # type: ignore[attr-defined]
        self._look_before_steps()

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self.last_epoch

    @property
    def base_lrs(self) -> list[Any]:
        """Peak of each group; kept in the groups as `initial_lr`."""
        return [group["initial_lr"] for group in self.optimizer.param_groups]

    @base_lrs.setter
    def base_lrs(self, values: list[Any]) -> None:
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            group["initial_lr"] = value

    def step(self, metric: float | None = None) -> None:
        """Set the values for the next step, after one optimizer step was made.

        Args:
            metric: The watched metric, where it was evaluated at this step; as `observe`.

        Raises:
            ValueError: A metric for a schedule that watches none.
        """
        if metric is not None:
            self._show(metric)
        elif self.metric is not None and self.last_epoch + 1 == self._warn_without_metric_at:
            self._warn_without_metric()
        self._step_count += 1
        self._update_lr()

    def observe(self, metric: float) -> None:
        """Take an evaluation in, without a step.

        Raises:
            ValueError: This schedule watches no metric.
        """
        self._show(metric)
        self._apply()

    def multiplier(self, global_step: int, group_index: int = 0) -> float:
        """Return what the lr of a group is multiplied by at a step, as far as it is known now."""
        self._catch_up()
        return self._schedules[group_index].multiplier(global_step)

    def get_lr(self) -> list[float | Tensor]:
        """Compute the learning rate of each group at the current step, by base and curve."""
        pairs = zip(self.base_lrs, self._schedules, strict=True)
        return [base * schedule.multiplier(self.last_epoch) for base, schedule in pairs]

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group for the step that comes next."""
        self._catch_up()
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> StateDict:
        """Return where the schedule stands; JSON-able.

        The curves are configuration and not in it.
        """
        last_lr = self.get_last_lr()
        plateaus = [schedule.plateau for schedule in self._schedules]
        return {
            "name": self.name,
            "metric": self.metric,
            "global_step": self.global_step,
            "last_lr": last_lr,
            "plateaus": [None if plateau is None else plateau.state_dict() for plateau in plateaus],
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from `state_dict()`: the lr follows from the step and the curves given here.

        Raises:
            ValueError: It is no such state, or belongs to another number of groups.
        """
        for key in ("global_step", "plateaus"):
            if key not in state_dict:
                raise ValueError(
                    f"this is no scheduler's state: it has no key {key!r}, but"
                    f" {list(state_dict)[:6]}."
                )
        self._take_in_groups()
        plateaus = state_dict["plateaus"]
        if len(plateaus) != len(self._schedules):
            raise ValueError(
                f"scheduler state has {len(plateaus)} parameter groups, the optimizer has"
                f" {len(self._schedules)}."
            )
        self.last_epoch = int(state_dict["global_step"])
        self._step_count = self.last_epoch + 1
        for schedule, saved in zip(self._schedules, plateaus, strict=True):
            if schedule.plateau is not None and saved is not None:
                schedule.plateau.load_state_dict(saved)
        self._apply()

    def __setstate__(self, state: State) -> None:
        """A copy looks at its own optimizer."""
        self.__dict__.update(state)
        self._look_before_steps()

    def _warn_without_metric(self) -> None:
        plateaus = [one.plateau for one in self._schedules if one.plateau is not None]
        if all(plateau.best is None for plateau in plateaus):
            warnings.warn(
                f"scheduler={self.name} (plateau of {self.metric}) has seen no metric in"
                f" {self.last_epoch + 1} steps, so it reduces nothing. Call scheduler.step(metric)"
                " or scheduler.observe(metric) after each evaluation, in transformers.Trainer by a"
                " TrainerCallback.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _show(self, metric: float) -> None:
        if self.metric is None:
            raise ValueError(
                f"scheduler={self.name} watches no metric, got {metric}. Only scheduler=plateau"
                " does."
            )
        for schedule in self._schedules:
            if schedule.plateau is not None:
                schedule.plateau.observe(float(metric))

    def _update_lr(self, epoch: int | None = None) -> None:
        """Set the lr for the next step, or for `epoch`.

        Torch's SequentialLR starts a schedule with 0.
        """
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._apply()

    def _apply(self) -> None:
        self._take_in_groups()
        for group, schedule, lr in zip(
            self.optimizer.param_groups, self._schedules, self.get_lr(), strict=True
        ):
            _set(group, "lr", lr)
            scale = schedule.decay_multiplier(self.last_epoch)
            if scale is not None and "weight_decay" in group:
                _set(group, "weight_decay", group["initial_weight_decay"] * scale)

    def _look_before_steps(self) -> None:
        """Let no step be made by a group that has not joined.

        The optimizer keeps no discarded schedule alive.
        """
        own = weakref.ref(self)

        def before_step(*_: object) -> None:
            scheduler = own()
            if scheduler is not None:
                scheduler._catch_up()

        _unwrapped(self.optimizer).register_step_pre_hook(before_step)

    def _catch_up(self) -> None:
        if len(self.optimizer.param_groups) != len(self._schedules):
            self._apply()

    def _take_in_groups(self) -> None:
        """Find what groups follow that were added since.

        A plateau begins where its likes have come to.
        """
        groups, known = self.optimizer.param_groups, len(self._schedules)
        if len(groups) < known:
            raise ValueError(
                f"the optimizer had {known} parameter groups, and now {len(groups)}: build a new"
                " schedule."
            )
        added = [self._follow(group) for group in groups[known:]]
        _refuse_functions(
            self.optimizer,
            self.name,
            weight_decay=any(one.weight_decay is not None for one in added),
        )
        plateaus = [one.plateau for one in (*self._schedules, *added) if one.plateau is not None]
        metrics = sorted({plateau.metric for plateau in plateaus})
        if len(metrics) > 1:
            raise ConfigError(
                f"scheduler.metric: the groups watch different metrics, {', '.join(metrics)}."
            )
        for group, schedule in zip(groups[known:], added, strict=True):
            if schedule.plateau is not None:
                schedule.plateau = copy.copy(plateaus[plateaus.index(schedule.plateau)])
            group.setdefault("initial_lr", float(group["lr"]))
            if schedule.weight_decay is not None:
                group.setdefault("initial_weight_decay", float(group.get("weight_decay", 0.0)))
        self.metric = metrics[0] if metrics else None
        self._schedules += added


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps.

    Accelerate's `prepare` puts one around it, which has no hooks.
    """
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _set(group: ParamGroup, key: str, value: float | Tensor) -> None:
    """Set in place if the optimizer keeps a tensor, as compiled and captured steps want it."""
    if isinstance(group[key], Tensor):
        with torch.no_grad():
            group[key].fill_(value)
    else:
        group[key] = value


def _refuse_functions(optimizer: Optimizer, name: str, *, weight_decay: bool) -> None:
    """Refuse an lr that is a function of the step already, since it would be overwritten here."""
    for key in ("lr", "weight_decay") if weight_decay else ("lr",):
        if any(key in group.get("functions", ()) for group in optimizer.param_groups):
            raise ValueError(
                f"scheduler={name}: {key} of a parameter group is a function of the step already; "
                "give a number, or build no scheduler for it."
            )
