"""What every kind of prediction has: rows to inputs, inputs to values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

import numpy as np

from optrun.base.errors import ConfigError
from optrun.config.schema.task_base import TaskConfig
from optrun.data.columns import USUAL_LABELS, text_column, texts
from optrun.data.loader import Batch
from optrun.data.source import Source, Split
from optrun.task.tokens import NO_TOKEN, encode_to_inputs
from optrun.training.failures import of_memory_in_evaluation
from optrun.training.step import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Inputs = dict[str, Any]
"""What is known of one row: arrays of ids by name, and what its prediction needs besides."""
Values = dict[str, Any]
"""One row's prediction: names of columns to plain values."""


@dataclass
class Predictor(ABC):
    """Predicts the rows of a file; `Task.predictor` names the class of a task.

    Attributes:
        columns: Keys of `data` that it reads, such as `text_column`.
        generates: Whether it takes `generation.KEY`.
        cuts: Whether `data.max_length` cuts its texts.
        model: On its device, in evaluation mode.
        tokenizer: The model's tokenizer, or its image preparation.
        labels: Class names by class id; empty without classes.
        task: Configuration of the task.
        max_length: `data.max_length`.
        precision: Precision of forward passes.
        source: The rows as its only evaluation set; `notes` are shown to the user.
        generation: `generation.KEY`.
    """

    columns: ClassVar[tuple[str, ...]] = ("text_column",)
    generates: ClassVar[bool] = False
    cuts: ClassVar[bool] = True

    model: PreTrainedModel
    tokenizer: Any
    labels: list[str]
    task: TaskConfig
    max_length: int
    precision: Precision
    source: Source
    generation: Mapping[str, Any]

    @property
    def split(self) -> Split:
        """The rows."""
        return self.source.eval_sets[""]

    @property
    def padding(self) -> int:
        """The token id that pads the rows of a batch."""
        return int(getattr(self.tokenizer, "pad_token_id", None) or 0)

    @abstractmethod
    def encode(self) -> list[Inputs]:
        """Encode all rows, in order, before anything is predicted.

        Raises:
            ConfigError: A column is missing, or a row or an option does not fit.
        """

    @abstractmethod
    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict a batch, in its order; draw from torch's seeded generators only."""

    def length(self, row: Inputs) -> int:
        """Count the tokens of one row; rows of like length share a batch."""
        return len(row.get("input_ids", ()))

    def run(self, batch: Batch, call: Callable[..., Any] | None = None, **options: object) -> Any:
        """Run the model, or a method of it, over a batch in the chosen precision."""
        with self.precision.autocast(), of_memory_in_evaluation(batch, "prediction"):
            return (call or self.model)(**self.precision.to_device(batch), **options)

    def text_column(self, *others: str | None) -> str:
        """Find the text column; `others`, labels and targets do not count.

        Raises:
            ConfigError: No column holds texts, or several do.
        """
        columns = self.source.columns
        assert columns is not None
        taken = [columns.label_column, columns.target_column or "target", *others]
        taken += columns.label_columns or ()
        if columns.label_column is None:
            taken += USUAL_LABELS
        return text_column(self.source, self.split, taken)

    def encode_texts(self, *columns: str, **options: bool) -> list[Inputs]:
        """Tokenize one column of texts, or two columns as pairs, as in training.

        Raises:
            ConfigError: A value is not a text, or a row has no token.
        """
        sides = [list(texts(self.split, column)) for column in columns]
        rows = sides[0] if len(sides) == 1 else list(zip(*sides, strict=True))
        arrays = encode_to_inputs(self.tokenizer, rows, self.max_length, **options)
        inputs = []
        for row in range(len(rows)):
            self.expect_tokens(row, arrays["input_ids"][row])
            inputs.append({name: np.asarray(arrays[name][row], np.int64) for name in arrays})
        return inputs

    def expect_tokens(self, row: int, ids: object) -> None:
        """Refuse a row without a token.

        Raises:
            ConfigError: The message names the row by number.
        """
        if not ids:
            raise ConfigError(f"{self.split.where(row)} has no token: {NO_TOKEN}")


def plain(number: SupportsFloat) -> float:
    """Convert a float32 to its shortest exact decimal.

    Example:
        >>> plain(np.float32(0.1))
        0.1
    """
    return float(str(np.float32(float(number))))
