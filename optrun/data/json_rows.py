"""JSON and jsonl as Python's `json` reads them, with every text and cell unchanged.

The reader of `datasets` turns a text that looks like a time into one.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow as pa
from datasets.features.features import register_feature

from optrun.base.errors import ConfigError
from optrun.data.cache import cached, versions
from optrun.data.content import ROW, open_bytes, parse_row, unique_keys
from optrun.data.heartbeat import send_heartbeat
from optrun.data.reading import Reading
from optrun.data.row_advice import refuse_one_object

if TYPE_CHECKING:
    from datasets import Dataset, Features

Row = dict[str, Any]
_ROWS_AT_ONCE = 1000
_INT64_LIMIT = 2**63
_MIXED = "mixed"
_BLANK = re.compile(r"[ \t\r\n]*")
_SCALARS = {str: "string", bool: "bool", int: "int64", float: "float64"}


@dataclass
class NestedCell(datasets.Json):
    """A cell of any JSON value, exactly: objects keep their keys, numbers their digits."""

    pa_type = pa.string()
    _type: str = field(default="NestedCell", init=False, repr=False)

    def encode_example(self, example_data: object) -> str | None:
        """Write a cell as JSON."""
        if example_data is None:
            return None
        return json.dumps(example_data)

    def decode_example(
        self,
        example_data: str | None,
        token_per_repo_id: object = None,  # noqa: ARG002
    ) -> Any:
        """Read a cell."""
        if example_data is None:
            return None
        return parse_row(example_data)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # the function says that it is experimental
    register_feature(NestedCell, "NestedCell")


def read_json_rows(reading: Reading) -> Dataset:
    """Read the objects of JSON files, one a line or in a list, mapped from the cache.

    Raises:
        ConfigError: A row is no object, or a file is a single object with the rows inside.
    """
    address = reading.address("json-1", versions("datasets", "pyarrow"))
    folder = cached("rows", address, lambda folder: _convert(reading, folder))
    rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    if len(reading.files) == len(rows) == 1:
        refuse_one_object(reading.key, reading.files[0], rows)
    return rows


def _convert(reading: Reading, folder: Path) -> None:
    """Read all rows twice: to find the type of each column, and to write `rows.arrow`."""
    with tempfile.TemporaryDirectory(dir=folder) as plain:
        texts = list(zip(reading.files, reading.utf8_files(Path(plain)), strict=True))

        def rows() -> Iterator[Row]:
            for path, text in texts:
                send_heartbeat()
                yield from _rows_of(f"{reading.key}={path}", text)

        features = column_features(rows())
        schema = features.arrow_schema
        with (
            pa.OSFile(str(folder / "rows.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, schema) as writer,
        ):
            remaining = rows()
            while batch := list(islice(remaining, _ROWS_AT_ONCE)):
                writer.write_batch(_record_batch(batch, features, schema))


def _record_batch(rows: list[Row], features: Features, schema: pa.Schema) -> pa.RecordBatch:
    """Convert rows to an Arrow batch; missing cells are null."""
    columns = []
    for name, feature in features.items():
        cells = [row.get(name) for row in rows]
        if isinstance(feature, NestedCell):
            cells = [feature.encode_example(cell) for cell in cells]
        columns.append(pa.array(cells, schema.field(name).type))
    return pa.record_batch(columns, schema=schema)


def table_of(rows: Sequence[Mapping[str, object]]) -> Dataset:
    """Make a table of rows in memory, with every column of any row."""
    features = column_features(rows)
    cells = {name: [row.get(name) for row in rows] for name in features}
    return datasets.Dataset.from_dict(cells, features=features)


def column_features(rows: Iterable[Mapping[str, object]]) -> Features:
    """Find the type of each column: a text, a number, a truth value, or a list of these.

    Every other column holds `NestedCell`s: objects, lists of objects, cells of several types. A row
    may lack columns that other rows have.

    Example:
        >>> column_features([{"n": 1}, {"n": 0.5, "who": {"name": "a"}}])
        {'n': Value('float64'), 'who': NestedCell(decode=True)}
    """
    kinds: dict[str, str] = {}
    for row in rows:
        for name, cell in row.items():
            kinds[name] = _common_type(kinds.get(name, ""), _cell_type(cell))
    return datasets.Features({name: _feature_of_type(kind) for name, kind in kinds.items()})


def _cell_type(cell: object) -> str:
    """Name the type of a cell; lists of lists are `mixed`.

    Example:
        >>> [_cell_type(cell) for cell in (None, 1, [], ["a", None], [1, "a"], {"a": 1})]
        ['', 'int64', '[]', '[string]', 'mixed', 'mixed']
    """
    if cell is None:
        return ""
    if not isinstance(cell, list):
        return _SCALARS.get(type(cell), _MIXED)
    item_type = ""
    for item in cell:
        if isinstance(item, list):
            return _MIXED
        item_type = _common_type(item_type, _cell_type(item))
    return _list_type(item_type)


def _list_type(item_type: str) -> str:
    """Name the type of lists with such items."""
    if item_type == _MIXED:
        return _MIXED
    return f"[{item_type}]"


def _common_type(first: str, second: str) -> str:
    """Name the type of a column with cells of two types, named as by `_cell_type`.

    Missing cells have any type. Integers and fractions are `float64`; other types are `mixed`.

    Example:
        >>> _common_type("int64", ""), _common_type("[int64]", "[float64]")
        ('int64', '[float64]')
        >>> _common_type("int64", "string"), _common_type("int64", "[int64]")
        ('mixed', 'mixed')
    """
    if first == second or not second:
        return first
    if not first:
        return second
    if first.startswith("[") and second.startswith("["):
        return _list_type(_common_type(first[1:-1], second[1:-1]))
    if {first, second} == {"int64", "float64"}:
        return "float64"
    return _MIXED


def _feature_of_type(kind: str) -> Any:
    """Return the feature of `datasets` for a type as `_cell_type` names it."""
    if kind == _MIXED:
        return NestedCell()
    if kind.startswith("["):
        return datasets.List(_feature_of_type(kind[1:-1]))
    return datasets.Value(kind or "null")


def _rows_of(where: str, path: Path) -> Iterator[Row]:
    """Yield the objects of a file: one a line, else of a list, else one after another.

    Only a file of lines is read line by line; the others are in memory as a whole. Blank lines are
    skipped.

    Raises:
        ConfigError: A row is no object; rows are counted from 1.
    """
    with (
        open_bytes(path) as stream,
        io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n") as lines,
    ):
        number = 0
        for line in lines:
            if not line.strip():
                continue
            # The first line with something in it says which kind of file it is.
            if number == 0 and _is_start_of_many_lines(line):
                yield from _rows_of_text(where, line + lines.read())
                return
            number += 1
            yield _parse_object(where, number, line)


def _is_start_of_many_lines(line: str) -> bool:
    """Tell whether a first line begins a list of all rows, or an object of several lines.

    Example:
        >>> [_is_start_of_many_lines(line) for line in ('[{"a": 1},', "{", '{"a":', '{"a": 1}')]
        [True, True, True, False]
    """
    if line.lstrip().startswith("["):
        return True
    return line.strip() == "{" or not line.rstrip().endswith(("}", "},"))


def _parse_object(where: str, number: int, line: str) -> Row:
    """Parse the object of a line.

    Args:
        where: Key and path, for messages.
        number: The number of the row, from 1.
        line: The line.

    Raises:
        ConfigError: It is not JSON, or `_check_row` refuses it.
    """
    try:
        value = parse_row(line)
    except ValueError as error:
        hint = ""
        if re.fullmatch(r"\{.*\},", line.strip()):
            hint = ". Remove the comma at its end"
        elif "double quotes" in str(error):
            hint = ". Write names and texts in double quotes"
        raise _row_error(where, number, f"is not JSON: {error}{hint}") from error
    return _check_row(where, number, value)


def _check_row(where: str, number: int, value: object) -> Row:
    """Check that a row is an object whose numbers and texts Arrow can store; return it unchanged.

    Cells and the items of lists are checked; deeper values are stored as JSON text.

    Raises:
        ConfigError: It is no object, has a number beyond 64 bits, or half of a surrogate pair.
    """
    if not isinstance(value, dict):
        value_text = json.dumps(value)[:40]
        raise _row_error(where, number, f"is not an object, such as {ROW}, but {value_text!r}")
    for name, cell in value.items():
        items = cell if isinstance(cell, list) else [cell]
        for item in items:
            if type(item) is int and not -_INT64_LIMIT <= item < _INT64_LIMIT:
                problem = f"has a number beyond 64 bits in {name}: {item}. Write it as a text"
                raise _row_error(where, number, problem)
            if isinstance(item, str) and not _is_unicode(item):
                problem = f"has half of a surrogate pair in {name}: {ascii(item)[:60]}. Write UTF-8"
                raise _row_error(where, number, problem)
    return value


def _is_unicode(text: str) -> bool:
    """Tell whether UTF-8 can encode a text, which it cannot with half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _rows_of_text(where: str, text: str) -> Iterator[Row]:
    """Yield the rows of a JSON list, or of objects of several lines each.

    A text in the list becomes a row with the column `text`: `["a", {"text": "b"}]` has the rows
    `{"text": "a"}` and `{"text": "b"}`.

    Raises:
        ConfigError: It is not JSON, or a row is no object.
    """
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    # 1. All values of the text, one after another.
    values: list[Any] = []
    at = _end_of_blank(text, 0)
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            at = _end_of_blank(text, at)
    except ValueError as error:
        raise ConfigError(f"{where}: cannot be read as json: {error}.") from error
    except RecursionError as error:
        raise ConfigError(
            f"{where}: cannot be read as json: too many brackets within brackets."
        ) from error
    # 2. Their rows: the items of a single list, else the values.
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    for number, value in enumerate(values, 1):
        row = {"text": value} if isinstance(value, str) else value
        yield _check_row(where, number, row)


def _end_of_blank(text: str, begin: int) -> int:
    """Find the first character at or after `begin` other than white space."""
    match = _BLANK.match(text, begin)
    assert match is not None
    return match.end()


def _row_error(where: str, number: int, problem: str) -> ConfigError:
    """Build the error for a row, counted from 1; `problem` is such as `is not an object`."""
    return ConfigError(f"{where}: cannot be read as json: row {number:,} {problem}.")
