"""The formats of files that are read: a row for each, with the function that reads it."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base import shell
from optrun.base.errors import ConfigError, UnreadableFileError, did_you_mean
from optrun.base.formatting import list_names
from optrun.base.reading import open_file
from optrun.data.cache import cached_result
from optrun.data.content import (
    COMPRESSED,
    UNREADABLE_KINDS,
    check_text,
    name_inside,
    name_with_ending,
)
from optrun.data.delimited import read_delimited
from optrun.data.encoding import UTF8
from optrun.data.folders import read_classes
from optrun.data.reading import Reading, cache_rows, innermost_error, user_data_errors
from optrun.data.shards import File, Groups, Lines, Opening, Shard
from optrun.data.tagged import read_tagged

if TYPE_CHECKING:
    from datasets import Dataset


def _any_content(path: Path, kind: str, encoding: str | None) -> tuple[str, str]:  # noqa: ARG001
    """Check nothing, for formats whose readers recognise their files."""
    return UTF8, ""


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: As `data.format` says it.
        endings: Of the files; none for folders.
        check: Takes a file, this name and the encoding that the user named; returns its encoding
            and a sample of the text. Raises an `UnreadableFileError` that says what the file is
            instead.
        read: Reads all rows.
        options: Keys of `ReadOptions` that mean something to such files.
        magic: First bytes of every such file, which tell it if its ending does not; empty: none.
        stream: Opens a file for `data.streaming=true`; None: it cannot be read in the middle.
        unstreamed: Endings of this format whose files cannot be read in the middle all the same.
    """

    name: str
    endings: tuple[str, ...]
    check: Callable[[Path, str, str | None], tuple[str, str]]
    read: Callable[[Reading], Dataset]
    options: tuple[str, ...] = ()
    magic: bytes = b""
    stream: Callable[[str, File, Opening], Shard] | None = None
    unstreamed: tuple[str, ...] = ()


def _read_by_library(kind: str, reading: Reading) -> Dataset:
    """Read files with a reader of `datasets`; the rows are mapped from our cache.

    Args:
        kind: Name of the reader, such as `parquet`.
        reading: The files.

    Raises:
        ConfigError: The reader raised any error.
    """
    import datasets

    options = {}
    if kind == "text":
        sample_by = "document" if reading.documents else "line"
        options = {"sample_by": sample_by, "encoding": "utf-8-sig"}

    def read(cache_dir: str) -> Dataset:
        plain = reading.utf8_files(Path(cache_dir) / "utf8")
        names = [glob.escape(str(path.resolve())) for path in plain]  # it would expand them
        return datasets.load_dataset(
            kind,
            data_files=names,
            split="train",
            cache_dir=cache_dir,
            keep_in_memory=False,
            **options,
        )

    def describe(error: Exception) -> str:
        if "corresponds to no data" in str(error):
            return "no rows in it."
        return f"cannot be read as {kind}: {innermost_error(error)}"

    with user_data_errors(f"{reading.key}={list_names(reading.files, 3)}", describe):
        return cache_rows(reading.address(kind, str(options)), read)


def _read_json(reading: Reading) -> Dataset:
    from optrun.data.json_rows import read_json_rows  # imports datasets, which takes a second

    return read_json_rows(reading)


def largest_document() -> int:
    """Compute the bytes of the longest text to read as one row: an eighth of the memory.

    A text takes some eight times its bytes while it is read, cut and encoded. At most 2 GiB.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(2**31 - 1, memory // 8)


def _read_texts(reading: Reading) -> Dataset:
    """Read texts, each as one row if the task joins documents, else each line.

    Raises:
        ConfigError: A text is too long to be one row.
    """
    limit = largest_document()
    for path in reading.files if reading.documents else ():
        size = path.stat().st_size
        if size > limit:
            prefix = shell.quote(f"{path.stem}-")
            raise ConfigError(
                f"{reading.key}={path}: a text of {size:,} bytes is one row here, and this machine"
                f" can hold up to {limit:,} bytes as one row. Cut it at line ends: split -C"
                f" {limit // 2} --additional-suffix={path.suffix} {shell.quote(str(path))} {prefix}"
            )
    return _read_by_library("text", reading)


_TEXT = ("encoding",)
_TABLE = ("delimiter", "column_names", "encoding")
FORMATS: dict[str, Format] = {
    file_format.name: file_format
    for file_format in (
        Format("csv", (".csv",), check_text, partial(read_delimited, kind="csv"), _TABLE),
        Format("tsv", (".tsv", ".tab"), check_text, partial(read_delimited, kind="tsv"), _TABLE),
        Format(
            "json",
            (".json", ".jsonl", ".ndjson"),
            check_text,
            _read_json,
            _TEXT,
            stream=Lines.open,
            unstreamed=(".json",),
        ),
        Format(
            "parquet",
            (".parquet",),
            _any_content,
            partial(_read_by_library, "parquet"),
            (),
            b"PAR1",
            Groups.open,
        ),
        Format(
            "arrow",
            (".arrow", ".feather"),
            _any_content,
            partial(_read_by_library, "arrow"),
            magic=b"ARROW1",
        ),
        Format("text", (".txt", ".text", ".py", ".md", ".rst"), check_text, _read_texts, _TEXT),
        Format("conll", (".conll", ".iob", ".iob2", ".bio"), check_text, read_tagged, _TEXT),
        Format("classes", (), _any_content, read_classes, _TEXT),
    )
}
"""Name to format."""


def by_ending() -> dict[str, Format]:
    """Map each ending to its format."""
    formats = {}
    for file_format in FORMATS.values():
        formats.update(dict.fromkeys(file_format.endings, file_format))
    return formats


def format_of(key: str, path: Path, typed_format: str | None) -> Format:
    """Return the format of a file, or of a folder of classes (one subfolder for each).

    Args:
        key: The configuration key, for messages.
        path: The file or folder.
        typed_format: `data.format`; None: the ending decides, without that of a compression.

    Raises:
        ConfigError: An unknown ending or name; the message says what such files are, if it knows.
    """
    # 1. A folder of classes.
    if path.is_dir():
        return FORMATS["classes"]
    # 2. The format that the user names.
    if typed_format is not None:
        names = [name for name, file_format in FORMATS.items() if file_format.endings]
        if typed_format not in names:
            raise ConfigError(
                f"data.format={typed_format}: unknown format. {did_you_mean(typed_format, names)}"
            )
        return FORMATS[typed_format]
    # 3. The one of the ending.
    ending = Path(name_inside(path)).suffix.lower()  # `.csv` of `a.csv.gz`
    formats = by_ending()
    if ending not in formats:
        problem = "unknown format"
        if ending in UNREADABLE_KINDS:
            problem = f"unknown format: {UNREADABLE_KINDS[ending]}"
        raise ConfigError(
            f"{key}={path}: {problem}. Known endings: {', '.join(formats)} (also with"
            f" {', '.join(COMPRESSED)}). For another ending, name the format: data.format=NAME."
        )
    return formats[ending]


def one_format(key: str, formats: Iterable[Format]) -> Format:
    """Return the common format of all files, of which there must be at least one.

    formats: The format of each file.

    Raises:
        ConfigError: The files have several formats.
    """
    kinds = {file_format.name: file_format for file_format in formats}
    if len(kinds) > 1:
        raise ConfigError(
            f"{key}: files of several formats ({', '.join(sorted(kinds))}). Give files of one"
            " format."
        )
    return next(iter(kinds.values()))


def streamed_format(key: str, file: Path | File) -> Format:
    """Return the format of a file of a stream, here or on the hub, by its ending.

    Raises:
        ConfigError: The file is compressed, or of a format that cannot be read in the middle.
    """
    ending = Path(str(file)).suffix.lower()
    if ending in COMPRESSED:
        raise ConfigError(
            f"{key}={file}: data.streaming=true cannot begin in the middle of a compressed file."
            " Unpack it, or write it as parquet, which is compressed inside."
        )
    streamed = {
        suffix: file_format
        for suffix, file_format in by_ending().items()
        if file_format.stream and suffix not in file_format.unstreamed
    }
    if ending not in streamed:
        raise ConfigError(
            f"{key}={file}: data.streaming=true reads {', '.join(streamed)}. Write its rows as one"
            " of these, or take data.streaming=false."
        )
    return streamed[ending]


def check_file(key: str, path: Path, kind: Format, encoding: str | None = None) -> tuple[str, str]:
    """Find the encoding of a file, and refuse a file of another format.

    Args:
        key: The configuration key, for messages.
        path: The file; not empty.
        kind: The format that its ending says.
        encoding: `data.encoding`; None: it is found.

    Returns:
        The encoding; and, if it is a guess, a line by which a person can check it, else an empty
        text. UTF-8 for a folder and for formats that are no text. The result is cached.

    Raises:
        ConfigError: Another format, an unknown encoding, a pointer of Git LFS, a web page, or
            nothing but white space.
    """
    if path.is_dir():
        return UTF8, ""
    try:
        name, sample = cached_result(
            f"content-5 {kind.name} {encoding} {path.name}",
            lambda: _check_content(path, kind, encoding),
            path,
        )
    except UnreadableFileError as error:
        raise ConfigError(f"{key}={path}: {error}") from error
    return name, sample  # not the list that a cached result is


def _check_content(path: Path, kind: Format, encoding: str | None) -> tuple[str, str]:
    """Find the encoding of a file and refuse another format, as `check_file` without a cache.

    Raises:
        UnreadableFileError: As the ConfigError of `check_file`.
    """
    # 1. By the first bytes: a pointer, or another format of optrun.
    with open_file(path, follow=True) as file:
        raw = file.read(64)
    if raw.startswith(b"version https://git-lfs"):
        raise UnreadableFileError(
            "this is a pointer of Git LFS, not the data themselves. Fetch them: git lfs pull"
        )
    for other in FORMATS.values():
        if other.magic and raw.startswith(other.magic) and other.name != kind.name:
            raise UnreadableFileError(
                f"cannot be read as {kind.name}: its bytes are {other.name}. Call it"
                f" {name_with_ending(path, other.endings[0])}."
            )
    # 2. By all of it, as the format itself says.
    return kind.check(path, kind.name, encoding)


def refuse_other_content(key: str, path: Path, kind: Format) -> None:
    """Refuse a file of a stream if it is another format or no UTF-8.

    Raises:
        ConfigError: With the file, and what it is.
    """
    encoding, _ = check_file(key, path, kind)
    if encoding != UTF8:
        new = shell.quote(str(path.with_name(f"utf8-{path.name}")))
        raise ConfigError(
            f"{key}={path}: its bytes are {encoding}, not UTF-8, which a stream needs."
            f" Convert it: iconv -f {encoding} -t utf-8"
            f" {shell.quote(str(path))} > {new}"
        )
