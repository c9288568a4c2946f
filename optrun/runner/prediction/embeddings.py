"""Vectors of texts, and how alike two texts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from optrun.runner.prediction.base import Inputs, Predictor, Values, plain
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
        columns = self.predicting.columns
        names = set(self.split.rows.column_names)
        paired = any(names.issuperset(pair) for pair in USUAL_PAIRS)
        if columns.text_pair_column is not None or (paired and columns.text_column is None):
            self.names = [*pair_columns(columns, self.split)]
            self.check_texts(*self.names)
        else:
            self.names = [self.text_column()]

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode each text as in training."""
        longest = self.predicting.max_length
        sides = [encoded(self.tokenizer, self.texts(name, numbers), longest) for name in self.names]
        rows: list[Inputs] = []
        for row in range(len(numbers)):
            rows.append({key: [np.asarray(side[key][row]) for side in sides] for key in sides[0]})
        return self.expect_tokens(rows, numbers)

    def length(self, row: Inputs) -> int:
        """Count the tokens of the longest text; 0 if one of them has none."""
        lengths = [len(ids) for ids in row["input_ids"]]
        return max(lengths) if all(lengths) else 0

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict in one forward pass."""
        batch = pad_texts(inputs, self.padding)
        outputs = self.predicting.forward(batch)
        mask = batch["attention_mask"].to(outputs.last_hidden_state.device)
        vectors = self.pooling(outputs, mask).unflatten(0, (len(inputs), -1))
        if len(self.names) == 2:
            return [{"similarity": plain(cosine)} for cosine in cosines(vectors).cpu()]
        return [
            {"embedding": [plain(value) for value in vector]}
            for vector in vectors[:, 0].cpu().numpy()
        ]
