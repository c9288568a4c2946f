"""Labels with probabilities, and numbers: of texts, pairs of texts, and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from optrun.data.columns import image_column, named
from optrun.data.images import Images
from optrun.runner.prediction.base import Inputs, Predictor, Values, plain, probabilities


class ClassPredictor(Predictor):
    """Logits of shape (batch, classes) to a label and the probability of each."""

    def values(self, logits: torch.Tensor) -> list[Values]:
        """Convert logits of shape (batch, classes) to predictions."""
        rows: list[Values] = []
        for row in probabilities(logits):
            shares = self.by_label(row)
            label = self.labels[int(row.argmax())]
            rows.append(
                {"prediction": label, "probability": shares[label], "probabilities": shares}
            )
        return rows

    def by_label(self, row: np.ndarray) -> dict[str, float]:
        """Map each label to its probability; shape (classes,)."""
        return {label: plain(share) for label, share in zip(self.labels, row, strict=True)}


class TextClasses(ClassPredictor):
    """Texts, or pairs of texts, to a label, several labels, or a number."""

    columns: ClassVar[tuple[str, ...]] = ("text_column", "eval_text_column", "text_pair_column")

    def inspect(self) -> None:
        """Find the texts."""
        self.pair = named(self.predicting.columns, "text_pair_column", self.split)
        self.text = self.text_column(self.pair)
        if self.pair is not None:
            self.check_texts(self.pair)

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training."""
        pairs = None if self.pair is None else self.texts(self.pair, numbers)
        encoding = self.tokenize(self.texts(self.text, numbers), pairs)
        return self.expect_tokens(self.arrays(encoding), numbers)

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass; of several labels those with a probability above 0.5."""
        logits = self.predicting.forward(self.pad_inputs(inputs)).logits
        if self.predicting.task.of_numbers:
            return [{"prediction": plain(number)} for number in logits.float().reshape(-1).cpu()]
        if not self.predicting.task.of_sets:
            return self.values(logits)
        rows = [self.by_label(row) for row in logits.float().sigmoid().cpu().numpy()]
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
        self.images = Images(self.split, image_column(self.predicting.source, self.split))

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training."""
        return [{"pixel_values": self.prepare(self.images[number].decoded())} for number in numbers]

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        pixels = torch.from_numpy(np.stack([row["pixel_values"] for row in inputs]))
        return self.values(self.predicting.forward({"pixel_values": pixels}).logits)
