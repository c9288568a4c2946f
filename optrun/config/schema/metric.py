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
    """What is known of a metric without computing it: facts alone, a metric has no keys."""

    MODE: ClassVar[str]
    """Which direction is better: `max` or `min`; each metric says it."""
    TASKS: ClassVar[tuple[str, ...]] = ()
    """The tasks it is for, by their `task=`; empty: every one."""
    OF_NUMBERS: ClassVar[bool | None] = None
    """True: it compares numbers (regression); False: classes; None: either."""
    WANTS_NUM_LABELS: ClassVar[bool] = False
    """Whether it is called with `num_labels=`, the number of classes, too."""


class OfClasses(MetricConfig):
    """Predicted classes against true ones."""

    MODE = "max"
    OF_NUMBERS = False


class F1(OfClasses):
    """Its meaning depends on how many classes there are."""

    WANTS_NUM_LABELS = True


class Correlation(MetricConfig):
    """Predicted numbers against true ones; more is better."""

    MODE = "max"
    OF_NUMBERS = True


class PredictionError(Correlation):
    """Likewise; less is better."""

    MODE = "min"


SCHEMAS = registry.own(
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
    """Tell which direction of a metric is better, `min` or `max`.

    Of one that is not registered by its name.

    Args:
        name: As in metrics.jsonl, such as `eval/loss` or `eval/dev/accuracy`; the last part
            decides.

    Example:
        >>> metric_mode("eval/dev/mse"), metric_mode("eval/accuracy")
        ('min', 'max')
    """
    leaf = name.rpartition("/")[2]
    if leaf in SCHEMAS:
        return str(SCHEMAS[leaf].MODE)
    modes = [
        str(task.MODE) for task in registry.schemas("task").values() if leaf == task.MAIN_METRIC
    ]
    if modes:
        return modes[0]
    if _LESS_IS_BETTER.search(leaf):
        return "min"
    return "max"


def chosen_metrics(names: Iterable[str], task: str, *, of_numbers: bool) -> list[registry.Choice]:
    """Find the rows that `task.metrics` names.

    Args:
        names: As configured.
        task: The choice in `task=`.
        of_numbers: Whether the task predicts numbers, and no classes.

    Raises:
        ConfigError: No such metric, or one that is not for this task; with those that are.
    """
    names = list(names)
    rows = dict(registry.choices("metric"))
    for name in names:
        row = registry.find("metric", name)
        if row is not None:
            rows[name] = row
    fitting = {
        name: row
        for name, row in rows.items()
        if (not row.schema.TASKS or task in row.schema.TASKS)
        and row.schema.OF_NUMBERS in (None, of_numbers)
    }
    for name in names:
        if name not in fitting:
            why = "no such metric"
            if name in rows:
                labels = " with numbers as labels" if of_numbers else ""
                why = f"this metric is not for task={task}{labels}"
            raise ConfigError(f"task.metrics: {name}: {why}. {did_you_mean(name, fitting)}")
    return [fitting[name] for name in names]
