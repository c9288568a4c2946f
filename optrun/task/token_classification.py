"""A label for each word: names, parts of speech, spans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.cache import cached_result, digest_if_known
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
    ColumnLabels,
    class_names,
    label_config,
    note_minus_one_labels,
    read_label_lists,
)
from optrun.task.tokens import model_inputs_of, rows_key, tokenize_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.generic import ModelOutput

USUAL_LABEL_LISTS = ("labels", "ner_tags", "tags", "label")
MEAN_F1 = "f1_macro"
"""The main metric of labels that are no entities."""
_CHUNK = 1 << 20

Row = tuple[list[str], list[int]]
"""Words, and the class number of each."""


class TokenClassification(Task):
    """Lists of words to lists of labels.

    The first token of a word has its label; its other tokens have none.

    Raises:
        ConfigError: No lists, lists of unequal length, a label unseen in training, a tokenizer that
            does not say which token belongs to which word.
    """

    columns = ("text_column", "label_column")
    reads_words = True
    predictor = "optrun.runner.predictors:WordLabels"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield the words of each training row, one a line: they are tokenized one by one."""
        split = source.train
        column = words_column(source, split, _labels_column(source, split))
        return map("\n".join, _word_lists(split, column))

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find the classes, the labels of each word, and their scheme of entities.

        Sets `labels`, `label_lists`, `class_numbers` and `scheme`. Without a scheme the main metric
        becomes `f1_macro`; a note says what F1 is over.

        Raises:
            ConfigError: A slow tokenizer, a row without a list of labels, fewer than two classes.
        """
        if not tokenizer.is_fast:
            raise ConfigError(
                f"task=token_classification: {type(tokenizer).__name__} does not say which token"
                " belongs to which word. Name a fast tokenizer with model.tokenizer."
            )
        # 1. Labels and classes.
        self.label_lists: dict[Split, ColumnLabels] = {}
        for split in source.splits:
            column = _labels_column(source, split)
            self.label_lists[split] = read_label_lists(split, column, LABEL_OF_EACH_WORD)
            note_minus_one_labels(source, split, column, self.label_lists[split])
        train_column = _labels_column(source, source.train)
        self.labels = class_names(source, train_column, self.label_lists)
        self.class_numbers = ClassNumbers(self.labels, source)

        # 2. What F1 is over: whole entities if the labels follow a scheme, else labels.
        self.scheme = entities.scheme_of(self.labels)
        if self.scheme is None:
            self.main_metric = MEAN_F1
            note = (
                f"{MEAN_F1} is the mean over labels, which follow no scheme of entities"
                f" ({', '.join(entities.SCHEMES)})"
            )
        else:
            note = (
                f"entities read as {self.scheme}: precision, recall and f1 are those of whole"
                " entities"
            )
        self.notes.append(note)

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read one example for each row with a word; `limit` counts these rows.

        Adds a note on rows without a word, and on words beyond `data.max_length`, whose labels are
        lost.

        Raises:
            ConfigError: No row has a word, words and labels differ in number, a label is no class,
                or no word is within `data.max_length`.
        """
        label_column = _labels_column(source, split)
        column = words_column(source, split, label_column)
        lists = self.label_lists[split]  # the labels of all rows, joined; `offsets` divides them
        offsets = lists.offsets
        assert offsets is not None
        words_per_row = np.diff(offsets)
        _expect_labels_for_words(split, column, label_column, words_per_row)

        # 1. Choose rows: the numbers of those with a word, at most `limit`.
        chosen_rows = self._choose_rows(split, words_per_row, limit, seed)
        takes_all = len(chosen_rows) == len(words_per_row)
        part = split if takes_all else split.take(chosen_rows)

        # 2. Encode them, with the class number of each word: that of each distinct label is looked
        # up, and then taken by the index of the word's label.
        number_of_name = self.class_numbers.numbers_of_names(split, lists)

        def rows() -> Iterator[Row]:
            """Yield the words of each row, and their class numbers."""
            for row, words in zip(chosen_rows.tolist(), _word_lists(part, column), strict=True):
                name_indices = lists.indices[offsets[row] : offsets[row + 1]]
                yield words, number_of_name[name_indices].tolist()

        encoder, key = self._encoder(tokenizer)
        content = digest_if_known(part.content, "words", column, label_column, *self.labels)
        examples = encode(rows, encoder, key, longest=self.max_length, content=content)

        # 3. Count the words whose labels are lost: the first token of each word has its label, so
        # fewer labelled tokens than words are words without one.
        word_count = int(words_per_row[chosen_rows].sum())
        labelled_count = _count_labelled(examples)
        if labelled_count < word_count:
            self.notes.append(
                f"{split.key}: the labels of {word_count - labelled_count} words are lost: these"
                f" words are beyond data.max_length={self.max_length}, or have no token"
            )
        if len(chosen_rows) and not labelled_count:
            raise ConfigError(
                f"{split.key}: no word has a token within data.max_length={self.max_length}. Raise"
                " it."
            )
        return examples

    def _choose_rows(
        self, split: Split, words_per_row: np.ndarray, limit: int | None, seed: int | None
    ) -> np.ndarray:
        """Choose up to `limit` rows with a word, and note how many have none.

        Args:
            split: The rows.
            words_per_row: Number of words of each row.
            limit: The largest number of rows; None: all.
            seed: Draws the rows if they are limited; None: the same draw in every run.

        Raises:
            ConfigError: There are rows, and none has a word.
        """
        rows_with_words = np.flatnonzero(words_per_row)
        without_words = len(words_per_row) - len(rows_with_words)
        if without_words:
            self.notes.append(f"{split.key}: {without_words} rows without a word left out")
            if not len(rows_with_words):
                raise ConfigError(f"{split.key}: no row has a word.")
        indices = chosen(len(rows_with_words), limit, seed=seed)
        return rows_with_words if indices is None else rows_with_words[indices]

    def _encoder(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Encoder, str]:
        """Return an encoder of rows to `input_ids` and `labels`, and a digest of its settings."""

        def encode_batch(batch: list[Row], cut: bool) -> dict[str, list[list[int]]]:
            word_lists = [words for words, _ in batch]
            longest = self.max_length if cut else None
            encoding = tokenize_rows(tokenizer, word_lists, longest, is_split_into_words=True)
            labels = []
            for index, (_, numbers) in enumerate(batch):
                labels.append(_token_labels(encoding.word_ids(index), numbers))
            return {**model_inputs_of(encoding), "labels": labels}

        return encode_batch, rows_key(tokenizer, "words", self.max_length)

    def needs(self) -> ModelNeeds:
        """Require a head with an output for each class."""
        return ModelNeeds(label_config(self.labels), self.max_length)

    def running_metrics(self) -> MetricAccumulator:
        """Construct loss and accuracy over words, and F1 over entities or labels.

        F1 is that of whole entities if the labels follow a scheme, else the mean over labels.
        """
        return WordMetrics(self.labels, whole_entities=self.scheme is not None)


class WordMetrics(SummedMetrics):
    """Loss and accuracy over labelled words; F1 of entities, or the mean F1 over labels.

    Args:
        labels: Names by class number.
        whole_entities: Whether the labels follow a scheme of entities such as IOB: then
            precision, recall and F1 are over entities. One is right if its type, first and last
            word are.
    """

    def __init__(self, labels: list[str], *, whole_entities: bool) -> None:
        own_names = ["precision", "recall", "f1"] if whole_entities else [MEAN_F1]
        no_confusions = np.zeros((len(labels), len(labels)), dtype=np.int64)
        super().__init__(_count_words, ["loss", "accuracy", *own_names], no_confusions, Counter())
        self.labels = labels
        self.whole_entities = whole_entities

    def sum_batch(
        self, outputs: ModelOutput, batch: Batch
    ) -> tuple[np.ndarray, Counter[tuple[str, int]]]:
        """Count confusions of labels, shape (labels, labels), and entities.

        Entities are counted as `entities.count_entities` does, by type and 0 (right), 1
        (predicted) or 2 (actual). The counter is empty if the labels are no entities.
        """
        # 1. Count confusions over the first token of each word.
        labels = batch["labels"].cpu().numpy()
        predicted = outputs.logits.argmax(-1).cpu().numpy()
        is_word = labels != IGNORED
        confusions = metrics.confusion(predicted[is_word], labels[is_word], len(self.labels))
        if not self.whole_entities:
            return confusions, Counter()

        # 2. Count entities in the names of each text's predictions and labels.
        names = np.array(self.labels, dtype=object)
        texts = []
        for row_predicted, row_labels, mask in zip(predicted, labels, is_word, strict=True):
            texts.append((names[row_predicted[mask]].tolist(), names[row_labels[mask]].tolist()))
        return confusions, entities.count_entities(texts)

    def table(self) -> ClassTable:
        """Return the table of entities by type, or of words by label."""
        _, _, confusions, entity_counts = self.sums
        if not self.whole_entities:
            return table_of_classes(self.labels, confusions)
        # The types, such as `LOC` of `B-LOC`; rows of counts are right, predicted and actual ones.
        types = sorted({label.partition("-")[2] for label in self.labels if label != "O"})
        counts = np.zeros((3, len(types)), dtype=np.int64)
        for row in range(3):
            counts[row] = [entity_counts[entity_type, row] for entity_type in types]
        return table_of_counts("entity", types, counts)

    def compute(self) -> dict[str, float]:
        """Compute loss and accuracy over all words, and F1.

        With whole entities, precision, recall and F1 are the micro means over entity types, else
        F1 is the mean over labels. Loss and accuracy are NaN if there was no word.
        """
        loss_sum, count, confusions, _ = self.sums
        count = count or math.nan
        values = {"loss": loss_sum / count, "accuracy": float(np.trace(confusions)) / count}
        if not self.whole_entities:
            return {**values, MEAN_F1: metrics.mean_f1(confusions)}
        micro = self.table().means[0]
        return {**values, "precision": micro.precision, "recall": micro.recall, "f1": micro.f1}


def _count_words(batch: Batch) -> int:
    """Count the labelled words of a batch."""
    return int((batch["labels"] != IGNORED).sum())


def _labels_column(source: Source, split: Split) -> str:
    """Find the column of labels: `data.label_column`, else one of the usual names."""
    return label_column(source, split, USUAL_LABEL_LISTS)


def _word_lists(split: Split, column: str) -> Iterator[list[str]]:
    """Yield the words of each row.

    Raises:
        ConfigError: A row or a word without a value.
    """
    for row, row_words in enumerate(values(split, column)):
        if row_words is None or any(word is None for word in row_words):
            raise ConfigError(
                f"{split.where(row)} has no value, or a missing word, in column {column}."
            )
        yield list(row_words)


def _expect_labels_for_words(
    split: Split, words: str, labels: str, labels_per_row: np.ndarray
) -> None:
    """Refuse the first row with unequal numbers of words and labels.

    The result is cached if all rows are right, so that they are read for it once.

    Args:
        split: The rows.
        words: The column of words.
        labels: The column of labels.
        labels_per_row: Number of labels of each row, shape (rows,).

    Raises:
        ConfigError: With the row and both numbers.
    """

    def check() -> bool:
        pairs = zip(_word_lists(split, words), labels_per_row.tolist(), strict=True)
        for row, (row_words, label_count) in enumerate(pairs):
            if len(row_words) != label_count:
                raise ConfigError(
                    f"{split.where(row)} has {len(row_words)} words and {label_count} labels. Write"
                    " one label for each word."
                )
        return True

    cached_result(digest_if_known("words-1", split.content, words, labels), check)


def _count_labelled(examples: Examples) -> int:
    """Count the tokens with a label; cached, with `_CHUNK` tokens in memory at a time."""

    def count() -> int:
        labels = examples.flat("labels")
        total = 0
        for begin in range(0, len(labels), _CHUNK):
            total += int((labels[begin : begin + _CHUNK] != IGNORED).sum())
        return total

    return cached_result(digest_if_known("labelled-1", examples.origin), count)


def _token_labels(words: list[int | None], numbers: list[int]) -> list[int]:
    """Label the first token of each word with its class, and all other tokens with `IGNORED`.

    Args:
        words: The index of each token's word, as `BatchEncoding.word_ids` returns it; None for a
            special token.
        numbers: The class number of each word.

    Example:
        >>> _token_labels([None, 0, 0, 1, None], [7, 8])
        [-100, 7, -100, 8, -100]
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
