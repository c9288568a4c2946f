"""One run, one writer: a kernel lock on a file of the run directory.

The lock belongs to the open file, not to the file's existence: it is gone the moment its holder is, however it died.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from optrun.errors import LockedError, StorageError


class RunLock:
    """Holds a run directory while the `with` block lasts.

    Args:
        path: The lock file; made where missing, and left there.

    Raises:
        LockedError: Another process holds it; the message names process, host and since when.
        StorageError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        try:
            file = self.path.open("a+", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(file)
            file.close()
            raise LockedError(
                f"{self.path.parent}: another process writes this run{holder}. Wait for it, stop it, or choose another "
                "directory with hydra.run.dir=DIR."
            ) from error
        file.seek(0)
        file.truncate()
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}, file)
        file.flush()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        said = json.load(file)
        return f" (process {said['pid']} on {said['host']}, since {said['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
