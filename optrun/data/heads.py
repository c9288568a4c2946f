"""What is known of the columns of a stream before it is read.

The first rows of each file say it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

HEAD = 100
"""Rows of a file by which its columns are known."""
NO_TABLE = (TypeError, ValueError, OverflowError, NotImplementedError)
"""What Arrow and `datasets` raise of values that make no column."""
_ALPACA, _MORE, _TOOLS = (
    frozenset({"instruction", "output"}),
    frozenset({"input", "system"}),
    frozenset({"tools"}),
)
"""Columns of chats that are taken in where they are there (`optrun.data.chat`).

Of Alpaca's rows, and of any chat.
"""


def table(rows: Sequence[Mapping[str, object]]) -> Dataset:
    """Make a table with all columns that any row has.

    `Dataset.from_list` knows those of the first one alone.

    A column that the first row lacks and that has values of several types is there as JSON: it may
    be one that nobody reads.

    Raises:
        TypeError, ValueError, OverflowError: A column of the first row has values of several types,
        or of none.
    """
    from datasets import Dataset, Features

    names = list(dict.fromkeys(name for row in rows for name in row))
    later = [name for name in names if name not in rows[0]]
    if not later:
        return Dataset.from_list(list(rows))
    values = {name: [row.get(name) for row in rows] for name in names}
    features = dict(Dataset.from_dict({name: values[name] for name in rows[0]}).features)
    for name in later:
        try:
            features[name] = Dataset.from_dict({name: values[name]}).features[name]
        except NO_TABLE:
            features[name] = Dataset.from_dict(
                {name: values[name]}, on_mixed_types="use_json"
            ).features[name]
    return Dataset.from_dict(values, features=Features(features))


def widened(first: Dataset, count: int, features: Mapping[str, object]) -> Dataset:
    """Add further columns to the first rows, which are empty there.

    Args:
        first: They, perhaps with these columns already, of no type.
        count: How many.
        features: Type by name.
    """
    from datasets import Dataset, Features, concatenate_datasets

    there = [name for name in first.column_names if name not in features]
    empty = Dataset.from_dict(
        {name: [None] * count for name in features}, features=Features(dict(features))
    )
    return concatenate_datasets([first.select_columns(there), empty], axis=1) if there else empty


def unread(
    columns: Collection[str], first: Mapping[str, object], known: Collection[str]
) -> frozenset[str]:
    """List names that would be among the columns to read, had the first rows of a file had them.

    Args:
        columns: Those to read.
        first: The first row, of these columns.
        known: Of the first rows of all files.
    """
    alpaca = set(columns) >= _ALPACA
    chats = any(
        isinstance(value, list) and value and isinstance(value[0], dict) for value in first.values()
    )
    wanted = (_MORE if alpaca else frozenset()) | (_TOOLS if alpaca or chats else frozenset())
    return wanted - set(known)
