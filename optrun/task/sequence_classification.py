"""A label, several labels, or a number, for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from optrun.base.errors import ConfigError
from optrun.data.cache import cached_result, key_of
from optrun.data.columns import cell_text, label_column, named_column, text_column, texts
from optrun.data.examples import Example, chosen
from optrun.data.loader import Batch, ExampleSource
from optrun.data.shards import Row
from optrun.data.source import Source, Split
from optrun.data.stream import StreamedRows, StreamRows
from optrun.task.base import ModelNeeds, Task, model_inputs
from optrun.task.evaluation import MetricAccumulator
from optrun.task.label_sets import LabelSetMetrics, label_columns, row_sets
from optrun.task.labels import label_config, numbers, row_classes
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

    columns = (
        "text_column",
        "text_pair_column",
        "label_column",
        "label_columns",
    )
    unit = "examples"
    predictor = "optrun.runner.prediction.forward_pass:TextClasses"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield both texts of each row."""
        return interleave_columns(
            source.train, list(filter(None, _text_columns(source, source.train)))
        )

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: ARG002
        """Find the classes and the number of each row's, or the numbers to predict."""
        self.regression = self.config.of_numbers
        self.several = self.config.of_sets
        label_names = None if source.columns is None else source.columns.label_columns
        if label_names is not None and not self.several:
            raise ConfigError(
                f"data.label_columns={list(label_names)}:"
                f" task.problem_type={self.config.problem_type.value} reads one column of labels."
                " Several are read by task.problem_type=multi_label_classification."
            )
        if self.regression:
            self.numbers = {
                split: numbers(split, label_column(source, split)) for split in source.splits
            }
        else:
            self.labels, self.numbers = row_sets(source) if self.several else row_classes(source)

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read one example a row; of a stream it is tokenised when it is read."""
        text, pair = _text_columns(source, split)
        names = [text] if pair is None else [text, pair]
        labels = self.numbers.pop(split)
        if isinstance(split.rows, StreamRows):
            encoder = text_encoder(tokenizer, self.max_length)
            key = rows_key(tokenizer, "sequence", self.max_length)

            def example(row: Row) -> Example:
                row_texts = tuple(cell_text(row, name) for name in names)
                return example_of_one_row(
                    encoder([row_texts[0] if pair is None else row_texts], True)
                )

            return StreamedRows(split.rows.select_columns(names), example, key, {"labels": labels})

        def rows() -> Iterator[Any]:
            columns = (texts(part, name) for name in names)
            if pair is None:
                return next(columns)
            return zip(*columns, strict=True)

        indices = chosen(len(split.rows), limit, seed=seed)
        part = split.take(indices)
        empty = cached_result(
            key_of("blank-1", part.content, text),
            lambda: sum(not value.strip() for value in texts(part, text)),
        )
        if empty:
            self.notes.append(
                f"{split.key}: {empty:,} of {len(part.rows):,} rows have no text in column {text}"
            )
        examples = encode_rows(part, rows, tokenizer, self.max_length, "sequence", text, str(pair))
        bare = np.flatnonzero(examples.lengths == 0)
        if len(bare):
            raise ConfigError(f"{part.where(int(bare[0]))} has no token: {NO_TOKEN}")
        return examples.with_scalars(labels=labels if indices is None else labels[indices])

    def needs(self) -> ModelNeeds:
        """Require a head with an output for each class, or one for the number."""
        config = {"num_labels": 1} if self.regression else label_config(self.labels)
        return ModelNeeds(
            {**config, "problem_type": self.config.problem_type.value}, self.max_length
        )

    def collate(self, examples: list[Example]) -> Batch:
        """Collate `input_ids`, `attention_mask` (`token_type_ids`) of shape (batch, longest).

        `labels` (batch,). There is a mask only if something is padded.

        Of any number of labels these are 0 or 1, shape (batch, labels), float32, as transformers'
        own loss takes them.
        """
        labels = torch.from_numpy(np.stack([example["labels"] for example in examples]))
        if not self.several:
            labels = labels.to(torch.float32 if self.regression else torch.int64)
        return {**model_inputs(examples, self.padding), "labels": labels}

    def count(self, batch: Batch) -> int:
        """Count the examples; -100 is a number like another."""
        return len(batch["labels"])

    def running_metrics(self) -> MetricAccumulator:
        """Make the loss; for any number of labels f1 and exact matches, too."""
        if self.several:
            return LabelSetMetrics(self.labels)
        return super().running_metrics()

    def loss_by_example(
        self, outputs: ModelOutput, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute losses by example.

        Squares of differences for numbers, means over labels for any number of them.
        """
        if self.several:
            losses = functional.binary_cross_entropy_with_logits(
                outputs.logits.float(), batch["labels"], reduction="none"
            ).mean(dim=1)
        elif self.regression:
            losses = (outputs.logits.float().reshape(-1) - batch["labels"]) ** 2
        else:
            return super().loss_by_example(outputs, batch)
        return losses, torch.ones_like(losses)

    def predictions(self, outputs: ModelOutput, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return classes, or numbers; shape (batch,) each."""
        if not self.regression:
            return super().predictions(outputs, batch)
        return outputs.logits.float().reshape(-1).cpu().numpy(), batch["labels"].cpu().numpy()


def _text_columns(source: Source, split: Split) -> tuple[str, str | None]:
    """Find the columns of the text and the second text."""
    labels = label_columns(source, split)
    pair = named_column(source.columns, "text_pair_column", split)
    return text_column(source, split, taken=(*labels, pair)), pair
