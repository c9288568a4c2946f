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
from optrun.runner.prediction.base import Inputs, Predictor, Shape, Values, plain
from optrun.task.chat_encoder import TARGETS, ChatEncoder
from optrun.task.chat_template import no_template, use_template
from optrun.task.pairs import REFERENCE, pair_batch, pair_outputs, pair_scores


class PreferredAnswers(Predictor):
    """Pairs to the answer with the higher reward, the rewards, and the margin of the chosen over the rejected one.

    A reward is beta times the log-ratio to the start model, or without a reference beta times the
    mean log-probability of a token, as in training.
    """

    columns: ClassVar[tuple[str, ...]] = ("text_column",)

    def inspect(self) -> None:
        """Find the columns and the template, look at every row, and build the start model where there is one."""
        task = self.predicting.task
        assert isinstance(task, PreferenceConfig)
        self.task = task
        self.template = use_template(self.tokenizer, None)
        self.places = pair_columns(self.rows.source, self.split)
        for first, _ in self._pairs(self.split):
            if isinstance(first, Chat) and self.template is None:
                raise no_template(f"{self.split.key} has conversations")
        self.start = self.predicting.start() if task.loss_type.has_reference else None

    def _pairs(self, split: Split) -> Iterable[Pair]:
        return preferences(
            split, self.places, ROLES if self.template is None else self.template.roles
        )

    @property
    def shape(self) -> Shape:
        """The preferred answer, the margin, and both rewards."""
        return {
            "prediction": str,
            "margin": float,
            "rewards_chosen": float,
            "rewards_rejected": float,
        }

    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode both answers as in training.

        Raises:
            ConfigError: A row of which no answer is left.
        """
        part = self.part(numbers)
        encoder = ChatEncoder(
            self.task, self.template, part, self.tokenizer, self.predicting.max_length
        )
        found: list[Inputs] = []
        for number, pair in zip(numbers, self._pairs(part), strict=True):
            first, second = (
                {
                    name: np.asarray(values[0], dtype=np.int64)
                    for name, values in encoder([side], True).items()
                }
                for side in pair
            )
            if not (first[TARGETS].any() and second[TARGETS].any()):
                raise ConfigError(
                    f"{self.split.key}: row {self.split.number(number)} has no answer within"
                    f" data.max_length={self.predicting.max_length}: its prompt is longer. Leave"
                    " such rows out."
                )
            found.append(
                {**first, "rejected_ids": second["input_ids"], "rejected_targets": second[TARGETS]}
            )
        return found

    def length(self, one: Inputs) -> int:
        """Count the tokens of the longer answer."""
        return max(len(one["input_ids"]), len(one["rejected_ids"]))

    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Compare the rewards of a batch."""
        batch = self.predicting.to_device(pair_batch(inputs, self.padding))
        with self.predicting.autocast():
            outputs = pair_outputs(self.predicting.model, batch)
            if self.start is not None:
                batch[REFERENCE] = pair_outputs(self.start, batch).logps.float().view(2, -1).T
        scores = pair_scores(outputs, batch, has_reference=self.start is not None)
        rewards = (
            self.task.beta * torch.stack([scores.chosen, scores.rejected], dim=1).float().cpu()
        )
        return [
            {
                "prediction": CHOSEN if chosen > rejected else REJECTED,
                "margin": plain(chosen - rejected),
                "rewards_chosen": plain(chosen),
                "rewards_rejected": plain(rejected),
            }
            for chosen, rejected in rewards
        ]
