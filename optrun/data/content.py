"""Check the content of a file before a reader stumbles over it."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from optrun.base.errors import UnreadableFileError
from optrun.base.reading import open_file
from optrun.data.cache import digest
from optrun.data.encoding import (
    UTF8,
    TextEncoding,
    find_encoding,
    recode_to_utf8,
    zero_bytes_error,
)

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_CHUNK = 1 << 20
_UNPACKED = 1 << 28
"""Bytes that any packed file may hold."""
_RATIO = 100

_SHEET = "a spreadsheet. Save it as CSV (UTF-8) and give that"
_ZIP = b"PK\x03\x04"
_ZIPPED = (
    "a zip archive, as a spreadsheet is, too. Save a spreadsheet as CSV (UTF-8); unpack an archive"
    " and give the files in it"
)
_ARCHIVE = "an archive. Unpack it and give the files in it"
_IMAGE = (
    "an image. Give a folder with one folder of images for each class: data=hub data.path=FOLDER"
)
_PICKLE = "a pickle, which is never opened. Where you trust its origin write it as parquet"
ROW = '{"text": ..., "label": ...}'
_TREE = f"no table. Write its rows as jsonl, one object a line, such as {ROW}"
ELSEWHERE = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".xlsb", ".ods"), _SHEET),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), _ARCHIVE),
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".webp", ".gif"), _IMAGE),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".joblib"), _PICKLE),
    **dict.fromkeys(
        (".yaml", ".yml", ".xml", ".html", ".pdf", ".docx", ".npy", ".npz", ".db", ".sqlite"), _TREE
    ),
}
"""Ending to what such a file is and what to do, for kinds that people hand over but are not read.
"""


def open_bytes(path: Path) -> IO[bytes]:
    """Open the bytes of a file, unpacked by what its first bytes say, whatever its ending."""
    import pyarrow as pa

    compression = compression_of(path)
    if compression == "xz":
        return lzma.open(path)
    stream: IO[bytes] = pa.input_stream(str(path), compression=compression)
    return stream


def name_inside(path: Path) -> str:
    """Return the name of a file without the ending of its compression."""
    if path.suffix.lower() in COMPRESSED:
        return path.name.removesuffix(path.suffix)
    return path.name


def chunks_of(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked.

    Raises:
        UnreadableFileError: It unpacks to more than a hundred times its size, as no text does, and
            to more than 256 MiB.
    """
    packed_size = path.stat().st_size
    unpacked = 0
    with open_bytes(path) as stream:
        while chunk := stream.read(_CHUNK):
            unpacked += len(chunk)
            if unpacked > max(_UNPACKED, packed_size * _RATIO):
                raise UnreadableFileError(
                    f"unpacks to more than {_RATIO} times its {packed_size:,} bytes; expected a"
                    " text, which packs to a tenth. Unpack it yourself, and give what is in it."
                )
            yield chunk


def as_utf8(path: Path, encoding: str, folder: Path) -> Path:
    """Write a text, unpacked and as UTF-8, into a folder.

    Returns:
        The new file.
    """
    new = folder / f"{digest(str(path))[:8]}-{Path(name_inside(path)).name}"
    new.parent.mkdir(parents=True, exist_ok=True)
    with new.open("wb") as file:
        for chunk in recode_to_utf8(chunks_of(path), encoding):
            file.write(chunk)
    return new


def compression_of(path: Path) -> str | None:
    """Name the compression of a file by its first bytes; None: it is not compressed."""
    with open_file(path, follow=True) as file:
        raw = file.read(8)
    return next((name for magic, name in _MAGIC.items() if raw.startswith(magic)), None)


def check_text(path: Path, kind: str, encoding: str | None) -> TextEncoding:
    """Find the encoding of a text, and refuse an unreadable one.

    Args:
        path: The file; it may be packed.
        kind: Name of its format, for messages.
        encoding: The encoding that the user named; None: see `find_encoding`.

    Raises:
        UnreadableFileError: It is a zip archive, another format or blank, has zero bytes, cannot be
            unpacked or decoded.
        OSError: The disk refused.
    """
    import pyarrow as pa

    try:
        if next(chunks_of(path), b"").startswith(_ZIP):
            raise UnreadableFileError(f"its bytes are {_ZIPPED}.")
        return find_encoding(
            lambda: chunks_of(path), encoding, lambda text: _refuse_content(path, kind, text)
        )
    except (UnreadableFileError, pa.ArrowException, OSError, EOFError, lzma.LZMAError) as error:
        if getattr(error, "errno", None) is not None:  # the disk's own word, not a decompressor's
            raise
        raise UnreadableFileError(f"cannot be read as {kind}: {error}") from error


def _refuse_content(path: Path, kind: str, text: Iterable[bytes]) -> None:
    """Refuse a text in UTF-8 of another format, with zero bytes, or blank."""
    line = 1
    is_blank = True
    number = -1
    for number, chunk in enumerate(text):
        if number == 0:
            _refuse_beginning(chunk, path, kind)
        if b"\x00" in chunk:
            line += chunk[: chunk.index(b"\x00")].count(b"\n")
            raise zero_bytes_error(line)
        line += chunk.count(b"\n")
        is_blank = is_blank and not chunk.decode(UTF8, "replace").strip()
    if number < 0:
        raise UnreadableFileError("the file is empty.")
    if is_blank and kind in ("text", "json"):
        raise UnreadableFileError("no rows in it: nothing but white space.")


def _refuse_beginning(head: bytes, path: Path, kind: str) -> None:
    """Refuse a web page, JSON in a table, and anything else than JSON in a JSON file."""
    begin = head.lstrip()
    if kind != "text" and begin[:15].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise UnreadableFileError(
            f"it begins with {first_line(begin)}: a web page, such as an error or a login, in place"
            " of the data."
        )
    if kind in ("csv", "tsv") and begin.startswith((b'{"', b"[{")):
        raise UnreadableFileError(
            f"its lines are JSON. Call it {name_with_ending(path, '.jsonl')}."
        )
    if kind == "json" and begin and not begin.startswith((b"{", b"[")):
        raise UnreadableFileError(
            f"it begins with {first_line(begin)}, where JSON begins with {{ or [."
        )


def name_with_ending(path: Path, ending: str) -> str:
    """Return the name of a file with another ending; that of a compression stays behind it."""
    packed = ""
    if path.suffix.lower() in COMPRESSED:
        packed = path.suffix
    return Path(path.name.removesuffix(packed)).with_suffix(ending).name + packed


def parse_row(text: str | bytes) -> Any:
    """Parse a row of JSON and refuse a repeated key.

    Raises:
        ValueError: It is no JSON; a key stands twice; it is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise ValueError("too many brackets within brackets") from error


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make an object of keys and values, for the `json` module.

    Raises:
        ValueError: A key stands twice, so that one of its values would be lost.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} stands twice in one object")
    return values


def first_line(raw: bytes) -> str:
    """Write the first 40 bytes of the first line as a quoted text, for a message."""
    if raw.strip():
        raw = raw.splitlines()[0]
    return repr(raw[:40].decode("utf-8", "replace"))
