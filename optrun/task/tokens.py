"""Encode texts with a tokenizer, and digest all that decides their ids, for cache keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.data.cache import digest, digest_if_known
from optrun.data.columns import texts
from optrun.data.encoded import Encoder
from optrun.data.examples import Example, Examples, encode
from optrun.data.source import Split

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

NO_TOKEN = "the text is empty, and the tokenizer adds no special token. Leave such rows out."


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Serialize a tokenizer for cache keys: all settings with an effect on the ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a slow tokenizer
        settings = sorted(map(str, tokenizer.init_kwargs.items()))
        return f"{type(tokenizer).__qualname__} {sorted(tokenizer.get_vocab().items())} {settings}"
    # Truncation and padding are those of the latest call; each call sets them anew.
    values = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    return json.dumps(values, sort_keys=True)


def added_begin_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer's begin-of-text token, such as `<s>`, if it adds one; else "".

    A text that a chat template wrote may have it already, and must not begin twice.
    """
    ids = tokenizer("a", verbose=False)["input_ids"]
    if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]:
        return str(tokenizer.bos_token)
    return ""


def ids_around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """List the ids added before and after a text by a tokenizer, such as `<s>` of Llama.

    Both are empty for GPT-2. They are found by encoding "a" with and without special tokens. A
    model that has never seen a text without them predicts badly if they are missing.

    Example: BERT encodes "a" to [101, 1037, 102], and to [1037] without special tokens: ([101],
    [102]).
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids: list[int] = tokenizer("a")["input_ids"]
    # Where the plain ids are among all ids.
    begin = 0
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            begin = start
            break
    return ids[:begin], ids[begin + len(plain) :]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[str]) -> list[list[int]]:
    """Encode prompts: with the special ids before a text, without those after it.

    Behind an end-of-text token, which some tokenizers add, a model would write nothing. A begin
    token that a text has already is not added twice.
    """
    before, _ = ids_around_text(tokenizer)
    begin_token = added_begin_token(tokenizer)
    bare_prompts = [prompt.removeprefix(begin_token) for prompt in prompts]
    rows = encode_to_inputs(tokenizer, bare_prompts, None, add_special_tokens=False)["input_ids"]
    return [before + ids for ids in rows]


def largest_id_plus_one(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's largest id plus one."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def rows_key(tokenizer: PreTrainedTokenizerBase, kind: str, longest: int | str, *more: str) -> str:
    """Digest everything that decides the ids of rows, for cache keys.

    Args:
        tokenizer: Of the model.
        kind: Names the kind of rows, such as `sequence`.
        longest: Tokens after which rows are truncated.
        more: Other settings.
    """
    return digest(
        tokenizer_key(tokenizer), kind, str(longest), str(tokenizer.model_input_names), *more
    )


def tokenize_rows(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[object],
    longest: int | None,
    **options: object,
) -> BatchEncoding:
    """Encode texts, or pairs of texts, without `attention_mask`.

    Args:
        tokenizer: Of the model.
        rows: All of them texts or lists of words, or all of them tuples of two texts.
        longest: Tokens after which a row is truncated, the longer text of a pair first; None: it is
            not.
        options: Further arguments of the tokenizer.
    """
    # The tokenizer takes pairs as two lists: the first texts, the second texts.
    are_pairs = bool(rows) and isinstance(rows[0], tuple)
    columns = zip(*rows, strict=True) if are_pairs else [rows]
    return tokenizer(
        *map(list, columns),
        truncation=longest is not None,
        max_length=longest,
        return_attention_mask=False,
        verbose=False,
        **options,
    )


def encode_to_inputs(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], longest: int | None, **options: object
) -> dict[str, list[list[int]]]:
    """Encode rows as `tokenize_rows` does, and keep only the inputs of a model.

    Returns:
        One list of ids a row: `input_ids` and, if the tokenizer returns them, `token_type_ids`.
    """
    return model_inputs_of(tokenize_rows(tokenizer, rows, longest, **options))


def model_inputs_of(encoding: PlainMapping) -> PlainDict:
    """Select `input_ids` and, if there are any, `token_type_ids` from a tokenizer's output."""
    return {name: encoding[name] for name in ("input_ids", "token_type_ids") if name in encoding}


def interleave_columns(split: Split, columns: Sequence[str]) -> Iterator[str]:
    """Yield the texts of several columns: all of the first row, then of the second, and so on."""
    return chain.from_iterable(zip(*(texts(split, name) for name in columns), strict=True))


def encode_rows(
    split: Split,
    rows: Callable[[], Iterator[object]],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    kind: str,
    *columns: str,
) -> Examples:
    """Encode texts, or pairs of texts, or map them from the cache.

    The cache key covers the content of the split, kind, columns, tokenizer and length.

    Args:
        split: Where the rows are from.
        rows: Yields the texts anew at each call; not called if they are cached.
        tokenizer: Of the model.
        longest: Tokens after which a row is truncated.
        kind: Names the kind of rows, such as `sequence`.
        columns: Columns of the texts.
    """
    return encode(
        rows,
        text_encoder(tokenizer, longest),
        rows_key(tokenizer, kind, longest),
        longest=longest,
        content=digest_if_known(split.content, kind, *columns),
        ids_below=largest_id_plus_one(tokenizer),
    )


def text_encoder(tokenizer: PreTrainedTokenizerBase, longest: int) -> Encoder:
    """Return an encoder of batches of texts, or of pairs of texts.

    It truncates them to `longest` tokens if its second argument is true.
    """
    return lambda batch, cut: encode_to_inputs(tokenizer, batch, longest if cut else None)


def example_of_one_row(encoding: Mapping[str, Iterable[object]]) -> Example:
    """Convert a tokenizer's output for a batch of one row to an example of int64 arrays.

    Raises:
        ConfigError: The row has no token.
    """
    example: Example = {
        name: np.asarray(next(iter(rows)), dtype=np.int64) for name, rows in encoding.items()
    }
    if not len(example["input_ids"]):
        raise ConfigError(f"it has no token: {NO_TOKEN}")
    return example
