"""What one forward pass says of a row: labels, numbers, filled masks, vectors."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from optrun.base.errors import ConfigError
from optrun.data.columns import image_column, named, words_column
from optrun.data.images import Images
from optrun.runner.prediction.base import Inputs, Predictor, Values, plain, probabilities
from optrun.task.base import pad_inputs
from optrun.task.contrastive import cosines
from optrun.task.embedding import pad_texts
from optrun.task.embedding_columns import USUAL_PAIRS, pair_columns
from optrun.task.entities import entities, scheme_of
from optrun.task.pooling import Pooling
from optrun.task.tokens import inputs_in, tokenized

TOKENS = 5
"""Likeliest tokens that are written for each mask."""


class TextClasses(Predictor):
    """Texts, or pairs of texts, to a label, several labels, or a number."""

    columns: ClassVar[tuple[str, ...]] = ("text_column", "eval_text_column", "text_pair_column")

    def encode(self) -> list[Inputs]:
        """Encode as in training."""
        pair = named(self.predicting.source.columns, "text_pair_column", self.split)
        text = self.text_column(pair)
        return self.encode_texts(text) if pair is None else self.encode_texts(text, pair)

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass; of several labels those with a probability above 0.5."""
        logits = self.predicting.run(pad_inputs(inputs, self.padding)).logits
        if self.predicting.task.of_numbers:
            return [{"prediction": plain(number)} for number in logits.float().reshape(-1).cpu()]
        if not self.predicting.task.of_sets:
            return self.classes(logits)
        predictions: list[Values] = []
        for row in map(self.by_label, logits.float().sigmoid().cpu().numpy()):
            labels = [label for label in row if row[label] > 0.5]
            predictions.append({"prediction": labels, "probabilities": row})
        return predictions

    def classes(self, logits: torch.Tensor) -> list[Values]:
        """Convert logits of shape (batch, classes) to a label with the probability of each."""
        predictions: list[Values] = []
        for row in map(self.by_label, probabilities(logits)):
            label = max(row, key=row.__getitem__)
            values = {"prediction": label, "probability": row[label], "probabilities": row}
            predictions.append(values)
        return predictions

    def by_label(self, row: np.ndarray) -> dict[str, float]:
        """Map each label to its probability; shape (classes,)."""
        return {label: plain(share) for label, share in zip(self.labels, row, strict=True)}


class ImageClasses(TextClasses):
    """Images to labels."""

    columns: ClassVar[tuple[str, ...]] = ("image_column",)
    cuts: ClassVar[bool] = False

    def encode(self) -> list[Inputs]:
        """Find the images; each is opened when its turn comes."""
        images = Images(self.split, image_column(self.predicting.source, self.split))
        return [{"image": images[row]} for row in range(len(self.split.rows))]

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Prepare images as in training, and predict in one forward pass."""
        size = getattr(self.predicting.task, "image_size", None)
        prepare = self.tokenizer if size is None else self.tokenizer.resized(size)
        pixels = np.stack([prepare(row["image"].decoded()) for row in inputs])
        batch = {"pixel_values": torch.from_numpy(pixels)}
        return self.classes(self.predicting.run(batch).logits)


class WordLabels(Predictor):
    """Lists of words to lists of labels; of labels of entities also these, whole.

    The first piece of a word has its label, as in training. A word beyond `data.max_length`, or
    without a piece, has none: null.
    """

    def encode(self) -> list[Inputs]:
        """Encode as in training, with the place of each word's first piece; None: it has none."""
        column = words_column(self.predicting.source, self.split, "")
        return [
            self._encoded(row, row_words) for row, row_words in enumerate(self.split.rows[column])
        ]

    def _encoded(self, row: int, words: list[str | None] | None) -> Inputs:
        if words is None or None in words:
            raise ConfigError(f"{self.split.where(row)} has no words, or a missing word.")
        if not words:
            return {"words": [], "first": []}
        encoding = tokenized(
            self.tokenizer, [words], self.predicting.max_length, is_split_into_words=True
        )
        word_ids = encoding.word_ids(0)
        first = [word_ids.index(word) if word in word_ids else None for word in range(len(words))]
        inputs = {name: np.asarray(ids[0]) for name, ids in inputs_in(encoding).items()}
        return {**inputs, "words": words, "first": first}

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass over the rows with a word."""
        shares = np.zeros((len(inputs), 0, len(self.labels)))
        full = [row for row in inputs if row["words"]]
        if full:
            shares = probabilities(self.predicting.run(pad_inputs(full, self.padding)).logits)
        rows = iter(shares)
        return [self._values(row, next(rows) if row["words"] else shares) for row in inputs]

    def _values(self, row: Inputs, shares: np.ndarray) -> Values:
        """Return the labels of one row, given the shares of its pieces, (pieces, classes)."""
        labels: list[str | None] = []
        certainties: list[float | None] = []
        for first in row["first"]:
            best = None if first is None else int(shares[first].argmax())
            labels.append(None if best is None else self.labels[best])
            certainties.append(None if best is None else plain(shares[first][best]))
        values: Values = {"prediction": labels, "probability": certainties}
        if scheme_of(self.labels):
            spans = entities([label or "O" for label in labels])
            values["entities"] = [
                {
                    "type": kind,
                    "start": start,
                    "end": end,
                    "words": row["words"][start:end],
                    "probability": min(filter(None, certainties[start:end])),
                }
                for kind, start, end in spans
            ]
        return values


class MaskedTokens(Predictor):
    """Texts with masks to the likeliest tokens for each mask, and the text with the first ones."""

    def encode(self) -> list[Inputs]:
        """Encode as in training, one text a row; at least one has a mask."""
        column = self.text_column()
        mask = self.tokenizer.mask_token
        rows = self.encode_texts(column, return_token_type_ids=False)
        if not any(self.tokenizer.mask_token_id in row["input_ids"] for row in rows):
            raise ConfigError(
                f"{self.split.key}: no row has {mask} in column {column}, so there is nothing to"
                f" fill in. Write {mask} where a token is to be predicted."
            )
        return rows

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        logits = self.predicting.run(pad_inputs(inputs, self.padding)).logits
        predictions: list[Values] = []
        for row, row_logits in zip(inputs, logits, strict=True):
            ids = row["input_ids"].copy()
            masks = np.flatnonzero(ids == self.tokenizer.mask_token_id)
            tokens = []
            for position, shares in zip(masks, probabilities(row_logits[masks]), strict=True):
                best = np.argsort(-shares, kind="stable")[:TOKENS].tolist()
                ids[position] = best[0]
                tokens.append([self._named(token, shares) for token in best])
            text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
            predictions.append({"prediction": text, "tokens": tokens})
        return predictions

    def _named(self, token: int, shares: np.ndarray) -> Values:
        """Write a token and its probability."""
        return {"token": self.tokenizer.decode([token]), "probability": plain(shares[token])}


class Embeddings(Predictor):
    """A text to its vector; a pair of texts to their cosine."""

    columns: ClassVar[tuple[str, ...]] = ("text_column", "text_pair_column")

    def encode(self) -> list[Inputs]:
        """Encode each text as in training: a pair where it is named or has usual names, else one.

        The inputs of a row are lists with an array for each text.
        """
        columns = self.predicting.source.columns
        assert columns is not None
        names = set(self.split.rows.column_names)
        paired = any(names.issuperset(pair) for pair in USUAL_PAIRS)
        if columns.text_pair_column is not None or (paired and columns.text_column is None):
            sides = [self.encode_texts(name) for name in pair_columns(columns, self.split)]
        else:
            sides = [self.encode_texts(self.text_column())]
        rows = zip(*sides, strict=True)
        return [{name: [side[name] for side in row] for name in row[0]} for row in rows]

    def length(self, row: Inputs) -> int:
        """Count the tokens of the longest text."""
        return max(len(ids) for ids in row["input_ids"])

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        pooling = Pooling.of(self.predicting.model.config)
        batch = pad_texts(inputs, self.padding)
        outputs = self.predicting.run(batch)
        mask = batch["attention_mask"].to(outputs.last_hidden_state.device)
        vectors = pooling(outputs, mask).unflatten(0, (len(inputs), -1))
        if vectors.shape[1] == 2:
            return [{"similarity": plain(cosine)} for cosine in cosines(vectors).cpu()]
        rows = vectors[:, 0].cpu().numpy()
        return [{"embedding": list(map(plain, row))} for row in rows]
