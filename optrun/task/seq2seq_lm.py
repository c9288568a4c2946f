"""A text from a text, by encoder and decoder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.data.cache import digest
from optrun.data.columns import target_column, text_column, texts
from optrun.data.examples import Examples, Joined, chosen, encode
from optrun.data.loader import Batch
from optrun.data.source import Source, Split
from optrun.errors import ConfigError
from optrun.task.base import Task, TextKind
from optrun.task.evaluation import MetricAccumulator, TokenMetrics
from optrun.task.tokens import tokenizer_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Seq2SeqLm(Task):
    """`data.text_column` to `data.target_column`; the model makes its decoder inputs from the labels.

    Raises:
        ConfigError: A missing column, a row without a target, a tokenizer without a padding token.
    """

    columns = ("text_column", "eval_text_column", "target_column")
    text_kind = TextKind.SEQ2SEQ
    predictor = "optrun.prediction.generation:TextToText"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Texts and targets in turn."""
        text, target = _columns(source, source.train)
        return chain.from_iterable(zip(texts(source.train, text), texts(source.train, target), strict=True))

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
        """Look for the padding token, and for rows without a target."""
        if tokenizer.pad_token_id is None:
            raise ConfigError("task=seq2seq_lm: the tokenizer has no padding token. Name another with model.tokenizer.")
        self.max_target_length = self.config.max_target_length
        self.limits.append(f"task.max_target_length={self.max_target_length}")
        for split in source.splits:
            target = target_column(source, split)
            for row, value in enumerate(split.rows[target]):
                if value is None or value == "":
                    raise ConfigError(
                        f"{split.key}: row {split.number(row)} has no text in column {target}: nothing to produce."
                    )

    def read(
        self, source: Source, split: Split, tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int | None
    ) -> Joined:
        """Texts and targets side by side."""
        text, target = _columns(source, split)
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

            settings = digest(key, "target" if as_target else "text", str(longest), str(tokenizer.model_input_names))
            examples = encode(lambda: texts(part, column), encoder, settings, longest=longest)
            if (np.diff(examples.offsets) == 0).any():
                raise ConfigError(f"{split.key}: a text in column {column} has no token. Leave such rows out.")
            return examples

        targets = encoded(target, self.max_target_length, as_target=True)
        return Joined(
            encoded(text, self.max_length, as_target=False),
            targets.renamed({"input_ids": "labels"}),
        )

    def sizes(self, batch: Batch) -> tuple[int, int]:
        """Tokens of texts and targets, and examples."""
        tokens, examples = super().sizes(batch)
        return tokens + self.count(batch), examples

    def running_metrics(self) -> MetricAccumulator:
        """Loss, perplexity, accuracy over target tokens."""
        return TokenMetrics(shift=False)


def _columns(source: Source, split: Split) -> tuple[str, str]:
    """The columns of texts and of targets."""
    target = target_column(source, split)
    return text_column(source, split, taken=(target,)), target
