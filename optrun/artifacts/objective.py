"""Compare two values of a metric, and rank the evaluations of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from optrun.artifacts.metrics import MetricsLog


def is_better(value: float, other: float, mode: str) -> bool:
    """Tell whether a value beats another; NaN beats nothing, and is beaten by all.

    Args:
        value: A value of a metric.
        other: The value to beat.
        mode: `min` or `max`.
    """
    if math.isnan(other):
        return not math.isnan(value)
    if mode == "min":
        return value < other
    return value > other


def loss_beside(metric: str) -> str:
    """Name the loss of the same evaluation as a metric.

    Example:
        >>> loss_beside("eval/accuracy"), loss_beside("eval/dev/f1")
        ('eval/loss', 'eval/dev/loss')
    """
    return f"{metric.rpartition('/')[0]}/loss"


def rank_steps(values: Mapping[int, float], losses: Mapping[int, float], mode: str) -> list[int]:
    """Order evaluations, best first.

    Ties go to the lower loss, then to the later step.

    Args:
        values: Step -> metric; NaN is left out.
        losses: Step -> loss of the same evaluation; a missing loss or NaN counts as infinite.
        mode: `min` or `max`.

    Example:
        >>> rank_steps({40: 1.0, 60: 1.0, 80: 1.0, 20: 0.5}, {40: 0.02, 60: 0.01, 80: 0.01}, "max")
        [80, 60, 40, 20]
    """

    def sort_key(step: int) -> tuple[float, float, int]:
        value = values[step] if mode == "min" else -values[step]
        loss = losses.get(step, math.inf)
        if math.isnan(loss):
            loss = math.inf
        return value, loss, -step

    return sorted((step for step, value in values.items() if not math.isnan(value)), key=sort_key)


def best_evaluation(log: MetricsLog, metric: str, mode: str) -> int | None:
    """Find the step of the best evaluation after step 0; None if none is finite.

    Ties go to the lower loss of the same evaluation (eval/loss for eval/accuracy), then to the
    later step.

    Args:
        log: The records of `metrics.jsonl`.
        metric: Name of the metric, such as `eval/accuracy`.
        mode: `min` or `max`.
    """
    values = {
        step: value for step, value in _points(log, metric) if step > 0 and math.isfinite(value)
    }
    losses = dict(_points(log, loss_beside(metric)))
    return next(iter(rank_steps(values, losses, mode)), None)


def _points(log: MetricsLog, name: str) -> Iterable[tuple[int, float]]:
    return zip(*log.series(name), strict=True)


def score_of_diverged(
    finite: Iterable[float], untrained: Iterable[float | None], mode: str
) -> float | None:
    """Choose the score of a diverged run, so that no contender gains by divergence.

    It is the worst value that any run has shown, trained or not.

    Args:
        finite: Scores of the runs that finished.
        untrained: Metric before the first step of each run; None if it was not evaluated.
        mode: `min` or `max`.

    Returns:
        The worst of all finite values; None if there is none.

    Example:
        >>> score_of_diverged([3.1, 3.3], [10.8, None], "min")
        10.8
    """
    scores = [
        value for value in (*finite, *untrained) if value is not None and math.isfinite(value)
    ]
    if mode == "min":
        return max(scores, default=None)
    return min(scores, default=None)
