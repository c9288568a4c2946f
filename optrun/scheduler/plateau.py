"""Reduce on plateau: the one schedule that looks at a metric and not at the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from optrun.base.options import State, StateDict


@dataclass(kw_only=True)
class Plateau:
    """A multiplier of the lr that shrinks by `factor` when a metric stops improving.

    Two are equal if their options are, whatever metrics they have observed.

    Attributes:
        mode: `min` or `max`: whether lower or higher is better.
        factor: Factor of each reduction.
        patience: Evaluations without improvement before a reduction.
        threshold: Smallest improvement that counts, absolute or relative by `threshold_mode`.
        threshold_mode: `abs` or `rel`.
        cooldown: Evaluations after a reduction that do not count.
        final: Lower bound of the multiplier.
        metric: Name of the metric.
        multiplier: Product of the reductions so far.
        best: Best value so far; None before the first.
        num_bad: Evaluations in a row without improvement.
        cooling: Evaluations of the current cooldown that are left.

    Source: torch.optim.lr_scheduler.ReduceLROnPlateau, counted in evaluations.

    Example:
        >>> options = {"threshold": 0.0, "threshold_mode": "rel", "cooldown": 0, "final": 0.0}
        >>> plateau = Plateau(mode="min", factor=0.5, patience=1, metric="eval/loss", **options)
        >>> [plateau.observe(loss) for loss in (1.0, 1.0, 1.0, 0.5, 0.6, 0.6)]
        [1.0, 1.0, 0.5, 0.5, 0.5, 0.25]
    """

    mode: str
    factor: float
    patience: int
    threshold: float
    threshold_mode: str
    cooldown: int
    final: float
    metric: str
    multiplier: float = field(default=1.0, init=False, compare=False)
    best: float | None = field(default=None, init=False, compare=False)
    num_bad: int = field(default=0, init=False, compare=False)
    cooling: int = field(default=0, init=False, compare=False)

    def observe(self, metric: float) -> float:
        """Update the multiplier by the metric of one evaluation, and return it.

        After more than `patience` evaluations in a row without improvement it is multiplied by
        `factor`, but stays at `final` at least, and a cooldown begins.

        Args:
            metric: The value of the metric; NaN counts as no improvement.
        """
        if self._improves(metric):
            self.best = metric
            self.num_bad = 0
        else:
            self.num_bad += 1
        if self.cooling > 0:  # evaluations of a cooldown never count as bad
            self.cooling -= 1
            self.num_bad = 0
        if self.num_bad > self.patience:
            self.multiplier = max(self.multiplier * self.factor, self.final)
            self.cooling = self.cooldown
            self.num_bad = 0
        return self.multiplier

    def _improves(self, metric: float) -> bool:
        """Tell whether a metric beats the best one by more than the threshold; NaN never does."""
        if math.isnan(metric):
            return False
        if self.best is None:
            return True
        is_relative = self.threshold_mode == "rel"
        if self.mode == "min":
            if is_relative:  # as torch, also if the best value is negative
                return metric < self.best * (1 - self.threshold)
            return self.best - metric > self.threshold
        if is_relative:
            return metric > self.best * (1 + self.threshold)
        return metric - self.best > self.threshold

    def state_dict(self) -> StateDict:
        """Return multiplier, best value, counters and `mode` as a dict that JSON can hold."""
        return {
            "multiplier": self.multiplier,
            "best": self.best,
            "num_bad": self.num_bad,
            "cooling": self.cooling,
            "mode": self.mode,
        }

    def load_state_dict(self, state: State) -> None:
        """Set multiplier, best value and counters from `state_dict()`; its `mode` is not read."""
        self.multiplier = float(state["multiplier"])
        self.best = None if state["best"] is None else float(state["best"])
        self.num_bad = int(state["num_bad"])
        self.cooling = int(state["cooling"])
