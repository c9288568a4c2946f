"""Which of two answers a model that was trained on preferences prefers, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch

from optrun.base.errors import ConfigError
from optrun.config.schema.chat_tasks import PreferenceConfig
from optrun.data.chat import ROLES, Chat
from optrun.data.preferences import CHOSEN, REJECTED, Pair, pair_columns, preferences
from optrun.data.source import Split
from optrun.runner.prediction.base import Inputs, Predictor, Values, plain
from optrun.task.chat_encoder import TARGETS, ChatEncoder
from optrun.task.chat_template import no_template, use_template
from optrun.task.pairs import REFERENCE, pair_batch, pair_outputs, pair_scores


class PreferredAnswers(Predictor):
    """Pairs to the answer with the higher reward, the rewards, and the margin between them.

    A reward is beta times the log-ratio to the start model, or without a reference beta times the
    mean log-probability of a token, as in training.
    """

    columns: ClassVar[tuple[str, ...]] = ("text_column",)

    def inspect(self) -> None:
        """Find columns and template, look at every row, and build the reference model."""
        task = self.predicting.task
        assert isinstance(task, PreferenceConfig)
        self.task = task
        self.template = use_template(self.tokenizer, None)
        self.places = pair_columns(self.predicting.source, self.split)
        for first, _ in self._pairs(self.split):
            if isinstance(first, Chat) and self.template is None:
                raise no_template(f"{self.split.key} has conversations")
        self.has_reference = bool(task.loss_type.has_reference)
        if self.has_reference:
            self.reference_model = self.predicting.reference_model()

    def _pairs(self, split: Split) -> Iterable[Pair]:
        roles = ROLES if self.template is None else self.template.roles
        return preferences(split, self.places, roles)

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode both answers as in training.

        Raises:
            ConfigError: A row of which no answer is left.
        """
        part = self.part(numbers)
        longest = self.predicting.max_length
        encoder = ChatEncoder(self.task, self.template, part, self.tokenizer, longest)
        rows: list[Inputs] = []
        for number, pair in zip(numbers, self._pairs(part), strict=True):
            chosen, rejected = (encoder([side], True) for side in pair)
            row: Inputs = {
                "input_ids": np.asarray(chosen["input_ids"][0], dtype=np.int64),
                TARGETS: np.asarray(chosen[TARGETS][0], dtype=np.int64),
                "rejected_ids": np.asarray(rejected["input_ids"][0], dtype=np.int64),
                "rejected_targets": np.asarray(rejected[TARGETS][0], dtype=np.int64),
            }
            if not (row[TARGETS].any() and row["rejected_targets"].any()):
                raise ConfigError(
                    f"{self.split.key}: row {self.split.number(number)} has no answer within"
                    f" data.max_length={longest}: its prompt is longer. Leave such rows out."
                )
            rows.append(row)
        return rows

    def length(self, row: Inputs) -> int:
        """Count the tokens of the longer answer."""
        return max(len(row["input_ids"]), len(row["rejected_ids"]))

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Compare the rewards of a batch."""
        batch = self.predicting.to_device(pair_batch(inputs, self.padding))
        with self.predicting.autocast():
            outputs = pair_outputs(self.predicting.model, batch)
            if self.has_reference:
                reference = pair_outputs(self.reference_model, batch)
                batch[REFERENCE] = reference.logps.float().view(2, -1).T
        scores = pair_scores(outputs, batch, has_reference=self.has_reference)
        rewards = torch.stack([scores.chosen, scores.rejected], dim=1).float().cpu()
        return [
            {
                "prediction": CHOSEN if chosen > rejected else REJECTED,
                "margin": plain(chosen - rejected),
                "rewards_chosen": plain(chosen),
                "rewards_rejected": plain(rejected),
            }
            for chosen, rejected in self.task.beta * rewards
        ]
