"""Arrays over all rows, computed once and mapped from the cache from then on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from optrun.data.cache import cached

_VALUES_AT_ONCE = 1 << 20
"""Values that are looked at together."""


def map_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Map the file of each array in a folder of the cache; keys are the names of the files."""
    return {
        path.stem: np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        for path in sorted(folder.glob("*.npy"))
    }


def cached_arrays(
    kind: str, key: str | None, compute: Callable[[], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Compute arrays once, and map them from the cache.

    Args:
        kind: Subfolder of the cache.
        key: Digest of everything the arrays depend on; None: it is not known, and the arrays are
            computed at each call.
        compute: Computes the arrays. If it raises, nothing is kept.

    Returns:
        Name to array, mapped from the cache.
    """
    if key is None:
        return dict(compute())

    def make(folder: Path) -> None:
        for name, array in compute().items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)

    return map_arrays(cached(kind, key, make))


def texts_to_array(texts: Iterable[str]) -> np.ndarray:
    """Write texts as JSON in an array of bytes, for `cached_arrays`."""
    return np.frombuffer(json.dumps(list(texts)).encode(), dtype=np.uint8)


def array_to_texts(array: np.ndarray) -> list[str]:
    """Read the texts of an array of `texts_to_array`."""
    return list(json.loads(array.tobytes()))


def rows_without_marks(marks: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Find the rows without a marked value after their first one; empty rows are among them.

    The first value does not count, since no token of a language model predicts it. A million values
    are in memory at a time, or one longer row.

    Args:
        marks: The values of all rows, one row behind the other; a value that is not 0 is marked.
            Shape (values,).
        offsets: Where each row begins, and where the last one ends; shape (rows + 1,), int64.

    Returns:
        Numbers of the rows, ascending; int64.

    Example:
        >>> rows_without_marks(np.array([1, 0, 0, 1, 1]), np.array([0, 2, 4, 4, 5])).tolist()
        [0, 2, 3]
    """
    row_count = len(offsets) - 1
    unmarked_rows = [np.zeros(0, dtype=np.int64)]
    first = 0
    while first < row_count:
        # 1. Take the rows from `first` up to `end`: as many as hold a million values together, at
        #    least one row, and at most a million (empty) rows.
        last_offset = offsets[first] + _VALUES_AT_ONCE
        end = int(np.searchsorted(offsets, last_offset, side="right")) - 1
        end = min(row_count, max(first + 1, end), first + _VALUES_AT_ONCE)
        # 2. Count the marked values of each row but for its first value: the difference of two
        #    running totals, at the row's end and at its second value.
        borders = np.asarray(offsets[first : end + 1]) - offsets[first]
        is_marked = marks[offsets[first] : offsets[end]] != 0
        marked_before = np.concatenate([[0], np.cumsum(is_marked, dtype=np.int64)])
        row_ends = borders[1:]
        second_values = np.minimum(borders[:-1] + 1, row_ends)  # of an empty row its end
        counts = marked_before[row_ends] - marked_before[second_values]
        unmarked_rows.append(first + np.flatnonzero(counts == 0))
        first = end
    return np.concatenate(unmarked_rows)
