"""What every kind of prediction has: its columns, rows to inputs, inputs to values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

import numpy as np
import torch

from optrun.base.errors import ConfigError
from optrun.config.schema.data import ColumnsConfig
from optrun.config.schema.task_base import TaskConfig
from optrun.data.columns import USUAL_LABELS, text_column, texts
from optrun.data.loader import Batch
from optrun.data.source import Source, Split
from optrun.task.base import pad

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel
    from transformers.utils.generic import ModelOutput

Inputs = dict[str, Any]
"""What is known of one row: arrays of ids by name, and what its prediction needs besides."""
Values = dict[str, Any]
"""One row's prediction: names of columns to plain values."""


@dataclass
class Predicting:
    """A trained model, how it is run, and the rows that predictions are asked for."""

    model: PreTrainedModel
    """On its device, in evaluation mode."""
    tokenizer: Any
    """Its tokenizer; its image preparation where the task is about images."""
    labels: list[str]
    """Names of the classes by number; empty where there are none."""
    task: TaskConfig
    max_length: int
    """`data.max_length`."""
    to_device: Callable[[Batch], Batch]
    autocast: Callable[[], AbstractContextManager[object]]
    reference_model: Callable[[], Callable[..., object]]
    """Builds the model that training started from, called as `model` is."""
    split: Split
    """The rows."""
    columns: ColumnsConfig
    """Names of the columns: of the run, and of the command line."""
    generation: Mapping[str, object]
    """`generation.KEY`."""
    notes: list[str] = field(default_factory=list)
    """What was decided where nothing was said; shown to the user."""

    @property
    def source(self) -> Source:
        """The rows as an evaluation set, as tasks look for their columns."""
        trained = Split(self.split.rows, "data.train")
        return Source(trained, {"": self.split}, self.columns, notes=self.notes)

    def forward(self, batch: Batch) -> ModelOutput:
        """Run the model over a batch in the chosen precision."""
        with self.autocast():
            outputs: ModelOutput = self.model(**self.to_device(batch))
        return outputs


class Predictor(ABC):
    """Predictions for the rows of a file; `Task.predictor` names the one of a task.

    Attributes:
        columns: Keys of `data` that it reads, such as `text_column`.
        generates: Whether it takes `generation.KEY`.
        cuts: Whether `data.max_length` cuts its texts.

    Raises:
        ConfigError: A column that is missing, a row that does not fit.
    """

    columns: ClassVar[tuple[str, ...]] = ("text_column", "eval_text_column")
    generates: ClassVar[bool] = False
    cuts: ClassVar[bool] = True

    def __init__(self, predicting: Predicting) -> None:
        self.predicting = predicting
        self.tokenizer = predicting.tokenizer
        self.labels = predicting.labels
        self.split = predicting.split
        padding = getattr(self.tokenizer, "pad_token_id", None)
        self.padding = 0 if padding is None else int(padding)
        self.inspect()

    @abstractmethod
    def inspect(self) -> None:
        """Find the columns and look at every row, before anything is predicted.

        Raises:
            ConfigError: A column that is missing, a row or an option that does not fit.
        """

    @abstractmethod
    def encode(self, numbers: Sequence[int]) -> list[Inputs]:
        """Encode some rows, by their indices."""

    @abstractmethod
    def predict(self, inputs: list[Inputs]) -> list[Values]:
        """Predict a batch, in its order; what is drawn comes from torch's seeded generators."""

    def length(self, row: Inputs) -> int:
        """Count the tokens of one row, by which rows share a batch."""
        return len(row.get("input_ids", ()))

    def part(self, numbers: Sequence[int]) -> Split:
        """Return some rows, by their indices."""
        return self.split.take(np.asarray(numbers, dtype=np.int64))

    def texts(self, column: str, numbers: Sequence[int]) -> list[str]:
        """Return the texts of some rows.

        Raises:
            ConfigError: A value that is no text.
        """
        return list(texts(self.part(numbers), column))

    def check_texts(self, *columns: str) -> None:
        """Look at every row.

        Raises:
            ConfigError: A row that is no text.
        """
        for column in columns:
            for _ in texts(self.split, column):
                pass

    def taken(self) -> list[str | None]:
        """List columns of the file that have labels or targets, and no texts to read."""
        columns = self.predicting.columns
        names = [columns.label_column or "", columns.target_column or "target"]
        names += columns.label_columns or ()
        if not columns.label_column:
            names += USUAL_LABELS
        return [name for name in names if name in self.split.rows.column_names]

    def text_column(self, *others: str | None) -> str:
        """Find the column of texts, and look at every row.

        Args:
            others: Columns with another meaning, besides those of labels and targets.

        Raises:
            ConfigError: There is none, or several; a row that is no text.
        """
        column = text_column(self.predicting.source, self.split, taken=(*self.taken(), *others))
        self.check_texts(column)
        return column

    def tokenize(self, *rows: Sequence[object] | None, **options: bool) -> BatchEncoding:
        """Encode texts, or pairs of them, as in training: cut at `data.max_length`."""
        encoding: BatchEncoding = self.tokenizer(
            *rows,
            truncation=True,
            max_length=self.predicting.max_length,
            return_attention_mask=False,
            verbose=False,
            **options,
        )
        return encoding

    def arrays(self, encoding: Mapping[str, Sequence[Sequence[int]]]) -> list[Inputs]:
        """Make the inputs of each row of what a tokenizer encoded."""
        names = [name for name in ("input_ids", "token_type_ids") if name in encoding]
        rows = zip(*(encoding[name] for name in names), strict=True)
        return [
            {name: np.asarray(ids, dtype=np.int64) for name, ids in zip(names, row, strict=True)}
            for row in rows
        ]

    def pad_inputs(self, inputs: list[Inputs], *, left: bool = False) -> Batch:
        """Pad `input_ids`, `attention_mask` (`token_type_ids`), shape (batch, longest)."""

        def fill(rows: Iterable[np.ndarray], value: int) -> torch.Tensor:
            return pad([row[::-1] for row in rows], value).flip(1) if left else pad(rows, value)

        rows = [row["input_ids"] for row in inputs]
        masks = [np.ones_like(row) for row in rows]
        batch = {"input_ids": fill(rows, self.padding), "attention_mask": fill(masks, 0)}
        if "token_type_ids" in inputs[0]:
            batch["token_type_ids"] = fill([row["token_type_ids"] for row in inputs], 0)
        return batch

    def expect_tokens(self, inputs: list[Inputs], numbers: Sequence[int]) -> list[Inputs]:
        """Refuse a row without a token.

        Raises:
            ConfigError: With its number.
        """
        for row, number in zip(inputs, numbers, strict=True):
            if not self.length(row):
                raise ConfigError(
                    f"{self.split.key}: row {self.split.number(number)} has no token: an empty"
                    " text, and a tokenizer that adds none of its own. Leave such rows out."
                )
        return inputs


def plain(number: SupportsFloat) -> float:
    """Convert a float32 to the shortest decimal that reads as the same one.

    Example:
        >>> plain(np.float32(0.1)), plain(torch.tensor(0.7))
        (0.1, 0.7)
    """
    return float(str(np.float32(float(number))))


def probabilities(logits: torch.Tensor) -> np.ndarray:
    """Compute softmax over the last axis, in float32, on the CPU."""
    shares: np.ndarray = logits.float().softmax(-1).cpu().numpy()
    return shares
