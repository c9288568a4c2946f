"""Write aside, flush to the disk, commit by one rename.

Everything a run may not lose goes through these few calls of the operating system, in this order;
what a crash between any two of them leaves is the older state, whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from optrun.base.errors import DiskFullError, StorageError

DOOMED = ".deleting-"
MARGIN = 2**20
"""Bytes of room left for the manifest, folders and metrics."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Add the path to operating system errors about a file descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a library's error while it writes into a StorageError if the disk caused it.

    An OSError always counts. After any other error the disk itself is tried, so the block must not
    delete what the library wrote: a full disk would have room again.

    Args:
        path: What is written in the block.

    Raises:
        StorageError: The disk refused the write. Other errors are raised unchanged.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        # Errors of safetensors and tokenizers do not tell that the disk was full.
        refusal = error if isinstance(error, OSError) else _try_to_write_beside(path)
        if refusal is None:
            raise
        reason = refusal.strerror or refusal
        raise StorageError(f"{path}: cannot be written: {reason}.") from refusal


def _try_to_write_beside(path: Path) -> OSError | None:
    """Write 1 MiB beside a path and delete it, to learn whether the disk takes it.

    Returns:
        The error of the disk. None if the disk takes the bytes, or if the folder is missing, so
        that nothing is known.
    """
    probe = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_bytes(probe, bytes(MARGIN))
    except FileNotFoundError:
        return None
    except OSError as refusal:
        return refusal
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def refuse_without_room(path: Path, size: int, advice: str) -> None:
    """Refuse to begin a write larger than the free space of the disk.

    Args:
        path: What is to be written, in a folder that exists.
        size: Bytes to write.
        advice: The end of the message.

    Raises:
        DiskFullError: The message names the needed and the free bytes.
    """
    needed = size + MARGIN
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise DiskFullError(
            f"{path}: not saved: it needs {needed:,} bytes, {free:,} are free. {advice}"
        )


class Output:
    """A file being written, without a buffer of its own.

    Written bytes survive a crash of this process, but not of the machine before `sync`.

    Args:
        path: Path of the file; a link is refused.
        exclusive: Refuse an existing file; otherwise it is emptied.
    """

    def __init__(self, path: Path, *, exclusive: bool = False) -> None:
        self.path = path
        self._descriptor = os.open(path, _NEW | (os.O_EXCL if exclusive else os.O_TRUNC), 0o666)

    def write(self, content: bytes | memoryview) -> None:
        """Write all bytes.

        Raises:
            OSError: The disk refused the write; a part may have been written.
        """
        rest = memoryview(content)
        with name_in_errors(self.path):
            # `os.write` may take a part, and returns its number of bytes.
            while rest.nbytes:
                rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        """Flush the file to the disk (fsync)."""
        with name_in_errors(self.path):
            os.fsync(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        os.close(self._descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with name_in_errors(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that know no such thing
            raise
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk; no rename."""
    with Output(path) as file:
        file.write(content)
        file.sync()


def replace_text(path: Path, text: str) -> None:
    """Replace a small file atomically, flushed to the disk.

    Args:
        path: The file.
        text: The new content.
    """
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Replace a file's content atomically, flushed to the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_bytes(temporary, content)
        os.rename(temporary, path)  # noqa: PTH104  # one system call, by its own name
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def commit_folder(temporary: Path, folder: Path) -> None:
    """Rename a finished folder into place, and flush its entry and that of its parent.

    Its files must be flushed already: only the two folders are flushed here.

    Raises:
        OSError: The disk refused the rename, or the destination exists and is not an empty folder,
            which POSIX replaces.
    """
    sync_folder(temporary)
    os.rename(temporary, folder)  # noqa: PTH104
    sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder written by optrun; links are deleted, never followed.

    The folder is renamed to `.deleting-NAME` first, so that a killed deletion leaves nothing that
    looks complete. What such a deletion left there is deleted, too.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder
    if not folder.name.startswith(DOOMED):
        doomed = folder.with_name(f"{DOOMED}{folder.name}")
        # What a killed deletion left, or a link that somebody put there.
        if doomed.is_symlink():
            doomed.unlink()
        elif doomed.exists():
            shutil.rmtree(doomed)
        os.rename(folder, doomed)  # noqa: PTH104
    shutil.rmtree(doomed)
