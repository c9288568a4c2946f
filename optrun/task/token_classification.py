"""A label for each word: names, parts of speech, spans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.cache import cached_result, key_of
from optrun.data.columns import label_column, values, words_column
from optrun.data.encoded import Encoder
from optrun.data.examples import Examples, chosen, encode
from optrun.data.loader import Batch, ExampleSource
from optrun.data.source import Source, Split
from optrun.task import entities, metrics
from optrun.task.base import ModelNeeds, Task
from optrun.task.class_table import ClassTable, table_of_classes, table_of_counts
from optrun.task.evaluation import IGNORED, MetricAccumulator, SummedMetrics
from optrun.task.labels import (
    LABEL_OF_EACH_WORD,
    ClassNumbers,
    class_names,
    label_config,
    note_minus_one_labels,
    row_label_lists,
)
from optrun.task.tokens import model_inputs_of, rows_key, tokenize_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.generic import ModelOutput

USUAL_LABEL_LISTS = ("labels", "ner_tags", "tags", "label")
MEAN_F1 = "f1_macro"
"""The main metric of labels that are no entities."""
_PIECE = 1 << 20

Row = tuple[list[str], list[int]]
"""Words, and the class number of each."""


class TokenClassification(Task):
    """Lists of words to lists of labels.

    The first piece of a word carries its label; the others have none.

    Raises:
        ConfigError: No lists, lists of unequal length, a label unseen in training, a tokenizer that
            does not say which piece belongs to which word.
    """

    columns = ("text_column", "label_column")
    reads_words = True
    predictor = "optrun.runner.prediction.forward_pass:WordLabels"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield the words of each row, one a line, since each is encoded by itself."""
        split = source.train
        return (
            "\n".join(row)
            for row in _word_lists(
                split, words_column(source, split, _labels_column(source, split))
            )
        )

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find the classes, the labels of each word, and their scheme of entities."""
        if not tokenizer.is_fast:
            raise ConfigError(
                f"task=token_classification: {type(tokenizer).__name__} does not say which piece is"
                " of which word. Name a fast tokenizer with model.tokenizer."
            )
        lists = {split: _labels_column(source, split) for split in source.splits}
        train = source.train
        self.lists = {
            split: row_label_lists(split, name, LABEL_OF_EACH_WORD) for split, name in lists.items()
        }
        for split, row_lists in self.lists.items():
            note_minus_one_labels(source, split, lists[split], row_lists.names, row_lists.places)
        met = {split: row_lists.names for split, row_lists in self.lists.items()}
        self.labels = class_names(source, lists[train], met)
        self.scheme = entities.scheme_of(self.labels)
        self.numbered = ClassNumbers(self.labels, source)
        for name in met[train]:
            self.numbered.of(name, train.key)
        if self.scheme is None:
            self.main_metric = MEAN_F1
        self.notes.append(
            f"entities read as {self.scheme}: precision, recall and f1 are those of whole entities"
            if self.scheme
            else (
                f"{MEAN_F1} is the mean over labels: they are no entities"
                f" ({', '.join(entities.SCHEMES)})"
            )
        )

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read one example for each row with a word.

        Works once for each split: it takes the labels that `inspect` found out of `lists`. Adds a
        note on rows without a word, and on words beyond `data.max_length`.

        Raises:
            ConfigError: No row has a word, words and labels differ in number, or no word is within
                `data.max_length`.
        """
        encoder, key = self._encoder(tokenizer)
        names = _labels_column(source, split)
        words_name = words_column(source, split, names)
        labels = self.lists.pop(split)
        sizes = np.diff(labels.borders)
        _expect_labels_for_words(split, words_name, names, sizes)
        numbers = self.numbered.table(split, *labels)
        full = np.flatnonzero(sizes)
        if len(full) < len(sizes):
            self.notes.append(f"{split.key}: {len(sizes) - len(full)} rows without a word left out")
        if not len(full) and len(sizes):
            raise ConfigError(f"{split.key}: no row has a word.")
        indices = chosen(len(full), limit, seed=seed)
        chosen_rows = full if indices is None else full[indices]
        if len(chosen_rows) == len(sizes) and indices is None:
            part = split
        else:
            part = split.take(chosen_rows)

        def rows() -> Iterator[Row]:
            for row, texts in zip(chosen_rows.tolist(), _word_lists(part, words_name), strict=True):
                yield (
                    texts,
                    numbers[labels.places[labels.borders[row] : labels.borders[row + 1]]].tolist(),
                )

        content = key_of(part.content, "words", words_name, names, *self.labels)
        examples = encode(rows, encoder, key, longest=self.max_length, content=content)
        labelled = _labelled(examples)
        cut = int(sizes[chosen_rows].sum()) - labelled
        if cut > 0:
            self.notes.append(
                f"{split.key}: {cut} words stand beyond data.max_length={self.max_length} or have"
                " no piece"
            )
        if len(chosen_rows) and not labelled:
            raise ConfigError(
                f"{split.key}: no word has a piece within data.max_length={self.max_length}."
            )
        return examples

    def _encoder(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Encoder, str]:
        """Return an encoder of words with class numbers, and a digest of its settings."""

        def encoder(batch: list[Row], cut: bool) -> dict[str, list[list[int]]]:
            texts = [texts for texts, _ in batch]
            longest = self.max_length if cut else None
            encoding = tokenize_rows(tokenizer, texts, longest, is_split_into_words=True)
            labels = [
                _piece_labels(encoding.word_ids(index), numbers)
                for index, (_, numbers) in enumerate(batch)
            ]
            return {**model_inputs_of(encoding), "labels": labels}

        return encoder, rows_key(tokenizer, "words", self.max_length)

    def needs(self) -> ModelNeeds:
        """Require a head with an output for each class."""
        return ModelNeeds(label_config(self.labels), self.max_length)

    def running_metrics(self) -> MetricAccumulator:
        """Make loss and accuracy over words; F1 of whole entities, or the mean F1 over labels."""
        return WordMetrics(self.labels, whole_entities=self.scheme is not None)


class WordMetrics(SummedMetrics):
    """Loss and accuracy over labelled words; F1 of whole entities, or the mean F1 over labels.

    Args:
        labels: Names by number.
        whole_entities: Whether the labels are of a scheme of entities.
    """

    def __init__(self, labels: list[str], *, whole_entities: bool) -> None:
        names = [
            "loss",
            "accuracy",
            *(["precision", "recall", "f1"] if whole_entities else [MEAN_F1]),
        ]
        count_words = lambda batch: int((batch["labels"] != IGNORED).sum())  # noqa: E731
        super().__init__(
            count_words, names, np.zeros((len(labels), len(labels)), dtype=np.int64), Counter()
        )
        self.labels = labels
        self.whole_entities = whole_entities

    def counted(
        self, outputs: ModelOutput, batch: Batch
    ) -> tuple[np.ndarray, Counter[tuple[str, int]]]:
        """Count confusions of labels, and entities."""
        labels = batch["labels"].cpu().numpy()
        predicted = outputs.logits.argmax(-1).cpu().numpy()
        is_word = labels != IGNORED
        counts = metrics.confusion(predicted[is_word], labels[is_word], len(self.labels))
        if not self.whole_entities:
            return counts, Counter()
        names = np.array(self.labels, dtype=object)
        texts = []
        for row_predicted, row_labels, mask in zip(predicted, labels, is_word, strict=True):
            texts.append((names[row_predicted[mask]].tolist(), names[row_labels[mask]].tolist()))
        return counts, entities.count_entities(texts)

    def table(self) -> ClassTable:
        """Return whole entities by type, or words by label."""
        *_, counts, entity_counts = self.sums
        if not self.whole_entities:
            return table_of_classes(self.labels, counts)
        types = sorted({label.partition("-")[2] for label in self.labels if label != "O"})
        counts_by_type = [[entity_counts[kind, index] for kind in types] for index in range(3)]
        return table_of_counts("entity", types, np.array(counts_by_type, dtype=np.int64))

    def compute(self) -> dict[str, float]:
        """Compute metrics over all words; loss and accuracy are NaN if there was none."""
        total, count, counts, _ = self.sums
        count = count or math.nan
        values = {"loss": total / count, "accuracy": float(np.trace(counts)) / count}
        if not self.whole_entities:
            return {**values, MEAN_F1: metrics.mean_f1(counts)}
        micro = self.table().means[0]
        return {**values, "precision": micro.precision, "recall": micro.recall, "f1": micro.f1}


def _labels_column(source: Source, split: Split) -> str:
    return label_column(source, split, USUAL_LABEL_LISTS)


def _word_lists(split: Split, column: str) -> Iterator[list[str]]:
    for row, row_words in enumerate(values(split, column)):
        if row_words is None or any(word is None for word in row_words):
            raise ConfigError(
                f"{split.where(row)} has no value, or a missing word, in column {column}."
            )
        yield list(row_words)


def _expect_labels_for_words(split: Split, words: str, labels: str, sizes: np.ndarray) -> None:
    """Refuse the first row with unequal numbers of words and labels.

    Rows that were looked at are not read again.
    """

    def look() -> bool:
        for row, (texts, size) in enumerate(
            zip(_word_lists(split, words), sizes.tolist(), strict=True)
        ):
            if len(texts) != size:
                raise ConfigError(
                    f"{split.where(row)} has {len(texts)} words and {size} labels. Write one"
                    " label for each word."
                )
        return True

    cached_result(key_of("words-1", split.content, words, labels), look)


def _labelled(examples: Examples) -> int:
    """Count the labelled pieces."""

    def count() -> int:
        marks = examples.flat("labels")
        return sum(
            int((marks[at : at + _PIECE] != IGNORED).sum()) for at in range(0, len(marks), _PIECE)
        )

    return cached_result(key_of("labelled-1", examples.origin), count)


def _piece_labels(words: list[int | None], numbers: list[int]) -> list[int]:
    """Return the label of each piece: that of its word for the first one, else none.

    Args:
        words: Which word each piece is of; None: of none.
        numbers: The class of each word.
    """
    labels = []
    before = None
    for word in words:
        if word is None or word == before:
            labels.append(IGNORED)
        else:
            labels.append(numbers[word])
        before = word
    return labels
