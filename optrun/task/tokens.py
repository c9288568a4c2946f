"""Texts to the ids of a tokenizer, and what decides these: part of the address of cached tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict, PlainMapping
from optrun.data.cache import digest, key_of
from optrun.data.columns import texts
from optrun.data.examples import encode

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

    from optrun.data.encoded import Encoder
    from optrun.data.examples import Example, Examples
    from optrun.data.source import Split

NO_TOKEN = "an empty text, and a tokenizer that adds none of its own. Leave such rows out."


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Serialize the settings of a tokenizer, for cache keys."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # How long a text may be is set anew at each call; the last call is no part of what the
        # tokenizer is.
        return json.dumps(
            {**json.loads(backend.to_str()), "truncation": None, "padding": None}, sort_keys=True
        )
    settings = sorted(map(str, tokenizer.init_kwargs.items()))
    return f"{type(tokenizer).__qualname__} {sorted(tokenizer.get_vocab().items())} {settings}"


def begin_of_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a tokenizer's begin-of-text token, such as Llama's `<s>`; "" if it adds none.

    A row that was written with a template has it already, and would begin twice.
    """
    ids = tokenizer("a", verbose=False)["input_ids"]
    puts_begin = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    if puts_begin:
        return str(tokenizer.bos_token)
    return ""


def ids_around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """List a tokenizer's ids before and after a text, such as Llama's `<s>`.

    GPT-2's puts none.

    A model that has never seen a text without them predicts badly where they are missing.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids: list[int] = tokenizer("a")["input_ids"]
    starts = range(len(ids) - len(plain) + 1)
    begin = next((start for start in starts if ids[start : start + len(plain)] == plain), 0)
    return ids[:begin], ids[begin + len(plain) :]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[str]) -> list[list[int]]:
    """Encode texts that are to be continued: begun as any text, and not ended.

    Behind an end-of-text token, which some tokenizers add to every text, a model writes nothing.
    """
    start, _ = ids_around_text(tokenizer)
    begin = begin_of_text(tokenizer)
    texts_alone = [prompt.removeprefix(begin) for prompt in prompts]
    rows = encode_to_inputs(tokenizer, texts_alone, None, add_special_tokens=False)["input_ids"]
    return [start + ids for ids in rows]


def ids_below(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the tokenizer's largest id plus one."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def rows_key(tokenizer: PreTrainedTokenizerBase, kind: str, longest: int | str, *more: str) -> str:
    """Digest tokenizer and settings, the determinants of row ids.

    The tokenizer, their kind, the length after which they are cut, and more.
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
    """Encode texts, or pairs of texts; the longer side of a pair is cut first.

    Args:
        tokenizer: Of the model.
        rows: All texts, or all pairs.
        longest: Tokens after which it cuts; None: it does not.
        options: Of the call of the tokenizer.
    """
    sides = zip(*rows, strict=True) if rows and isinstance(rows[0], tuple) else [rows]
    return tokenizer(
        *map(list, sides),
        truncation=longest is not None,
        max_length=longest,
        return_attention_mask=False,
        verbose=False,
        **options,
    )


def encode_to_inputs(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], longest: int | None, **options: object
) -> dict[str, list[list[int]]]:
    """Encode rows as `tokenized`, to `input_ids` and.

    If the tokenizer makes them, `token_type_ids`.
    """
    return model_inputs_of(tokenize_rows(tokenizer, rows, longest, **options))


def model_inputs_of(made: PlainMapping) -> PlainDict:
    """Select the model inputs from a tokenizer's output."""
    return {name: made[name] for name in ("input_ids", "token_type_ids") if name in made}


def interleave_columns(split: Split, columns: Sequence[str]) -> Iterator[str]:
    """Yield the texts of several columns, row by row."""
    return chain.from_iterable(zip(*(texts(split, name) for name in columns), strict=True))


def encode_rows(
    part: Split,
    rows: Callable[[], Iterator[object]],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    kind: str,
    *columns: str,
) -> Examples:
    """Encode texts, or pairs of texts, once for the same rows, tokenizer and length.

    Args:
        part: The rows.
        rows: Yields their texts anew at each call.
        tokenizer: Of the model.
        longest: Tokens after which it cuts.
        kind: What is made of them.
        columns: Where the texts stand.
    """
    encoder = text_encoder(tokenizer, longest)
    key = rows_key(tokenizer, kind, longest)
    content_key = key_of(part.content, kind, *columns)
    size = ids_below(tokenizer)
    return encode(rows, encoder, key, longest=longest, content=content_key, ids_below=size)


def text_encoder(tokenizer: PreTrainedTokenizerBase, longest: int) -> Encoder:
    """Return an encoder of batches of texts, or of pairs of texts."""
    return lambda batch, cut: encode_to_inputs(tokenizer, batch, longest if cut else None)


def example_of_one_row(made: Mapping[str, Iterable[object]]) -> Example:
    """Make the example of a batch of one row.

    Raises:
        ConfigError: It has no token.
    """
    example: Example = {
        name: np.asarray(next(iter(rows)), dtype=np.int64) for name, rows in made.items()
    }
    if not len(example["input_ids"]):
        raise ConfigError(f"it has no token: {NO_TOKEN}")
    return example
