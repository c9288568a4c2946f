"""Rows of one column of texts in memory, with the interface of a `datasets.Dataset`.

To import datasets, with pandas and pyarrow, takes a second. Texts that optrun reads without it
need none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

_COLUMN = "text"


class TextRows:
    """Texts as rows with the single column `text`.

    It reads like a `datasets.Dataset`. Other methods of that class, such as `map`, are called on a
    Dataset that is made of the texts.

    Args:
        texts: A text for each row.

    Example:
        >>> rows = TextRows(["a", "b", "c"])
        >>> len(rows), rows[1], rows[:2], rows.select([2, 0])["text"]
        (3, {'text': 'b'}, {'text': ['a', 'b']}, ['c', 'a'])
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts: list[Any] = list(texts)
        self.column_names = [_COLUMN]
        self.features = {
            _COLUMN: SimpleNamespace(dtype="string")
        }  # as far as that of a Dataset is asked

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[dict[str, str]]:
        return ({_COLUMN: text} for text in self._texts)

    def __getitem__(self, key: object) -> Any:
        if isinstance(key, str) and key == _COLUMN:
            return self._texts
        if isinstance(key, int | slice):
            return {_COLUMN: self._texts[key]}
        return self.dataset[key]

    def select(self, indices: Iterable[int]) -> TextRows:
        """Return the rows at some indices, in the order of these."""
        return TextRows(self._texts[index] for index in indices)

    def select_columns(self, names: Sequence[str]) -> TextRows | Dataset:
        """Return these rows if `names` is the column `text`, else what a Dataset would."""
        if list(names) == [_COLUMN]:
            return self
        return self.dataset.select_columns(names)

    def iter(self, batch_size: int) -> Iterator[dict[str, list[str]]]:
        """Yield rows in batches."""
        for begin in range(0, len(self), batch_size):
            yield {_COLUMN: self._texts[begin : begin + batch_size]}

    @cached_property
    def dataset(self) -> Dataset:
        """The same rows as a Dataset."""
        from datasets import Dataset

        return Dataset.from_dict({_COLUMN: self._texts})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of copies and pickles, before there is anything in it
            raise AttributeError(name)
        return getattr(self.dataset, name)
