"""Where a study is kept.

A database by its URL, or a journal, which a network file system carries, too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from optrun.base.errors import ConfigError, OptrunError, StorageError
from optrun.base.reading import LINE_BYTES, open_file
from optrun.config.schema.sweeper import STORAGE, journal_path

_RECORD = b'{"op_code":'
"""What every line of a journal begins with (`_write_log` of
`optuna.storages.journal.JournalStorage`).
"""
_OF_THE_VALUE = (
    ValueError,
    ImportError,
)  # no database of that name, no driver for it, one that Optuna has no more


def open_storage(given: str | None, default: Path) -> str | JournalStorage:
    """Open a journal, or name a database for `optuna.create_study`.

    Args:
        given: `hydra.sweeper.storage`; None: sqlite in the file `default`.
        default: Of the sweep directory.

    Raises:
        ConfigError: The file is no journal, or one that cannot be read.
        StorageError: It cannot be written.
    """
    journal = None if given is None else journal_path(given)
    if journal is not None:
        return _open_journal(Path(journal).expanduser().absolute())
    return given or f"sqlite:///{default.resolve()}"


@contextlib.contextmanager
def told_by_name(name: str) -> Iterator[None]:
    """Turn what a database says when it is opened into one message.

    Args:
        name: How the message names it.

    Raises:
        ConfigError: A URL that means nothing, or asks for a package.
        StorageError: It cannot be opened.
    """
    try:
        yield
    except OptrunError:
        raise
    except Exception as error:
        kinds = {
            kind.__name__
            for kind in type(error).__mro__
            if kind.__module__.startswith(("sqlalchemy.", "optuna."))
        }
        if not kinds and not isinstance(error, _OF_THE_VALUE):
            raise
        wrong = isinstance(error, _OF_THE_VALUE) or "ArgumentError" in kinds
        raise (ConfigError if wrong else StorageError)(f"{name}: {_first_line(error)}") from error


def _open_journal(path: Path) -> JournalStorage:
    try:
        _refuse_foreign(path)
        # The lock is a symbolic link beside the file: made by one call on every version of NFS. It
        # names the journal by its whole path, since a link is read from the folder that it lies in.
        lock = MendingLock(str(path))
        backend = JournalFileBackend(str(path), lock_obj=lock)
        lock.acquire()
        lock.release()
        return JournalStorage(backend)
    except OSError as error:
        raise StorageError(f"{STORAGE}={path}: {error.strerror}. Choose another file.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{STORAGE}={path}: this journal cannot be read: {_first_line(error)}"
        ) from error


class MendingLock(JournalFileSymlinkLock):  # type: ignore[misc,unused-ignore]
    """Lock of a journal that, once it is held, drops a last record which its writer did not finish.

    Optuna appends to whatever is there: behind half a record the next one would be lost with it,
    and with both the study. Nobody has read such a half.
    """

    def acquire(self) -> bool:
        """Wait for the lock, then mend the end of the journal."""
        held = super().acquire()
        try:
            _drop_half_a_record(Path(self._lock_target_file))
        except BaseException:
            self.release()
            raise
        return bool(held)


def _drop_half_a_record(path: Path) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        if file.read() in (b"", b"\n"):
            return
        file.seek(0)
        content = file.read()
        kept = content.rfind(b"\n") + 1
        if _is_record(content[kept:]):
            file.truncate(kept)


def _refuse_foreign(path: Path) -> None:
    """Refuse a file of somebody's own, before anything is added to it.

    Raises:
        ConfigError: Its first or last line is no record of a journal.
        OSError: It cannot be read.
    """
    if not path.exists():
        return
    with open_file(path, follow=True) as file:
        first = file.readline(LINE_BYTES)
        file.seek(max(0, file.seek(0, os.SEEK_END) - LINE_BYTES))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    if not all(map(_is_record, (first, last))):
        raise ConfigError(
            f"{STORAGE}={path}: this file is no journal of Optuna's; it was not changed. Choose"
            " another."
        )


def _is_record(line: bytes) -> bool:
    """Tell whether a line, perhaps cut, is one of a journal."""
    return line.startswith(_RECORD) or _RECORD.startswith(line)


def _first_line(error: Exception) -> str:
    """Cut an error to its first line, without user and password of a database."""
    lines = str(error).strip().splitlines()
    return re.sub(r"//[^/\s]*@", "//", lines[0]) if lines else type(error).__name__
