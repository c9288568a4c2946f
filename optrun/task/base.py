"""What every task says of itself."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from optrun.data.columns import text_column, texts
from optrun.data.examples import Example
from optrun.data.source import Source
from optrun.task.metrics import perplexity

Batch = dict[str, torch.Tensor]
IGNORED = -100
"""Label that transformers leaves out of the loss."""


class TextKind:
    """Which special tokens a tokenizer trained for a task puts around a text."""

    STREAM = "stream"
    """None around it; `<|endoftext|>` between documents."""
    PAIR = "pair"
    """[CLS] text [SEP] pair [SEP]."""
    SEQ2SEQ = "seq2seq"
    """text </s>."""
    NONE = "none"
    """No text at all."""


@dataclass
class ModelNeeds:
    """What the data asks of a model."""

    config: dict[str, Any] = field(default_factory=dict)
    """Values of the transformers configuration that the data decides, such as `id2label`."""
    max_length: int | None = None
    """Positions it must have room for."""


class MetricAccumulator(ABC):
    """Metrics over a split, batch by batch."""

    @abstractmethod
    def update(self, outputs: Any, batch: Batch) -> None:
        """Take in one batch.

        Args:
            outputs: What the model returned; has `loss` and `logits`.
            batch: What it was given.
        """

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Names without prefix, such as `loss`, to their values over all batches."""


class Task(ABC):
    """A task after it has read its source.

    Attributes:
        name: The choice in `task=`.
        auto_class: Name of the transformers class that builds a model with the head for it.
        train: Training examples.
        eval: Evaluation examples.
        notes: What was decided where the configuration was silent.
        main_metric: The metric that says which checkpoint is best.
        mode: `min` or `max`: which direction of it is better.
        reads_words: Whether the tokenizer is given one word at a time.
        unit: What a loss is averaged over: `tokens` or `examples`.
        limits: The keys, with their values, after which texts are cut.
    """

    name: str
    auto_class: str
    train: Any
    eval: Any
    main_metric: str = "loss"
    mode: str = "min"
    unit: str = "tokens"
    text_kind: str = TextKind.PAIR
    reads_words: bool = False

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.limits: list[str] = []

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """The training texts that a tokenizer made for this task learns from.

        Raises:
            ConfigError: A missing column.
        """
        return texts(source.train, text_column(source, source.train))

    @abstractmethod
    def needs(self) -> ModelNeeds:
        """What the data asks of the model."""

    @abstractmethod
    def collate(self, examples: list[Example]) -> Batch:
        """One padded batch; a pure function of its examples."""

    def transform(self, example: Example, randomness: np.random.Generator) -> Example:  # noqa: ARG002
        """What changes from epoch to epoch, such as masking; nothing by default."""
        return example

    @abstractmethod
    def weight(self, batch: Batch) -> int:
        """How many tokens or examples the model's mean loss of a batch is over."""

    @abstractmethod
    def evaluation(self) -> MetricAccumulator:
        """Empty metrics."""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """What `evaluation().compute()` will report."""

    def sizes(self, batch: Batch) -> tuple[int, int]:
        """Tokens (without padding) and examples of a batch, for throughput."""
        if "attention_mask" in batch:
            return int(batch["attention_mask"].sum()), int(batch["attention_mask"].shape[0])
        first = next(iter(batch.values()))
        return (first.numel() if "input_ids" in batch else 0), int(first.shape[0])


TOKEN_METRICS = ["loss", "perplexity", "accuracy"]


class TokenMetrics(MetricAccumulator):
    """Loss, perplexity and accuracy over target tokens.

    Args:
        shift: True where the logits at a place predict the next token.
    """

    def __init__(self, *, shift: bool) -> None:
        self.shift = shift
        self.loss = 0.0
        self.right = 0
        self.count = 0

    def update(self, outputs: Any, batch: Batch) -> None:
        """Count one batch."""
        labels = batch["labels"]
        logits = outputs.logits
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        targets = labels != IGNORED
        count = int(targets.sum())
        if count == 0:
            return
        self.loss += float(outputs.loss) * count
        self.right += int(((logits.argmax(-1) == labels) & targets).sum())
        self.count += count

    def compute(self) -> dict[str, float]:
        """Means over all target tokens; NaN where there was none."""
        if self.count == 0:
            return dict.fromkeys(TOKEN_METRICS, math.nan)
        loss = self.loss / self.count
        return {"loss": loss, "perplexity": perplexity(loss), "accuracy": self.right / self.count}


def pad(rows: Iterable[np.ndarray], value: int) -> torch.Tensor:
    """Rows of unequal length in one tensor; shape (rows, longest), int64."""
    rows = list(rows)
    out = np.full((len(rows), max(len(row) for row in rows)), value, dtype=np.int64)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(out)


def tokenizer_key(tokenizer: Any) -> str:
    """Everything that decides which ids a tokenizer gives, as text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # How long a text may be is set anew at each call; the last call is no part of what the tokenizer is.
        return json.dumps({**json.loads(backend.to_str()), "truncation": None, "padding": None}, sort_keys=True)
    settings = sorted(map(str, tokenizer.init_kwargs.items()))
    return f"{type(tokenizer).__qualname__} {sorted(tokenizer.get_vocab().items())} {settings}"
