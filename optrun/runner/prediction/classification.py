"""Labels with probabilities, and numbers: of texts, pairs of texts, and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from optrun.data.columns import image_column, named
from optrun.data.images import Images
from optrun.runner.prediction.base import (
    Inputs,
    Predictor,
    Shape,
    Values,
    plain,
    probabilities,
    sigmoids,
)


class ClassPredictor(Predictor):
    """Logits of shape (batch, classes) to a label and the probability of each."""

    @property
    def shape(self) -> Shape:
        """Label, its probability, and those of all labels."""
        return {
            "prediction": str,
            "probability": float,
            "probabilities": dict.fromkeys(self.labels, float),
        }

    def values(self, logits: torch.Tensor) -> list[Values]:
        """Convert logits of shape (batch, classes) to predictions."""
        found: list[Values] = []
        for row in probabilities(logits):
            best, shares = self.labels[int(row.argmax())], self.shares(row)
            found.append({"prediction": best, "probability": shares[best], "probabilities": shares})
        return found

    def shares(self, row: np.ndarray) -> dict[str, float]:
        """Map each label to its probability; shape (classes,)."""
        return {label: plain(share) for label, share in zip(self.labels, row, strict=True)}


class TextClasses(ClassPredictor):
    """Texts, or pairs of texts, to a label, several labels, or a number."""

    columns: ClassVar[tuple[str, ...]] = ("text_column", "eval_text_column", "text_pair_column")

    def inspect(self) -> None:
        """Find the texts."""
        self.regression, self.several = (
            self.predicting.task.of_numbers,
            self.predicting.task.of_sets,
        )
        self.pair = named(self.rows.columns, "text_pair_column", self.split)
        self.text = self.text_column(self.pair)

    @property
    def shape(self) -> Shape:
        """A number, or labels."""
        if self.several:
            return {"prediction": [str], "probabilities": dict.fromkeys(self.labels, float)}
        return {"prediction": float} if self.regression else super().shape

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training."""
        pairs = None if self.pair is None else self.texts(self.pair, numbers)
        return self.expect_tokens(
            self.arrays(self.tokenize(self.texts(self.text, numbers), pairs)), numbers
        )

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass.

        Of several labels those with a probability above one half.
        """
        logits = self.predicting.forward(self.pad_inputs(inputs)).logits
        if self.regression:
            return [{"prediction": plain(number)} for number in logits.float().reshape(-1).cpu()]
        if not self.several:
            return self.values(logits)
        rows = [self.shares(row) for row in sigmoids(logits)]
        return [
            {"prediction": [name for name in row if row[name] > 0.5], "probabilities": row}
            for row in rows
        ]


class ImageClasses(ClassPredictor):
    """Images to labels."""

    columns: ClassVar[tuple[str, ...]] = ("image_column",)
    cuts: ClassVar[bool] = False

    def inspect(self) -> None:
        """Find the images; each is opened when its turn comes."""
        size = getattr(self.predicting.task, "image_size", None)
        self.prepare = self.tokenizer if size is None else self.tokenizer.resized(size)
        self.images = Images(self.split, image_column(self.rows.source, self.split))

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training."""
        return [{"pixel_values": self.prepare(self.images[number].decoded())} for number in numbers]

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        pixels = torch.from_numpy(np.stack([one["pixel_values"] for one in inputs]))
        return self.values(self.predicting.forward({"pixel_values": pixels}).logits)
