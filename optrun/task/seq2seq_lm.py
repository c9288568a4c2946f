"""Text to text with an encoder-decoder model, such as translation or summarization."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict
from optrun.data.cache import cached_result, digest_if_known
from optrun.data.columns import target_column, text_column, texts, values
from optrun.data.examples import Examples, Joined, chosen, encode
from optrun.data.loader import Batch, ExampleSource
from optrun.data.source import Source, Split
from optrun.task.base import Task, TextKind
from optrun.task.evaluation import MetricAccumulator
from optrun.task.tokens import interleave_columns, rows_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Seq2SeqLm(Task):
    """Texts of `data.text_column` to texts of `data.target_column`.

    The model derives its decoder inputs from the labels.

    Raises:
        ConfigError: A missing column, a row without a target, a tokenizer without a padding token.
    """

    columns = ("text_column", "target_column")
    text_kind = TextKind.SEQ2SEQ
    predictor = "optrun.runner.predictors:TextToText"

    @classmethod
    def vocabulary(cls, source: Source) -> Iterator[str]:
        """Yield text and target of each training row."""
        return interleave_columns(source.train, _columns(source, source.train))

    def inspect(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a tokenizer without a padding token, and rows without a target.

        Sets `max_target_length`, and adds it to `limits`. That all rows have a target is cached.

        Raises:
            ConfigError: The tokenizer has no padding token, or a row has no target.
        """
        if tokenizer.pad_token_id is None:
            raise ConfigError(
                "task=seq2seq_lm: the tokenizer has no padding token. Name another with"
                " model.tokenizer."
            )
        self.max_target_length = self.config.max_target_length
        self.limits.append(f"task.max_target_length={self.max_target_length}")
        for split in source.splits:
            target = target_column(source, split)
            key = digest_if_known("all-targets-1", split.content, target)
            cached_result(key, partial(_refuse_missing_targets, split, target))

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read one example for each row: `input_ids` of the text, `labels` of the target.

        Texts are truncated to `data.max_length` tokens, targets to their own maximum. The two
        columns are encoded and cached apart, by tokenizer, maximum and content.

        Args:
            source: Names the columns.
            split: The rows.
            tokenizer: Of the model.
            limit: Rows to take; None: all.
            seed: Draws the rows if they are limited; None: the same draw in every run.

        Raises:
            ConfigError: A text or a target without a token.
        """
        text_name, target_name = _columns(source, split)
        part = split.take(chosen(len(split.rows), limit, seed=seed))

        def encode_column(column: str, field: str, longest: int) -> Examples:
            """Encode a column as `text` or as `target`."""

            def encoder(batch: list[str], cut: bool) -> dict[str, list[list[int]]]:
                return {"input_ids": _token_ids(tokenizer, batch, longest if cut else None, field)}

            examples = encode(
                lambda: texts(part, column),
                encoder,
                rows_key(tokenizer, field, longest),
                longest=longest,
                content=digest_if_known(part.content, "seq2seq", column),
            )
            if (examples.lengths == 0).any():
                raise ConfigError(
                    f"{split.key}: a text in column {column} has no token. Leave such rows out."
                )
            return examples

        # An example has the `input_ids` of its text and the `labels` of its target.
        targets = encode_column(target_name, "target", self.max_target_length)
        inputs = encode_column(text_name, "text", self.max_length)
        return Joined(inputs, targets.renamed({"input_ids": "labels"}))

    def count_tokens_and_examples(self, batch: Batch) -> tuple[int, int]:
        """Count the tokens of texts and targets without padding, and the examples."""
        tokens, examples = super().count_tokens_and_examples(batch)
        return tokens + self.count(batch), examples

    def running_metrics(self) -> MetricAccumulator:
        """Construct loss, perplexity and accuracy over target tokens."""
        return self.token_metrics()


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, batch: list[str], longest: int | None, field: str
) -> list[list[int]]:
    """Encode texts or targets; the two may get different special tokens.

    Args:
        tokenizer: Of the model.
        batch: The texts.
        longest: Tokens after which a text is truncated; None: it is not.
        field: `text` or `target`.
    """
    arguments: PlainDict = {"text_target": batch} if field == "target" else {"text": batch}
    ids: list[list[int]] = tokenizer(
        **arguments,
        truncation=longest is not None,
        max_length=longest,
        return_attention_mask=False,
        verbose=False,
    )["input_ids"]
    return ids


def _columns(source: Source, split: Split) -> tuple[str, str]:
    """Find the column of texts and the column of targets."""
    target = target_column(source, split)
    return text_column(source, split, taken=(target,)), target


def _refuse_missing_targets(split: Split, column: str) -> bool:
    """Refuse the first row with an empty or missing target.

    True if every row has one; the caller caches this.

    Raises:
        ConfigError: With the row and the column.
    """
    for row, value in enumerate(values(split, column)):
        if value is None or value == "":
            raise ConfigError(
                f"{split.where(row)} has no text in column {column}: nothing to produce. Leave such"
                " rows out."
            )
    return True
