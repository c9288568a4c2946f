"""What stands behind the masks of a text: the likeliest tokens for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.columns import texts
from optrun.runner.prediction.base import Inputs, Predictor, Shape, Values, plain, probabilities


class MaskedTokens(Predictor):
    """Texts with mask tokens to the `top_k` likeliest tokens for each mask, and the text with the likeliest ones."""

    options: ClassVar[Mapping[str, object]] = {"top_k": 5}

    def inspect(self) -> None:
        """Find the texts; at least one has a mask."""
        self.text = self.text_column()
        self.mask = self.tokenizer.mask_token
        self.top_k = self.given["top_k"]
        entries = len(self.tokenizer)
        if (
            not isinstance(self.top_k, int)
            or isinstance(self.top_k, bool)
            or not 0 < self.top_k <= entries
        ):
            raise ConfigError(
                f"top_k={self.top_k}: expected a whole number from 1 to {entries:,}, the tokens"
                " there are."
            )
        if not any(self.mask in text for text in texts(self.split, self.text)):
            raise ConfigError(
                f"{self.split.key}: no row has {self.mask} in column {self.text}, so there is"
                f" nothing to fill in. Write {self.mask} where a token is to be predicted."
            )

    @property
    def shape(self) -> Shape:
        """The text, and for each mask the tokens."""
        return {"prediction": str, "tokens": [[{"token": str, "probability": float}]]}

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training, one text a row."""
        encoded = self.tokenize(self.texts(self.text, numbers), return_token_type_ids=False)
        return self.expect_tokens(self.arrays(encoded), numbers)

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        logits = self.predicting.forward(self.pad_inputs(inputs)).logits
        found = []
        for one, row in zip(inputs, logits, strict=True):
            ids = one["input_ids"].copy()
            places = np.flatnonzero(ids == self.tokenizer.mask_token_id)
            tokens = []
            for place, shares in zip(places, probabilities(row[places.tolist()]), strict=True):
                best = np.argsort(-shares, kind="stable")[: self.top_k]
                ids[place] = best[0]
                tokens.append(
                    [
                        {
                            "token": self.tokenizer.decode([int(id_)]),
                            "probability": plain(shares[id_]),
                        }
                        for id_ in best
                    ]
                )
            found.append(
                {
                    "prediction": self.tokenizer.decode(ids.tolist(), skip_special_tokens=True),
                    "tokens": tokens,
                }
            )
        return found
