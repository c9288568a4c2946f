"""Vectors of texts, and how alike two texts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from optrun.base.errors import ConfigError
from optrun.runner.prediction.base import Inputs, Predictor, Shape, Values, plain
from optrun.task.compared import USUAL_PAIRS, pair_columns
from optrun.task.contrastive import cosines
from optrun.task.embedding import pad_texts
from optrun.task.pooling import Pooling
from optrun.task.tokens import encoded


class Embeddings(Predictor):
    """A text to its vector; a pair of texts to their cosine."""

    columns: ClassVar[tuple[str, ...]] = ("text_column", "text_pair_column")

    def inspect(self) -> None:
        """Find the texts: a pair where it is named or has usual names, else one."""
        self.pooling = Pooling.of(self.predicting.model.config)
        own, there = self.rows.columns, self.split.rows.column_names
        paired = own.text_pair_column is not None or any(
            {*pair} <= {*there} for pair in USUAL_PAIRS
        )
        if paired and (own.text_column is None or own.text_pair_column is not None):
            self.names = [*pair_columns(own, self.split)]
            self.read(*self.names)
        else:
            self.names = [self.text_column()]

    @property
    def shape(self) -> Shape:
        """A vector, or a number."""
        return {"similarity": float} if len(self.names) == 2 else {"embedding": [float]}

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode each text as in training."""
        sides = [
            encoded(self.tokenizer, self.texts(name, numbers), self.predicting.max_length)
            for name in self.names
        ]
        found: list[Inputs] = [
            {key: [np.asarray(side[key][at], dtype=np.int64) for side in sides] for key in sides[0]}
            for at in range(len(numbers))
        ]
        for one, number in zip(found, numbers, strict=True):
            if not all(map(len, one["input_ids"])):
                raise ConfigError(
                    f"{self.split.key}: row {self.split.number(number)} has a text without a token."
                )
        return found

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        batch = pad_texts(inputs, self.padding)
        outputs = self.predicting.forward(batch)
        mask = batch["attention_mask"].to(outputs.last_hidden_state.device)
        vectors = self.pooling(outputs, mask).unflatten(0, (len(inputs), -1))
        if len(self.names) == 2:
            return [{"similarity": plain(one)} for one in cosines(vectors).cpu()]
        return [
            {"embedding": [plain(value) for value in one]} for one in vectors[:, 0].cpu().numpy()
        ]
