"""Read the value of an objective from what a run wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from optrun.artifacts.metrics import MetricsLog
from optrun.base.plain import lookup


@dataclass(frozen=True)
class Objective:
    """A number of a run, and which direction of it is better."""

    name: str
    """As in metrics.jsonl; without a slash, a dotted name of summary.json."""
    mode: str
    """`min` or `max`."""

    @property
    def sign(self) -> float:
        """1 where less is better, -1 where more is."""
        return 1.0 if self.mode == "min" else -1.0


def is_better(value: float, other: float, mode: str) -> bool:
    """Tell whether a value beats another; NaN beats nothing, and is beaten by all.

    Args:
        value: Of a metric.
        other: Another one.
        mode: `min` or `max`.
    """
    if other != other:
        return value == value
    return value < other if mode == "min" else value > other


def loss_beside(metric: str) -> str:
    """Name the loss of the evaluation that a metric is of.

    Example:
        >>> loss_beside("eval/accuracy"), loss_beside("eval/dev/f1")
        ('eval/loss', 'eval/dev/loss')
    """
    return f"{metric.rpartition('/')[0]}/loss"


def rank_steps(values: Mapping[int, float], losses: Mapping[int, float], mode: str) -> list[int]:
    """Order evaluations, best first.

    Of equal values the lower loss, of equal losses the later step.

    Args:
        values: Step to the metric; a NaN is left out.
        losses: Step to the loss of the same evaluation; one that is missing or NaN counts as
            infinite.
        mode: `min` or `max`.

    Example:
        >>> rank_steps({40: 1.0, 60: 1.0, 80: 1.0, 20: 0.5}, {40: 0.02, 60: 0.01, 80: 0.01}, "max")
        [80, 60, 40, 20]
    """
    sign = 1.0 if mode == "min" else -1.0

    def place(step: int) -> tuple[float, float, int]:
        loss = losses.get(step, math.nan)
        return sign * values[step], math.inf if math.isnan(loss) else loss, -step

    return sorted((step for step, value in values.items() if not math.isnan(value)), key=place)


def best_evaluation(log: MetricsLog, metric: str, mode: str) -> int | None:
    """Find the step of the best evaluation after a step of training; None: none was finite.

    Args:
        log: `metrics.jsonl`.
        metric: Such as `eval/accuracy`.
        mode: `min` or `max`.
    """
    values = {
        step: value for step, value in _points(log, metric) if step > 0 and math.isfinite(value)
    }
    return next(iter(rank_steps(values, dict(_points(log, loss_beside(metric))), mode)), None)


def _points(log: MetricsLog, name: str) -> Iterable[tuple[int, float]]:
    return zip(*log.series(name), strict=True)


def objective_value(
    objective: Objective, log: MetricsLog, summary: Mapping[str, object]
) -> float | None:
    """Compute one number of a run.

    `eval/` metrics are those of one model: at the evaluation at which the main metric was best.
    `perf/` metrics are the median over the run, others the last that was logged.

    Args:
        objective: Which.
        log: `metrics.jsonl`.
        summary: `summary.json`.

    Returns:
        None where the run has no such number; NaN where it was none.
    """
    if "/" not in objective.name:
        return _of_summary(objective.name, summary)
    steps, values = log.series(objective.name)
    if not steps:
        return None
    if objective.name.startswith("perf/"):
        return float(median(values))
    if objective.name.startswith("eval/"):
        best = _best_step(log, summary)
        return (
            values[steps.index(best)] if best in steps else None if best is not None else values[-1]
        )
    return values[-1]


def known_objectives(log: MetricsLog, summary: Mapping[str, object]) -> list[str]:
    """List the names of numbers that a run has."""
    facts = ("wall_seconds", "model.parameters", "model.trainable_parameters")
    return [*log.names(), *(name for name in facts if _of_summary(name, summary) is not None)]


def _best_step(log: MetricsLog, summary: Mapping[str, object]) -> int | None:
    """Find the step of the evaluation that the main metric is best at; None: nothing says so."""
    name, mode = (lookup(summary, "main_metric", key) for key in ("name", "mode"))
    return (
        best_evaluation(log, name, "max" if mode == "max" else "min")
        if isinstance(name, str)
        else None
    )


def _of_summary(name: str, summary: Mapping[str, object]) -> float | None:
    value = lookup(summary, *name.split("."))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def stand_in(finite: Iterable[float], untrained: Iterable[float | None], mode: str) -> float | None:
    """Find the score that a diverged run counts with: nobody wins by losing runs.

    Args:
        finite: Scores of the runs that finished.
        untrained: The metric before the first step; None where it was not evaluated.
        mode: `min` or `max`.

    Returns:
        The worst of all of them; None where nothing is known.

    Example:
        >>> stand_in([3.1, 3.3], [10.8, None], "min"), stand_in([0.9], [None], "max"), stand_in([], [], "min")
        (10.8, 0.9, None)
    """
    known = [value for value in (*finite, *untrained) if value is not None and math.isfinite(value)]
    return (max if mode == "min" else min)(known, default=None)
