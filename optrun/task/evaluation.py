"""Metrics over an evaluation set.

Counted batch by batch, or by registered functions once all of it was seen.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from optrun.base.errors import OptrunError
from optrun.config import registry
from optrun.config.schema.metric import chosen_metrics
from optrun.config.schema.task_base import TaskConfig
from optrun.data.loader import Batch
from optrun.task.class_table import ClassTable, table_of_classes
from optrun.task.metrics import confusion, perplexity

if TYPE_CHECKING:
    import torch
    from transformers.utils.generic import ModelOutput

IGNORED = -100
"""Label that transformers leaves out of the loss."""

Item = TypeVar("Item")
Sums = list[Any]
"""Numbers, arrays, counters: what can be added."""
Labelled = tuple[np.ndarray, np.ndarray]
"""Predictions and labels of a batch; shape (targets,) each."""
Seen = tuple[Any, list[Labelled]]
"""What was counted batch by batch, and what was kept of each batch."""
MetricFunction = Callable[[np.ndarray, np.ndarray, int], float]
"""Predictions, labels, number of classes -> value."""


class MetricAccumulator(ABC):
    """Metrics over an evaluation set, batch by batch.

    Attributes:
        names: What `compute` reports, without prefix, such as `loss`; in order.
    """

    names: list[str]
    reads_loss = False
    """Whether `update` reads `outputs.loss`: the task's loss stands there where the model returns
    none."""

    @property
    def mergeable(self) -> bool:
        """Whether ranks can share a set; else each of them runs over all of it."""
        return type(self).merge is not MetricAccumulator.merge

    @abstractmethod
    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Take in one batch.

        Args:
            outputs: What the model returned; has `loss` and `logits`.
            batch: What it was given.
        """

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Compute names without prefix, such as `loss`, and their values over all batches."""

    def table(self) -> ClassTable | None:
        """Return the figures of each class over all batches; None: there are no classes."""
        return None

    def partial(self) -> Any:
        """Return the counts so far, in the form taken by `merge`."""
        raise NotImplementedError

    def merge(self, partials: Sequence[Any]) -> None:
        """Replace the counts of this rank by those of all ranks.

        Args:
            partials: What `partial` returned, by rank, this one's among them.
        """
        raise NotImplementedError


def _expect_scalar(loss: object) -> object:
    """Refuse a task's loss unless it is one number.

    Raises:
        OptrunError: It is none.
    """
    if isinstance(loss, float) or getattr(loss, "shape", None) == ():
        return loss
    if hasattr(loss, "shape"):
        shown_type = f"a tensor of shape {tuple(loss.shape)}"
    else:
        shown_type = type(loss).__name__
    raise OptrunError(
        f"the loss of the task is {shown_type}: expected a tensor of shape () with a gradient."
    )


class SummedMetrics(MetricAccumulator):
    """Metrics made of sums over batches, which ranks add.

    The loss by target, the targets, and what `counted` adds.

    Args:
        count: How many targets the mean loss of a batch is over.
        names: What `compute` reports.
        zeros: What the sums of `counted` begin with: numbers, arrays, or whatever else can be
            added.
    """

    reads_loss = True

    def __init__(self, count: Callable[[Batch], int], names: Sequence[str], *zeros: Any) -> None:
        self.count = count
        self.names = list(names)
        self.sums: Sums = [0.0, 0, *zeros]

    def counted(self, outputs: ModelOutput, batch: Batch) -> Sequence[Any]:  # noqa: ARG002
        """Compute the additional sums of a batch, in the order of `zeros`."""
        return ()

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Add one batch's; one without a target has a loss of 0/0, and is left out."""
        count = self.count(batch)
        if count:
            batch_sums = [float(outputs.loss) * count, count, *self.counted(outputs, batch)]
            self.sums = list(map(operator.add, self.sums, batch_sums))

    def partial(self) -> Sums:
        """Return the sums."""
        return self.sums

    def merge(self, partials: Sequence[Sums]) -> None:
        """Add the sums of all ranks."""
        self.sums = [reduce(operator.add, values) for values in zip(*partials, strict=True)]

    def compute(self) -> dict[str, float]:
        """Compute the mean of each sum over all targets; NaN if there was none."""
        total, count, *more_sums = self.sums
        return {
            name: value / count if count else math.nan
            for name, value in zip(self.names, (total, *more_sums), strict=True)
        }


class MeanLoss(SummedMetrics):
    """The model's own loss; the task's where the model has none.

    Args:
        count: How many targets the mean loss of a batch is over.
    """

    def __init__(self, count: Callable[[Batch], int]) -> None:
        super().__init__(count, ["loss"])


def predicted(outputs: ModelOutput, *, shift: bool) -> torch.Tensor:
    """Return the most probable class in the place of each target, shape (batch, targets)."""
    if not hasattr(outputs, "logits"):  # TargetLosses
        chosen: torch.Tensor = outputs.predicted
        return chosen
    logits: torch.Tensor = outputs.logits
    return (logits[:, :-1] if shift else logits).argmax(-1)


class TokenMetrics(SummedMetrics):
    """Loss, perplexity and accuracy over target tokens.

    Args:
        shift: True where the logits at a position predict the next token.
        router_loss: Computes the loss that balances experts, which the model's own loss holds; it
            is reported as `router_loss`, and loss and perplexity are without it. None: there is no
            such loss.
    """

    def __init__(
        self,
        *,
        shift: bool,
        router_loss: Callable[[ModelOutput], torch.Tensor | float] | None = None,
    ) -> None:
        names = ["loss", "perplexity", "accuracy"]
        if router_loss is not None:
            names.append("router_loss")
        super().__init__(lambda batch: int((self._targets(batch) != IGNORED).sum()), names, 0, 0.0)
        self.shift = shift
        self.router_loss = router_loss

    def _targets(self, batch: Batch) -> torch.Tensor:
        if self.shift:
            return batch["labels"][:, 1:]
        return batch["labels"]

    def counted(self, outputs: ModelOutput, batch: Batch) -> Sequence[float]:
        """Count the right tokens, and sum the loss of the experts over all tokens."""
        labels = self._targets(batch)
        is_right = (predicted(outputs, shift=self.shift) == labels) & (labels != IGNORED)
        router = 0.0 if self.router_loss is None else float(self.router_loss(outputs))
        return [int(is_right.sum()), router * self.count(batch)]

    def compute(self) -> dict[str, float]:
        """Compute means over all target tokens; NaN if there was none."""
        total, count, right, router = self.sums
        if count == 0:
            return dict.fromkeys(self.names, math.nan)
        loss = (total - router) / count
        values = {"loss": loss, "perplexity": perplexity(loss), "accuracy": right / count}
        if self.router_loss is not None:
            values["router_loss"] = router / count
        return values


def interleave(lists: Iterable[Iterable[Item]]) -> list[Item]:
    """Interleave the batches kept by each rank, in their global order."""
    return [item for together in zip_longest(*lists) for item in together if item is not None]


class EvaluationMetrics(MetricAccumulator):
    """Metrics counted batch by batch, then registered ones over all predictions.

    Args:
        running: Counted batch by batch.
        functions: The registered ones by name; predictions are kept only where there are any.
        predictions: A batch to its predictions and labels, shape (targets,) each.
        num_labels: How many classes there are; 0: no classes, or tokens.
        labels: Their names, for a table of them; empty: there is none.
        loss: The task's, for a model that returns none.
    """

    def __init__(
        self,
        running: MetricAccumulator,
        functions: Mapping[str, MetricFunction],
        predictions: Callable[[ModelOutput, Batch], Labelled],
        num_labels: int,
        labels: Sequence[str] = (),
        loss: Callable[[ModelOutput, Batch], object] | None = None,
    ) -> None:
        self.loss = loss
        self.running = running
        self.functions = {
            name: function for name, function in functions.items() if name not in running.names
        }
        self.names = [*running.names, *self.functions]
        self.predictions = predictions
        self.num_labels = num_labels
        self.labels = labels
        self.kept: list[Labelled] = []

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Count one batch, and keep its predictions."""
        if (
            self.running.reads_loss
            and self.loss is not None
            and getattr(outputs, "loss", None) is None
        ):
            outputs.loss = _expect_scalar(self.loss(outputs, batch))
        self.running.update(outputs, batch)
        if self.functions:
            self.kept.append(self.predictions(outputs, batch))

    @property
    def mergeable(self) -> bool:
        """Whether the metrics counted batch by batch can be merged."""
        return self.running.mergeable

    def partial(self) -> Seen:
        """Return the counts, and the predictions of each batch."""
        return self.running.partial(), self.kept

    def merge(self, partials: Sequence[Seen]) -> None:
        """Merge the counts of all ranks, with predictions in the order of their batches."""
        self.running.merge([running for running, _ in partials])
        self.kept = interleave(batches for _, batches in partials)

    def compute(self) -> dict[str, float]:
        """Compute the metrics over the whole set; a registered metric of no target at all is NaN.

        Raises:
            OptrunError: A registered metric fails, or gives no number.
        """
        values = self.running.compute()
        if not self.functions:
            return values
        if not self.kept:  # an evaluation set without rows
            return values | dict.fromkeys(self.functions, math.nan)
        predictions, labels = self._all()
        for name, function in self.functions.items():
            values[name] = (
                function(predictions, labels, self.num_labels) if len(labels) else math.nan
            )
        return values

    def table(self) -> ClassTable | None:
        """Return the metrics' table by class, else one of the kept predictions."""
        counted = self.running.table()
        if counted is not None or not self.labels or not self.kept:
            return counted
        return table_of_classes(self.labels, confusion(*self._all(), len(self.labels)))

    def _all(self) -> tuple[np.ndarray, np.ndarray]:
        """Join predictions and labels of all batches."""
        predictions, labels = (np.concatenate(side) for side in zip(*self.kept, strict=True))
        return predictions, labels


def metric_functions(config: TaskConfig) -> dict[str, MetricFunction]:
    """Collect the registered metrics of a task.

    Those it always reports, then those of `task.metrics`.

    Raises:
        ConfigError: No such metric, or one that is not for this task.
    """
    names = dict.fromkeys([*config.own_metrics, *config.metrics])
    return {
        row.name: _function(row)
        for row in chosen_metrics(names, config.kind, of_numbers=config.of_numbers)
    }


def _function(row: registry.Choice) -> MetricFunction:
    function = row.load()
    wants_num_labels = row.schema.WANTS_NUM_LABELS

    def compute(predictions: np.ndarray, labels: np.ndarray, num_labels: int) -> float:
        options = {"num_labels": num_labels} if wants_num_labels else {}
        try:
            value = function(predictions, labels, **options)
        except Exception as error:  # whatever it is: the name of the metric is what the user needs
            raise OptrunError(
                f"task.metrics: {row.name} failed on {len(labels):,} predictions:"
                f" {type(error).__name__}: {error}"
            ) from error
        return number_of(value, f"task.metrics: {row.name}")

    return compute


def number_of(value: Any, what: str) -> float:
    """Convert a metric's result to a number; NaN is one.

    Raises:
        OptrunError: It is none, with what it is.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = getattr(value, "shape", None)
        value_shown = f"an array of shape {tuple(shape)}" if shape else f"{value!r:.60}"
        raise OptrunError(f"{what} gave {value_shown}: expected one number.") from error
