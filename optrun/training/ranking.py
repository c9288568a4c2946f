"""Which metric says that a checkpoint is best, and which direction is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optrun.training.state import TrainState


@dataclass
class Ranking:
    """Which metric says that a checkpoint is best."""

    metric: str
    """With prefix, such as `eval/loss`."""
    mode: str
    """`min` or `max`."""

    def better(self, value: float, other: float) -> bool:
        """Whether `value` beats `other`; a NaN beats nothing."""
        if other != other:
            return value == value
        return value < other if self.mode == "min" else value > other

    def best(self, ranking: Mapping[str, float]) -> list[int]:
        """All steps, best first; of equals the earlier. A NaN is left out."""
        sign = 1 if self.mode == "min" else -1
        finite = [(sign * value, int(step)) for step, value in ranking.items() if value == value]
        return [step for _, step in sorted(finite)]


def best_mode(name: str, ranking: Ranking) -> str:
    """Tell which direction of a metric is better."""
    if name == ranking.metric:
        return ranking.mode
    return "min" if name.rsplit("/", 1)[-1] in ("loss", "perplexity", "mse", "mae") else "max"


def rank_by(state: TrainState, ranking: Ranking) -> str | None:
    """Rank checkpoints by one metric in one direction from here on; values of another are forgotten.

    Args:
        state: Of a checkpoint, or new; changed in place.
        ranking: From here on.

    Returns:
        A note for the user where something was forgotten.
    """
    before, state.ranked_by = state.ranked_by, f"{ranking.metric} {ranking.mode}"
    if before in ("", state.ranked_by):
        return None
    metric, mode = before.rsplit(" ", 1)
    old = Ranking(metric, mode)
    state.best = {name: held for name, held in state.best.items() if best_mode(name, old) == best_mode(name, ranking)}
    state.ranking = {}
    return (
        f"checkpoints are ranked by {ranking.metric} ({ranking.mode}) from here on; the earlier ones were ranked by "
        f"{metric} ({mode}), and none of them counts as best"
    )
