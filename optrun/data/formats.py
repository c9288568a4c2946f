"""The formats of files that are read, one row each.

A new format is a row, and the function that reads it.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError, UnreadableFileError, did_you_mean
from optrun.base.reading import open_file
from optrun.data.cache import known_by
from optrun.data.content import (
    COMPRESSED,
    ELSEWHERE,
    called,
    check_parquet,
    check_text,
    name_inside,
)
from optrun.data.delimited import read_delimited
from optrun.data.encoding import UTF8
from optrun.data.folders import read_classes, read_saved
from optrun.data.reading import Reading, kept_rows, reason, understood
from optrun.data.shards import File, Groups, Lines, Opening, Shard
from optrun.data.tagged import read_tagged

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


def _any_content(path: Path, kind: str, encoding: str | None) -> tuple[str, str]:  # noqa: ARG001
    return UTF8, ""


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name: As `data.format` says it.
        endings: Of the files; none for folders.
        check: From a file, this name and the encoding that was said, to its encoding and a sample;
            raises an
            `UnreadableFileError` that says what the file is instead.
        read: Reads all rows.
        options: What may be said of such files: the keys of `ReadOptions` that mean something to
            them.
        magic: First bytes of every such file, by which one that is called otherwise is known;
            empty: it has none.
        stream: Opens a file whose rows are read in the middle (`data.streaming=true`); None:
            nothing does.
        whole: Endings of files that can only be read as a whole all the same.
    """

    name: str
    endings: tuple[str, ...]
    check: Callable[[Path, str, str | None], tuple[str, str]]
    read: Callable[[Reading], Dataset]
    options: tuple[str, ...] = ()
    magic: bytes = b""
    stream: Callable[[str, File, Opening], Shard] | None = None
    whole: tuple[str, ...] = ()


def _by_library(kind: str, asked: Reading) -> Dataset:
    """Read with the reader of `datasets` of this name."""
    import datasets

    by = "document" if asked.documents else "line"
    options = {"sample_by": by, "encoding": "utf-8-sig"} if kind == "text" else {}

    def read(cache_dir: str) -> DatasetDict:
        plain = asked.in_utf8(Path(cache_dir) / "utf8")
        names = [glob.escape(str(path.resolve())) for path in plain]
        return datasets.load_dataset(
            kind, data_files=names, cache_dir=cache_dir, keep_in_memory=False, **options
        )

    def why(error: Exception) -> str:
        none = "corresponds to no data" in str(error)
        return "no rows in it." if none else f"cannot be read as {kind}: {reason(error)}"

    named = ", ".join(str(path) for path in asked.files[:3]) + (
        ", ..." if len(asked.files) > 3 else ""
    )
    with understood(f"{asked.key}={named}", why):
        return kept_rows("files", asked.address(kind, str(options)), read)["train"]


def _json(asked: Reading) -> Dataset:
    from optrun.data.json_rows import read_json_rows  # imports datasets, which takes a second

    return read_json_rows(asked)


def largest_document() -> int:
    """Count the bytes of the longest text that is read as a whole: 2 GiB, or a part of the memory.

    A text takes some six times its bytes while it is read, cut and encoded.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(2**31 - 1, memory // 6)


def _text(asked: Reading) -> Dataset:
    limit = largest_document()
    for path in asked.files if asked.documents else ():
        size = path.stat().st_size
        if size > limit:
            parts = shlex.quote(f"{path.stem}-")
            raise ConfigError(
                f"{asked.key}={path}: one text of {size:,} bytes is joined with others here, and"
                f" this machine reads up to {limit:,} bytes as one. Cut it at line ends: split -C"
                f" {limit // 2} --additional-suffix={path.suffix} {shlex.quote(str(path))} {parts}"
            )
    return _by_library("text", asked)


_TEXT = ("encoding",)
_TABLE = ("delimiter", "column_names", "encoding")
FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("csv", (".csv",), check_text, partial(read_delimited, kind="csv"), _TABLE),
        Format("tsv", (".tsv", ".tab"), check_text, partial(read_delimited, kind="tsv"), _TABLE),
        Format(
            "json",
            (".json", ".jsonl", ".ndjson"),
            check_text,
            _json,
            _TEXT,
            stream=Lines.open,
            whole=(".json",),
        ),
        Format(
            "parquet",
            (".parquet",),
            check_parquet,
            partial(_by_library, "parquet"),
            (),
            b"PAR1",
            Groups.open,
        ),
        Format(
            "arrow",
            (".arrow", ".feather"),
            _any_content,
            partial(_by_library, "arrow"),
            magic=b"ARROW1",
        ),
        Format("text", (".txt", ".text", ".py", ".md", ".rst"), check_text, _text, _TEXT),
        Format("conll", (".conll", ".iob", ".iob2", ".bio"), check_text, read_tagged, _TEXT),
        Format("saved", (), _any_content, read_saved),
        Format("classes", (), _any_content, read_classes, _TEXT),
    )
}
"""Name to format; everything else that knows of formats asks here."""


def by_ending() -> dict[str, Format]:
    """Map each ending to its format."""
    return {ending: row for row in FORMATS.values() for ending in row.endings}


def format_of(key: str, path: Path, said: str | None) -> Format:
    """Name the format of a file by its ending, or as it was said; of a folder by what is in it.

    Raises:
        ConfigError: It is none that is read.
    """
    if path.is_dir():
        return FORMATS["saved" if (path / "state.json").is_file() else "classes"]
    if said is not None:
        names = [name for name, row in FORMATS.items() if row.endings]
        if said not in names:
            raise ConfigError(f"data.format={said}: no such format. {did_you_mean(said, names)}")
        return FORMATS[said]
    ending = Path(name_inside(path)).suffix.lower()
    known = by_ending()
    if ending not in known:
        what = f"unknown format: {ELSEWHERE[ending]}" if ending in ELSEWHERE else "unknown format"
        raise ConfigError(
            f"{key}={path}: {what}. Known endings: {', '.join(known)} (also with"
            f" {', '.join(COMPRESSED)}); data.format=NAME says what a file with another one holds."
        )
    return known[ending]


def one_format(key: str, found: Iterable[Format]) -> Format:
    """Return the format that all files have.

    Raises:
        ConfigError: They have several.
    """
    kinds = {row.name: row for row in found}
    if len(kinds) > 1:
        raise ConfigError(
            f"{key}: files of several formats ({', '.join(sorted(kinds))}). Give files of one"
            " format."
        )
    return next(iter(kinds.values()))


def streamed_format(key: str, file: Path | File) -> Format:
    """Name the format of a file whose rows are read in the middle, by its ending.

    Raises:
        ConfigError: They cannot be.
    """
    ending = Path(str(file)).suffix.lower()
    if ending in COMPRESSED:
        raise ConfigError(
            f"{key}={file}: data.streaming=true cannot begin in the middle of a compressed file."
            " Unpack it, or write it as parquet, which is compressed inside."
        )
    streamed = {
        ending: row for ending, row in by_ending().items() if row.stream and ending not in row.whole
    }
    if ending not in streamed:
        raise ConfigError(
            f"{key}={file}: data.streaming=true reads {', '.join(streamed)}. Write its rows as one"
            " of these, or take data.streaming=false."
        )
    return streamed[ending]


def check(key: str, path: Path, kind: Format, encoding: str | None = None) -> tuple[str, str]:
    """Find the encoding of a file, and refuse one that is another format.

    Args:
        key: The configuration key, for messages.
        path: The file; not empty.
        kind: What its ending says.
        encoding: Of a text, as it was said; None: found.

    Returns:
        The encoding, and what a person can judge it by; empty for one that is certain.

    Raises:
        ConfigError: Another format, an encoding that cannot be told, a pointer of Git LFS, a web
            page, nothing but white space.
    """
    if path.is_dir():
        return UTF8, ""

    def look() -> tuple[str, str]:
        try:
            with open_file(path, follow=True) as file:
                raw = file.read(64)
            if raw.startswith(b"version https://git-lfs"):
                raise UnreadableFileError(
                    "this is a pointer of Git LFS, the data themselves are not here. Fetch them:"
                    " git lfs pull"
                )
            found = next(
                (row for row in FORMATS.values() if row.magic and raw.startswith(row.magic)), kind
            )
            if found.name != kind.name:
                instead = called(path, found.endings[0])
                raise UnreadableFileError(
                    f"cannot be read as {kind.name}: its bytes are {found.name}. Call it {instead}."
                )
            return kind.check(path, kind.name, encoding)
        except UnreadableFileError as error:
            raise ConfigError(f"{key}={path}: {error}") from error

    name, shown = known_by(f"content-5 {kind.name} {encoding} {path.name}", look, path)
    return name, shown


def refuse_other_content(key: str, path: Path, kind: Format) -> None:
    """Refuse what `check` refuses, and a text that is no UTF-8: it is to be read where it lies.

    Raises:
        ConfigError: With the file, and what it is.
    """
    encoding, _ = check(key, path, kind)
    if encoding != UTF8:
        new = shlex.quote(str(path.with_name(f"utf8-{path.name}")))
        raise ConfigError(
            f"{key}={path}: its bytes are {encoding}, no UTF-8, and a stream is read where it lies."
            f" Convert it: iconv -f {encoding.replace('latin-1', 'latin1')} -t utf-8"
            f" {shlex.quote(str(path))} > {new}"
        )
