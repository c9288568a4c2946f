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
from optrun.data.encoding import UTF8, TextEncoding, find_encoding, recode_to_utf8, zero_bytes_error

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_CHUNK_BYTES = 1 << 20
_LARGEST_UNPACKED = 1 << 28
"""Bytes that any packed file may hold."""
_LARGEST_RATIO = 100

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
UNREADABLE_KINDS = {
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
    """Open the bytes of a file, decompressed according to its first bytes, not to its ending."""
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
        while chunk := stream.read(_CHUNK_BYTES):
            unpacked += len(chunk)
            if unpacked > max(_LARGEST_UNPACKED, packed_size * _LARGEST_RATIO):
                raise UnreadableFileError(
                    f"unpacks to more than {_LARGEST_RATIO} times its {packed_size:,} bytes;"
                    " expected a text, which packs to a tenth. Unpack it yourself, and give what is"
                    " in it."
                )
            yield chunk


def write_as_utf8(path: Path, encoding: str, folder: Path) -> Path:
    """Write a text, unpacked and as UTF-8, to a new file in a folder, and return the file.

    Args:
        path: The text; it may be compressed.
        encoding: Its encoding, as `codecs` knows it.
        folder: Where the file is written; made if it is missing. The name is that of the text
            without the ending of a compression, behind a digest of its path, so that texts of
            several folders may have one name.

    Raises:
        UnreadableFileError: The text cannot be decoded, or unpacks to too much (`chunks_of`).
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
    """Find the encoding of a text by reading all of it, and refuse an unreadable one.

    Args:
        path: The file; it may be compressed.
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
        # Decompressors raise OSError, too, but only the disk gives a number.
        is_from_disk = getattr(error, "errno", None) is not None
        if is_from_disk:
            raise
        raise UnreadableFileError(f"cannot be read as {kind}: {error}") from error


def _refuse_content(path: Path, kind: str, text: Iterable[bytes]) -> None:
    """Refuse an empty text, zero bytes, or the beginning of another format.

    A text of nothing but white space is refused as text and JSON; tables report it themselves.

    Args:
        path: The file, for messages.
        kind: Name of its format.
        text: Its content as UTF-8.

    Raises:
        UnreadableFileError: With the reason.
    """
    line = 1  # the number of the line that a chunk begins in
    is_empty = True
    is_blank = True
    for chunk in text:
        if is_empty:
            _refuse_beginning(chunk, path, kind)
        is_empty = False
        before_zero, zero, _ = chunk.partition(b"\x00")
        line += before_zero.count(b"\n")
        if zero:
            raise zero_bytes_error(line)
        if chunk.decode(UTF8, "replace").strip():
            is_blank = False
    if is_empty:
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
    """Return the name of a file with another ending; an ending such as `.gz` stays behind it.

    Example:
        >>> name_with_ending(Path("a.csv.gz"), ".jsonl")
        'a.jsonl.gz'
    """
    name = name_inside(path)
    compression = path.name.removeprefix(name)
    return Path(name).with_suffix(ending).name + compression


def parse_row(text: str | bytes) -> Any:
    """Parse a row of JSON.

    Raises:
        ValueError: It is no JSON, a key is repeated in an object, or it is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise ValueError("too many brackets within brackets") from error


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a dict of the keys and values of an object: an `object_pairs_hook` of `json`.

    Raises:
        ValueError: A key is repeated; `json` alone would drop its first value.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is repeated in one object")
    return values


def first_line(raw: bytes) -> str:
    """Write the first 40 bytes of the first line as a quoted text, for a message."""
    if raw.strip():
        raw = raw.splitlines()[0]
    return repr(raw[:40].decode("utf-8", "replace"))
