"""The metric that ranks checkpoints, and its better direction."""

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
    """With prefix, such as `eval/loss`."""
    mode: str
    """`min` or `max`."""

    def better(self, value: float, other: float) -> bool:
        """Tell whether a value of the metric beats another."""
        return is_better(value, other, self.mode)

    def best(self, state: TrainState) -> list[int]:
        """List all evaluated steps, best first, as `rank_steps` orders them."""
        values, losses = (
            {int(step): value for step, value in by_step.items()}
            for by_step in (state.ranking, state.ranking_losses)
        )
        return rank_steps(values, losses, self.mode)


def best_mode(name: str, ranking: Ranking) -> str:
    """Choose the better direction of a metric.

    That of the ranking metric counts for each evaluation set.
    """
    same = name.rpartition("/")[2] == ranking.metric.rpartition("/")[2]
    if same:
        return ranking.mode
    return metric_mode(name)


def remember_best(state: TrainState, ranking: Ranking, values: Mapping[str, float]) -> None:
    """Take an evaluation into the best values and into the ranking of checkpoints.

    Args:
        state: Changed in place.
        ranking: Which checkpoint is best.
        values: What the evaluation of the present step found.
    """
    step = state.global_step
    for name, value in values.items():
        beside = loss_beside(name)
        evaluation: Best = {"value": value, "step": step, "tied": 1}
        if beside in values:
            evaluation["loss"] = values[beside]
        state.best[name] = _better_of(state.best.get(name), evaluation, best_mode(name, ranking))
    state.ranking[str(step)] = values[ranking.metric]
    loss = values.get(loss_beside(ranking.metric))
    if loss is not None:
        state.ranking_losses[str(step)] = loss


def _better_of(best: Best | None, new: Best, mode: str) -> Best:
    """Choose the better of two evaluations, with how many had its value."""
    if best is None or math.isnan(best["value"]):
        return new
    both = {best["step"]: best, new["step"]: new}
    values = {step: evaluation["value"] for step, evaluation in both.items()}
    losses = {step: evaluation.get("loss", math.nan) for step, evaluation in both.items()}
    better = both[rank_steps(values, losses, mode)[0]].copy()
    if best["value"] == new["value"]:
        better["tied"] = best["tied"] + 1
    return better


def rank_by(state: TrainState, ranking: Ranking) -> str | None:
    """Rank checkpoints by one metric in one direction from here on.

    Values of another are forgotten.

    Args:
        state: Of a checkpoint, or new; changed in place.
        ranking: From here on.

    Returns:
        A note for the user where something was forgotten.
    """
    before = state.ranked_by
    state.ranked_by = f"{ranking.metric} {ranking.mode}"
    if before in ("", state.ranked_by):
        return None
    metric, mode = before.rsplit(" ", 1)
    old = Ranking(metric, mode)
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
