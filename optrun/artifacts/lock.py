"""One run, one writer: a kernel lock on a file of the run directory.

The lock belongs to the open file, not to the file's existence: it is gone the moment its holder is,
however it died. Processes forked from the holder, such as loader workers, give up their copy at
once, so that one which outlives a killed holder does not keep the run locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from optrun.base.errors import LockedError, StorageError
from optrun.base.reading import parse_json

UNLOCKED = "OPTRUN_UNLOCKED"
"""Environment variable that lets a run go on where the file system has no locks."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_LOOK = 0.02
"""Seconds; far longer than a look takes."""
_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """Holds a run directory while the `with` block lasts.

    Args:
        path: The lock file; created if missing, and never deleted.

    Raises:
        LockedError: Another process holds it; the message names process, host and since when.
        StorageError: The file cannot be written, is a link, or lies on a file system without locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            descriptor = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
            )
        except OSError as error:
            why = "it is a link" if error.errno == errno.ELOOP else error.strerror
            raise StorageError(f"{self.path}: the lock cannot be taken: {why}.") from error
        try:
            _take(self.path, descriptor)
            self._sign(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held.add(self)
        return self

    def _sign(self, descriptor: int) -> None:
        """Write who holds the lock into the file, only for messages of other processes."""
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with contextlib.suppress(OSError):  # a full disk is the business of what is written later
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)

    def __exit__(self, *ended: object) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # who held it is nobody's concern any more
                os.ftruncate(self._descriptor, 0)
        self._drop()

    def _drop(self) -> None:
        _held.discard(self)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _take(path: Path, descriptor: int) -> None:
    """Take the lock of a run, without waiting for a holder to end.

    On a file system without locks nothing is taken if OPTRUN_UNLOCKED is 1.

    Args:
        path: The lock file, for messages.
        descriptor: Of the lock file, open for writing; closing it gives the lock up.

    Raises:
        LockedError: Another process holds the lock.
        StorageError: The file system has no locks, or refuses this one.
    """
    try:
        if not _try_lock(descriptor):
            raise _locked(path, _holder(descriptor))  # a LockedError, which is no OSError
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StorageError(f"{path}: the lock cannot be taken: {error.strerror}.") from error
        if os.environ.get(UNLOCKED) != "1":
            raise StorageError(
                f"{path}: this file system has no locks ({error.strerror}), so two processes could"
                " write this run at once. Choose another directory with hydra.run.dir=DIR, or set"
                f" {UNLOCKED}=1 if you are sure that there is only one."
            ) from error


def _try_lock(descriptor: int) -> bool:
    """Try to take a lock; False if another process holds it.

    A second try follows after 20 ms, since `is_held` of another process takes it for a moment.
    """
    for seconds in (_LOOK, 0.0):  # the pause after each try
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(seconds)
    return False


def refuse_held(path: Path) -> None:
    """Refuse a lock file that another process holds; create and keep nothing.

    The lock is taken and released at once. A file that is missing or cannot be opened passes, and
    so does a file system without locks.

    Raises:
        LockedError: Another process holds the lock; the message names process, host and since when.
    """
    with (
        contextlib.suppress(OSError, StorageError),  # a LockedError is none of them
        _opened(path, os.O_RDWR | os.O_NOFOLLOW) as descriptor,
    ):
        _take(path, descriptor)


def is_held(path: Path) -> bool:
    """Tell whether any process, this one included, holds a lock.

    Nothing is created or kept, as in `refuse_held`. False if the path is missing, or if the file
    system has no locks.

    Args:
        path: A lock file, or the directory of a run that `starting` holds.
    """
    try:
        with _opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks tells nothing
        return isinstance(error, BlockingIOError)
    return False


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def starting(path: Path) -> Iterator[None]:
    """Reserve a run directory for the ranks that this process starts, until the block ends.

    The directory itself is locked and not the lock file: rank 0, a process of its own, has to find
    that free. No file is created. Without effect on a file system without locks.

    Args:
        path: The lock file; its folder exists.

    Raises:
        LockedError: Another process writes this run, or is starting one there.
    """
    refuse_held(path)
    with _opened(path.parent, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        with contextlib.suppress(OSError):  # no locks here: rank 0 will report it
            if not _try_lock(descriptor):
                raise _locked(path, "")
        yield


def _locked(path: Path, holder: str) -> LockedError:
    return LockedError(
        f"{path.parent}: another process writes this run{holder}. Wait for it, stop it, or choose"
        " another directory with hydra.run.dir=DIR."
    )


def _drop_inherited() -> None:
    for lock in list(_held):
        lock._drop()


os.register_at_fork(after_in_child=_drop_inherited)


def _holder(descriptor: int) -> str:
    try:
        holder = parse_json(os.pread(descriptor, 4096, 0), "the lock")
        return f" (process {holder['pid']} on {holder['host']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
