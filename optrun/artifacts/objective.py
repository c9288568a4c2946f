"""Read the value of an objective from what a run wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from optrun.artifacts.metrics import MetricsLog


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


def objective_value(objective: Objective, log: MetricsLog, summary: Mapping[str, Any]) -> float | None:
    """Compute one number of a run.

    `eval/` metrics are those of one model: at the evaluation at which the main metric was best. `perf/` metrics are
    the median over the run, others the last that was logged.

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
        return values[steps.index(best)] if best in steps else None if best is not None else values[-1]
    return values[-1]


def known_objectives(log: MetricsLog, summary: Mapping[str, Any]) -> list[str]:
    """List the names of numbers that a run has."""
    facts = ("wall_seconds", "model.parameters", "model.trainable_parameters")
    return [*log.names(), *(name for name in facts if _of_summary(name, summary) is not None)]


def _best_step(log: MetricsLog, summary: Mapping[str, Any]) -> int | None:
    """The step of the evaluation that the main metric is best at, the first of equals; None: nothing says so."""
    main = summary.get("main_metric")
    if not isinstance(main, Mapping) or not isinstance(main.get("name"), str):
        return None
    steps, values = log.series(main["name"])
    sign = -1.0 if main.get("mode") == "max" else 1.0
    finite = [(sign * value, step) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return min(finite)[1] if finite else None


def _of_summary(name: str, summary: Mapping[str, Any]) -> float | None:
    value: Any = summary
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
