"""Files as they were written, by size and checksum, and whether they still are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Protocol, Self, TypedDict

import xxhash

from optrun.base.plain import PlainMapping
from optrun.base.reading import kind_of, open_file

_PIECE = 4 * 2**20


class Hash(Protocol):
    """The interface of a `hashlib` hash."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add data to the digest."""

    def hexdigest(self) -> str:
        """Return the hexadecimal digest of the data so far."""


ALGORITHMS: dict[str, Callable[[], Hash]] = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256}
"""`xxh3`: XXH3 of 128 bits (Collet, https://xxhash.com), faster than disks: a flipped bit, a cut or
an exchanged file is found. It stands for tensors, `sha256` for all else."""


class TensorEntry(TypedDict):
    """One tensor in a manifest."""

    dtype: str
    """As of torch, such as `float32`."""
    shape: list[int]


@dataclass(frozen=True)
class Entry:
    """One file in a manifest, as it was written."""

    size: int
    """Bytes."""
    hexdigest: str
    algorithm: str = "sha256"
    """One of `ALGORITHMS`."""

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Build the entry for content to be written."""
        return cls(len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def read(cls, values: PlainMapping) -> Self:
        """Read an entry of a manifest; the key of the checksum names its algorithm.

        Example:
            >>> Entry.read({"name": "a.txt", "size": 3, "sha256": "ba78"})
            Entry(size=3, hexdigest='ba78', algorithm='sha256')

        Raises:
            ValueError: There is no checksum, or more than one.
            KeyError: There is no size.
        """
        (algorithm,) = ALGORITHMS.keys() & values.keys()
        return cls(int(values["size"]), str(values[algorithm]), algorithm)

    def to_dict(self, name: str) -> dict[str, object]:
        """Convert to the entry of a manifest."""
        return {"name": name, "size": self.size, self.algorithm: self.hexdigest}


def digest_of(file: BufferedIOBase, algorithm: str = "sha256", size: int | None = None) -> Hash:
    """Digest a file from its current position, 4 MiB at a time.

    Equals `hashlib.sha256(file.read(size))` without holding the bytes in memory.

    Args:
        file: The file, at the position where the digested part begins.
        algorithm: One of `ALGORITHMS`.
        size: Number of bytes; None: up to the end. A shorter file is digested to its end.

    Returns:
        The hash; its `hexdigest()` is the checksum.
    """
    total = ALGORITHMS[algorithm]()
    buffer = memoryview(bytearray(_PIECE))
    # `readinto` returns the number of bytes read, 0 at the end of the file or if `size` is used up.
    while count := file.readinto(buffer[:size]):  # buffer[:None] is all of it
        total.update(buffer[:count])
        if size is not None:
            size -= count
    return total


def file_problem(path: Path, entry: Entry) -> str | None:
    """Describe the damage of one file, after reading all of it; None if there is none.

    Args:
        path: The file.
        entry: Size and checksum when it was written.

    Raises:
        OSError: The file exists, and cannot be read.
    """
    try:
        kind = kind_of(path)
        size = path.lstat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return f"{path}: missing."
    if kind is not None:
        return f"{path}: {kind}."
    if size != entry.size:
        return f"{path}: {size:,} bytes, {entry.size:,} expected."
    with open_file(path) as file:
        if digest_of(file, entry.algorithm, entry.size).hexdigest() == entry.hexdigest:
            return None
    return f"{path}: its bytes changed since it was written (checksum differs)."
