"""What is known of the columns of a stream before it is read.

The first rows of each file say it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

FIRST_ROWS = 100
"""Rows of a file by which its columns are known."""
_OF_CHATS = frozenset({"tools", "system", "chat_template_kwargs"})
"""Columns that are taken in beside any chat where they are there (`optrun.data.chat`)."""
_OF_LAYOUTS = {
    frozenset({"instruction", "output"}): frozenset({"input", "history"}),
    frozenset({"prompt", "completion"}): frozenset({"label"}),
}
"""The columns of a layout of chats, and those that are taken in beside them as well."""


def with_empty_columns(first: Dataset, count: int, features: Mapping[str, object]) -> Dataset:
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


def related_columns(
    columns: Collection[str], first: Mapping[str, object], known: Collection[str]
) -> frozenset[str]:
    """List names that would be among the columns to read, had the first rows of a file had them.

    Args:
        columns: Those to read.
        first: The first row, of these columns.
        known: Of the first rows of all files.
    """
    has_turns = any(
        isinstance(value, list) and value and isinstance(value[0], dict) for value in first.values()
    )
    wanted = set(_OF_CHATS) if has_turns else set()
    for names, more in _OF_LAYOUTS.items():
        if names <= set(columns):
            wanted |= _OF_CHATS | more
    return frozenset(wanted - set(known))
