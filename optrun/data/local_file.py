"""A local file of a stream, read at any place as long as nobody writes to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import OptrunError
from optrun.data.cache import Result, cached_result, chunks_of_file

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class LocalFile:
    """One local file, with the methods of a `HubFile`.

    Attributes:
        key: The configuration key that names it, for messages.
        path: Its path.
        size: In bytes, when it was opened.
        changed: When it had changed last when it was opened, in nanoseconds.
    """

    key: str
    path: Path
    size: int
    changed: int

    @staticmethod
    def of(key: str, path: Path) -> LocalFile:
        """Record size and time of change of a file as it is now."""
        entry = path.stat()
        return LocalFile(key, path, entry.st_size, entry.st_mtime_ns)

    def __str__(self) -> str:
        return str(self.path)

    def identified(self, read: Callable[[], str]) -> str:
        """Return the checksum of the file, computed by `read` once."""
        return self.cached_result("bytes-1", read)

    def part_of(self, offsets: np.ndarray) -> np.ndarray:
        """Number the part that is read as a whole with each byte; here each byte is a part."""
        return offsets

    def cached_result(self, key: str, compute: Callable[[], Result]) -> Result:
        """Compute a result of the file once, as `optrun.data.cache.cached_result`."""
        return cached_result(key, compute, self.path)

    @cached_property
    def _descriptor(self) -> int:
        """The open file; `pread` has no position, so that processes may share it."""
        self.refuse_changed()
        return os.open(self.path, os.O_RDONLY)

    def read(self, begin: int, size: int) -> bytes:
        """Read up to `size` bytes from byte `begin`; fewer at the end of the file.

        Raises:
            OptrunError: The file changed after it was opened.
        """
        raw = b""
        while len(raw) < size:
            piece = os.pread(self._descriptor, size - len(raw), begin + len(raw))
            if not piece:
                break
            raw += piece
        # after each read, since rows that were overwritten in place would still parse
        self.refuse_changed()
        return raw

    def chunks(self) -> Iterator[bytes]:
        """Yield all of it, from the beginning."""
        return chunks_of_file(self.path)

    def opened(self) -> Path:
        """Return the path for `pyarrow`."""
        return self.path

    def refuse_changed(self) -> None:
        """Refuse a file if it changed after it was opened.

        Raises:
            OptrunError: It was written to, replaced or removed.
        """
        try:
            entry = self.path.stat()
            is_same = (entry.st_size, entry.st_mtime_ns) == (self.size, self.changed)
        except OSError:
            is_same = False
        if not is_same:
            raise OptrunError(
                f"{self.key}={self.path}: this file changed while it was read as a stream, so its"
                " rows are no longer where they were. Leave the files of a stream as they are;"
                " start again with the file as it is now."
            )
