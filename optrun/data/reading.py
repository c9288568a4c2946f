"""Shared parts of the readers of files.

Files of one format, how they are to be read, and the readers of `datasets`, quiet, with their rows
in a cache that notices damage.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError, OptrunError, message_in_one_line
from optrun.data.cache import cached, digest, versions
from optrun.data.content import compression_of, write_as_utf8
from optrun.data.encoding import UTF8

if TYPE_CHECKING:
    from datasets import Dataset

_UNPACKED_BY_READERS = (None, "gzip", "bz2", "xz")
"""Compressions that every reader unpacks; None: no compression."""


@dataclass(frozen=True)
class ReadOptions:
    """How files are read, as the user said; None: as it is found."""

    format: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    column_names: Sequence[str] | None = None


@dataclass
class Reading:
    """Files of one format to be read.

    Attributes:
        key: The configuration key, for messages.
        files: Not empty; or folders.
        encodings: The encoding of each file.
        contents: Digest of the bytes of each file.
        documents: Whether a text file is one row.
        options: As the user said.
        notes: Takes what was found where the user said nothing.
    """

    key: str
    files: list[Path]
    encodings: list[str]
    contents: list[str]
    documents: bool
    options: ReadOptions
    notes: list[str]

    def address(self, *parts: str) -> str:
        """Digest the content and the reading of the files."""
        return digest(*parts, *self.contents, *self.encodings)

    def utf8_files(self, folder: Path) -> list[Path]:
        """List the files as UTF-8; they may be compressed with gzip, bz2 or xz.

        A file in another encoding, or with another compression, is written anew into the folder.
        """
        files = []
        for path, encoding in zip(self.files, self.encodings, strict=True):
            if encoding != UTF8 or compression_of(path) not in _UNPACKED_BY_READERS:
                path = write_as_utf8(path, encoding, folder)
            files.append(path)
        return files


def cache_rows(key: str, read: Callable[[str], Dataset]) -> Dataset:
    """Read with a reader of `datasets`, and keep its Arrow files in our cache, which finds damage.

    Args:
        key: Digest of everything the rows depend on, besides the packages that read them.
        read: Reads the rows; it puts its files into the folder whose path it is given.

    Returns:
        The rows, mapped from the cache.

    Raises:
        StorageError: The disk refused.
    """
    import datasets

    def make(folder: Path) -> None:
        with silence_datasets():
            rows = read(str(folder / "reader"))
        for number, file in enumerate(rows.cache_files):
            Path(file["filename"]).rename(folder / f"{number:05d}.arrow")
        shutil.rmtree(folder / "reader")

    folder = cached("files", digest(versions("datasets", "pyarrow"), key), make)
    paths = sorted(folder.glob("*.arrow"))
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(path)) for path in paths])


@contextmanager
def silence_datasets() -> Iterator[None]:
    """Silence progress bars and log lines of `datasets`; errors are raised all the same."""
    import datasets

    was_enabled = datasets.utils.logging.is_progress_bar_enabled()
    level = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if was_enabled:
            datasets.enable_progress_bars()


@contextmanager
def user_data_errors(
    where: str, describe: Callable[[Exception], str] | None = None
) -> Iterator[None]:
    """Turn any error of a library inside this context into a ConfigError.

    Errors of optrun pass unchanged.

    Args:
        where: Key and value, with which the message begins.
        describe: Writes the rest of the message; None: `innermost_error`.

    Raises:
        ConfigError: A library raised anything.
    """
    try:
        yield
    except OptrunError:
        raise
    except Exception as error:  # reader, disk and network have errors of their own
        raise ConfigError(f"{where}: {(describe or innermost_error)(error)}") from error


def innermost_error(error: BaseException) -> str:
    """Write the last `__cause__` of an error, with its type, as `message_in_one_line`."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = message_in_one_line(error)
    if isinstance(error, UnicodeDecodeError):
        message = f"its bytes are not UTF-8 ({message})"
    return f"{type(error).__name__}: {message}"
