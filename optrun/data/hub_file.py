"""A file of a dataset on the hub at one commit, read by ranges of bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import IO, TYPE_CHECKING

from optrun.base.errors import OptrunError, message_in_one_line
from optrun.data.cache import Result, cached_result, digest

if TYPE_CHECKING:
    import numpy as np
    from huggingface_hub import HfFileSystem

BLOCK = 4 << 20
"""Bytes that are fetched together, where fewer are asked for."""
_CACHE = {"block_size": BLOCK, "cache_type": "blockcache", "cache_options": {"maxblocks": 8}}
"""Of each open file eight blocks stay in the memory of a process."""


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
        """Size and digest, unique to the file."""
        return f"{self.size} {self.digest}"

    def identified(self, read: Callable[[], str]) -> str:  # noqa: ARG002
        """Return `content`: nothing is read for it."""
        return self.content

    def refuse_changed(self) -> None:
        """Do nothing: a commit never changes."""

    def part_of(self, offsets: np.ndarray) -> np.ndarray:
        """Number the block of each byte; shape (offsets,), int64."""
        return offsets // BLOCK

    def cached_result(self, key: str, compute: Callable[[], Result]) -> Result:
        """Compute a result of the file once, and cache it under the digest of the hub."""
        return cached_result(digest(key, self.content), compute)

    def read(self, begin: int, size: int) -> bytes:
        """Read up to `size` bytes from byte `begin`; the last blocks stay in memory.

        Raises:
            OptrunError: The hub does not send them.
        """
        end = min(begin + size, self.size)
        try:
            file = self.opened()
            file.seek(begin)
            raw = file.read(end - begin)
        except Exception as error:  # the hub's client and whichever HTTP library it is built on
            why = f"{type(error).__name__}: {message_in_one_line(error)}"
            raise self._refusal(
                f"the hub does not send its bytes: {why}. If the run has saved, resume= continues"
                " as soon as the hub answers."
            ) from error
        if len(raw) != end - begin:
            raise self._refusal(
                f"the hub sent {len(raw):,} bytes of the {end - begin:,} that were requested: it"
                " does not answer range requests."
            )
        return raw

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes from the beginning, and compare them with the digest at the end.

        Raises:
            OptrunError: The hub does not send it, or sends other bytes.
        """
        kind, _, expected = self.digest.partition(":")
        total = hashlib.new(kind, usedforsecurity=False)
        if kind == "sha1":  # git hashes a header before the bytes of a blob
            total.update(b"blob %d\0" % self.size)
        for begin in range(0, self.size, 2 * BLOCK):
            chunk = self.read(begin, 2 * BLOCK)
            total.update(chunk)
            yield chunk
        if total.hexdigest() != expected:
            raise self._refusal(
                f"the hub sent other bytes than it lists: their {kind} is {total.hexdigest()}, and"
                f" {expected} in the listing. Try again."
            )

    def opened(self) -> IO[bytes]:
        """Return the open file of this process."""
        return _opened(self, os.getpid())


@lru_cache(4)
def _opened(file: HubFile, process: int) -> IO[bytes]:  # noqa: ARG001
    """Open a file once in each process, with a cache of the last blocks."""
    opened: IO[bytes] = _file_system().open(str(file), "rb", size=file.size, **_CACHE)
    return opened


@cache
def _file_system() -> HfFileSystem:
    from huggingface_hub import HfFileSystem

    return HfFileSystem()
