"""What stands behind the masks of a text: the likeliest tokens for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.columns import texts
from optrun.runner.prediction.base import Inputs, Predictor, Values, plain, probabilities

TOKENS = 5
"""Likeliest tokens that are written for each mask."""


class MaskedTokens(Predictor):
    """Texts with masks to the likeliest tokens for each mask, and the text with the first ones."""

    def inspect(self) -> None:
        """Find the texts; at least one has a mask."""
        self.text = self.text_column()
        mask = self.tokenizer.mask_token
        if not any(mask in text for text in texts(self.split, self.text)):
            raise ConfigError(
                f"{self.split.key}: no row has {mask} in column {self.text}, so there is nothing to"
                f" fill in. Write {mask} where a token is to be predicted."
            )

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training, one text a row."""
        encoding = self.tokenize(self.texts(self.text, numbers), return_token_type_ids=False)
        return self.expect_tokens(self.arrays(encoding), numbers)

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        logits = self.predicting.forward(self.pad_inputs(inputs)).logits
        rows: list[Values] = []
        for row, row_logits in zip(inputs, logits, strict=True):
            ids = row["input_ids"].copy()
            masks = np.flatnonzero(ids == self.tokenizer.mask_token_id).tolist()
            tokens = []
            for mask, shares in zip(masks, probabilities(row_logits[masks]), strict=True):
                best = np.argsort(-shares, kind="stable")[:TOKENS].tolist()
                ids[mask] = best[0]
                names = [self.tokenizer.decode([token]) for token in best]
                tokens.append(
                    [
                        {"token": name, "probability": plain(shares[token])}
                        for name, token in zip(names, best, strict=True)
                    ]
                )
            text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
            rows.append({"prediction": text, "tokens": tokens})
        return rows
