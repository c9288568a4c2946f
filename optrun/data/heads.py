"""What is known of the columns of a stream before it is read.

The first rows of each file say it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

HEAD = 100
"""Rows of a file by which its columns are known."""
_ALPACA, _MORE, _TOOLS = (
    frozenset({"instruction", "output"}),
    frozenset({"input", "system"}),
    frozenset({"tools"}),
)
"""Columns of chats that are taken in where they are there (`optrun.data.chat`).

Of Alpaca's rows, and of any chat.
"""


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
