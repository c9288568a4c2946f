"""Metrics over an evaluation set: counted batch by batch, or computed once over all predictions."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain, zip_longest
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
    from torch import Tensor
    from transformers.utils.generic import ModelOutput

IGNORED = -100
"""Label that transformers leaves out of the loss."""

Item = TypeVar("Item")
Sums = list[Any]
"""Values that support `+`: numbers, arrays, counters."""
PredictionsAndLabels = tuple[np.ndarray, np.ndarray]
"""Predictions and labels of a batch; shape (targets,) each."""
Partial = tuple[Any, list[PredictionsAndLabels]]
"""`partial` of the metrics counted batch by batch, and predictions and labels of each batch."""
MetricFunction = Callable[[np.ndarray, np.ndarray, int], float]
"""Predictions, labels, number of classes -> value."""


class MetricAccumulator(ABC):
    """Metrics over an evaluation set, batch by batch.

    Attributes:
        names: What `compute` reports, without prefix, such as `loss`; in order.
    """

    names: list[str]
    reads_loss = False
    """Whether `update` reads `outputs.loss`; if the model returns none, it is the task's loss."""

    @property
    def mergeable(self) -> bool:
        """Whether ranks can share an evaluation set; else each rank runs over all of it."""
        return type(self).merge is not MetricAccumulator.merge

    @abstractmethod
    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Count one batch.

        Args:
            outputs: Outputs of the model, with `loss` and `logits`.
            batch: Its inputs and labels.
        """

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Compute the metrics over all batches, by name without prefix, such as `loss`."""

    def table(self) -> ClassTable | None:
        """Return precision, recall and F1 by class over all batches; None without classes."""
        return None

    def partial(self) -> Any:
        """Return the counts of this rank, for `merge`; only metrics that define `merge` have it."""
        raise NotImplementedError

    def merge(self, partials: Sequence[Any]) -> None:
        """Replace the counts of this rank by the merged counts of all ranks.

        Args:
            partials: What `partial` returned on each rank, by rank, this one included.
        """
        raise NotImplementedError


class SummedMetrics(MetricAccumulator):
    """Metrics made of sums over batches: of the loss, of the targets, and those of `sum_batch`.

    Args:
        count: Counts the targets of a batch, the denominator of its mean loss.
        names: Names that `compute` reports, in order, the loss first.
        zeros: Start values of the sums of `sum_batch`: numbers, arrays, or anything else that `+`
            adds.
    """

    reads_loss = True

    def __init__(self, count: Callable[[Batch], int], names: Sequence[str], *zeros: Any) -> None:
        self.count = count
        self.names = list(names)
        self.sums: Sums = [0.0, 0, *zeros]

    def sum_batch(self, outputs: ModelOutput, batch: Batch) -> Sequence[Any]:  # noqa: ARG002
        """Compute the additional sums of a batch, in the order of `zeros`; none by default."""
        return ()

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Add the sums of one batch; a batch without a target is left out: its mean loss is 0/0."""
        count = self.count(batch)
        if count:
            batch_sums = [float(outputs.loss) * count, count, *self.sum_batch(outputs, batch)]
            self.sums = list(map(operator.add, self.sums, batch_sums))

    def partial(self) -> Sums:
        """Return the sums: of the loss, of the targets, then those of `sum_batch`."""
        return self.sums

    def merge(self, partials: Sequence[Sums]) -> None:
        """Add the sums of all ranks."""
        self.sums = [reduce(operator.add, values) for values in zip(*partials, strict=True)]

    def compute(self) -> dict[str, float]:
        """Divide each sum by the number of targets; all NaN if there was no target."""
        loss_sum, count, *more_sums = self.sums
        if not count:
            return dict.fromkeys(self.names, math.nan)
        sums = (loss_sum, *more_sums)
        return {name: value / count for name, value in zip(self.names, sums, strict=True)}


class MeanLoss(SummedMetrics):
    """The mean of `outputs.loss` over all targets.

    Args:
        count: Counts the targets of a batch, the denominator of its mean loss.
    """

    def __init__(self, count: Callable[[Batch], int]) -> None:
        super().__init__(count, ["loss"])


def predicted_classes(outputs: ModelOutput, *, shift: bool) -> Tensor:
    """Return the most probable class at each target position, shape (batch, targets).

    Args:
        outputs: With `logits`, or `TargetLosses` with `predicted`.
        shift: Whether the logits at a position predict the next token: the last ones are left out.
    """
    if not hasattr(outputs, "logits"):  # TargetLosses
        classes: Tensor = outputs.predicted
        return classes
    logits: Tensor = outputs.logits
    if shift:
        logits = logits[:, :-1]
    return logits.argmax(-1)


class TokenMetrics(SummedMetrics):
    """Loss, perplexity and accuracy over target tokens.

    Args:
        shift: Whether the logits at a position predict the next token.
        router_loss: Computes the load-balancing loss of a mixture of experts, which the model's own
            loss includes. It is reported as `router_loss`, and subtracted from loss and
            perplexity. None: the model has no such loss.
    """

    def __init__(
        self, *, shift: bool, router_loss: Callable[[ModelOutput], Tensor | float] | None = None
    ) -> None:
        names = ["loss", "perplexity", "accuracy"]
        if router_loss is not None:
            names.append("router_loss")
        super().__init__(lambda batch: int((self._targets(batch) != IGNORED).sum()), names, 0, 0.0)
        self.shift = shift
        self.router_loss = router_loss

    def _targets(self, batch: Batch) -> Tensor:
        if self.shift:
            return batch["labels"][:, 1:]
        return batch["labels"]

    def sum_batch(self, outputs: ModelOutput, batch: Batch) -> Sequence[float]:
        """Count the right tokens, and sum the load-balancing loss over the targets."""
        labels = self._targets(batch)
        is_target = labels != IGNORED
        is_right = (predicted_classes(outputs, shift=self.shift) == labels) & is_target
        router = 0.0 if self.router_loss is None else float(self.router_loss(outputs))
        return [int(is_right.sum()), router * self.count(batch)]

    def compute(self) -> dict[str, float]:
        """Compute means over all target tokens; NaN if there was none.

        The load-balancing loss of experts is subtracted from the model's loss.
        """
        loss_sum, count, right, router_sum = self.sums
        if count == 0:
            return dict.fromkeys(self.names, math.nan)
        loss = (loss_sum - router_sum) / count
        values = {"loss": loss, "perplexity": perplexity(loss), "accuracy": right / count}
        if self.router_loss is not None:
            values["router_loss"] = router_sum / count
        return values


def interleave(lists: Iterable[Iterable[Item]]) -> list[Item]:
    """Interleave the lists of all ranks: the first items by rank, then the second ones, and so on.

    Example:
        >>> interleave([["batch 0", "batch 2"], ["batch 1"]])
        ['batch 0', 'batch 1', 'batch 2']
    """
    # `zip_longest` stands None in for what the shorter lists lack.
    items = chain.from_iterable(zip_longest(*lists))
    return [item for item in items if item is not None]


class EvaluationMetrics(MetricAccumulator):
    """Metrics counted batch by batch, then registered ones over all predictions.

    Args:
        running: Metrics counted batch by batch.
        functions: Registered metrics by name; one with the name of a running metric is left out.
            Predictions are stored only if there are any.
        predictions: Computes predictions and labels of a batch, shape (targets,) each.
        num_labels: Number of classes; 0: no classes, or tokens.
        labels: Names of the classes, for `table`; empty: there is no table.
        loss: Computes the task's loss, for a model that returns none.
    """

    def __init__(
        self,
        running: MetricAccumulator,
        functions: Mapping[str, MetricFunction],
        predictions: Callable[[ModelOutput, Batch], PredictionsAndLabels],
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
        self.batch_predictions: list[PredictionsAndLabels] = []

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Count one batch, and store its predictions if a registered metric needs them.

        If the metrics read the loss and the model returned none, `outputs.loss` becomes the task's
        loss.

        Raises:
            OptrunError: The task's loss is no single number.
        """
        has_loss = getattr(outputs, "loss", None) is not None
        if self.running.reads_loss and not has_loss and self.loss is not None:
            outputs.loss = require_number(self.loss(outputs, batch), "the loss of the task")
        self.running.update(outputs, batch)
        if self.functions:
            self.batch_predictions.append(self.predictions(outputs, batch))

    @property
    def mergeable(self) -> bool:
        """Whether the metrics counted batch by batch can be merged over ranks."""
        return self.running.mergeable

    def partial(self) -> Partial:
        """Return the counts, and predictions and labels of each batch."""
        return self.running.partial(), self.batch_predictions

    def merge(self, partials: Sequence[Partial]) -> None:
        """Merge the counts of all ranks, with predictions in the order of their batches."""
        self.running.merge([running for running, _ in partials])
        self.batch_predictions = interleave(batches for _, batches in partials)

    def compute(self) -> dict[str, float]:
        """Compute the metrics over the whole set.

        A registered metric is NaN if the set has no target.

        Raises:
            OptrunError: A registered metric fails, or returns no number.
        """
        # Metrics that are summed batch by batch, such as the loss; the registered ones follow.
        values = self.running.compute() | dict.fromkeys(self.functions, math.nan)
        # An evaluation set without rows has no batch.
        if not self.functions or not self.batch_predictions:
            return values
        predictions, labels = self._joined_predictions()
        if len(labels):
            for name, function in self.functions.items():
                # `_load_metric` wrapped it, so that whatever it raises is an OptrunError.
                values[name] = function(predictions, labels, self.num_labels)
        return values

    def table(self) -> ClassTable | None:
        """Return precision, recall and F1 by class; None without classes or predictions.

        The table of the running metrics if they have one, else that of the stored predictions.
        """
        running_table = self.running.table()
        if running_table is not None or not self.labels or not self.batch_predictions:
            return running_table
        counts = confusion(*self._joined_predictions(), len(self.labels))
        return table_of_classes(self.labels, counts)

    def _joined_predictions(self) -> PredictionsAndLabels:
        """Join the predictions of all batches, and their labels; shape (targets,) each."""
        predictions, labels = zip(*self.batch_predictions, strict=True)
        return np.concatenate(predictions), np.concatenate(labels)


def metric_functions(config: TaskConfig) -> dict[str, MetricFunction]:
    """Load the metrics of a task: its own registered ones, then `task.metrics`.

    Raises:
        ConfigError: There is no metric of this name, or it is not for this task.
    """
    names = dict.fromkeys([*config.own_metrics, *config.metrics])
    rows = chosen_metrics(names, config.kind, of_numbers=config.of_numbers)
    return {row.name: _load_metric(row) for row in rows}


def _load_metric(row: registry.Choice) -> MetricFunction:
    """Load a registered metric as a function with errors that name it.

    Whatever it raises becomes an OptrunError, and so does a result that is no number. A metric
    whose schema sets `WANTS_NUM_LABELS` gets the number of classes, too.
    """
    function = row.load()  # of predictions and labels to a number
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
        return require_number(value, f"task.metrics: {row.name}")

    return compute


def require_number(value: Any, what: str) -> float:
    """Convert the result of a metric or loss to a float; NaN is accepted.

    Args:
        value: A number, or an array or tensor with one element.
        what: Names it in the message.

    Raises:
        OptrunError: It is a text, None, or an array with another number of elements.
    """
    try:
        if isinstance(value, str | bytes):  # float("3") would work
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = getattr(value, "shape", None)
        description = f"an array of shape {tuple(shape)}" if shape else f"{value!r:.60}"
        raise OptrunError(f"{what} gave {description}: expected one number.") from error
