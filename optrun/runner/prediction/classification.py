"""Labels with probabilities, and numbers: of texts, pairs of texts, and images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from optrun.data.columns import image_column, named
from optrun.data.images import Images
from optrun.runner.prediction.base import Inputs, Predictor, Values, plain, probabilities, sigmoids


class ClassPredictor(Predictor):
    """Logits of shape (batch, classes) to a label and the probability of each."""

    @property
    def shape(self) -> dict[str, Any]:
        """Label, its probability, and those of all labels."""
        return {"prediction": str, "probability": float, "probabilities": dict.fromkeys(self.labels, float)}

    def values(self, logits: torch.Tensor) -> list[Values]:
        """Convert logits of shape (batch, classes) to predictions."""
        found = []
        for row in probabilities(logits):
            best = int(row.argmax())
            shares = {label: plain(share) for label, share in zip(self.labels, row, strict=True)}
            found.append(
                {"prediction": self.labels[best], "probability": shares[self.labels[best]], "probabilities": shares}
            )
        return found


class TextClasses(ClassPredictor):
    """Texts, or pairs of texts, to a label, several labels, or a number."""

    columns: ClassVar[tuple[str, ...]] = ("text_column", "eval_text_column", "text_pair_column")

    def inspect(self) -> None:
        """Find the texts."""
        self.regression, self.several = self.predicting.task.of_numbers, self.predicting.task.of_sets
        self.pair = named(self.rows.columns, "text_pair_column", self.split)
        self.text = self.text_column(self.pair)

    @property
    def shape(self) -> dict[str, Any]:
        """A number, or labels."""
        if self.several:
            return {"prediction": [str], "probabilities": dict.fromkeys(self.labels, float)}
        return {"prediction": float} if self.regression else super().shape

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training."""
        pairs = None if self.pair is None else self.texts(self.pair, numbers)
        encoded = self.tokenizer(
            self.texts(self.text, numbers),
            pairs,
            truncation=True,
            max_length=self.predicting.max_length,
            return_attention_mask=False,
            verbose=False,
        )
        names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
        rows = zip(*(encoded[name] for name in names), strict=True)
        inputs = [{name: np.asarray(ids, dtype=np.int64) for name, ids in zip(names, row, strict=True)} for row in rows]
        return self.expect_tokens(inputs, numbers)

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        logits = self.predicting.forward(self.pad_inputs(inputs)).logits
        if self.regression:
            return [{"prediction": plain(number)} for number in logits.float().reshape(-1).cpu()]
        return self._sets(logits) if self.several else self.values(logits)

    def _sets(self, logits: torch.Tensor) -> list[Values]:
        """Choose the labels with a probability above one half, and give the probability of each."""
        found = []
        for row in sigmoids(logits):
            shares = {label: plain(share) for label, share in zip(self.labels, row, strict=True)}
            found.append(
                {"prediction": [label for label in self.labels if shares[label] > 0.5], "probabilities": shares}
            )
        return found


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
