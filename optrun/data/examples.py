"""Examples of unequal length in a few flat arrays, mapped from disk, the same for every text task."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from optrun.data.cache import cached, digest
from optrun.data.randomness import generator

Example = dict[str, Any]
_BATCH = 1000


class Examples:
    """Rows of token ids and numbers.

    Args:
        offsets: Where each example begins in the flat arrays; shape (n + 1,), int64.
        ragged: Name to flat array, such as `input_ids`; shape (offsets[-1],).
        scalars: Name to one value per example, such as `labels`; shape (n,).
    """

    def __init__(
        self, offsets: np.ndarray, ragged: Mapping[str, np.ndarray], scalars: Mapping[str, np.ndarray] | None = None
    ) -> None:
        self.offsets = offsets
        self.ragged = dict(ragged)
        self.scalars = dict(scalars or {})

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        example: Example = {name: np.asarray(flat[begin:end], dtype=np.int64) for name, flat in self.ragged.items()}
        example.update({name: values[index] for name, values in self.scalars.items()})
        return example

    def with_scalars(self, **scalars: np.ndarray) -> Examples:
        """The same examples with more values each."""
        return Examples(self.offsets, self.ragged, {**self.scalars, **scalars})

    def fingerprint(self) -> str:
        """A digest of everything the examples hold: the same data, wherever it lies, gives the same one."""
        total = hashlib.sha256(np.ascontiguousarray(self.offsets).tobytes())
        for name in sorted(self.ragged):
            total.update(name.encode())
            total.update(np.ascontiguousarray(self.ragged[name]).data)
        for name in sorted(self.scalars):
            total.update(name.encode())
            total.update(np.ascontiguousarray(self.scalars[name]).data)
        return total.hexdigest()


class Selected:
    """Some of the examples, in a given order."""

    def __init__(self, examples: Any, indices: np.ndarray) -> None:
        self.examples = examples
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        example: Example = self.examples[int(self.indices[index])]
        return example

    def fingerprint(self) -> str:
        """Digest of the examples and of which are taken."""
        return digest(self.examples.fingerprint(), np.ascontiguousarray(self.indices).tobytes())


def limited(examples: Any, limit: int | None, *, seed: int | None) -> Any:
    """At most `limit` examples.

    Args:
        examples: All of them.
        limit: How many to keep; None: all.
        seed: Picks them; None: the first ones.
    """
    if limit is None or limit >= len(examples):
        return examples
    if seed is None:
        return Selected(examples, np.arange(limit))
    return Selected(examples, generator(seed, "subset").permutation(len(examples))[:limit])


def encode(texts: Callable[[], Iterator[Any]], encoder: Callable[[list[Any]], Mapping[str, list[list[int]]]], key: str) -> Examples:
    """Token ids of texts, made once for the same texts, tokenizer and settings.

    Args:
        texts: Gives the texts (or pairs) anew at each call: once to hash them, once to encode them.
        encoder: A batch of texts to lists of ids by name, such as `input_ids` and `token_type_ids`.
        key: Digest of tokenizer and settings.

    Returns:
        One example per text, mapped from the cache.
    """
    total = hashlib.sha256()
    for text in texts():
        raw = repr(text).encode("utf-8", "surrogatepass")
        total.update(len(raw).to_bytes(8, "big"))
        total.update(raw)

    def make(folder: Path) -> None:
        lengths: list[np.ndarray] = []
        pieces: dict[str, list[np.ndarray]] = {}
        source = texts()
        while batch := list(islice(source, _BATCH)):
            encoded = encoder(batch)
            for name, rows in encoded.items():
                pieces.setdefault(name, []).append(np.fromiter((x for row in rows for x in row), dtype=np.int32))
            lengths.append(np.fromiter((len(row) for row in encoded["input_ids"]), dtype=np.int64))
        sizes = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
        np.save(folder / "offsets.npy", np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]))
        for name, arrays in pieces.items():
            np.save(folder / f"{name}.npy", np.concatenate(arrays))

    folder = cached("tokens", digest(total.hexdigest(), key), make)
    arrays = {path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("*.npy"))}
    offsets = arrays.pop("offsets")
    return Examples(offsets, arrays)


def packed(examples: Examples, length: int, separator: int | None, *, keep_rest: bool) -> Examples:
    """Documents joined and cut into blocks.

    Args:
        examples: One document each, with `input_ids` alone.
        length: Tokens of a block.
        separator: Id put after each document; None: the documents carry their own borders.
        keep_rest: True: what is left at the end is a shorter block; False: it is dropped, unless it is all there is.

    Returns:
        Blocks; every token but the dropped rest stands in exactly one.
    """
    ids = examples.ragged["input_ids"]
    if separator is not None:
        ids = np.insert(ids, examples.offsets[1:], separator)
    blocks = len(ids) // length
    borders = np.arange(blocks + 1, dtype=np.int64) * length
    rest = len(ids) - blocks * length
    if rest > 1 and (keep_rest or blocks == 0):
        borders = np.append(borders, len(ids))
    return Examples(borders, {"input_ids": ids[: borders[-1]]})
