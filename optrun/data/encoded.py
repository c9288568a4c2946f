"""Token ids of texts in files: written batch by batch, and mapped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from optrun.data.progress import progress

_TEXTS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 21
"""Texts that are encoded together: a thousand of them, or as many as have this many characters."""

MAKERS = ("tokenizers", "transformers", "jinja2")
"""Packages that decide which ids a text or a chat has."""


Encoder = Callable[[list[Any], bool], Mapping[str, Iterable[Any]]]
"""Encodes a batch of texts to lists of ids by name, such as `input_ids`; all names have equal
lengths. The second argument says whether texts are cut to the greatest length."""


def size_of(text: object) -> int:
    """Count the characters of a text, or of all texts in a list or tuple; 0 of anything else."""
    if isinstance(text, list | tuple):
        return sum(map(size_of, text))
    if isinstance(text, Sized):
        return len(text)
    return 0


def _batches(texts: Iterator[object]) -> Iterator[list[object]]:
    """Yield at most 1,000 texts with 2 million characters at a time; a longer text comes alone."""
    batch: list[object] = []
    characters = 0
    for text in texts:
        size = size_of(text)
        if batch and (len(batch) == _TEXTS_AT_ONCE or characters + size > _CHARACTERS_AT_ONCE):
            yield batch
            batch = []
            characters = 0
        batch.append(text)
        characters += size
    if batch:
        yield batch


def write_ids(
    texts: Iterator[object],
    encoder: Encoder,
    longest: int | None,
    folder: Path,
    dtype: str,
    characters: int,
) -> None:
    """Encode texts, and write their ids, lengths and hashes into a folder, batch by batch.

    For texts with the ids `[5, 6]` and `[7]` the file `input_ids.int32` holds 5, 6, 7, and
    `offsets.npy` 0, 2, 3.

    Args:
        texts: The texts, or whatever the encoder takes.
        encoder: Makes the ids.
        longest: Tokens after which the encoder cuts; None: it does not cut.
        folder: Gets `NAME.DTYPE` with the ids of each name, one text behind the other, and
            `offsets.npy` (texts + 1,), `lost.npy` (texts,) with the tokens that were cut off, and
            `hashes.npy` (texts,) of the `repr` of each text.
        dtype: Type of the ids, `int32` or `uint16`.
        characters: Characters of all texts, for the progress bar.
    """
    lengths: list[np.ndarray] = [np.zeros(1, dtype=np.int64)]
    lost: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    hashes: list[np.ndarray] = [np.zeros(0, dtype=np.uint64)]
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        bar = stack.enter_context(progress("tokenising", characters))
        for batch in _batches(texts):
            # 1. The ids, a file for each name. `sizes`, the tokens of each text, are those of the
            #    last name: all names have equal lengths.
            for name, rows in encoder(batch, True).items():
                if name not in files:
                    files[name] = stack.enter_context((folder / f"{name}.{dtype}").open("wb"))
                sizes = _append_ids(rows, files[name], dtype)
            lengths.append(sizes)
            # 2. Lost tokens, and a hash for each text.
            lost.append(_count_lost_tokens(batch, sizes, encoder, longest))
            raw = (repr(text).encode("utf-8", "surrogatepass") for text in batch)
            hashes.append(
                np.fromiter(map(xxhash.xxh3_64_intdigest, raw), dtype=np.uint64, count=len(batch))
            )
            bar.done(sum(map(size_of, batch)), tokens=int(sizes.sum()))
    np.save(folder / "offsets.npy", np.cumsum(np.concatenate(lengths)))
    np.save(folder / "lost.npy", np.concatenate(lost))
    np.save(folder / "hashes.npy", np.concatenate(hashes))


def _append_ids(rows: Iterable[Sequence[int]], file: BinaryIO, dtype: str) -> np.ndarray:
    """Append the ids of texts to a file, and return the length of each; shape (texts,), int64."""
    arrays = [np.asarray(row, dtype=dtype) for row in rows]
    np.concatenate(arrays).tofile(file)
    return np.array(list(map(len, arrays)), dtype=np.int64)


def _count_lost_tokens(
    batch: list[object], sizes: np.ndarray, encoder: Encoder, longest: int | None
) -> np.ndarray:
    """Count the tokens cut off each text of a batch; shape (texts,), int64.

    Args:
        batch: The texts.
        sizes: Tokens of each text as it was cut; shape (texts,).
        encoder: Encodes texts that fill `longest` again, without cutting.
        longest: Tokens after which a text was cut; None: no text was, and all counts are 0.
    """
    lost = np.zeros(len(batch), dtype=np.int64)
    if longest is None:
        return lost
    full = np.flatnonzero(sizes >= longest).tolist()
    if full:
        uncut = encoder([batch[index] for index in full], False)["input_ids"]
        lost[full] = np.array([len(row) for row in uncut]) - sizes[full]
    return lost


def map_ids(path: Path, dtype: str) -> np.ndarray:
    """Map a file of ids of `write_ids`, little-endian; shape (tokens,)."""
    kind = np.dtype(dtype).newbyteorder("<")
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=kind)
    # A plain array over the mapped bytes: slices of a memmap are slow.
    return np.asarray(np.memmap(path, dtype=kind, mode="r"))
