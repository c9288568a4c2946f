"""What one forward pass says of a row: labels, numbers, filled masks, vectors."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from optrun.base.errors import ConfigError
from optrun.data.columns import image_column, named_column, words_column
from optrun.data.images import Images
from optrun.runner.prediction.base import Inputs, Predictor, Values, plain
from optrun.task.base import pad_inputs
from optrun.task.contrastive import cosines
from optrun.task.embedding import pad_texts
from optrun.task.embedding_columns import USUAL_PAIRS, pair_columns
from optrun.task.entities import entities, scheme_of
from optrun.task.pooling import Pooling
from optrun.task.tokens import model_inputs_of, tokenize_rows

TOKENS = 5
"""Likeliest tokens that are written for each mask."""


class TextClasses(Predictor):
    """Predicts a label, several labels or a number from a text or a pair of texts."""

    columns: ClassVar[tuple[str, ...]] = ("text_column", "text_pair_column")

    def encode(self) -> list[Inputs]:
        """Encode as in training."""
        pair = named_column(self.source.columns, "text_pair_column", self.split)
        text = self.text_column(pair)
        if pair is None:
            return self.encode_texts(text)
        return self.encode_texts(text, pair)

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass; multi-label rows get all labels above 0.5."""
        logits = self.run(pad_inputs(inputs, self.padding)).logits.float().cpu()
        if self.task.of_numbers:
            return [{"prediction": plain(number)} for number in logits.reshape(-1)]
        if not self.task.of_sets:
            return [self.likeliest(shares) for shares in logits.softmax(-1)]
        predictions: list[Values] = []
        for shares in map(self.by_label, logits.sigmoid()):
            labels = [label for label in shares if shares[label] > 0.5]
            predictions.append({"prediction": labels, "probabilities": shares})
        return predictions

    def likeliest(self, row: torch.Tensor) -> Values:
        """Return the likeliest label and all probabilities; row: shape (classes,)."""
        shares = self.by_label(row)
        label = max(shares, key=shares.__getitem__)
        return {"prediction": label, "probability": shares[label], "probabilities": shares}

    def by_label(self, row: torch.Tensor) -> dict[str, float]:
        """Map each label to its probability; row: shape (classes,)."""
        return {label: plain(share) for label, share in zip(self.labels, row, strict=True)}


class ImageClasses(TextClasses):
    """Predicts a label from an image."""

    columns: ClassVar[tuple[str, ...]] = ("image_column",)
    cuts: ClassVar[bool] = False

    def encode(self) -> list[Inputs]:
        """Return the images unopened; `predict` opens them."""
        images = Images(self.split, image_column(self.source, self.split))
        return [{"image": images[row]} for row in range(len(self.split.rows))]

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Prepare images as in training, and predict in one forward pass."""
        size = getattr(self.task, "image_size", None)
        prepare = self.tokenizer if size is None else self.tokenizer.resized(size)
        pixels = np.stack([prepare(row["image"].decoded()) for row in inputs])
        logits = self.run({"pixel_values": torch.from_numpy(pixels)}).logits
        return [self.likeliest(shares) for shares in logits.float().cpu().softmax(-1)]


class WordLabels(Predictor):
    """Predicts a label for each word of a row, and whole entities if labels are IOB tags.

    The first token of a word decides, as in training. A word without a token, or beyond
    `data.max_length`, gets null.
    """

    def encode(self) -> list[Inputs]:
        """Encode as in training; `first` holds each word's first token position, or None."""
        inputs = []
        for row, words in enumerate(self.split.rows[words_column(self.source, self.split, "")]):
            if words is None or None in words:
                raise ConfigError(f"{self.split.where(row)} has no words, or a missing word.")
            # A row without words goes through the model with one, whose label is left out.
            encoding = tokenize_rows(
                self.tokenizer, [words or ["-"]], self.max_length, is_split_into_words=True
            )
            word_ids = encoding.word_ids(0)
            first = [word_ids.index(at) if at in word_ids else None for at in range(len(words))]
            arrays = {name: np.asarray(ids[0]) for name, ids in model_inputs_of(encoding).items()}
            inputs.append({**arrays, "words": words, "first": first})
        return inputs

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        shares = self.run(pad_inputs(inputs, self.padding)).logits.float().softmax(-1).cpu()
        return [self._values(row, shares[at]) for at, row in enumerate(inputs)]

    def _values(self, row: Inputs, shares: torch.Tensor) -> Values:
        """Build the labels of one row from probabilities of shape (tokens, classes)."""
        labels: list[str | None] = [None] * len(row["words"])
        certainties: list[float | None] = [None] * len(row["words"])
        for word, piece in enumerate(row["first"]):
            if piece is not None:
                labels[word] = self.labels[int(shares[piece].argmax())]
                certainties[word] = plain(shares[piece].max())
        values: Values = {"prediction": labels, "probability": certainties}
        if scheme_of(self.labels):
            values["entities"] = []
            for kind, start, end in entities([label or "O" for label in labels]):
                words = row["words"][start:end]
                certainty = min(filter(None, certainties[start:end]))
                entity = {"type": kind, "start": start, "end": end, "words": words}
                values["entities"].append({**entity, "probability": certainty})
        return values


class MaskedTokens(Predictor):
    """Predicts the likeliest tokens for each mask, and the text filled with the first."""

    def encode(self) -> list[Inputs]:
        """Encode one text per row as in training; at least one row must have a mask."""
        column = self.text_column()
        rows = self.encode_texts(column, return_token_type_ids=False)
        if not any(self.tokenizer.mask_token_id in row["input_ids"] for row in rows):
            mask = self.tokenizer.mask_token
            raise ConfigError(
                f"{self.split.key}: no row has {mask} in column {column}, so there is nothing to"
                f" fill in. Write {mask} where a token is to be predicted."
            )
        return rows

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        logits = self.run(pad_inputs(inputs, self.padding)).logits.float().cpu()
        predictions: list[Values] = []
        for row, row_logits in zip(inputs, logits, strict=True):
            ids = row["input_ids"].copy()
            tokens = []
            for position in np.flatnonzero(ids == self.tokenizer.mask_token_id):
                best = row_logits[position].softmax(-1).topk(TOKENS)
                ids[position] = best.indices[0]
                names = map(self.tokenizer.decode, best.indices)
                pairs = zip(names, map(plain, best.values), strict=True)
                tokens.append([{"token": name, "probability": share} for name, share in pairs])
            text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
            predictions.append({"prediction": text, "tokens": tokens})
        return predictions


class Embeddings(Predictor):
    """Computes the vector of a text, or the cosine of a pair of texts."""

    columns: ClassVar[tuple[str, ...]] = ("text_column", "text_pair_column")

    def encode(self) -> list[Inputs]:
        """Encode pairs if their columns are named or have usual names, else single texts.

        Each input of a row is a list with one array for each text.
        """
        columns = self.source.columns
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
        batch = pad_texts(inputs, self.padding)
        outputs = self.run(batch)
        mask = batch["attention_mask"].to(outputs.last_hidden_state.device)
        pooled = Pooling.of(self.model.config)(outputs, mask)
        vectors = pooled.unflatten(0, (len(inputs), -1))
        if vectors.shape[1] == 2:
            return [{"similarity": plain(cosine)} for cosine in cosines(vectors).cpu()]
        return [{"embedding": list(map(plain, row))} for row in vectors[:, 0].cpu()]
