"""Examples of unequal length in a few flat arrays, mapped from disk, the same for every text task."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash

from optrun.data.cache import cached, digest, digest_of
from optrun.data.permutation import LARGE, KeyedPermutation
from optrun.data.randomness import generator

Example = dict[str, Any]
_BATCH = 1000


class Examples:
    """Rows of token ids and numbers.

    Args:
        offsets: Where each example begins in the flat arrays; shape (n + 1,), int64.
        ragged: Name to flat array, such as `input_ids`; shape (offsets[-1],).
        scalars: Name to one value per example, such as `labels`; shape (n,).
        lost: Tokens that each example lost to its greatest length; shape (n,), int64. None: none was cut.
        hashes: Of the texts that the examples were made of, by which equal ones are found; shape (texts,), uint64. One
            an example, but where examples are blocks of joined texts.
    """

    def __init__(
        self,
        offsets: np.ndarray,
        ragged: Mapping[str, np.ndarray],
        scalars: Mapping[str, np.ndarray] | None = None,
        *,
        lost: np.ndarray | None = None,
        hashes: np.ndarray | None = None,
    ) -> None:
        self.offsets = offsets
        self.ragged = dict(ragged)
        self.scalars = dict(scalars or {})
        self.lost = lost
        self.hashes = hashes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        begin, end = int(self.offsets[index]), int(self.offsets[index + 1])
        example: Example = {name: np.asarray(flat[begin:end], dtype=np.int64) for name, flat in self.ragged.items()}
        example.update({name: values[index] for name, values in self.scalars.items()})
        return example

    def flat(self, name: str) -> np.ndarray:
        """One of the flat arrays; empty where there was no text to make any of."""
        return self.ragged.get(name, np.zeros(0, dtype="<i4"))

    def with_scalars(self, **scalars: np.ndarray) -> Examples:
        """The same examples with more values each."""
        return Examples(self.offsets, self.ragged, {**self.scalars, **scalars}, lost=self.lost, hashes=self.hashes)

    def renamed(self, names: Mapping[str, str]) -> Examples:
        """The same examples with other names for their flat arrays; one that is not named is left out."""
        ragged = {new: self.flat(old) for old, new in names.items()}
        return Examples(self.offsets, ragged, self.scalars, lost=self.lost, hashes=self.hashes)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example; shape (n,), int64."""
        return np.diff(self.offsets)

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

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example; shape (n,), int64."""
        found: np.ndarray = self.examples.lengths[self.indices]
        return found

    @property
    def lost(self) -> np.ndarray | None:
        """Tokens that each example lost to its greatest length; shape (n,), int64."""
        return None if self.examples.lost is None else self.examples.lost[self.indices]

    @property
    def hashes(self) -> np.ndarray | None:
        """Of the texts; of all of them where these are blocks."""
        found: np.ndarray | None = self.examples.hashes
        return found if found is None or len(found) != len(self.examples) else found[self.indices]

    def fingerprint(self) -> str:
        """Digest of the examples and of which are taken."""
        return digest(self.examples.fingerprint(), np.ascontiguousarray(self.indices).tobytes())


class InMemory:
    """Examples held in memory, for a task whose examples are not rows of ids; such as several texts each.

    Args:
        examples: Name to number, array, or list of arrays.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def fingerprint(self) -> str:
        """Digest of every value, with names, types and shapes."""
        return digest_of(
            piece for example in self.examples for name in sorted(example) for piece in _pieces(name, example[name])
        )


def _pieces(name: str, value: Any) -> Iterator[str | bytes]:
    parts = value if isinstance(value, list) else [value]
    yield f"{name} {len(parts)}"
    for array in map(np.asarray, parts):
        yield f"{array.dtype} {array.shape}"
        yield array.tobytes()


class Joined:
    """Two sequences of examples side by side: each example has the values of both.

    Args:
        first: Examples.
        second: As many, with other names.
    """

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> Example:
        return {**self.first[index], **self.second[index]}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, of both sides together; shape (n,), int64."""
        found: np.ndarray = self.first.lengths + self.second.lengths
        return found

    def fingerprint(self) -> str:
        """Digest of both."""
        return digest(self.first.fingerprint(), self.second.fingerprint())


def chosen(count: int, limit: int | None, *, seed: int | None) -> np.ndarray | None:
    """Which of `count` examples to keep where their number is limited; None: all of them.

    Args:
        count: How many there are.
        limit: How many to keep; None: all.
        seed: Picks them; None: by chance too, but the same ones whatever the run's seed, so that runs are judged on the
            same examples, and a split that is sorted by label is not judged by one label alone.

    Returns:
        Indices, shape (limit,), int64.
    """
    if limit is None or limit >= count:
        return None
    stream = "evaluation subset" if seed is None else "subset"
    if count > LARGE:
        indices = KeyedPermutation(count, seed or 0, stream)[:limit]
    else:
        indices = generator(seed or 0, stream).permutation(count)[:limit]
    return np.sort(indices) if seed is None else indices


SomeExamples = TypeVar("SomeExamples", bound=Sized)


def limited(examples: SomeExamples, limit: int | None, *, seed: int | None) -> SomeExamples | Selected:
    """At most `limit` examples, chosen as by `chosen`."""
    indices = chosen(len(examples), limit, seed=seed)
    return examples if indices is None else Selected(examples, indices)


Encoder = Callable[[list[Any], bool], Mapping[str, Iterable[Sequence[int]]]]
"""A batch of texts to lists of ids by name, such as `input_ids`, one length per text; True: cut, False: whole."""


def encode(texts: Callable[[], Iterator[Any]], encoder: Encoder, key: str, *, longest: int | None = None) -> Examples:
    """Token ids of texts, made once for the same texts, tokenizer and settings.

    Args:
        texts: Gives the texts (or pairs, or whatever the encoder takes) anew at each call: once to hash them, once to
            encode them. Their `repr` must say all of them.
        encoder: Makes the ids; asked again, for whole ones, where a text fills `longest`: what was cut is then known.
        key: Digest of tokenizer and settings.
        longest: Tokens after which it cuts; None: it does not.

    Returns:
        One example per text, mapped from the cache.
    """
    total = digest_of(repr(text) for text in texts())
    folder = cached("tokens", digest("tokens-3", total, key), lambda folder: _encode(texts(), encoder, longest, folder))
    offsets, lost, hashes = (
        np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False))
        for name in ("offsets", "lost", "hashes")
    )
    arrays = {path.stem: _mapped(path) for path in sorted(folder.glob("*.int32"))}
    return Examples(offsets, arrays, lost=None if longest is None else lost, hashes=hashes)


def _encode(texts: Iterator[Any], encoder: Encoder, longest: int | None, folder: Path) -> None:
    """Batch by batch to the disk: the corpus is never in memory as a whole."""
    lengths: list[np.ndarray] = [np.zeros(1, dtype=np.int64)]
    lost: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    hashes: list[np.ndarray] = [np.zeros(0, dtype=np.uint64)]
    with contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        while batch := list(islice(texts, _BATCH)):
            for name, rows in encoder(batch, True).items():
                rows = list(rows)
                if name not in files:
                    files[name] = stack.enter_context((folder / f"{name}.int32").open("wb"))
                np.concatenate([np.asarray(row, dtype="<i4") for row in rows]).tofile(files[name])
                sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
            lengths.append(sizes)
            lost.append(_lost(batch, sizes, encoder, longest))
            raw = (repr(text).encode("utf-8", "surrogatepass") for text in batch)
            hashes.append(np.fromiter(map(xxhash.xxh3_64_intdigest, raw), dtype=np.uint64, count=len(batch)))
    np.save(folder / "offsets.npy", np.cumsum(np.concatenate(lengths)))
    np.save(folder / "lost.npy", np.concatenate(lost))
    np.save(folder / "hashes.npy", np.concatenate(hashes))


def _lost(batch: list[Any], sizes: np.ndarray, encoder: Encoder, longest: int | None) -> np.ndarray:
    """Tokens that each text of a batch lost; shape (texts,), int64."""
    lost = np.zeros(len(batch), dtype=np.int64)
    full = [] if longest is None else np.flatnonzero(sizes >= longest).tolist()
    if full:
        whole = encoder([batch[index] for index in full], False)["input_ids"]
        lost[full] = [len(row) for row in whole]
        lost[full] -= sizes[full]
    return lost


def _mapped(path: Path) -> np.ndarray:
    if path.stat().st_size == 0:  # nothing cannot be mapped
        return np.zeros(0, dtype="<i4")
    return np.asarray(np.memmap(path, dtype="<i4", mode="r"))  # mapped all the same; a memmap is slow to cut


def packed(examples: Examples, length: int, *, keep_rest: bool) -> Examples:
    """Documents joined and cut into blocks.

    Args:
        examples: One document each, with `input_ids` alone, borders between documents included.
        length: Tokens of a block.
        keep_rest: True: what is left at the end is a shorter block; False: it is dropped, unless it is all there is.

    Returns:
        Blocks over the same flat array; every token but the dropped rest stands in exactly one. A rest of one token is
        always dropped: nothing can be predicted from it.
    """
    ids = examples.ragged["input_ids"]
    blocks = len(ids) // length
    borders = np.arange(blocks + 1, dtype=np.int64) * length
    rest = len(ids) - blocks * length
    if rest > 1 and (keep_rest or blocks == 0):
        borders = np.append(borders, len(ids))
    return Examples(borders, {"input_ids": ids[: borders[-1]]}, hashes=examples.hashes)
