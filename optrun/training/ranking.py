"""Rank evaluations by the metric that decides which checkpoint is best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from optrun.artifacts.objective import is_better, loss_beside, rank_steps
from optrun.config.schema.metric import metric_mode
from optrun.training.state import Best, TrainState


@dataclass
class Ranking:
    """The metric that ranks checkpoints."""

    metric: str
    """Name with prefix, such as `eval/loss`."""
    mode: str
    """`min` or `max`."""

    def is_better(self, value: float, other: float) -> bool:
        """Tell whether a value of the metric is better than another; equal values are not."""
        return is_better(value, other, self.mode)

    def ranked_steps(self, state: TrainState) -> list[int]:
        """List all evaluated steps, best first; equal values are ordered by `rank_steps`."""
        values = {int(step): value for step, value in state.ranking.items()}
        losses = {int(step): loss for step, loss in state.ranking_losses.items()}
        return rank_steps(values, losses, self.mode)


def best_mode(name: str, ranking: Ranking) -> str:
    """Return the better direction of a metric, `min` or `max`.

    The direction of the ranking also holds for the same metric of other evaluation sets: with
    `eval/dev/accuracy` for `eval/test/accuracy`. Other metrics have their registered direction.
    """
    if name.rpartition("/")[2] == ranking.metric.rpartition("/")[2]:
        return ranking.mode
    return metric_mode(name)


def remember_best(state: TrainState, ranking: Ranking, values: Mapping[str, float]) -> None:
    """Record an evaluation in the best values and in the ranking of checkpoints.

    Args:
        state: Changed in place.
        ranking: The metric that ranks checkpoints; it is among the values.
        values: Metrics of the evaluation after the present step, by name.
    """
    step = state.global_step
    # 1. The best evaluation of each metric.
    for name, value in values.items():
        evaluation: Best = {"value": value, "step": step, "tied": 1}
        loss_name = loss_beside(name)  # that of the same evaluation set: `eval/loss`
        if loss_name in values:
            evaluation["loss"] = values[loss_name]
        state.best[name] = _better_of(state.best.get(name), evaluation, best_mode(name, ranking))

    # 2. The values by which checkpoints are ranked.
    state.ranking[str(step)] = values[ranking.metric]
    loss = values.get(loss_beside(ranking.metric))
    if loss is not None:
        state.ranking_losses[str(step)] = loss


def _better_of(best: Best | None, new: Best, mode: str) -> Best:
    """Return the better of two evaluations of a metric.

    If both have the same value, the one with the lower loss wins, then the later one, and `tied`
    counts the evaluations with this value. A best that is None or NaN loses.

    Example:
        >>> best = Best(value=0.9, step=10, tied=1, loss=0.3)
        >>> _better_of(best, Best(value=0.8, step=20, tied=1, loss=0.2), "max")
        {'value': 0.9, 'step': 10, 'tied': 1, 'loss': 0.3}
        >>> _better_of(best, Best(value=0.9, step=20, tied=1, loss=0.2), "max")
        {'value': 0.9, 'step': 20, 'tied': 2, 'loss': 0.2}
    """
    if best is None or math.isnan(best["value"]):
        return new
    # Rank the two steps. A missing loss, NaN, decides nothing.
    by_step = {best["step"]: best, new["step"]: new}
    values = {step: evaluation["value"] for step, evaluation in by_step.items()}
    losses = {step: evaluation.get("loss", math.nan) for step, evaluation in by_step.items()}
    best_step = rank_steps(values, losses, mode)[0]
    better = by_step[best_step].copy()
    if best["value"] == new["value"]:
        better["tied"] = best["tied"] + 1
    return better


def set_ranking_metric(state: TrainState, ranking: Ranking) -> str | None:
    """Set the ranking metric of checkpoints, at the start of a run or of a resumed run.

    If the checkpoint was ranked by another metric or direction, the ranking is cleared, and best
    values whose direction changed are dropped.

    Args:
        state: State of a new run or of a checkpoint; changed in place.
        ranking: The new metric and direction.

    Returns:
        A note for the user if a ranking was cleared, else None.
    """
    before = state.ranked_by  # such as "eval/loss min"; empty at the start of a run
    state.ranked_by = f"{ranking.metric} {ranking.mode}"
    if before in ("", state.ranked_by):
        return None
    metric, mode = before.rsplit(" ", 1)
    old = Ranking(metric, mode)
    # Keep the best values whose better direction is the same: "best" still means what it did.
    state.best = {
        name: best
        for name, best in state.best.items()
        if best_mode(name, old) == best_mode(name, ranking)
    }
    state.ranking = {}
    state.ranking_losses = {}
    return (
        f"checkpoints are ranked by {ranking.metric} ({ranking.mode}) from here on; the earlier"
        f" ones were ranked by {metric} ({mode}), and none of them counts as best"
    )
