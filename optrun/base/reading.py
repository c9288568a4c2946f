"""The one door to files from other programs and people.

It opens regular files up to a size. The message of a refusal has the file, what was found, what was
expected, and what to do.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from optrun.base.errors import UnreadableFileError

JSON_BYTES = 64 * 2**20
"""Largest JSON file."""
TEXT_BYTES = 8 * 2**20
"""Largest text that is read as a whole."""
LINES_BYTES = 2**30
"""Largest file that is read line by line."""
LINE_BYTES = 16 * 2**20
"""Longest line of such a file."""
_KINDS = {
    stat.S_IFLNK: "a link: what lies outside of the folder is not read",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def expand_home(path: str | Path) -> Path:
    """Return a path with the home folder for a leading `~` or `~USER`; unknown users stay as typed.

    `Path.expanduser` raises RuntimeError for an unknown user, and a word such as `~x/model` may be
    anything that a person typed.

    Example:
        >>> str(expand_home("~nobody-of-this-name/model"))
        '~nobody-of-this-name/model'
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111


def kind_of(path: Path, *, follow: bool = False) -> str | None:
    """Name the kind of a path; None: it is a regular file.

    Raises:
        OSError: There is nothing, or it may not be looked at.
    """
    return _kind(os.stat(path, follow_symlinks=follow).st_mode)  # noqa: PTH116


def _kind(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def open_file(path: Path, *, limit: int | None = None, follow: bool = False) -> BufferedReader:
    """Open a regular file to read bytes; nothing waits for a writer, and no device is touched.

    Args:
        path: The file.
        limit: Most bytes that it may have; None: any number.
        follow: Whether it may be a link: for a user's data and models, never for files of a run.

    Raises:
        UnreadableFileError: It is no regular file, or too large.
        OSError: It is missing, or may not be read.
    """
    # Checked by its path, because opening a FIFO or a device may block or change it; then by its
    # descriptor, because another file may have taken its place.
    _refuse_kind(path, kind_of(path, follow=follow))
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            _refuse_kind(path, "a link or a socket")
        raise
    try:
        status = os.fstat(descriptor)
        _refuse_kind(path, _kind(status.st_mode))
        _refuse_size(path, status.st_size, limit)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int = JSON_BYTES, *, follow: bool = False) -> bytes:
    """Read a whole regular file of at most `limit` bytes.

    `follow` (may it be a link?) and the errors are those of `open_file`.
    """
    with open_file(path, limit=limit, follow=follow) as file:
        content = file.read(limit + 1)
    _refuse_size(path, len(content), limit)
    return content


def read_text(path: Path, *, follow: bool = False, errors: str = "strict") -> str:
    """Read a whole file of at most `TEXT_BYTES` (8 MiB) as UTF-8.

    Args:
        path: The file.
        follow: Whether it may be a link: for a user's data and models, never for files of a run.
        errors: What happens to bytes that are no UTF-8, as in `bytes.decode`.

    Raises:
        UnreadableFileError: It is no regular file, or too large.
        UnicodeDecodeError: It is no UTF-8, and `errors` is "strict".
        OSError: It is missing, or may not be read.
    """
    return read_bytes(path, TEXT_BYTES, follow=follow).decode("utf-8", errors)


def read_json(path: Path, *, follow: bool = False) -> Any:
    """Read a JSON file of at most `JSON_BYTES` (64 MiB), and parse it by `parse_json`.

    `follow` (may it be a link?) and the errors are those of `open_file`, too.
    """
    return parse_json(read_bytes(path, follow=follow), path)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends, up to `LINE_BYTES` bytes each.

    Raises:
        UnreadableFileError: As `open_file`; or a line is too long.
        OSError: As `open_file`.
    """
    with open_file(path, limit=LINES_BYTES) as file:
        number = 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            if len(line) > LINE_BYTES:
                raise _refusal(
                    f"{path}: line {number:,}", f"more than {LINE_BYTES:,} bytes", "shorter lines"
                )
            yield line


def parse_json(content: bytes, where: object) -> Any:
    """Parse JSON in UTF-8.

    Args:
        content: The text.
        where: Its file, for the message.

    Raises:
        UnreadableFileError: It is none, or is nested deeper than Python reads.

    Example:
        >>> parse_json(b'{"a": [1, 2]}', "x.json")
        {'a': [1, 2]}
        >>> parse_json(b"[" * 100_000, "x")  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        optrun.base.errors.UnreadableFileError: x: JSON nested too deeply; expected less.
    """
    try:
        return json.loads(content.decode("utf-8-sig"))
    except ValueError as error:
        raise _refusal(where, f"no valid JSON ({error})", "JSON in UTF-8") from error
    except RecursionError as error:
        raise _refusal(where, "JSON nested too deeply", "less") from error


def _refuse_kind(path: Path, kind: str | None) -> None:
    if kind is not None:
        raise _refusal(
            path, kind, "a regular file", "Remove it, or put the file itself in its place."
        )


def _refuse_size(path: Path, size: int, limit: int | None) -> None:
    if limit is not None and size > limit:
        raise _refusal(path, f"larger than {limit:,} bytes", "less")


def _refusal(
    where: object, problem: str, expected: str, advice: str = "Restore it from a copy."
) -> UnreadableFileError:
    return UnreadableFileError(f"{where}: {problem}; expected {expected}. {advice}")
