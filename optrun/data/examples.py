"""Examples of unequal length in a few flat arrays, mapped from disk, for every text task."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from optrun.data.cache import cached, cached_result, digest, digest_if_known, digest_of, versions
from optrun.data.cached_arrays import map_arrays
from optrun.data.encoded import MAKERS, Encoder, map_ids, size_of, write_ids
from optrun.data.randomness import generator

Example = dict[str, Any]
_VALUES_AT_ONCE = 1 << 22
_IDS_OF_16_BITS = 1 << 16
"""Ids below which two bytes hold one."""


@dataclass(eq=False)
class Examples:
    """Rows of token ids and numbers."""

    offsets: np.ndarray
    """Where each example begins in the flat arrays; shape (n + 1,), int64."""
    ragged: Mapping[str, np.ndarray]
    """Name to flat array, such as `input_ids`; shape (offsets[-1],)."""
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name to one value per example, such as `labels`; shape (n,)."""
    lost: np.ndarray | None = field(default=None, kw_only=True)
    """Tokens that were cut off each example; shape (n,), int64. None: nothing was cut."""
    hashes: np.ndarray | None = field(default=None, kw_only=True)
    """Hashes of the texts, equal for equal texts; shape (texts,), uint64. A text for each example,
    unless examples are blocks of joined texts."""
    origin: str | None = field(default=None, kw_only=True)
    """Digest of everything that decides offsets and flat arrays, under which the fingerprint is
    cached; None: it is computed anew."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        begin = int(self.offsets[index])
        end = int(self.offsets[index + 1])
        example: Example = {
            name: np.asarray(flat[begin:end], dtype=np.int64) for name, flat in self.ragged.items()
        }
        example.update({name: values[index] for name, values in self.scalars.items()})
        return example

    def flat(self, name: str) -> np.ndarray:
        """Return a flat array by its name; an empty one if there is none of this name."""
        return self.ragged.get(name, np.zeros(0, dtype="<i4"))

    def with_scalars(self, **scalars: np.ndarray) -> Examples:
        """Return the same examples with more scalars; one of the same name is replaced."""
        return replace(self, scalars={**self.scalars, **scalars})

    def renamed(self, names: Mapping[str, str]) -> Examples:
        """Return the same examples with other names for their flat arrays.

        Args:
            names: Old name to new one; an array without a new name is left out.

        Example:
            >>> examples = Examples(np.array([0, 2]), {"input_ids": np.array([5, 6])})
            >>> examples.renamed({"input_ids": "labels"})[0]
            {'labels': array([5, 6])}
        """
        ragged = {new: self.flat(old) for old, new in names.items()}
        return replace(
            self,
            ragged=ragged,
            origin=digest_if_known(self.origin, *map(str, sorted(names.items()))),
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example; shape (n,), int64."""
        return np.diff(self.offsets)

    def fingerprint(self) -> str:
        """Digest offsets, flat arrays and scalars; ids of two and of four bytes are equal."""
        return cached_result(
            digest_if_known("examples-1", self.origin, *scalar_pieces(self.scalars)),
            self._fingerprint,
        )

    def _fingerprint(self) -> str:
        """Compute the fingerprint, as `fingerprint` without a cache."""
        total = hashlib.sha256()
        for piece in _yield_pieces(self.offsets):
            total.update(np.ascontiguousarray(piece).data)
        for name in sorted(self.ragged):
            total.update(name.encode())
            for piece in _yield_pieces(self.ragged[name]):
                # The same ids have the same digest, whether two or four bytes hold one.
                dtype = "<i4" if piece.dtype == np.uint16 else None
                total.update(np.ascontiguousarray(piece, dtype=dtype).data)
        for name in sorted(self.scalars):
            total.update(name.encode())
            total.update(np.ascontiguousarray(self.scalars[name]).data)
        return total.hexdigest()


def scalar_pieces(scalars: Mapping[str, np.ndarray]) -> Iterator[str | bytes]:
    """Yield names and bytes of values, for a digest."""
    for name in sorted(scalars):
        yield name
        yield scalars[name].tobytes()


def _yield_pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array in pieces, one in memory at a time."""
    return (values[at : at + _VALUES_AT_ONCE] for at in range(0, len(values), _VALUES_AT_ONCE))


@dataclass(eq=False)
class Selected:
    """Some of the examples, in a given order."""

    examples: Any
    """A sequence of examples such as `Examples`."""
    indices: np.ndarray
    """Numbers of the examples; shape (selected,), int64."""

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Example:
        example: Example = self.examples[int(self.indices[index])]
        return example

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example; shape (n,), int64."""
        selected: np.ndarray = self.examples.lengths[self.indices]
        return selected

    @property
    def lost(self) -> np.ndarray | None:
        """Tokens lost by each example to its greatest length; shape (n,), int64."""
        return None if self.examples.lost is None else self.examples.lost[self.indices]

    @property
    def hashes(self) -> np.ndarray | None:
        """Hashes of the texts of the selected examples; of all texts if examples join texts."""
        hashes: np.ndarray | None = self.examples.hashes
        # Blocks of joined texts have another number of texts than of examples.
        if hashes is None or len(hashes) != len(self.examples):
            return hashes
        selected: np.ndarray = hashes[self.indices]
        return selected

    @property
    def origin(self) -> str | None:
        """Digest of the origin of the examples and the selection; None: unknown."""
        return digest_if_known(
            getattr(self.examples, "origin", None), "selected", self.indices.tobytes()
        )

    def fingerprint(self) -> str:
        """Digest the examples and the selection."""
        return digest(self.examples.fingerprint(), self.indices.tobytes())


@dataclass(eq=False)
class InMemory:
    """Examples in memory, such as several texts each."""

    examples: Sequence[Example]
    """Name to number, array, or list of arrays."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def fingerprint(self) -> str:
        """Digest every value, with its name, type and shape."""
        return digest_of(self._digest_pieces())

    def _digest_pieces(self) -> Iterator[str | bytes]:
        """Yield name, type, shape and bytes of every array, in the order of examples and names."""
        for example in self.examples:
            for name, value in sorted(example.items()):
                arrays = value if isinstance(value, list) else [value]
                yield f"{name} {len(arrays)}"
                for array in map(np.asarray, arrays):
                    yield f"{array.dtype} {array.shape}"
                    yield array.tobytes()


@dataclass(eq=False)
class Joined:
    """Two sequences of examples with as many examples: each example has the values of both."""

    first: Any
    second: Any
    """Its values have other names than those of `first`."""

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, index: int) -> Example:
        return {**self.first[index], **self.second[index]}

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, of both sides together; shape (n,), int64."""
        total: np.ndarray = self.first.lengths + self.second.lengths
        return total

    def fingerprint(self) -> str:
        """Digest both sides."""
        return digest(self.first.fingerprint(), self.second.fingerprint())


def chosen(count: int, limit: int | None, *, seed: int | None) -> np.ndarray | None:
    """Draw the examples to keep if their number is limited.

    Args:
        count: How many there are.
        limit: How many to keep; None: all.
        seed: Decides the draw and the order. None: the same draw for every run, in ascending order,
            so that runs are evaluated on the same examples.

    Returns:
        Indices, shape (limit,), int64; None: all examples, in their order.

    Example:
        >>> chosen(100, 3, seed=None).shape, chosen(3, 100, seed=None)
        ((3,), None)
    """
    if limit is None or limit >= count:
        return None
    stream = "evaluation subset" if seed is None else "subset"
    indices = generator(seed or 0, stream).permutation(count)[:limit]
    if seed is None:
        return np.sort(indices)
    return indices


SomeExamples = TypeVar("SomeExamples", bound=Sized)


def limited(
    examples: SomeExamples, limit: int | None, *, seed: int | None
) -> SomeExamples | Selected:
    """Keep at most `limit` examples, chosen as by `chosen`."""
    indices = chosen(len(examples), limit, seed=seed)
    return examples if indices is None else Selected(examples, indices)


def encode(
    texts: Callable[[], Iterator[object]],
    encoder: Encoder,
    key: str,
    *,
    longest: int | None = None,
    content: str | None = None,
    ids_below: int | None = None,
) -> Examples:
    """Encode texts to token ids, once for the same texts, tokenizer and settings.

    Args:
        texts: Yields the texts (or pairs, or whatever the encoder takes) anew at each call: once to
            hash their `repr`, once to encode them.
        encoder: Makes the ids. A text that fills `longest` is encoded a second time without
            cutting, to count its lost tokens.
        key: Digest of tokenizer and settings.
        longest: Tokens after which the encoder cuts; None: it does not cut.
        content: Digest of the input of `texts`, under which the hash of the texts is cached; None:
            the texts are hashed again.
        ids_below: All ids are below this number, so that small vocabularies take 16 bits; None: 32
            bits.

    Returns:
        One example per text, mapped from the cache.
    """
    # 1. Name the ids by everything that decides them.
    texts_digest, characters = cached_result(
        digest_if_known("texts-1", content), lambda: _digest_texts(texts())
    )
    dtype = "int32"
    if ids_below is not None and ids_below <= _IDS_OF_16_BITS:
        dtype = "uint16"
    name = digest("tokens-5", dtype, versions(*MAKERS), texts_digest, key)
    # 2. Write them, unless the cache has them.
    folder = cached(
        "tokens",
        name,
        lambda folder: write_ids(texts(), encoder, longest, folder, dtype, characters),
    )
    # 3. Map them: `offsets.npy`, `lost.npy` and `hashes.npy`, and the ids of each name.
    per_text = map_arrays(folder)
    ids = {path.stem: map_ids(path, dtype) for path in sorted(folder.glob(f"*.{dtype}"))}
    lost = None if longest is None else per_text["lost"]
    return Examples(per_text["offsets"], ids, lost=lost, hashes=per_text["hashes"], origin=name)


def _digest_texts(texts: Iterable[object]) -> tuple[str, int]:
    """Digest the `repr` of each text, and count the characters of all, in one pass."""
    characters = 0

    def reprs() -> Iterator[str]:
        nonlocal characters
        for text in texts:
            characters += size_of(text)
            yield repr(text)

    texts_digest = digest_of(reprs())
    return texts_digest, characters  # counted while the digest was computed


def packed(examples: Examples, length: int, *, keep_rest: bool) -> Examples:
    """Join documents, and cut the result into blocks of equal length.

    Args:
        examples: One document each, with `input_ids` alone, borders between documents included.
        length: Tokens of a block.
        keep_rest: Make a shorter block of the tokens that are left at the end; if false, they are
            dropped, unless there is no other block.

    Returns:
        Blocks over the same flat array; each token is in one block, but for dropped ones. A single
        token at the end is always dropped, since nothing can be predicted from it.

    Example:
        >>> documents = Examples(np.array([0, 3, 8]), {"input_ids": np.arange(8)})
        >>> packed(documents, 3, keep_rest=True).offsets.tolist()
        [0, 3, 6, 8]
        >>> packed(documents, 3, keep_rest=False).offsets.tolist()
        [0, 3, 6]
    """
    ids = examples.ragged["input_ids"]
    blocks, rest = divmod(len(ids), length)
    borders = np.arange(blocks + 1, dtype=np.int64) * length
    if rest > 1 and (keep_rest or blocks == 0):
        borders = np.append(borders, len(ids))
    origin = digest_if_known(examples.origin, "packed", str(length), str(keep_rest))
    return Examples(
        borders, {"input_ids": ids[: borders[-1]]}, hashes=examples.hashes, origin=origin
    )
