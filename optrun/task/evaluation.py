"""Metrics over an evaluation set: counted batch by batch, or by registered functions once all of it was seen."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import OptrunError
from optrun.config import registry
from optrun.config.schema.metric import chosen_metrics
from optrun.config.schema.task import TaskConfig
from optrun.data.loader import Batch
from optrun.task.class_table import ClassTable, table_of_classes
from optrun.task.metrics import confusion, perplexity

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

IGNORED = -100
"""Label that transformers leaves out of the loss."""

MetricFunction = Callable[[np.ndarray, np.ndarray, int], float]
"""Predictions, labels, number of classes -> value."""


class MetricAccumulator(ABC):
    """Metrics over an evaluation set, batch by batch.

    Attributes:
        names: What `compute` reports, without prefix, such as `loss`; in order.
    """

    names: list[str]
    reads_loss = False
    """Whether `update` reads `outputs.loss`: the task's loss stands there where the model returns none."""

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
        """Return what was counted so far, as `merge` takes it from other ranks."""
        raise NotImplementedError

    def merge(self, partials: Sequence[Any]) -> None:
        """Count in place of what was counted here what all ranks counted.

        Args:
            partials: What `partial` returned, by rank, this one's among them.
        """
        raise NotImplementedError


def _scalar(loss: Any) -> Any:
    """Refuse a loss that a task computed unless it is one number.

    Raises:
        OptrunError: It is none.
    """
    if isinstance(loss, float) or getattr(loss, "shape", None) == ():
        return loss
    found = f"a tensor of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
    raise OptrunError(f"the loss of the task is {found}: expected a tensor of shape () with a gradient.")


class MeanLoss(MetricAccumulator):
    """The model's own loss; the task's where the model has none.

    Args:
        count: How many targets the mean loss of a batch is over.
    """

    reads_loss = True

    def __init__(self, count: Callable[[Batch], int]) -> None:
        self.names = ["loss"]
        self.count = count
        self.loss = 0.0
        self.counted = 0

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Add one batch's."""
        count = self.count(batch)
        if count:  # else it is 0/0
            self.loss += float(outputs.loss) * count
            self.counted += count

    def partial(self) -> tuple[float, int]:
        """Sum of losses, and targets."""
        return self.loss, self.counted

    def merge(self, partials: Sequence[tuple[float, int]]) -> None:
        """Add those of all ranks."""
        self.loss, self.counted = sum(loss for loss, _ in partials), sum(count for _, count in partials)

    def compute(self) -> dict[str, float]:
        """Compute the mean over all targets; NaN if there was none."""
        return {"loss": self.loss / self.counted if self.counted else math.nan}


class TokenMetrics(MetricAccumulator):
    """Loss, perplexity and accuracy over target tokens.

    Args:
        shift: True where the logits at a position predict the next token.
    """

    reads_loss = True

    def __init__(self, *, shift: bool) -> None:
        self.names = ["loss", "perplexity", "accuracy"]
        self.shift = shift
        self.loss = 0.0
        self.right = 0
        self.count = 0

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Count one batch."""
        labels = batch["labels"]
        logits = outputs.logits
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        targets = labels != IGNORED
        count = int(targets.sum())
        if count == 0:
            return
        self.loss += float(outputs.loss) * count
        self.right += int(((logits.argmax(-1) == labels) & targets).sum())
        self.count += count

    def partial(self) -> tuple[float, int, int]:
        """Sum of losses, right tokens, and target tokens."""
        return self.loss, self.right, self.count

    def merge(self, partials: Sequence[tuple[float, int, int]]) -> None:
        """Add those of all ranks."""
        losses, rights, counts = zip(*partials, strict=True)
        self.loss, self.right, self.count = sum(losses), sum(rights), sum(counts)

    def compute(self) -> dict[str, float]:
        """Compute means over all target tokens; NaN if there was none."""
        if self.count == 0:
            return dict.fromkeys(self.names, math.nan)
        loss = self.loss / self.count
        return {"loss": loss, "perplexity": perplexity(loss), "accuracy": self.right / self.count}


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
        predictions: Callable[[ModelOutput, Batch], tuple[np.ndarray, np.ndarray]],
        num_labels: int,
        labels: Sequence[str] = (),
        loss: Callable[[ModelOutput, Batch], Any] | None = None,
    ) -> None:
        self.loss = loss
        self.running = running
        self.functions = {name: function for name, function in functions.items() if name not in running.names}
        self.names = [*running.names, *self.functions]
        self.predictions = predictions
        self.num_labels = num_labels
        self.labels = labels
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []

    def update(self, outputs: ModelOutput, batch: Batch) -> None:
        """Count one batch, and keep its predictions."""
        if self.running.reads_loss and self.loss is not None and getattr(outputs, "loss", None) is None:
            outputs.loss = _scalar(self.loss(outputs, batch))
        self.running.update(outputs, batch)
        if self.functions:
            self.kept.append(self.predictions(outputs, batch))

    @property
    def mergeable(self) -> bool:
        """Whether what is counted batch by batch is."""
        return self.running.mergeable

    def partial(self) -> tuple[Any, list[tuple[np.ndarray, np.ndarray]]]:
        """Return what was counted, and the predictions of each batch."""
        return self.running.partial(), self.kept

    def merge(self, partials: Sequence[tuple[Any, list[tuple[np.ndarray, np.ndarray]]]]) -> None:
        """Count those of all ranks, the predictions in the order of their batches."""
        self.running.merge([running for running, _ in partials])
        rounds = zip_longest(*(kept for _, kept in partials))
        self.kept = [batch for together in rounds for batch in together if batch is not None]

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
            values[name] = function(predictions, labels, self.num_labels) if len(labels) else math.nan
        return values

    def table(self) -> ClassTable | None:
        """Return what the metrics counted by class, else what the kept predictions say."""
        own = self.running.table()
        if own is not None or not self.labels or not self.kept:
            return own
        return table_of_classes(self.labels, confusion(*self._all(), len(self.labels)))

    def _all(self) -> tuple[np.ndarray, np.ndarray]:
        """Join predictions and labels of all batches."""
        predictions, labels = (np.concatenate(side) for side in zip(*self.kept, strict=True))
        return predictions, labels


def metric_functions(config: TaskConfig) -> dict[str, MetricFunction]:
    """Collect the registered metrics of a task: those it always reports, then those of `task.metrics`.

    Raises:
        ConfigError: No such metric, or one that is not for this task.
    """
    names = dict.fromkeys([*config.own_metrics, *config.metrics])
    return {row.name: _function(row) for row in chosen_metrics(names, config.kind, of_numbers=config.of_numbers)}


def _function(row: registry.Choice) -> MetricFunction:
    function, wants_num_labels = row.load(), row.schema.WANTS_NUM_LABELS

    def compute(predictions: np.ndarray, labels: np.ndarray, num_labels: int) -> float:
        options = {"num_labels": num_labels} if wants_num_labels else {}
        try:
            value = function(predictions, labels, **options)
        except Exception as error:  # whatever it is: the name of the metric is what the user needs
            raise OptrunError(
                f"task.metrics: {row.name} failed on {len(labels):,} predictions: {type(error).__name__}: {error}"
            ) from error
        return number_of(value, f"task.metrics: {row.name}")

    return compute


def number_of(value: Any, what: str) -> float:
    """Read what a metric gave as a number; NaN is one.

    Raises:
        OptrunError: It is none, with what it is.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = getattr(value, "shape", None)
        shown = f"an array of shape {tuple(shape)}" if shape else f"{value!r:.60}"
        raise OptrunError(f"{what} gave {shown}: expected one number.") from error
