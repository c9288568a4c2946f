"""A label for each word, and the entities that they make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.columns import words_column
from optrun.runner.prediction.base import Inputs, Predictor, Values, plain, probabilities
from optrun.task.entities import entities, scheme_of


class WordLabels(Predictor):
    """Lists of words to lists of labels; of labels of entities also these, whole.

    The first piece of a word has its label, as in training. A word beyond `data.max_length`, or
    without a piece, has none: null.
    """

    def inspect(self) -> None:
        """Find the words, and look at each row of them."""
        self.scheme = scheme_of(self.labels)
        self.words = words_column(self.predicting.source, self.split, "")
        for number, words in enumerate(self.split.rows[self.words]):
            if words is None or any(word is None for word in words):
                raise ConfigError(
                    f"{self.split.key}: row {self.split.number(number)} has no value, or a missing"
                    f" word, in column {self.words}."
                )

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training, with the place of each word's first piece; -1: it has none."""
        inputs: list[Inputs] = []
        for words in self.part(numbers).rows[self.words]:
            first = [-1] * len(words)
            row: Inputs = {"input_ids": np.zeros(0, dtype=np.int64)}
            if words:
                encoding = self.tokenize([list(words)], is_split_into_words=True)
                (row,) = self.arrays(encoding)
                for place, word in reversed(list(enumerate(encoding.word_ids(0)))):
                    if word is not None:
                        first[word] = place
            inputs.append({**row, "words": list(words), "first": first})
        return inputs

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass over the rows with a word."""
        full = [row for row in inputs if len(row["input_ids"])]
        shares: dict[int, np.ndarray] = {}
        if full:
            logits = self.predicting.forward(self.pad_inputs(full)).logits
            shares = dict(zip(map(id, full), probabilities(logits), strict=True))
        return [self._values(row, shares.get(id(row))) for row in inputs]

    def _values(self, row: Inputs, shares: np.ndarray | None) -> Values:
        """Return the labels of one row; shares: shape (longest, classes), None: no word."""
        labels: list[str | None] = []
        certainties: list[float | None] = []
        for place in row["first"]:
            if place < 0 or shares is None:
                labels.append(None)
                certainties.append(None)
                continue
            labels.append(self.labels[int(shares[place].argmax())])
            certainties.append(plain(shares[place].max()))
        values: Values = {"prediction": labels, "probability": certainties}
        if self.scheme:
            values["entities"] = [
                {
                    "type": kind,
                    "start": start,
                    "end": end,
                    "words": row["words"][start:end],
                    "probability": min(filter(None, certainties[start:end])),
                }
                for kind, start, end in entities([label or "O" for label in labels])
            ]
        return values
