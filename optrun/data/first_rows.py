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

    Returns:
        The other columns of the table, and then the new ones, None in each of the `count` rows.
        Example: `{"text": ["a", "b"]}` with a new column `tools` is
        `{"text": ["a", "b"], "tools": [None, None]}`.
    """
    from datasets import Dataset, Features, concatenate_datasets

    unchanged = {name: kind for name, kind in first.features.items() if name not in features}
    # Of tables without rows, concatenate_datasets returns the first: make one table instead.
    if not count:
        features = unchanged | dict(features)
        unchanged = {}
    empty = Dataset.from_dict(dict.fromkeys(features, [None] * count), features=Features(features))
    if not unchanged:
        return empty
    return concatenate_datasets([first.select_columns(list(unchanged)), empty], axis=1)


def missing_optional_columns(
    columns: Collection[str], first: Mapping[str, object], column_names: Collection[str]
) -> frozenset[str]:
    """List the optional columns of chats missing in all first rows, such as `tools`.

    If a first row had one of them, it would be read beside `columns`. Empty for rows that are no
    chats: their first row has no list of turns, and `columns` are no layout of chats.

    Args:
        columns: Columns that are read.
        first: The first row, with these columns.
        column_names: Columns of the first rows of all files.

    Example:
        >>> columns = ["prompt", "completion"]
        >>> row = {"prompt": "2 + 2 =", "completion": "4"}
        >>> sorted(missing_optional_columns(columns, row, [*columns, "system"]))
        ['chat_template_kwargs', 'label', 'tools']
    """
    has_turns = any(
        isinstance(value, list) and value and isinstance(value[0], dict) for value in first.values()
    )
    optional: set[str] = set()
    if has_turns:
        optional |= _OPTIONAL_IN_CHATS
    for required, optional_in_layout in _OPTIONAL_IN_LAYOUTS:
        if required <= set(columns):
            optional |= _OPTIONAL_IN_CHATS | optional_in_layout
    return frozenset(optional - set(column_names))
