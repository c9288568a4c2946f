"""Checksums of files: fast ones that find damage, and one that also stands against somebody who changes a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any, Protocol

import xxhash

_PIECE = 4 * 2**20


class Hash(Protocol):
    """As of `hashlib`."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take in more."""

    def hexdigest(self) -> str:
        """Return the digest of all up to here."""


ALGORITHMS: dict[str, Callable[[], Hash]] = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256}
"""`xxh3`: XXH3 of 128 bits (Collet, https://xxhash.com), faster than disks: a flipped bit, a cut or an exchanged file
is found. Whoever wants to can make another file with the same one; not so with `sha256`."""


@dataclass(frozen=True)
class Checksum:
    """Of a file, hexadecimal."""

    algorithm: str
    hexdigest: str


def checksum_in(entry: Mapping[str, Any]) -> Checksum:
    """Read the checksum of a manifest's entry, which stands under the name of its algorithm.

    Raises:
        ValueError: There is none, or more than one.
    """
    (algorithm,) = ALGORITHMS.keys() & entry.keys()
    return Checksum(algorithm, str(entry[algorithm]))


def digest_of_file(file: BufferedIOBase, algorithm: str) -> str:
    """Digest what a file holds from here on; hexadecimal."""
    if algorithm == "sha256":
        return hashlib.file_digest(file, "sha256").hexdigest()
    total, piece = ALGORITHMS[algorithm](), memoryview(bytearray(_PIECE))
    while count := file.readinto(piece):
        total.update(piece[:count])
    return total.hexdigest()
