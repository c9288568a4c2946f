"""What causal and masked language models share: documents to blocks or rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.data.cache import digest
from optrun.data.columns import cell_text, text_column, texts
from optrun.data.encoded import Encoder
from optrun.data.examples import Examples, Selected, encode, limited, packed
from optrun.data.loader import ExampleSource
from optrun.data.pieces import PIECE, Pieces, fast_ids, is_long, word_ends
from optrun.data.shards import Row
from optrun.data.source import Source, Split
from optrun.data.stream import StreamedBlocks, StreamedRows, StreamRows
from optrun.task.base import Task
from optrun.task.tokens import ids_below, tokenizer_key

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
        """Read examples with `input_ids` alone: blocks, or one text each.

        Raises:
            ConfigError: A split without a single token to predict.
        """
        options = {"length": self.max_length, "packing": self.config.packing, "separator": self.separator}
        if isinstance(split.rows, StreamRows):
            stream = _streamed(source, split, tokenizer, **options)
            self.notes += getattr(stream, "notes", [])
            return stream
        examples = _split_examples(source, split, tokenizer, **options)
        if len(examples) == 0 and len(split.rows):
            raise ConfigError(f"{split.key}: no text of two tokens or more: nothing to predict.")
        return limited(examples, limit, seed=seed)


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """List the ids that a tokenizer puts before a text, such as Llama's `<s>`; GPT-2's puts none.

    A model that has never seen a text without them predicts badly where they are missing.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    starts = range(len(whole) - len(plain) + 1)
    return whole[: next((start for start in starts if whole[start : start + len(plain)] == plain), 0)]


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """List the ids before and after a text."""
    whole: list[int] = tokenizer("a")["input_ids"]
    plain, before = tokenizer("a", add_special_tokens=False)["input_ids"], opening(tokenizer)
    return before, whole[len(before) + len(plain) :]


def _whole_rows(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    around: tuple[list[int], list[int]],
    notes: list[str],
    *,
    special: bool,
) -> list[Any]:
    """Encode texts of which none is cut: long ones in pieces if the pieces are the whole, others together.

    Args:
        texts: Of any length.
        tokenizer: Any.
        around: Ids before and after each.
        notes: Takes why long ones are encoded as wholes.
        special: Whether the tokenizer itself puts the ids around a text.
    """
    before, after = around
    ends = word_ends(tokenizer) if any(map(is_long, texts)) else ""
    whole = [str(text) for text in texts if not (ends and is_long(text))]
    if any(map(is_long, whole)):
        note = (
            f"a text of more than {2 * PIECE:,} characters is encoded as a whole: optrun knows no place where this "
            "tokenizer may cut it. This takes some 170 bytes of memory a character"
        )
        notes += [] if note in notes else [note]
    encoded = iter(fast_ids(whole, tokenizer, special=special))

    def row(text: str) -> Any:
        if ends and is_long(text):
            return Pieces(text, tokenizer, ends, before, after)
        return next(encoded) if special else [*before, *next(encoded), *after]

    return [row(text) for text in texts]


def _encoder(
    tokenizer: PreTrainedTokenizerBase, notes: list[str], *, length: int, packing: bool, separator: int | None
) -> tuple[Encoder, str]:
    """Return what makes ids of texts, and a digest of what they depend on besides the texts."""
    special = separator is None
    longest = None if packing else length
    start, end = ([], []) if separator is None else (opening(tokenizer), [separator])
    around = _around(tokenizer) if special else (start, end)

    def encode_texts(batch: list[str], cut: bool) -> dict[str, list[Any]]:
        if longest is None:
            return {"input_ids": _whole_rows(batch, tokenizer, around, notes, special=special)}
        encoded = tokenizer(
            batch,
            add_special_tokens=special,
            truncation=cut,
            max_length=longest - len(start) if cut else None,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        rows = (start + row for row in encoded["input_ids"])
        # A text that was cut has no end to learn.
        return {"input_ids": [row + end if len(row) < longest else row for row in rows]}

    key = digest(tokenizer_key(tokenizer), "language", str(special), str(longest), str(start), str(separator))
    return encode_texts, key


def _streamed(
    source: Source,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    packing: bool,
    separator: int | None,
) -> StreamedRows | StreamedBlocks:
    """Stream examples: a text of no token, or of one, is an example without a target."""
    column = text_column(source, split)
    encoder, key = _encoder(tokenizer, source.notes, length=length, packing=packing, separator=separator)
    rows: Any = split.rows.select_columns([column])
    filler = separator if separator is not None else int(tokenizer.pad_token_id or 0)

    def block(rows: list[Row]) -> dict[str, list[Any]]:
        found = [text for row in rows if (text := cell_text(row, column))]
        return {"input_ids": list(encoder(found, True)["input_ids"])} if found else {}

    def example(row: Row) -> dict[str, Any]:
        (ids,) = encoder([cell_text(row, column)], True)["input_ids"]
        return {"input_ids": np.asarray(ids if len(ids) else [filler], dtype=np.int64)}

    if packing:
        return StreamedBlocks(rows, block, length, key, {"input_ids": filler})
    return StreamedRows(rows, example, key)


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
    encoder, key = _encoder(tokenizer, source.notes, length=length, packing=packing, separator=separator)

    def rows() -> Iterator[str]:
        return (text for text in texts(split, column) if text)

    known = None if split.content is None else digest(split.content, "language", column)
    size = ids_below(tokenizer)
    examples = encode(rows, encoder, key, longest=None if packing else length, content=known, ids_below=size)
    if packing and len(examples):
        return packed(examples, length, keep_rest=split is not source.train)
    lengths = np.diff(examples.offsets)
    least = 1 + tokenizer.num_special_tokens_to_add() if separator is None else 2
    if (lengths >= least).all():
        return examples
    kept = Selected(examples, np.flatnonzero(lengths >= least))
    source.notes.append(f"{split.key}: {len(examples) - len(kept)} rows left out: too short to predict a token of them")
    return kept
