"""Which of several texts goes with a text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

import numpy as np

from optrun.data.columns import choices_column, named
from optrun.runner.prediction.base import Inputs, Predictor, Shape, Values, plain, probabilities
from optrun.task.multiple_choice import count_choices, pad_choices, pairs
from optrun.task.tokens import encoded


class ChosenTexts(Predictor):
    """Contexts and choices to the choice, its number from 0, and the probability of each."""

    columns: ClassVar[tuple[str, ...]] = (
        "text_column",
        "eval_text_column",
        "text_pair_column",
        "choices_column",
    )

    def inspect(self) -> None:
        """Find the columns, and look at the choices."""
        self.pair = named(self.rows.columns, "text_pair_column", self.split)
        self.choices = choices_column(self.rows.source, self.split)
        count_choices(self.split, self.choices)
        self.text = self.text_column(self.pair, self.choices)

    @property
    def shape(self) -> Shape:
        """The choice, its number, and the probabilities of the row's own."""
        return {"prediction": str, "choice": int, "probabilities": [float]}

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode as in training."""
        part = self.part(numbers)
        rows = list(pairs(part, self.text, self.pair, self.choices))
        made = {
            name: iter(np.asarray(row, dtype=np.int64) for row in ids)
            for name, ids in encoded(self.tokenizer, rows, self.predicting.max_length).items()
        }
        return [
            {
                **{name: list(islice(ids, len(choices))) for name, ids in made.items()},
                "choices": list(choices),
            }
            for choices in part.rows[self.choices]
        ]

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        logits = self.predicting.forward(pad_choices(inputs, self.padding)).logits
        found = []
        for one, scores in zip(inputs, logits, strict=True):
            shares = probabilities(scores[: len(one["choices"])])
            best, each = int(shares.argmax()), [plain(share) for share in shares]
            found.append(
                {"prediction": one["choices"][best], "choice": best, "probabilities": each}
            )
        return found
