"""A torch LRScheduler that sets the lr of every group by a curve."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from optrun.base.options import Group, ParamGroup, State, StateDict
from optrun.scheduler.curves import Curve
from optrun.scheduler.plateau import Plateau


class Scheduler(LRScheduler):
    """Sets the lr of every group to its base times the curve.

    The base of a group is `initial_lr`, the lr it was built with, scale included, so that ratios
    between groups stay. Optimizer step e, counted from 0, is made with `curve(e)`. A group that is
    added later joins the schedule at the step it has come to. `last_epoch`, as torch calls it, is
    the number of optimizer steps done.

    Attributes:
        name: What drives the learning rate, for messages.
        plateau: A further multiplier, which a metric reduces; None if no metric is watched.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = Scheduler(optimizer, lambda step: 0.5**step, name="halving")
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.05]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        curve: Curve,
        *,
        name: str,
        plateau: Plateau | None = None,
        warn_without_metric_at: int | None = None,
    ) -> None:
        """Set every group to its lr for step 0 and mark the optimizer as driven.

        Args:
            optimizer: Any torch optimizer.
            curve: From the step to the multiplier of the lr.
            name: What `set_lr` names when it refuses.
            plateau: Changed by `observe`.
            warn_without_metric_at: Step at which a schedule that watches a metric warns if it has
                seen none; None: never.

        Raises:
            ValueError: A group's lr is a function of the step already.
        """
        self.optimizer = optimizer
        self.name = name
        self.plateau = plateau
        self._curve = curve
        self._metric_due_step = warn_without_metric_at
        self._group_count = 0
        self._set_peak_of_new_groups()
        super().__init__(optimizer)
        _unwrapped(optimizer)._lr_driven_by = name  # type: ignore[attr-defined]
        self._register_new_group_hook()

    @property
    def metric(self) -> str | None:
        """Name of the metric that `observe` takes; None if no metric is watched."""
        if self.plateau is None:
            return None
        return self.plateau.metric

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self.last_epoch

    @property
    def base_lrs(self) -> list[Any]:
        """Peak lr of each group, its `initial_lr`."""
        return [group["initial_lr"] for group in self.optimizer.param_groups]

    @base_lrs.setter
    def base_lrs(self, values: list[Any]) -> None:
        for group, value in zip(self.optimizer.param_groups, values, strict=True):
            group["initial_lr"] = value

    def step(self, metric: float | None = None) -> None:
        """Set the lr for the next step, after one optimizer step was made.

        Args:
            metric: The watched metric, if it was evaluated at this step, see `observe`. None:
                nothing is observed; a schedule that watches a metric warns once when none has come
                by its expected step.

        `last_epoch`, the number of optimizer steps, is advanced with the lr.

        Raises:
            ValueError: A metric for a schedule that watches none.
        """
        if metric is not None:
            self._observe_metric(metric)
        elif self.last_epoch + 1 == self._metric_due_step:  # only at this step, so at most once
            self._warn_without_metric()
        self._step_count += 1
        self._update_lr()

    def observe(self, metric: float) -> None:
        """Update the plateau by a metric, and set the lr; the step count stays.

        Raises:
            ValueError: This schedule watches no metric.
        """
        self._observe_metric(metric)
        self._set_group_lrs()

    def multiplier(self, global_step: int) -> float:
        """Return the factor on the peak lr at a step, with the plateau's reductions so far."""
        reduction = 1.0 if self.plateau is None else self.plateau.multiplier
        return self._curve(global_step) * reduction

    def get_lr(self) -> list[float | Tensor]:
        """Compute the learning rate of each group at the current step, by base and curve."""
        multiplier = self.multiplier(self.last_epoch)
        return [base * multiplier for base in self.base_lrs]

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group for the next step."""
        self._apply_to_new_groups()
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> StateDict:
        """Return the step and the plateau as a dict that JSON can hold; the curve is not in it.

        Its keys are `name`, `metric`, `global_step`, `last_lr` (one lr for each group), and
        `plateau`.
        """
        last_lr = self.get_last_lr()
        return {
            "name": self.name,
            "metric": self.metric,
            "global_step": self.global_step,
            "last_lr": last_lr,
            "plateau": None if self.plateau is None else self.plateau.state_dict(),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from `state_dict()`; the lr is computed from its step and the current curve.

        Only `global_step` and `plateau` are read, `plateau` only if this scheduler watches a
        metric.

        Raises:
            ValueError: It has no `global_step` or no `plateau`.
        """
        for key in ("global_step", "plateau"):
            if key not in state_dict:
                raise ValueError(
                    f"this is not the state of an optrun scheduler: the key {key!r} is missing; it"
                    f" has {list(state_dict)[:6]}."
                )
        self.last_epoch = int(state_dict["global_step"])
        self._step_count = self.last_epoch + 1  # torch counts the call in its constructor, too
        if self.plateau is not None and state_dict["plateau"] is not None:
            self.plateau.load_state_dict(state_dict["plateau"])
        self._set_group_lrs()

    def __setstate__(self, state: State) -> None:
        """Restore a copy, and register the hook on its optimizer."""
        self.__dict__.update(state)
        self._register_new_group_hook()

    def _warn_without_metric(self) -> None:
        """Warn that a plateau scheduler has never seen its metric; do nothing if it has."""
        if self.plateau is not None and self.plateau.best is None:
            warnings.warn(
                f"scheduler={self.name} (plateau of {self.metric}) has seen no metric in"
                f" {self.last_epoch + 1} steps, so it reduces nothing. Call scheduler.step(metric)"
                " or scheduler.observe(metric) after each evaluation, in transformers.Trainer by a"
                " TrainerCallback.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _observe_metric(self, metric: float) -> None:
        """Pass a metric to the plateau rule, which may reduce its multiplier.

        The lr of the groups stays until it is set the next time.

        Raises:
            ValueError: The scheduler has no such rule.
        """
        if self.plateau is None:
            raise ValueError(
                f"scheduler={self.name} watches no metric, but got {metric}. Only scheduler=plateau"
                " takes one; call step() without it."
            )
        self.plateau.observe(float(metric))

    def _update_lr(self, epoch: int | None = None) -> None:
        """Set the lr for the next step, or for step `epoch`; torch's SequentialLR passes 0."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._set_group_lrs()

    def _set_group_lrs(self) -> None:
        """Set the lr of every group for the current step, also of groups added meanwhile."""
        self._set_peak_of_new_groups()
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            _set_lr(group, lr)

    def _register_new_group_hook(self) -> None:
        """Register a hook on the optimizer: before each step, groups added meanwhile get their lr.

        The hook has a weak reference, so that a discarded scheduler is freed.
        """
        reference = weakref.ref(self)

        def before_step(*_: object) -> None:
            scheduler = reference()
            if scheduler is not None:
                scheduler._apply_to_new_groups()

        _unwrapped(self.optimizer).register_step_pre_hook(before_step)

    def _apply_to_new_groups(self) -> None:
        """Set the lr of all groups if a group was added or removed."""
        if len(self.optimizer.param_groups) != self._group_count:
            self._set_group_lrs()

    def _set_peak_of_new_groups(self) -> None:
        """Set `initial_lr`, the peak, in groups that were added since the last call.

        It becomes the lr that the group has, unless the group has an `initial_lr` already.

        Raises:
            ValueError: Groups were removed, or the lr of one is a function of the step.
        """
        groups = self.optimizer.param_groups
        if len(groups) < self._group_count:
            raise ValueError(
                f"the optimizer had {self._group_count} parameter groups, and now has"
                f" {len(groups)}. Groups must not be removed: build a new scheduler."
            )
        for group in groups[self._group_count :]:  # new groups come last
            _refuse_lr_function(group, self.name)
            group.setdefault("initial_lr", float(group["lr"]))
        self._group_count = len(groups)


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside accelerate's wrapper, which has no hooks; else itself."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return inner
    return optimizer


def _set_lr(group: ParamGroup, lr: float | Tensor) -> None:
    """Set the lr of a group; in place if it is a tensor, for compiled and captured steps."""
    if isinstance(group["lr"], Tensor):
        with torch.no_grad():
            group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _refuse_lr_function(group: Group, name: str) -> None:
    """Raise ValueError if the lr of a group is a function of the step; it would be overwritten."""
    if "lr" in group.get("functions", ()):
        raise ValueError(
            f"scheduler={name}: the lr of a parameter group is already a function of the step. Give"
            " a number as lr, or build no scheduler for this optimizer."
        )
