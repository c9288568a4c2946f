"""The base class of causal and masked language models: texts to packed blocks, or a text each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict
from optrun.data.cache import digest, digest_if_known
from optrun.data.columns import cell_text, text_column, texts
from optrun.data.encoded import Encoder
from optrun.data.examples import Examples, Selected, encode, limited, packed
from optrun.data.loader import ExampleSource
from optrun.data.long_texts import encode_long, encode_uncut, is_long
from optrun.data.shards import Row
from optrun.data.source import Source, Split
from optrun.data.stream import StreamedBlocks, StreamedRows, StreamRows
from optrun.task.base import Task
from optrun.task.evaluation import MetricAccumulator
from optrun.task.tokens import (
    added_begin_token,
    ids_around_text,
    largest_id_plus_one,
    tokenize_rows,
    tokenizer_key,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LanguageModel(Task):
    """A task on texts: joined and cut into blocks (`task.packing`), or one text an example."""

    columns = ("text_column",)
    document_end_id: int | None = None
    """Id behind each document, with the ids that the tokenizer puts before a text; None: the
    tokenizer adds its special tokens around each document."""

    def read(
        self,
        source: Source,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        limit: int | None,
        seed: int | None,
    ) -> ExampleSource:
        """Read examples with `input_ids` alone: blocks, or one text each.

        Empty texts are left out; without packing also texts too short to predict a token, with a
        note. The last, shorter block is dropped in training; evaluation reads it. `limit` counts
        blocks or texts, drawn with `seed`, see `Task.read`; a stream has no limit.

        Raises:
            ConfigError: A split with rows but without a token to predict; not for a stream.
        """
        column = text_column(source, split)
        packing = self.config.packing
        encoder, key = self._encoder(tokenizer)  # a function of texts, and a digest of its settings

        # 1. A stream: nothing is read now; its rows are encoded when batches need them.
        if isinstance(split.rows, StreamRows):
            filler = self.document_end_id
            if filler is None:
                filler = int(tokenizer.pad_token_id or 0)
            return self._streamed(split.rows.select_columns([column]), column, encoder, key, filler)

        # 2. Encode all texts that are not empty, or map their ids from the cache.
        def rows() -> Iterator[str]:
            return (text for text in texts(split, column) if text)

        encoded = encode(
            rows,
            encoder,
            key,
            longest=None if packing else self.max_length,
            content=digest_if_known(split.content, "language", column),
            ids_below=largest_id_plus_one(tokenizer),
        )
        examples: Examples | Selected = encoded

        # 3. Cut the joined ids into blocks; or leave out texts without a token to predict. The
        # shortest that stays has one token, and beside it the end of the document, or the special
        # tokens around a text.
        if packing and len(encoded):
            examples = packed(encoded, self.max_length, keep_rest=split is not source.train)
        elif not packing:
            shortest = 2
            if self.document_end_id is None:
                shortest = 1 + tokenizer.num_special_tokens_to_add()
            long_enough = np.flatnonzero(encoded.lengths >= shortest)
            short_count = len(encoded) - len(long_enough)
            if short_count:
                examples = Selected(encoded, long_enough)
                source.notes.append(
                    f"{split.key}: {short_count} rows left out: too short to predict a token of"
                    " them"
                )
        if len(examples) == 0 and len(split.rows):
            raise ConfigError(f"{split.key}: no text of two tokens or more: nothing to predict.")
        return limited(examples, limit, seed=seed)

    def running_metrics(self) -> MetricAccumulator:
        """Construct loss, perplexity and accuracy over target tokens."""
        return self.token_metrics()

    def _encoder(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Encoder, str]:
        """Return an encoder of texts to `input_ids`, and a digest of its settings.

        Begin and end tokens that a text has already are not added twice. A truncated text gets no
        end token, since it does not end there. With packing nothing is truncated.

        Example: a causal model whose tokenizer puts `<s>` before a text, and whose documents end
        with `</s>`, encodes "a" to the ids of `<s>`, `a`, `</s>`; a masked one to those that its
        tokenizer gives, such as `[CLS]`, `a`, `[SEP]`.
        """
        # 1. The ids around a text: those of the tokenizer, but behind it the end of a document, if
        # documents have one. And the same as strings, which a text may have already.
        end_id = self.document_end_id
        longest = None if self.config.packing else self.max_length
        before, after = ids_around_text(tokenizer)
        if end_id is not None:
            after = [end_id]
        begin_token = added_begin_token(tokenizer)
        end_token = tokenizer.eos_token if after[-1:] == [tokenizer.eos_token_id] else ""

        # 2. Who adds them. Without an end of documents the tokenizer; `start` and `end` are empty.
        # Else `encode_texts` adds these two to what the tokenizer returns without any.
        adds_special = end_id is None
        start = [] if adds_special else before
        end = [] if adds_special else after

        def encode_texts(texts: list[str], cut: bool) -> dict[str, list[Any]]:
            """Encode texts; truncate them to `longest` if `cut` is true."""
            # A begin or end token that a text has already is removed; "" removes nothing.
            batch = [text.removeprefix(begin_token).removesuffix(end_token) for text in texts]
            if longest is None:  # packing: no text is truncated, so each gets its end
                rows = _whole_rows(batch, tokenizer, (before, after), adds_special=adds_special)
                return {"input_ids": rows}
            # `start` must fit, too; of `end` only what is left of `longest`.
            encoding = tokenize_rows(
                tokenizer,
                batch,
                longest - len(start) if cut else None,
                add_special_tokens=adds_special,
                return_token_type_ids=False,
            )
            rows = []
            for ids in encoding["input_ids"]:
                row = start + ids
                if len(row) < longest:  # else the text was cut, and does not end there
                    row += end
                rows.append(row)
            return {"input_ids": rows}

        key = digest(
            tokenizer_key(tokenizer),
            "language-3",
            str(adds_special),
            str(longest),
            str(start),
            str(end_id),
        )
        return encode_texts, key

    def _streamed(
        self, rows: Any, column: str, encoder: Encoder, key: str, filler: int
    ) -> ExampleSource:
        """Stream blocks, or one text each; a text of at most one token has no target.

        Args:
            rows: The stream, with the text column alone.
            column: The text column.
            encoder: Encodes texts to `input_ids`.
            key: Digest of its settings.
            filler: Id that fills the rest of a block, and stands for an empty text.
        """

        def encode_for_blocks(rows: list[Row]) -> dict[str, list[Any]]:
            """Encode the texts of rows that are not empty; {} if all are."""
            row_texts = [cell_text(row, column) for row in rows]
            not_empty = [text for text in row_texts if text]
            if not_empty:
                return {"input_ids": list(encoder(not_empty, True)["input_ids"])}
            return {}

        def encode_example(row: Row) -> PlainDict:
            """Encode a row to an example; an empty text becomes one token."""
            (ids,) = encoder([cell_text(row, column)], True)["input_ids"]
            return {"input_ids": np.asarray(ids if len(ids) else [filler], dtype=np.int64)}

        if not self.config.packing:
            return StreamedRows(rows, encode_example, key)
        blocks = StreamedBlocks(
            rows, encode_for_blocks, self.max_length, key, {"input_ids": filler}
        )
        self.notes += blocks.notes
        return blocks


def _whole_rows(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    around: tuple[list[int], list[int]],
    *,
    adds_special: bool,
) -> list[Any]:
    """Encode texts without truncation: very long ones in parts, the others in one batch.

    Args:
        texts: Of any length.
        tokenizer: Of the model.
        around: Ids before and after each text.
        adds_special: Whether the tokenizer adds these ids itself, except to very long texts.

    Returns:
        The ids of each text, in the order of the texts.
    """
    # 1. Encode the texts that are not very long (`is_long`: above 524,288 characters), in one call.
    # Their rows are taken one by one in 2.
    before, after = around
    short_texts = [text for text in texts if not is_long(text)]
    short_rows = iter(encode_uncut(short_texts, tokenizer, special=adds_special))

    # 2. Put all into the order of the texts, with the ids around each.
    rows: list[Any] = []
    for text in texts:
        if is_long(text):
            begin = np.array(before, dtype=np.int32)
            end = np.array(after, dtype=np.int32)
            rows.append(np.concatenate([begin, encode_long(text, tokenizer), end]))
        elif adds_special:
            rows.append(next(short_rows))
        else:
            rows.append([*before, *next(short_rows), *after])
    return rows
