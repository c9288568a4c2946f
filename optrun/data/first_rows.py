"""The columns of a stream, as the first rows of each file show them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

FIRST_ROWS = 100
"""Rows of a file that show its columns."""
_OPTIONAL_IN_CHATS = {"tools", "system", "chat_template_kwargs"}
"""Columns that are read beside any chat, if a row has them (`optrun.data.chat`)."""
_OPTIONAL_IN_LAYOUTS = (
    ({"instruction", "output"}, {"input", "history"}),
    ({"prompt", "completion"}, {"label"}),
)
"""The columns of a layout of chats, and the columns that are read beside them as well."""


def with_empty_columns(first: Dataset, count: int, features: Mapping[str, object]) -> Dataset:
    """Return a table with more columns, all of them empty.

    Args:
        first: The table; columns with the same names as new ones are replaced.
        count: The number of its rows, which a table without columns does not know.
        features: The type of each new column by its name.
    """
    from datasets import Dataset, Features, concatenate_datasets

    present = {name: kind for name, kind in first.features.items() if name not in features}
    if not count:  # of tables without rows, concatenate_datasets returns the first
        features = present | dict(features)
        present = {}
    empty = Dataset.from_dict(dict.fromkeys(features, [None] * count), features=Features(features))
    if not present:
        return empty
    return concatenate_datasets([first.select_columns(list(present)), empty], axis=1)


def related_columns(
    columns: Collection[str], first: Mapping[str, object], column_names: Collection[str]
) -> frozenset[str]:
    """List the optional columns of chats missing in all first rows, such as `tools`.

    They would be read beside the others if a first row had them. Empty for rows that are no chats.

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
        related |= _OPTIONAL_IN_CHATS
    for names, more in _OPTIONAL_IN_LAYOUTS:
        if names <= set(columns):
            related |= _OPTIONAL_IN_CHATS | more
    return frozenset(related - set(column_names))
