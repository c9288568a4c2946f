"""What a file is by its bytes, where its name says something else: told before a reader stumbles over it."""

from __future__ import annotations

import codecs
import io
import json
import lzma
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from optrun.base.errors import ConfigError, UnreadableFileError
from optrun.base.reading import open_file
from optrun.data.known_files import remembered

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_COMPRESSED_BY_MAGIC = ((b"\x1f\x8b", "gzip"), (b"BZh", "bz2"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd"))
_HEAD = 4096
_CHUNK = 1 << 20
_UNPACKED = 1 << 28
"""Bytes that any packed file may hold."""
_RATIO = 100
_DEPTH = 250
"""Brackets within brackets of JSON; Arrow's reader dies of some ten thousand, without a word."""
_PLAIN = bytes(set(range(256)) - set(b'[]{}"'))
_ESCAPED = re.compile(rb"(?s)\\.")
_QUOTED = re.compile(rb'"[^"]*"?')
_SHOWN = 60
"""Characters of a line in a message."""

_SHEET = "a spreadsheet. Save it as CSV (UTF-8) and give that"
_ARCHIVE = "an archive. Unpack it and give the files in it"
_IMAGE = "an image. Give a folder with one folder of images for each class: data=hub data.path=FOLDER"
_PICKLE = "a pickle, which is never opened. Where you trust its origin write it as parquet"
_ROW = '{"text": ..., "label": ...}'
_LIST_A_LINE = re.compile(rb"\[.*\][ \t\r]*\n\s*\[")
_TREE = f"no table. Write its rows as jsonl, one object a line, such as {_ROW}"
ELSEWHERE = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), _SHEET),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), _ARCHIVE),
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".gif"), _IMAGE),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".joblib"), _PICKLE),
    **dict.fromkeys((".yaml", ".yml", ".xml", ".html", ".pdf", ".docx", ".npy", ".npz", ".db", ".sqlite"), _TREE),
    ".arrow": "an Arrow file. Write it as parquet: datasets.Dataset.from_file(FILE).to_parquet(NEW)",
    ".feather": "an Arrow file. Write it as parquet: pandas.read_feather(FILE).to_parquet(NEW)",
}
"""Ending to what such a file is, and what to do: kinds that people do hand over and that are not read."""


def refuse_other_content(key: str, path: Path, kind: str) -> None:
    """Refuse a file that cannot be what its ending says, with what it is instead.

    Args:
        key: The configuration key, for messages.
        path: The file; not empty.
        kind: What its ending says: `csv`, `tsv`, `json`, `parquet` or `text`.

    Raises:
        ConfigError: Another format, another encoding, a pointer of Git LFS, a web page, nothing but white space.
    """

    def look() -> bool:
        message = _other_content(path, kind)
        if message is not None:
            raise ConfigError(f"{key}={path}: {message}")
        return True

    remembered(path, f"content-3 {kind} {path.name}", look)


def _other_content(path: Path, kind: str) -> str | None:
    with open_file(path, follow=True) as file:
        raw = file.read(_HEAD)
    return _by_magic(raw, path, kind) or (_parquet(raw, path) if kind == "parquet" else _text(path, kind))


def open_bytes(path: Path) -> Any:
    """Open the bytes of a file, unpacked if its ending or its first bytes say that they are compressed."""
    import pyarrow as pa

    compression = COMPRESSED.get(path.suffix.lower()) or _compression(path)
    if compression == "xz":
        return lzma.open(path)
    return pa.input_stream(str(path), compression=compression)


def _compression(path: Path) -> str | None:
    with open_file(path, follow=True) as file:
        raw = file.read(8)
    return next((name for magic, name in _COMPRESSED_BY_MAGIC if raw.startswith(magic)), None)


def _by_magic(raw: bytes, path: Path, kind: str) -> str | None:
    """Describe a wrong kind by the first bytes that are the same in every file of a kind."""
    if raw.startswith(b"version https://git-lfs"):
        return "this is a pointer of Git LFS, the data themselves are not here. Fetch them: git lfs pull"
    if raw.startswith(b"PK\x03\x04"):
        return f"its bytes are those of {ELSEWHERE['.xlsx' if b'xl/' in raw else '.zip']}."
    if raw.startswith(b"ARROW1"):
        return f"its bytes are those of {ELSEWHERE['.arrow']}."
    if raw.startswith(b"PAR1") and kind != "parquet":
        return f"cannot be read as {kind}: its bytes are parquet. Call it {_called(path, '.parquet')}."
    return None


def _parquet(raw: bytes, path: Path) -> str | None:
    if not raw.startswith(b"PAR1"):
        packed = " It is compressed as a whole: unpack it." if _compression(path) else ""
        return f"cannot be read as parquet: it begins with {_begin(raw)} instead of PAR1.{packed}"
    with open_file(path, follow=True) as file:
        file.seek(-4, 2)
        whole = file.read() == b"PAR1"
    return (
        None if whole else "cannot be read as parquet: its end is missing. It was cut short: fetch or write it again."
    )


def _text(path: Path, kind: str) -> str | None:
    """Describe what is wrong with the bytes of a text, read to the end; None: nothing."""
    import pyarrow as pa

    try:
        with open_bytes(path) as stream:
            chunks = _bounded(iter(lambda: stream.read(_CHUNK), b""), path)
            chunks = _shallow(chunks) if kind == "json" else chunks
            head = next(chunks, b"")
            if not head:
                return "the file is empty."
            return _wide(head, path, kind) or _beginning(head, path, kind) or _encoding(head, chunks, path, kind)
    except UnreadableFileError as error:
        return str(error)
    except (pa.ArrowException, OSError, EOFError, lzma.LZMAError):
        return None  # the reader says it, in its own words


def _bounded(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Yield what is unpacked of a file.

    Raises:
        UnreadableFileError: It is more than any text is packed to.
    """
    held, unpacked = path.stat().st_size, 0
    for chunk in chunks:
        unpacked += len(chunk)
        if unpacked > max(_UNPACKED, held * _RATIO):
            raise UnreadableFileError(
                f"unpacks to more than {_RATIO} times its {held:,} bytes; expected a text, which packs to a tenth. "
                "Unpack it yourself, and give what is in it."
            )
        yield chunk


def _shallow(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a JSON text.

    Raises:
        UnreadableFileError: It is nested too deeply.
    """
    begun, left = b"", b""
    for chunk in chunks:
        content = _ESCAPED.sub(b"", begun + chunk)
        rest = content.translate(None, _PLAIN).replace(b'""', b"")  # what stands in none of them stays as it is
        begun = b'"' * (rest.count(b'"') % 2) + b"\\" * content.endswith(b"\\")
        left = (left + _QUOTED.sub(b"", rest)).lstrip(b"]}")
        for _ in range(_DEPTH):  # each pass takes one level off
            before = len(left)
            left = left.replace(b"[]", b"").replace(b"{}", b"")
            if len(left) == before:
                break
        if left.count(b"[") + left.count(b"{") > _DEPTH:
            raise UnreadableFileError(
                f"cannot be read as json: more than {_DEPTH} brackets are open at once; expected fewer. "
                "Close them, or write what is in them as a text."
            )
        yield chunk


def _beginning(head: bytes, path: Path, kind: str) -> str | None:
    begin = head.removeprefix(codecs.BOM_UTF8).lstrip()
    cannot = f"cannot be read as {kind}: "
    if kind != "text" and begin[:15].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"{cannot}it begins with {_begin(begin)}: a web page, such as an error or a login, in place of the data."
    if kind in ("csv", "tsv") and begin.startswith((b'{"', b"[{")):
        return f"{cannot}its lines are JSON. Call it {_called(path, '.jsonl')}."
    if kind in ("csv", "tsv") and begin:
        return _other_delimiter(begin.splitlines()[0].decode("utf-8", "replace"), path, kind)
    if kind == "json" and begin and not begin.startswith((b"{", b"[")) and b"\x00" not in head[:_HEAD]:
        return f"{cannot}it begins with {_begin(begin)}, where JSON begins with {{ or [."
    if kind == "json" and _LIST_A_LINE.match(begin):
        return f"{cannot}each line is a list: {_begin(begin)}. Name what is in it: {_ROW}, one object a line."
    return None


def _other_delimiter(header: str, path: Path, kind: str) -> str | None:
    """Find a single column whose name holds what separates columns elsewhere: the file is of that kind."""
    own = {"csv": ",", "tsv": "\t"}[kind]
    other = next((mark for mark in ("\t", ";", "|", ",") if own not in header and mark in header), None)
    if other is None:
        return None
    if other in ",\t":
        word, ending = {",": ("commas", ".csv"), "\t": ("tabs", ".tsv")}[other]
        return f"its columns are separated by {word}, not as in {kind}: {header!r}. Call it {_called(path, ending)}."
    name, new, mark = map(json.dumps, (str(path), str(path.with_name(f"new-{path.name}")), other))
    read = f"pandas.read_csv({name}, sep={mark}, dtype=str, keep_default_na=False)"
    code = shlex.quote(f"import pandas; {read}.to_csv({new}, sep={json.dumps(own)}, index=False)")
    return f"its columns are separated by {other!r}, not as in {kind}: {header!r}. Write it anew: python -c {code}"


def _called(path: Path, ending: str) -> str:
    """Return the file's name with the right ending."""
    packed = path.suffix if path.suffix.lower() in COMPRESSED else ""
    return Path(path.name.removesuffix(packed)).with_suffix(ending).name + packed


def refuse_broken_row(key: str, path: Path) -> None:
    """Refuse the first row of a jsonl file that is no object; any other JSON is left to its reader.

    Raises:
        ConfigError: With the row, counted from 1: readers count from 0, and within a part of the file.
    """
    with open_bytes(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace") as lines:
        for row, line in enumerate((line for line in lines if line.strip()), 1):
            try:
                fault = (
                    None if isinstance(json.loads(line), dict) else f"is no object, such as {_ROW}, but {line[:40]!r}"
                )
            except ValueError as error:
                fault = f"is no JSON: {error}"
            if row == 1 and (fault is not None or line.lstrip().startswith("[")):
                return  # all lines together are one JSON text, or were meant to be
            if fault is not None:
                raise ConfigError(f"{key}={path}: cannot be read as json: row {row:,} {fault}.")


def _encoding(head: bytes, rest: Iterator[bytes], path: Path, kind: str) -> str | None:
    decoder, line, blank = codecs.getincrementaldecoder("utf-8-sig")(), 1, True
    for chunk in chain([head], rest):
        if b"\x00" in chunk:
            line += chunk[: chunk.index(b"\x00")].count(b"\n")
            return f"cannot be read as {kind}: line {line:,} holds zero bytes, as a binary or a damaged file does."
        try:
            blank = not decoder.decode(chunk).strip() and blank
        except UnicodeDecodeError as error:
            line += chunk[: error.start].count(b"\n")
            encoding, text = _one_byte(chunk[chunk.rfind(b"\n", 0, error.start) + 1 :].split(b"\n")[0])
            return (
                f"cannot be read as {kind}: the bytes of line {line:,} are no UTF-8; in {encoding} they are "
                f"{text[:_SHOWN]!r}. {_converted(path, encoding)}"
            )
        line += chunk.count(b"\n")
    return "no rows in it: nothing but white space." if blank and kind in ("text", "json") else None


def _wide(head: bytes, path: Path, kind: str) -> str | None:
    """Describe what is wrong with a text of two or four bytes a letter."""
    marks = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    encoding = next((name for mark, name in marks.items() if head.startswith(mark)), None) or _every_other_zero(head)
    if encoding is None:
        return None
    return f"cannot be read as {kind}: it holds zero bytes: it is {encoding[:6].upper()}. {_converted(path, encoding)}"


def _every_other_zero(head: bytes) -> str | None:
    """Guess the order of a UTF-16 text without a mark of it: Latin letters have a zero byte each."""
    for at, name in ((0, "utf-16be"), (1, "utf-16le")):
        half = head[at:_HEAD:2]
        if len(half) > 4 and half.count(0) > 0.4 * len(half) and head[1 - at : _HEAD : 2].count(0) < 0.1 * len(half):
            return name
    return None


def _one_byte(line: bytes) -> tuple[str, str]:
    """Guess the encoding of a line of one byte a letter: Latin-1 has no letters where Windows has quotes."""
    try:
        return "cp1252", line.decode("cp1252")
    except UnicodeDecodeError:
        return "latin1", line.decode("latin1")


def _converted(path: Path, encoding: str) -> str:
    """Write how to convert a file to UTF-8; one line of a shell, which ran."""
    packed = path.suffix.lower() in COMPRESSED
    if not packed and _compression(path):
        return f"It is packed as well: unpack it, and convert what is in it from {encoding} to utf-8."
    source = path.with_suffix("") if packed else path
    new = source.with_name(f"utf8-{source.name}")
    begin = f"Unpack it, and convert {source.name}" if packed else "Convert it"
    return f"{begin}: iconv -f {encoding} -t utf-8 {shlex.quote(str(source))} > {shlex.quote(str(new))}"


def _begin(raw: bytes) -> str:
    """Return the first line, for a message."""
    line = raw.splitlines()[0] if raw.strip() else raw
    return repr(line[:40].decode("utf-8", "replace"))
