"""csv and tsv as they stand: every field is a text, nothing is guessed, a line of the wrong width is an error."""

from __future__ import annotations

import contextlib
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optrun.base.errors import ConfigError
from optrun.data.cache import cached, digest, versions
from optrun.data.content import open_bytes

if TYPE_CHECKING:
    from datasets import Dataset

_BLOCK = 32 << 20
"""Bytes read at once; a single row may not be longer."""


def read_csv(key: str, files: list[Path], kind: str, content: str) -> Dataset:
    """Read rows of csv or tsv files, mapped from the cache.

    Args:
        key: The configuration key, for messages.
        files: All of one format.
        kind: `csv` (fields may be quoted, quotes inside doubled, line breaks inside quotes) or `tsv` (a field is what
            stands between tabs, quotes included).
        content: Digest of the files' bytes.

    Returns:
        Every column as text, `007` and `NA` included; an empty unquoted field is missing.

    Raises:
        ConfigError: Files with different columns, a column named twice, a row of another width, bytes not in UTF-8.
    """
    from datasets import Dataset

    name = digest("csv-2", versions("pyarrow"), kind, content)
    folder = cached("rows", name, lambda folder: _convert(key, files, kind, folder))
    return Dataset.from_file(str(folder / "rows.arrow"))


def _convert(key: str, files: list[Path], kind: str, folder: Path) -> None:
    import pyarrow as pa

    names: list[str] = []
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, contextlib.ExitStack() as stack:
        for path in files:
            with _understood(key, path, kind):
                here = _header(key, path, kind)
                if not names:
                    names = here
                    writer = stack.enter_context(
                        pa.ipc.new_stream(sink, pa.schema([(name, pa.string()) for name in names]))
                    )
                elif here != names:
                    raise ConfigError(
                        f"{key}={path}: its columns are {', '.join(here)}; those of {files[0]} are {', '.join(names)}. "
                        "Give files with the same columns in the same order."
                    )
                for batch in _batches(path, kind, names):
                    writer.write_batch(batch)


@contextlib.contextmanager
def _understood(key: str, path: Path, kind: str) -> Iterator[None]:
    """Turn what the reader says into words that name the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        if getattr(error, "errno", None) is not None:  # the disk's own word, not the reader's
            raise
        raise ConfigError(f"{key}={path}: cannot be read as {kind}: {_reason(str(error), kind)}") from error


def _options(kind: str) -> dict[str, Any]:
    import pyarrow.csv as reader

    if kind == "tsv":
        parse = reader.ParseOptions(delimiter="\t", quote_char=False)
    else:
        parse = reader.ParseOptions(quote_char='"', double_quote=True, newlines_in_values=True)
    return {"read_options": reader.ReadOptions(block_size=_BLOCK, use_threads=False), "parse_options": parse}


def _header(key: str, path: Path, kind: str) -> list[str]:
    import pyarrow.csv as reader

    with open_bytes(path) as stream, reader.open_csv(stream, **_options(kind)) as rows:
        names: list[str] = rows.schema.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{key}={path}: two columns are called {twice[0]!r}.")
    return names


def _batches(path: Path, kind: str, names: list[str]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.csv as reader

    convert = reader.ConvertOptions(
        column_types={name: pa.string() for name in names},
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        check_utf8=True,
    )
    with open_bytes(path) as stream, reader.open_csv(stream, convert_options=convert, **_options(kind)) as rows:
        yield from rows


def _reason(message: str, kind: str) -> str:
    # pyarrow counts the line of names as a row.
    line = re.sub(r"\bRow #(\d+)", lambda found: f"row {int(found[1]) - 1:,}", " ".join(message.split()))
    line = line if len(line) <= 300 else line[:300] + " ..."
    if "invalid UTF8" in line or "codec can't decode" in line:
        return "its bytes are no UTF-8."
    if "columns, got" in line and kind == "csv" and line.count('"') % 2:
        return f"{line} (a quotation mark is opened and not closed; inside of quotes it is written twice)"
    if "columns, got" in line and kind == "csv":
        return f"{line} (a field with a comma needs quotes around it)"
    if "Empty CSV" in line:
        return "there is no header line."
    return line
