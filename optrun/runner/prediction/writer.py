"""Rows and their predictions as one file: jsonl, csv or parquet, by its ending."""

from __future__ import annotations

import csv
import datetime
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import csv_cell
from optrun.data.source import Split
from optrun.runner.prediction.base import Kind, Shape, Values

if TYPE_CHECKING:
    import pyarrow as pa

ENDINGS = (".jsonl", ".csv", ".parquet")
ROW = "row"
_BATCH = 1000


def ending_of(out: Path) -> str:
    """Return the ending that says the format.

    Raises:
        ConfigError: Another one.
    """
    ending = out.suffix.lower()
    if ending not in ENDINGS:
        raise ConfigError(
            f"out={out}: unknown ending {ending or '(none)'}. Expected one of {', '.join(ENDINGS)}."
        )
    return ending


def kept_columns(
    split: Split, keep: Sequence[str] | None, predicted: Iterable[str], notes: list[str]
) -> list[str]:
    """List the columns of the file that stand beside the predictions.

    Args:
        split: The rows.
        keep: As `keep=[...]` names them; None: all that are texts, numbers, dates, or lists and
            objects of them.
        predicted: Columns of the predictions.
        notes: Takes which columns are left out.

    Raises:
        ConfigError: No such column, or one that is called as the predictions are.
    """
    there = split.rows.column_names
    for name in keep or ():
        if name not in there:
            raise ConfigError(
                f"keep: {split.key} has no column {name}. {did_you_mean(name, there)}"
            )
    bare = [name for name in there if _is_bare(split.rows.features[name])]
    if keep is None and bare:
        notes.append(f"not kept beside the predictions: {', '.join(bare)} (bytes)")
    for name in keep or ():
        if name in bare:
            raise ConfigError(
                f"keep: column {name} holds bytes, which are not written beside predictions."
            )
    names = [name for name in there if name not in bare and (keep is None or name in keep)]
    for name in (ROW, *predicted):
        if name in names:
            others = ",".join(other for other in names if other not in (ROW, *predicted))
            raise ConfigError(
                f"{split.key} has a column {name}, and so have the predictions. Rename it, or name"
                f" the columns to keep: keep=[{others}]."
            )
    return names


def _is_bare(feature: object) -> bool:
    """Tell whether a column holds bytes: images, sounds, binary."""
    kind = type(feature).__name__
    return kind in ("Image", "Audio", "Video", "Pdf", "Nifti") or "binary" in str(
        getattr(feature, "dtype", "")
    )


def write(
    path: Path,
    ending: str,
    split: Split,
    names: Sequence[str],
    shape: Shape,
    made: Iterable[Values],
) -> None:
    """Write all rows.

    Args:
        path: Replaced.
        ending: Which format.
        split: The rows.
        names: Columns to be kept of them.
        shape: Columns of the predictions with their types.
        made: A mapping of values for each row, in order.

    Raises:
        OSError: The disk refused.
    """
    if ending == ".parquet":
        _write_parquet(path, split, names, shape, iter(made))
        return
    columns = [ROW, *names, *shape]
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if ending == ".csv":
            table.writerow(map(csv_cell, columns))
        for number, (row, values) in enumerate(zip(_rows(split, names), made, strict=True), 1):
            found = {ROW: number, **row, **{name: values.get(name) for name in shape}}
            if ending == ".csv":
                table.writerow([_cell(found[name]) for name in columns])
            else:
                file.write(json.dumps(found, ensure_ascii=False) + "\n")


def _rows(split: Split, names: Sequence[str]) -> Iterator[dict[str, object]]:
    if not names:
        yield from ({} for _ in range(len(split.rows)))
        return
    for values in split.cells(names):
        yield {name: _plain(value) for name, value in zip(names, values, strict=True)}


def _plain(value: object) -> object:
    """Convert a value of a row to JSON; what is no number there is null, a date its ISO form."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _cell(value: object) -> object:
    """Write a cell of a csv file: lists and objects are JSON."""
    return (
        json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else csv_cell(value)
    )


def _write_parquet(
    path: Path, split: Split, names: Sequence[str], shape: Shape, made: Iterator[Values]
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    fields = [pa.field(ROW, pa.int64())]
    rows = split.rows.select_columns(list(names)).with_format("arrow") if names else None
    if rows is not None:
        first = rows[:1]
        fields += [first.schema.field(name).remove_metadata() for name in names]
    fields += [pa.field(name, _arrow(kind)) for name, kind in shape.items()]
    schema = pa.schema(fields)
    with parquet.ParquetWriter(str(path), schema) as writer:
        for begin in range(0, len(split.rows), _BATCH):
            values = list(islice(made, _BATCH))
            columns = [pa.array(range(begin + 1, begin + 1 + len(values)), pa.int64())]
            if rows is not None:
                part = rows[begin : begin + _BATCH]
                columns += [part.column(name) for name in names]
            columns += [
                pa.array([one.get(name) for one in values], schema.field(name).type)
                for name in shape
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _arrow(kind: Kind) -> pa.DataType:
    """Return the type of Arrow for one of a predictor's `shape`."""
    import pyarrow as pa

    if isinstance(kind, Mapping):
        return pa.struct([pa.field(name, _arrow(inner)) for name, inner in kind.items()])
    if isinstance(kind, list):
        return pa.list_(_arrow(kind[0]))
    return {str: pa.string(), float: pa.float64(), int: pa.int64(), bool: pa.bool_()}[kind]
