"""Which metric says that a checkpoint is best, and which direction is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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

    def best(self, ranking: Mapping[str, float], count: int) -> list[int]:
        """The `count` best steps, best first; of equals the earlier."""
        sign = 1 if self.mode == "min" else -1
        finite = [(sign * value, int(step)) for step, value in ranking.items() if value == value]
        return [step for _, step in sorted(finite)[:count]]


def best_mode(name: str, ranking: Ranking) -> str:
    """Which direction of a metric is better."""
    if name == ranking.metric:
        return ranking.mode
    return "min" if name.rsplit("/", 1)[-1] in ("loss", "perplexity", "mse", "mae") else "max"
