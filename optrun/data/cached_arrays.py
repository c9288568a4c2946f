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
    are in memory at a time.

    Args:
        marks: The values of all rows, one row behind the other; a value that is not 0 is marked.
            Shape (values,).
        offsets: Where each row begins, and where the last one ends: from 0 to the number of values.
            Shape (rows + 1,), int64.

    Returns:
        Numbers of the rows, ascending; int64.

    Example:
        >>> rows_without_marks(np.array([1, 0, 0, 1, 1]), np.array([0, 2, 4, 4, 5])).tolist()
        [0, 2, 3]
    """
    has_mark = np.zeros(len(offsets) - 1, dtype=bool)
    for begin in range(0, len(marks), _VALUES_AT_ONCE):
        positions = begin + np.flatnonzero(marks[begin : begin + _VALUES_AT_ONCE])
        # The row of a value is the last one that begins at it or before it.
        rows = np.searchsorted(offsets, positions, side="right") - 1
        is_first_value = positions == offsets[rows]
        has_mark[rows[~is_first_value]] = True
    return np.flatnonzero(~has_mark)
