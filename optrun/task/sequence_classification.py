"""A label, several labels, or a number, for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from optrun.base.errors import ConfigError
from optrun.data.cache import cached_result, digest_if_known
from optrun.data.columns import cell_text, label_column, named_column, text_column, texts
from optrun.data.examples import Example, chosen
from optrun.data.loader import Batch, ExampleSource
from optrun.data.shards import Row
from optrun.data.source import Source, Split
from optrun.data.stream import StreamedRows, StreamRows
from optrun.task.base import ModelNeeds, Task, model_inputs
from optrun.task.evaluation import MetricAccumulator, PredictionsAndLabels
from optrun.task.label_sets import LabelSetMetrics, label_columns, read_label_sets
from optrun.task.labels import label_config, note_minus_100, read_classes, read_finite_numbers
from optrun.task.tokens import (
    NO_TOKEN,
    encode_rows,
    example_of_one_row,
    interleave_columns,
    rows_key,
    text_encoder,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.generic import ModelOutput


class SequenceClassification(Task):
    """Texts, or pairs of texts, to a class, to any number of labels, or to a number.

    Raises:
        ConfigError: A missing column, a label unseen in training, text where numbers are expected.
    """

    columns = ("text_column", "text_pair_column", "label_column", "label_columns")
    unit = "examples"
    predictor = "optrun.runner.predictors:TextClasses"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield the texts of the training rows, both of a pair."""
        return interleave_columns(source.train, _text_columns(source, source.train))

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: ARG002
        """Read the labels of all splits: class numbers, 0 and 1 by label, or numbers to predict.

        Sets `labels_by_split`; `labels`, unless numbers are to be predicted; and from
        `task.problem_type` `is_regression` and `has_label_sets`.

        Raises:
            ConfigError: `data.label_columns` without
                `task.problem_type=multi_label_classification`; labels that cannot be read.
        """
        self.is_regression = self.config.of_numbers
        self.has_label_sets = self.config.of_sets
        # 1. Refuse a column for each label where a row has one label.
        column_names = None if source.columns is None else source.columns.label_columns
        if column_names is not None and not self.has_label_sets:
            raise ConfigError(
                f"data.label_columns={list(column_names)}:"
                f" task.problem_type={self.config.problem_type.value} reads one column of labels."
                " Take task.problem_type=multi_label_classification, which reads several."
            )

        # 2. Read numbers, sets of labels, or one label for each row.
        if self.is_regression:
            self.labels_by_split = {
                split: read_finite_numbers(split, label_column(source, split))
                for split in source.splits
            }
            for split, numbers in self.labels_by_split.items():
                note_minus_100(source, split, numbers)
        elif self.has_label_sets:
            self.labels, self.labels_by_split = read_label_sets(source)
        else:
            self.labels, self.labels_by_split = read_classes(source)

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read one example for each row.

        A row of a stream is tokenized when a batch needs it. A note says how many rows have an
        empty text.

        Raises:
            ConfigError: A row without a single token.
        """
        columns = _text_columns(source, split)
        labels = self.labels_by_split[split]  # those of all rows, read by `inspect`
        if isinstance(split.rows, StreamRows):
            return self._stream(split.rows, columns, tokenizer, labels)
        indices = chosen(len(split.rows), limit, seed=seed)  # None: all rows
        part = split.take(indices)

        def rows() -> Iterator[Any]:
            """Yield texts, or pairs of texts."""
            if len(columns) == 1:
                return texts(part, columns[0])
            return zip(*(texts(part, name) for name in columns), strict=True)

        # 1. Note empty texts.
        empty_count = cached_result(
            digest_if_known("blank-1", part.content, columns[0]),
            lambda: sum(not text.strip() for text in texts(part, columns[0])),
        )
        if empty_count:
            self.notes.append(
                f"{split.key}: {empty_count:,} of {len(part.rows):,} rows have no text in column"
                f" {columns[0]}"
            )

        # 2. Encode the rows, and give each its label.
        examples = encode_rows(part, rows, tokenizer, self.max_length, "sequence", *columns)
        without_token = np.flatnonzero(examples.lengths == 0)
        if len(without_token):
            raise ConfigError(f"{part.where(int(without_token[0]))} has no token: {NO_TOKEN}")
        return examples.with_scalars(labels=labels if indices is None else labels[indices])

    def _stream(
        self,
        rows: StreamRows,
        columns: list[str],
        tokenizer: PreTrainedTokenizerBase,
        labels: np.ndarray,
    ) -> StreamedRows:
        """Tokenize each row of a stream when a batch needs it.

        Args:
            rows: The stream.
            columns: The column of the text, and of the second text of a pair.
            tokenizer: Of the model.
            labels: The label of each row, shape (rows,) or (rows, labels).
        """
        encoder = text_encoder(tokenizer, self.max_length)
        key = rows_key(tokenizer, "sequence", self.max_length)

        def encode_row(row: Row) -> Example:
            """Tokenize the text, or both texts, of a row."""
            cells = tuple(cell_text(row, name) for name in columns)
            text_or_pair = cells[0] if len(columns) == 1 else cells
            return example_of_one_row(encoder([text_or_pair], True))

        return StreamedRows(rows.select_columns(columns), encode_row, key, {"labels": labels})

    def needs(self) -> ModelNeeds:
        """Require a head with an output for each class, or one for the number."""
        config = {"num_labels": 1} if self.is_regression else label_config(self.labels)
        return ModelNeeds(
            {**config, "problem_type": self.config.problem_type.value}, self.max_length
        )

    def collate(self, examples: list[Example]) -> Batch:
        """Pad the examples to a batch.

        Returns:
            `input_ids` and, if the tokenizer returns them, `token_type_ids`, shape (batch,
            longest); `attention_mask` only if something is padded; `labels`: class numbers, shape
            (batch,), int64; numbers to predict, float32; or 0 and 1 by label, shape (batch,
            labels), float32.
        """
        labels = torch.from_numpy(np.stack([example["labels"] for example in examples]))
        if not self.has_label_sets:
            labels = labels.to(torch.float32 if self.is_regression else torch.int64)
        return {**model_inputs(examples, self.padding), "labels": labels}

    def count(self, batch: Batch) -> int:
        """Count the examples: each has a target, and a number to predict may well be -100."""
        return len(batch["labels"])

    def weight(self, batch: Batch) -> float:
        """Return the number of examples for sets of labels, whatever the class weights.

        `pos_weight` of torch weighs terms of the loss, but its mean divides by their number.
        """
        if self.has_label_sets:
            return self.count(batch)
        return super().weight(batch)

    def loss(self, outputs: ModelOutput, batch: Batch) -> Tensor:
        """Compute the training loss of a batch, shape ().

        For sets of labels with class weights it is the binary cross-entropy, a mean over examples
        and labels, in which the weight of a label multiplies the term of each example that has it.
        In all other cases it is that of `Task.loss`.
        """
        if not self.has_label_sets or self.class_weights is None:
            return super().loss(outputs, batch)
        weights = self.class_weights.to(outputs.logits.device)
        return functional.binary_cross_entropy_with_logits(
            outputs.logits.float(), batch["labels"], pos_weight=weights
        )

    def running_metrics(self) -> MetricAccumulator:
        """Make empty metrics: mean loss; with several labels an example also F1 and exact match."""
        if self.has_label_sets:
            return LabelSetMetrics(self.labels)
        return super().running_metrics()

    def loss_by_example(self, outputs: ModelOutput, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of each example, and count it once; shape (batch,) each.

        Without class weights and label smoothing: the squared difference for numbers, the mean
        binary cross-entropy over the labels for sets of labels, else the cross-entropy.
        """
        if self.has_label_sets:
            losses = functional.binary_cross_entropy_with_logits(
                outputs.logits.float(), batch["labels"], reduction="none"
            ).mean(dim=1)
        elif self.is_regression:
            losses = (outputs.logits.float().reshape(-1) - batch["labels"]) ** 2
        else:
            return super().loss_by_example(outputs, batch)
        return losses, torch.ones_like(losses)

    def predictions(self, outputs: ModelOutput, batch: Batch) -> PredictionsAndLabels:
        """Return predictions and labels: class numbers, or numbers; shape (batch,) each."""
        if not self.is_regression:
            return super().predictions(outputs, batch)
        return outputs.logits.float().reshape(-1).cpu().numpy(), batch["labels"].cpu().numpy()


def _text_columns(source: Source, split: Split) -> list[str]:
    """Find the column of the text and, if `data.text_pair_column` is given, of the second text."""
    labels = label_columns(source, split)
    pair = named_column(source.columns, "text_pair_column", split)
    text = text_column(source, split, taken=(*labels, pair))
    return [text] if pair is None else [text, pair]
