"""A label, or a number, for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from optrun.config.schema.data import DataConfig
from optrun.config.schema.task import ProblemType, SequenceClassificationConfig
from optrun.data.cache import digest
from optrun.data.columns import label_column, named, refuse_unused, text_column, texts
from optrun.data.examples import Example, Examples, chosen, encode
from optrun.data.source import Source, Split
from optrun.errors import ConfigError
from optrun.task import metrics
from optrun.task.base import Batch, MetricAccumulator, ModelNeeds, Task, pad, tokenizer_key
from optrun.task.labels import label_config, numbers, row_classes

_COLUMNS = ("text_column", "eval_text_column", "text_pair_column", "label_column")


def _text_columns(source: Source, split: Split) -> tuple[str, str | None]:
    """Text and second text."""
    label = label_column(source, split)
    pair = named(source.columns, "text_pair_column", split)
    return text_column(source, split, taken=(label, pair)), pair


CLASS_METRICS = ["loss", "accuracy", "f1", "mcc"]
REGRESSION_METRICS = ["loss", "mse", "mae", "pearson", "spearman"]


class SequenceClassification(Task):
    """Texts, or pairs of texts, to classes or to a number.

    Raises:
        ConfigError: A missing column, a label unseen in training, text where numbers are expected.
    """

    name = "sequence_classification"
    auto_class = "AutoModelForSequenceClassification"
    unit = "examples"

    def __init__(
        self, config: SequenceClassificationConfig, data: DataConfig, source: Source, tokenizer: Any, *, seed: int
    ) -> None:
        super().__init__()
        refuse_unused(source.columns, _COLUMNS, self.name)
        self.regression = config.problem_type is ProblemType.regression
        self.main_metric, self.mode = ("pearson", "max") if self.regression else ("accuracy", "max")
        self.max_length = data.max_length
        self.limits = [f"data.max_length={data.max_length}"]
        self.padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        columns = label_column(source, source.train), label_column(source, source.eval)
        self.labels: list[str] = []
        if self.regression:
            train_labels, eval_labels = numbers(source.train, columns[0]), numbers(source.eval, columns[1])
        else:
            self.labels, train_labels, eval_labels = row_classes(source, *columns)
        self.train = self._read(source, source.train, tokenizer, train_labels, data.max_train_examples, seed)
        self.eval = self._read(source, source.eval, tokenizer, eval_labels, data.max_eval_examples, None)

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Both texts of each row."""
        text, pair = _text_columns(source, source.train)
        if pair is None:
            return texts(source.train, text)
        both = zip(texts(source.train, text), texts(source.train, pair), strict=True)
        return chain.from_iterable(both)

    def _read(
        self, source: Source, split: Split, tokenizer: Any, labels: np.ndarray, limit: int | None, seed: int | None
    ) -> Examples:
        text, pair = _text_columns(source, split)
        indices = chosen(len(split.rows), limit, seed=seed)
        part = split.take(indices)

        def rows() -> Iterator[Any]:
            return texts(part, text) if pair is None else zip(texts(part, text), texts(part, pair), strict=True)

        def encoder(batch: list[Any], cut: bool) -> dict[str, list[list[int]]]:
            firsts = batch if pair is None else [first for first, _ in batch]
            seconds = None if pair is None else [second for _, second in batch]
            encoded = tokenizer(
                firsts,
                seconds,
                truncation=cut,
                max_length=self.max_length if cut else None,
                return_attention_mask=False,
                verbose=False,
            )
            return {name: encoded[name] for name in ("input_ids", "token_type_ids") if name in encoded}

        blank = sum(not value.strip() for value in texts(part, text))
        if blank:
            self.notes.append(f"{split.key}: {blank:,} of {len(part.rows):,} rows have no text in column {text}")
        key = digest(tokenizer_key(tokenizer), "sequence", str(self.max_length), str(tokenizer.model_input_names))
        examples = encode(rows, encoder, key, longest=self.max_length)
        if (np.diff(examples.offsets) == 0).any():
            empty = int(np.flatnonzero(np.diff(examples.offsets) == 0)[0])
            raise ConfigError(
                f"{split.key}: row {part.number(empty)} has no token: an empty "
                "text, and a tokenizer that adds none of its own. Leave such rows out."
            )
        return examples.with_scalars(labels=labels if indices is None else labels[indices])

    def needs(self) -> ModelNeeds:
        """A model with a sequence-classification head."""
        if self.regression:
            config: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
        else:
            config = {**label_config(self.labels), "problem_type": "single_label_classification"}
        return ModelNeeds(config, self.max_length)

    def collate(self, examples: list[Example]) -> Batch:
        """`input_ids`, `attention_mask` (`token_type_ids`) of shape (batch, longest); `labels` of shape (batch,)."""
        rows = [example["input_ids"] for example in examples]
        dtype = torch.float32 if self.regression else torch.int64
        batch = {
            "input_ids": pad(rows, self.padding),
            "attention_mask": pad((np.ones_like(row) for row in rows), 0),
            "labels": torch.tensor([example["labels"].item() for example in examples], dtype=dtype),
        }
        if "token_type_ids" in examples[0]:
            batch["token_type_ids"] = pad((example["token_type_ids"] for example in examples), 0)
        return batch

    def weight(self, batch: Batch) -> int:
        """Examples."""
        return int(batch["labels"].shape[0])

    def metric_names(self) -> list[str]:
        """Of the problem type."""
        return REGRESSION_METRICS if self.regression else CLASS_METRICS

    def evaluation(self) -> MetricAccumulator:
        """Loss and what the problem type is judged by."""
        return LabelMetrics(0 if self.regression else len(self.labels))


class LabelMetrics(MetricAccumulator):
    """Loss, accuracy, F1 and Matthews correlation; or loss, squared and absolute error, and both correlations.

    Args:
        classes: How many; 0: regression.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.loss = 0.0
        self.predictions: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []

    def update(self, outputs: Any, batch: Batch) -> None:
        """Keep one batch's predictions."""
        self.loss += float(outputs.loss) * int(batch["labels"].shape[0])
        made = outputs.logits.argmax(-1) if self.classes else outputs.logits.float().reshape(-1)
        self.predictions.append(made.cpu().numpy())
        self.labels.append(batch["labels"].cpu().numpy())

    def compute(self) -> dict[str, float]:
        """Over all examples."""
        predictions, labels = np.concatenate(self.predictions), np.concatenate(self.labels)
        found = {"loss": self.loss / len(labels)}
        if self.classes:
            counts = metrics.confusion(predictions, labels, self.classes)
            found["accuracy"] = metrics.accuracy(predictions, labels)
            found["f1"] = metrics.f1(counts)
            found["mcc"] = metrics.matthews(counts)
        else:
            error = predictions.astype(np.float64) - labels.astype(np.float64)
            found["mse"] = float((error**2).mean())
            found["mae"] = float(np.abs(error).mean())
            found["pearson"] = metrics.pearson(predictions, labels)
            found["spearman"] = metrics.spearman(predictions, labels)
        return found
