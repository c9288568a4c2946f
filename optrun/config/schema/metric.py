"""Metrics that can be chosen by name, and which direction of each is better."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from optrun.base.errors import ConfigError, did_you_mean
from optrun.config import registry

FEW_EXAMPLES = 100
"""Fewer evaluation examples make an accuracy coarse: one of 42 is 2.4 points."""


@dataclass(kw_only=True)
class MetricConfig:
    """Base class of metric schemas: facts about a metric; it has no keys."""

    MODE: ClassVar[str]
    """The direction in which it is better: `max` or `min`; each metric sets it."""
    TASKS: ClassVar[tuple[str, ...]] = ()
    """The choices of `task=` that it is for; empty: every one."""
    OF_NUMBERS: ClassVar[bool | None] = None
    """True: it compares numbers (regression); False: classes; None: both."""
    WANTS_NUM_LABELS: ClassVar[bool] = False
    """Whether it is also called with `num_labels=`, the number of classes."""


class OfClasses(MetricConfig):
    """Predicted classes against true ones."""

    MODE = "max"
    OF_NUMBERS = False


class F1(OfClasses):
    """F1, whose meaning depends on the number of classes."""

    WANTS_NUM_LABELS = True


class Correlation(MetricConfig):
    """Predicted numbers against true ones; more is better."""

    MODE = "max"
    OF_NUMBERS = True


class PredictionError(Correlation):
    """Predicted numbers against true ones; less is better."""

    MODE = "min"


SCHEMAS = registry.add_builtin(
    "metric",
    {
        "accuracy": (OfClasses, "optrun.task.metrics:accuracy"),
        "f1": (F1, "optrun.task.metrics:f1"),
        "mcc": (OfClasses, "optrun.task.metrics:matthews"),
        "mse": (PredictionError, "optrun.task.metrics:mean_squared_error"),
        "mae": (PredictionError, "optrun.task.metrics:mean_absolute_error"),
        "pearson": (Correlation, "optrun.task.metrics:pearson"),
        "spearman": (Correlation, "optrun.task.metrics:spearman"),
    },
)

_LESS_IS_BETTER = re.compile(r"(loss|perplexity|error|mse|mae|bits_per_\w+)$")


def metric_mode(name: str) -> str:
    """Tell the better direction of a metric, `min` or `max`.

    The last part of the name decides: the schema of a metric, else a task with this main metric,
    else `min` for names that end like an error, such as `loss` or `perplexity`.

    Args:
        name: As in metrics.jsonl, such as `eval/loss` or `eval/dev/accuracy`.

    Example:
        >>> metric_mode("eval/dev/mse"), metric_mode("eval/accuracy")
        ('min', 'max')
    """
    leaf = name.rpartition("/")[2]
    if leaf in SCHEMAS:
        return str(SCHEMAS[leaf].MODE)
    for task in registry.schemas("task").values():
        if leaf == task.MAIN_METRIC:
            return str(task.MODE)
    if _LESS_IS_BETTER.search(leaf):
        return "min"
    return "max"


def chosen_metrics(names: Iterable[str], task: str, *, of_numbers: bool) -> list[registry.Choice]:
    """Find the registry rows of the metrics in `task.metrics`.

    Args:
        names: The value of `task.metrics`.
        task: The choice in `task=`.
        of_numbers: Whether the task predicts numbers, not classes.

    Raises:
        ConfigError: A metric is unknown or not for this task; the message suggests one that is.
    """
    names = list(names)
    for name in names:
        registry.find("metric", name)  # imports the package that has it
    rows = registry.choices("metric")
    suitable = {name: row for name, row in rows.items() if _suits(row.schema, task, of_numbers)}
    for name in names:
        if name not in suitable:
            problem = "no such metric"
            if name in rows:
                labels = " with numbers as labels" if of_numbers else ""
                problem = f"this metric is not for task={task}{labels}"
            raise ConfigError(f"task.metrics: {name}: {problem}. {did_you_mean(name, suitable)}")
    return [suitable[name] for name in names]


def _suits(metric: type[MetricConfig], task: str, of_numbers: bool) -> bool:
    """Tell whether a metric is for a task, and for its numbers or classes."""
    is_for_task = not metric.TASKS or task in metric.TASKS
    return is_for_task and metric.OF_NUMBERS in (None, of_numbers)
