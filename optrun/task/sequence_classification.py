"""A label, several labels, or a number, for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from optrun.base.errors import ConfigError
from optrun.data.cache import digest, known_by
from optrun.data.columns import cell_text, label_column, named, text_column, texts
from optrun.data.encoded import Encoder
from optrun.data.examples import Example, chosen, encode
from optrun.data.loader import Batch, ExampleSource
from optrun.data.shards import Row
from optrun.data.source import Source, Split
from optrun.data.stream import StreamedRows, StreamRows
from optrun.task.base import ModelNeeds, Task, pad_inputs
from optrun.task.evaluation import MetricAccumulator
from optrun.task.label_sets import LabelSetMetrics, label_columns, row_sets
from optrun.task.labels import label_config, numbers, row_classes
from optrun.task.stream_labels import streamed_labels
from optrun.task.tokens import ids_below, tokenizer_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.generic import ModelOutput


class SequenceClassification(Task):
    """Texts, or pairs of texts, to a class, to any number of labels, or to a number.

    Raises:
        ConfigError: A missing column, a label unseen in training, text where numbers are expected.
    """

    columns = ("text_column", "eval_text_column", "text_pair_column", "label_column", "label_columns")
    unit = "examples"
    predictor = "optrun.runner.prediction.classification:TextClasses"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield both texts of each row."""
        text, pair = _text_columns(source, source.train)
        if pair is None:
            return texts(source.train, text)
        both = zip(texts(source.train, text), texts(source.train, pair), strict=True)
        return chain.from_iterable(both)

    @classmethod
    def inputs(cls, source: Source) -> list[str]:
        """List the columns of the text, and of the second one if there is one."""
        return [name for name in _text_columns(source, source.train) if name is not None]

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: ARG002
        """Find the classes and the number of each row's, or the numbers to predict."""
        self.regression, self.several = self.config.of_numbers, self.config.of_sets
        given = None if source.columns is None else source.columns.label_columns
        if given is not None and not self.several:
            raise ConfigError(
                f"data.label_columns={list(given)}: task.problem_type={self.config.problem_type.value} reads one "
                "column of labels. Several are read by task.problem_type=multi_label_classification."
            )
        if isinstance(source.train.rows, StreamRows):
            self.labels, self.numbers = streamed_labels(source, regression=self.regression)
        elif self.regression:
            self.numbers = {split: numbers(split, label_column(source, split)) for split in source.splits}
        else:
            self.labels, self.numbers = row_sets(source) if self.several else row_classes(source)

    def read(
        self, source: Source, split: Split, tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int | None
    ) -> ExampleSource:
        """Read one example a row."""
        text, pair = _text_columns(source, split)

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

        key = digest(tokenizer_key(tokenizer), "sequence", str(self.max_length), str(tokenizer.model_input_names))
        if isinstance(split.rows, StreamRows):
            return self._streamed(split, text, pair, encoder, key)
        indices = chosen(len(split.rows), limit, seed=seed)
        part = split.take(indices)

        def count_blank() -> int:
            return sum(not value.strip() for value in texts(part, text))

        blank = count_blank() if part.content is None else known_by(digest("blank-1", part.content, text), count_blank)
        if blank:
            self.notes.append(f"{split.key}: {blank:,} of {len(part.rows):,} rows have no text in column {text}")
        known = None if part.content is None else digest(part.content, "sequence", text, str(pair))
        size = ids_below(tokenizer)
        examples = encode(rows, encoder, key, longest=self.max_length, content=known, ids_below=size)
        if (np.diff(examples.offsets) == 0).any():
            empty = int(np.flatnonzero(np.diff(examples.offsets) == 0)[0])
            raise ConfigError(
                f"{split.key}: row {part.number(empty)} has no token: an empty "
                "text, and a tokenizer that adds none of its own. Leave such rows out."
            )
        labels = self.numbers.pop(split)
        return examples.with_scalars(labels=labels if indices is None else labels[indices])

    def _streamed(self, split: Split, text: str, pair: str | None, encoder: Encoder, key: str) -> StreamedRows:
        """Stream rows that are tokenised when they are read; their labels are known."""
        rows: Any = split.rows.select_columns([text] if pair is None else [text, pair])

        def example(row: Row) -> Example:
            one = cell_text(row, text)
            encoded = encoder([one if pair is None else (one, cell_text(row, pair))], True)
            found: Example = {name: np.asarray(next(iter(values)), dtype=np.int64) for name, values in encoded.items()}
            if not len(found["input_ids"]):
                raise ConfigError(
                    "it has no token: an empty text, and a tokenizer that adds none of its own. Leave such rows out."
                )
            return found

        return StreamedRows(rows, example, key, {"labels": self.numbers.pop(split)})

    def needs(self) -> ModelNeeds:
        """Require a head with an output for each class, or one for the number."""
        config = {"num_labels": 1} if self.regression else label_config(self.labels)
        return ModelNeeds({**config, "problem_type": self.config.problem_type.value}, self.max_length)

    def collate(self, examples: list[Example]) -> Batch:
        """Collate `input_ids`, `attention_mask` (`token_type_ids`) of shape (batch, longest); `labels` (batch,).

        Of any number of labels these are 0 or 1, shape (batch, labels), float32, as transformers' own loss takes them.
        """
        if self.several:
            sets = torch.from_numpy(np.stack([example["labels"] for example in examples]))
            return {**pad_inputs(examples, self.padding), "labels": sets}
        dtype = torch.float32 if self.regression else torch.int64
        labels = torch.tensor([example["labels"].item() for example in examples], dtype=dtype)
        return {**pad_inputs(examples, self.padding), "labels": labels}

    def count(self, batch: Batch) -> int:
        """Count the examples; -100 is a number like another."""
        return len(batch["labels"])

    def weight(self, batch: Batch) -> float:
        """Count the examples if there is any number of labels: `pos_weight` changes no mean."""
        return self.count(batch) if self.several else super().weight(batch)

    def loss(self, outputs: ModelOutput, batch: Batch) -> torch.Tensor:
        """Compute the loss; for any number of labels the binary cross-entropy, a mean over examples and labels."""
        if not self.several or self.class_weights is None:
            return super().loss(outputs, batch)
        weights = self.class_weights.to(outputs.logits.device)
        return functional.binary_cross_entropy_with_logits(outputs.logits.float(), batch["labels"], pos_weight=weights)

    def running_metrics(self) -> MetricAccumulator:
        """Make the loss; for any number of labels f1 and exact matches, too."""
        return LabelSetMetrics(self.labels) if self.several else super().running_metrics()

    def loss_by_example(self, outputs: ModelOutput, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute losses by example: squares of differences for numbers, means over labels for any number of them."""
        if self.several:
            each = functional.binary_cross_entropy_with_logits(
                outputs.logits.float(), batch["labels"], reduction="none"
            ).mean(dim=1)
        elif self.regression:
            each = (outputs.logits.float().reshape(-1) - batch["labels"]) ** 2
        else:
            return super().loss_by_example(outputs, batch)
        return each, torch.ones_like(each)

    def predictions(self, outputs: ModelOutput, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return classes, or numbers; shape (batch,) each."""
        if not self.regression:
            return super().predictions(outputs, batch)
        return outputs.logits.float().reshape(-1).cpu().numpy(), batch["labels"].cpu().numpy()


def _text_columns(source: Source, split: Split) -> tuple[str, str | None]:
    """Find the columns of the text and the second text."""
    labels = label_columns(source, split)
    pair = named(source.columns, "text_pair_column", split)
    return text_column(source, split, taken=(*labels, pair)), pair
