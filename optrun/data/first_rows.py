"""The columns of a stream, as the first rows of each file show them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

FIRST_ROWS = 100
"""Rows of a file that show its columns."""
_OF_CHATS = frozenset({"tools", "system", "chat_template_kwargs"})
"""Columns that are read beside any chat, if a row has them (`optrun.data.chat`)."""
_OF_LAYOUTS = {
    frozenset({"instruction", "output"}): frozenset({"input", "history"}),
    frozenset({"prompt", "completion"}): frozenset({"label"}),
}
"""The columns of a layout of chats, and those that are read beside them as well."""


def with_empty_columns(first: Dataset, count: int, features: Mapping[str, object]) -> Dataset:
    """Return a table with further columns, all of them empty.

    Args:
        first: The table; columns with the same names as new ones are replaced.
        count: The number of its rows, which a table without columns does not know.
        features: The type of each new column by its name.
    """
    from datasets import Dataset, Features, concatenate_datasets

    present = [name for name in first.column_names if name not in features]
    empty = Dataset.from_dict(
        {name: [None] * count for name in features}, features=Features(dict(features))
    )
    if not present:
        return empty
    return concatenate_datasets([first.select_columns(present), empty], axis=1)


def related_columns(
    columns: Collection[str], first: Mapping[str, object], column_names: Collection[str]
) -> frozenset[str]:
    """List columns that would be read beside others if the first rows had them.

    Chats have such columns (`tools`, `system`, `input`, ...); other rows have none.

    Args:
        columns: Columns that are read.
        first: The first row, with these columns.
        column_names: Columns of the first rows of all files.
    """
    has_turns = any(
        isinstance(value, list) and value and isinstance(value[0], dict) for value in first.values()
    )
    related: set[str] = set()
    if has_turns:
        related |= _OF_CHATS
    for names, more in _OF_LAYOUTS.items():
        if names <= set(columns):
            related |= _OF_CHATS | more
    return frozenset(related - set(column_names))
