"""What causal and masked language models share: documents to blocks or rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.data.cache import digest
from optrun.data.columns import text_column, texts
from optrun.data.examples import Examples, Selected, encode, limited, packed
from optrun.data.loader import ExampleSource
from optrun.data.pieces import is_long, long_ids
from optrun.data.source import Source, Split
from optrun.errors import ConfigError
from optrun.task.base import Task
from optrun.task.tokens import tokenizer_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LanguageModel(Task):
    """A task on texts alone, joined and cut into blocks or one an example."""

    columns = ("text_column", "eval_text_column")
    separator: int | None = None
    """Id after each document, which begins as the tokenizer begins a text; None: the special tokens of the tokenizer
    stand around each."""

    def read(
        self, source: Source, split: Split, tokenizer: PreTrainedTokenizerBase, limit: int | None, seed: int | None
    ) -> ExampleSource:
        """Examples with `input_ids` alone: blocks, or one text each.

        Raises:
            ConfigError: A split without a single token to predict.
        """
        examples = _split_examples(
            source, split, tokenizer, length=self.max_length, packing=self.config.packing, separator=self.separator
        )
        if len(examples) == 0 and len(split.rows):
            raise ConfigError(f"{split.key}: no text of two tokens or more: nothing to predict.")
        return limited(examples, limit, seed=seed)


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that a tokenizer puts before a text, such as Llama's `<s>`; GPT-2's puts none.

    A model that has never seen a text without them predicts badly where they are missing.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    starts = range(len(whole) - len(plain) + 1)
    return whole[: next((start for start in starts if whole[start : start + len(plain)] == plain), 0)]


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids before and after a text."""
    whole: list[int] = tokenizer("a")["input_ids"]
    plain, before = tokenizer("a", add_special_tokens=False)["input_ids"], opening(tokenizer)
    return before, whole[len(before) + len(plain) :]


def _whole_rows(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, before: list[int], after: list[int]
) -> list[np.ndarray]:
    """Ids of texts of which some are long: these in pieces, the others together."""
    short = [text for text in texts if not is_long(text, tokenizer)]
    encoded = iter(tokenizer(short, add_special_tokens=False, verbose=False)["input_ids"] if short else [])
    rows = (long_ids(text, tokenizer) if is_long(text, tokenizer) else next(encoded) for text in texts)
    return [np.concatenate([np.asarray(part, dtype=np.int32) for part in (before, row, after)]) for row in rows]


def _split_examples(
    source: Source,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    packing: bool,
    separator: int | None,
) -> Examples | Selected:
    column = text_column(source, split)
    special = separator is None
    longest = None if packing else length
    start, end = ([], []) if separator is None else (opening(tokenizer), [separator])
    around = _around(tokenizer) if special else (start, end)

    def encoder(batch: list[str], cut: bool) -> dict[str, list[Any]]:
        if longest is None and any(is_long(text, tokenizer) for text in batch):
            return {"input_ids": _whole_rows(batch, tokenizer, *around)}
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
        return packed(examples, length, keep_rest=split is not source.train)
    lengths = np.diff(examples.offsets)
    least = 1 + tokenizer.num_special_tokens_to_add() if special else 2
    if (lengths >= least).all():
        return examples
    kept = Selected(examples, np.flatnonzero(lengths >= least))
    source.notes.append(f"{split.key}: {len(examples) - len(kept)} rows left out: too short to predict a token of them")
    return kept
