"""A text from a text, by encoder and decoder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from optrun.config.schema.data import DataConfig
from optrun.config.schema.task import Seq2SeqLmConfig
from optrun.data.cache import digest
from optrun.data.columns import refuse_unused, target_column, text_column, texts
from optrun.data.examples import Example, Examples, Joined, chosen, encode
from optrun.data.source import Source, Split
from optrun.errors import ConfigError
from optrun.task.base import (
    IGNORED,
    TOKEN_METRICS,
    Batch,
    MetricAccumulator,
    ModelNeeds,
    Task,
    TextKind,
    TokenMetrics,
    pad,
    tokenizer_key,
)

_COLUMNS = ("text_column", "eval_text_column", "target_column")


class Seq2SeqLm(Task):
    """`data.text_column` to `data.target_column`; the model makes its decoder inputs from the labels.

    Raises:
        ConfigError: A missing column, a row without a target, a tokenizer without a padding token.
    """

    name = "seq2seq_lm"
    auto_class = "AutoModelForSeq2SeqLM"
    text_kind = TextKind.SEQ2SEQ

    def __init__(self, config: Seq2SeqLmConfig, data: DataConfig, source: Source, tokenizer: Any, *, seed: int) -> None:
        super().__init__()
        refuse_unused(source.columns, _COLUMNS, self.name)
        if tokenizer.pad_token_id is None:
            raise ConfigError("task=seq2seq_lm: the tokenizer has no padding token. Name another with model.tokenizer.")
        self.padding = int(tokenizer.pad_token_id)
        self.max_length = data.max_length
        self.limits = [f"data.max_length={data.max_length}", f"task.max_target_length={config.max_target_length}"]
        self.max_target_length = config.max_target_length
        self.train = self._read(source, source.train, tokenizer, data.max_train_examples, seed)
        self.eval = self._read(source, source.eval, tokenizer, data.max_eval_examples, None)

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Texts and targets in turn."""
        split = source.train
        target = target_column(source, split)
        text = text_column(source, split, taken=(target,))
        return chain.from_iterable(zip(texts(split, text), texts(split, target), strict=True))

    def _read(self, source: Source, split: Split, tokenizer: Any, limit: int | None, seed: int | None) -> Joined:
        target = target_column(source, split)
        text = text_column(source, split, taken=(target,))
        for row, value in enumerate(split.rows[target]):
            if value is None or value == "":
                raise ConfigError(
                    f"{split.key}: row {split.number(row)} has no text in column {target}: nothing to produce."
                )
        part = split.take(chosen(len(split.rows), limit, seed=seed))
        key = tokenizer_key(tokenizer)

        def encoded(column: str, longest: int, *, as_target: bool) -> Examples:
            def encoder(batch: list[str], cut: bool) -> dict[str, list[list[int]]]:
                given: dict[str, Any] = {"text_target": batch} if as_target else {"text": batch}
                made = tokenizer(
                    **given,
                    truncation=cut,
                    max_length=longest if cut else None,
                    return_attention_mask=False,
                    verbose=False,
                )
                return {"input_ids": made["input_ids"]}

            words = digest(key, "target" if as_target else "text", str(longest), str(tokenizer.model_input_names))
            examples = encode(lambda: texts(part, column), encoder, words, longest=longest)
            if (np.diff(examples.offsets) == 0).any():
                raise ConfigError(f"{split.key}: a text in column {column} has no token. Leave such rows out.")
            return examples

        targets = encoded(target, self.max_target_length, as_target=True)
        return Joined(
            encoded(text, self.max_length, as_target=False),
            targets.renamed({"input_ids": "labels"}),
        )

    def needs(self) -> ModelNeeds:
        """An encoder-decoder with a language-model head."""
        return ModelNeeds(max_length=max(self.max_length, self.max_target_length))

    def collate(self, examples: list[Example]) -> Batch:
        """`input_ids` and `attention_mask` of shape (batch, longest text), `labels` likewise over targets."""
        rows = [example["input_ids"] for example in examples]
        return {
            "input_ids": pad(rows, self.padding),
            "attention_mask": pad((np.ones_like(row) for row in rows), 0),
            "labels": pad((example["labels"] for example in examples), IGNORED),
        }

    def weight(self, batch: Batch) -> int:
        """Target tokens."""
        return int((batch["labels"] != IGNORED).sum())

    def sizes(self, batch: Batch) -> tuple[int, int]:
        """Tokens of texts and targets, and examples."""
        tokens, examples = super().sizes(batch)
        return tokens + self.weight(batch), examples

    def metric_names(self) -> list[str]:
        """Over target tokens."""
        return TOKEN_METRICS

    def evaluation(self) -> MetricAccumulator:
        """Loss, perplexity, accuracy."""
        return TokenMetrics(shift=False)
