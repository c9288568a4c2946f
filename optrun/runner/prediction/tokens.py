"""A label for each word, and the entities that they make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.columns import words_column
from optrun.runner.prediction.base import Inputs, Predictor, Shape, Values, plain, probabilities
from optrun.task.entities import entities, scheme_of


class WordLabels(Predictor):
    """Lists of words to lists of labels; of labels of entities also these, whole.

    The first piece of a word has its label, as in training. A word beyond `data.max_length`, or
    without a piece, has
    none: null.
    """

    def inspect(self) -> None:
        """Find the words, and look at each row of them."""
        self.scheme = scheme_of(self.labels)
        self.words = words_column(self.rows.source, self.split, "")
        for number, words in enumerate(self.split.rows[self.words]):
            if words is None or any(word is None for word in words):
                raise ConfigError(
                    f"{self.split.key}: row {self.split.number(number)} has no value, or a missing"
                    f" word, in column {self.words}."
                )

    @property
    def shape(self) -> Shape:
        """A label and its probability for each word; entities."""
        entity: Shape = {
            "type": str,
            "start": int,
            "end": int,
            "words": [str],
            "probability": float,
        }
        return {
            "prediction": [str],
            "probability": [float],
            **({"entities": [entity]} if self.scheme else {}),
        }

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training, with the place of each word's first piece; -1: it has none."""
        from transformers import BatchEncoding

        rows = [list(words) for words in self.split.rows.select(list(numbers))[self.words]]
        full = [words for words in rows if words]
        encoded = (
            self.tokenize(full, is_split_into_words=True)
            if full
            else BatchEncoding({"input_ids": []})
        )
        pieces = iter(enumerate(self.arrays(encoded)))
        inputs: list[Inputs] = []
        for words in rows:
            if not words:
                inputs.append({"input_ids": np.zeros(0, dtype=np.int64), "words": [], "first": []})
                continue
            at, ids = next(pieces)
            first = [-1] * len(words)
            for place, word in reversed(list(enumerate(encoded.word_ids(at)))):
                if word is not None:
                    first[word] = place
            inputs.append({**ids, "words": words, "first": first})
        return inputs

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass over the rows with a word."""
        full = [one for one in inputs if len(one["input_ids"])]
        shares = iter(
            probabilities(self.predicting.forward(self.pad_inputs(full)).logits) if full else []
        )
        return [
            self._values(one, next(shares) if len(one["input_ids"]) else None) for one in inputs
        ]

    def _values(self, one: Inputs, shares: np.ndarray | None) -> Values:
        """Return the labels of one row.

        Args:
            one: The row.
            shares: Probabilities of its pieces, shape (longest, classes); None: it has no word.
        """
        labels: list[str | None] = []
        sure: list[float | None] = []
        for place in one["first"]:
            row = None if place < 0 or shares is None else shares[place]
            labels.append(None if row is None else self.labels[int(row.argmax())])
            sure.append(None if row is None else plain(row.max()))
        found: Values = {"prediction": labels, "probability": sure}
        if self.scheme:
            found["entities"] = [
                {
                    "type": kind,
                    "start": start,
                    "end": end,
                    "words": one["words"][start:end],
                    "probability": plain(
                        min(share for share in sure[start:end] if share is not None)
                    ),
                }
                for kind, start, end in entities([label or "O" for label in labels])
            ]
        return found
