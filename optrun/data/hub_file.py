"""A file of a dataset on the hub at one commit, of which only the bytes that are asked for are fetched."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from optrun.base.errors import OptrunError
from optrun.data.cache import Found, digest, known_by
from optrun.data.parts import Recent, spans

if TYPE_CHECKING:
    import numpy as np
    from huggingface_hub import HfFileSystem
    from typing_extensions import Buffer

BLOCK = 4 << 20
"""Bytes that are fetched together, where fewer are asked for."""
_KEPT = 32
"""Blocks that stay in the memory of a process."""
_blocks: Recent[tuple[HubFile, int], bytes] = Recent(_KEPT)


@dataclass(frozen=True)
class HubFile:
    """One file.

    Attributes:
        repo: `OWNER/NAME`.
        revision: The commit, by its whole sha: what it holds never changes.
        path: Inside the repository.
        size: In bytes.
        digest: The hub's own: `sha256:...` of a file in large storage, else git's `sha1:...` of the
            blob.
    """

    repo: str
    revision: str
    path: str
    size: int
    digest: str

    def __str__(self) -> str:
        """Its address for `fsspec` and for people."""
        return f"hf://datasets/{self.repo}@{self.revision}/{self.path}"

    def _refusal(self, why: str) -> OptrunError:
        return OptrunError(f"data.path={self.repo}: {self.path} at revision {self.revision}: {why}")

    @property
    def content(self) -> str:
        """What another file has not: size and digest."""
        return f"{self.size} {self.digest}"

    def identified(self, read: Callable[[], str]) -> str:  # noqa: ARG002
        """Return `content`: nothing is read for it."""
        return self.content

    def refuse_changed(self) -> None:
        """Do nothing: what a commit holds never changes."""

    def part_of(self, places: np.ndarray) -> np.ndarray:
        """Number the block in which each byte lies; shape (places,), int64."""
        return places // BLOCK

    def known(self, key: str, find: Callable[[], Found]) -> Found:
        """Find out of it once what `known_by` keeps; the hub's digest says which file it is."""
        return known_by(digest(key, self.content), find)

    def read(self, begin: int, size: int) -> bytes:
        """Read some of its bytes: of a few the blocks they are in, which stay a while.

        Raises:
            OptrunError: The hub does not give them.
        """
        end = min(begin + size, self.size)
        if end - begin >= BLOCK:
            return self._fetched(begin, end)
        ends = range(BLOCK, self.size + BLOCK, BLOCK)
        return b"".join(
            self._block(number)[first:last] for number, first, last in spans(ends, begin, end)
        )

    def _block(self, number: int) -> bytes:
        fetch = partial(self._fetched, number * BLOCK, min((number + 1) * BLOCK, self.size))
        return _blocks.read((self, number), fetch)

    def _fetched(self, begin: int, end: int) -> bytes:
        try:
            with _file_system().open(str(self), "rb", size=self.size, cache_type="none") as file:
                file.seek(begin)
                found: bytes = file.read(end - begin)
        except Exception as error:  # the hub's client and whichever HTTP library it is built on
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise self._refusal(
                f"the hub does not give its bytes: {why}. Where the run has saved, resume= goes on"
                " as soon as the hub answers."
            ) from error
        if len(found) != end - begin:
            raise self._refusal(
                f"{len(found):,} bytes came where {end - begin:,} were asked for: this hub answers"
                " no range requests."
            )
        return found

    def chunks(self) -> Iterator[bytes]:
        """Yield all of it, from the beginning, as no parts stay.

        At the end it is compared with its digest.

        Raises:
            OptrunError: The hub does not give it, or gives other bytes.
        """
        kind, _, expected = self.digest.partition(":")
        total = hashlib.new(
            kind, b"" if kind == "sha256" else b"blob %d\0" % self.size, usedforsecurity=False
        )
        for begin in range(0, self.size, 2 * BLOCK):
            chunk = self._fetched(begin, min(begin + 2 * BLOCK, self.size))
            total.update(chunk)
            yield chunk
        if total.hexdigest() != expected:
            raise self._refusal(
                f"the hub gives other bytes than it names: {kind} {total.hexdigest()}, and"
                f" {expected} in its listing. Try again."
            )

    def opened(self) -> io.RawIOBase:
        """Open it as a file to read and seek in."""
        return _Opened(self)


class _Opened(io.RawIOBase):
    """What `pyarrow` reads as if it were a file."""

    def __init__(self, file: HubFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go there."""
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        """Read as much as there is room for."""
        room = memoryview(buffer).cast("B")
        found = self._file.read(self._at, len(room))
        room[: len(found)] = found
        self._at += len(found)
        return len(found)


@cache
def _file_system() -> HfFileSystem:
    from huggingface_hub import HfFileSystem

    return HfFileSystem()
