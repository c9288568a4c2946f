"""What causal and masked language models share: documents to blocks or rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from optrun.config.schema.data import DataConfig
from optrun.data.cache import digest
from optrun.data.columns import refuse_unused, text_column, texts
from optrun.data.examples import Selected, encode, limited, packed
from optrun.data.source import Source, Split
from optrun.errors import ConfigError
from optrun.task.base import tokenizer_key


def language_examples(
    source: Source, config: DataConfig, tokenizer: Any, *, task: str, packing: bool, separator: int | None, seed: int
) -> tuple[Any, Any]:
    """Training and evaluation examples with `input_ids` alone.

    Args:
        source: Both splits.
        config: Lengths and limits.
        tokenizer: Of the model.
        task: Its name, for messages.
        packing: Join and cut, or one row an example.
        separator: Id after each document, which begins as the tokenizer begins a text; None: the special tokens of the
            tokenizer stand around each.
        seed: Picks the training examples where they are limited.

    Raises:
        ConfigError: A split without a single token to predict, or a column the task does not read.
    """
    refuse_unused(source.columns, ("text_column", "eval_text_column"), task)
    found = []
    for split, limit, picks in (
        (source.train, config.max_train_examples, seed),
        (source.eval, config.max_eval_examples, None),
    ):
        examples = _split_examples(source, split, config, tokenizer, packing=packing, separator=separator)
        if len(examples) == 0 and len(split.rows):
            raise ConfigError(f"{split.key}: no text of two tokens or more: nothing to predict.")
        found.append(limited(examples, limit, seed=picks))
    return found[0], found[1]


def opening(tokenizer: Any) -> list[int]:
    """The ids that a tokenizer puts before a text, such as Llama's `<s>`; GPT-2's puts none.

    A model that has never seen a text without them predicts badly where they are missing.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    places = range(len(whole) - len(plain) + 1)
    return whole[: next((place for place in places if whole[place : place + len(plain)] == plain), 0)]


def _split_examples(
    source: Source, split: Split, config: DataConfig, tokenizer: Any, *, packing: bool, separator: int | None
) -> Any:
    column = text_column(source, split)
    special = separator is None
    longest = None if packing else config.max_length
    start, end = ([], []) if separator is None else (opening(tokenizer), [separator])

    def encoder(batch: list[str], cut: bool) -> dict[str, list[list[int]]]:
        cut = cut and longest is not None
        encoded = tokenizer(
            batch,
            add_special_tokens=special,
            truncation=cut,
            max_length=longest - len(start) if cut and longest is not None else None,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        rows = (start + row for row in encoded["input_ids"])
        # A text that was cut has no end to learn.
        return {"input_ids": [row + end if longest is None or len(row) < longest else row for row in rows]}

    def rows() -> Iterator[str]:
        return (text for text in texts(split, column) if text)

    key = digest(tokenizer_key(tokenizer), "language", str(special), str(longest), str(start), str(separator))
    examples = encode(rows, encoder, key, longest=longest)
    if packing and len(examples):
        return packed(examples, config.max_length, keep_rest=split is source.eval)
    lengths = np.diff(examples.offsets)
    least = 1 + tokenizer.num_special_tokens_to_add() if special else 2
    if (lengths >= least).all():
        return examples
    kept = Selected(examples, np.flatnonzero(lengths >= least))
    source.notes.append(f"{split.key}: {len(examples) - len(kept)} rows left out: too short to predict a token of them")
    return kept
