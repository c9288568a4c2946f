"""The compiled kernel: `step.c` through ctypes.

Where it is missing, the reason is kept for those who ask.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from optrun.optimizer.kernels.build import LIBRARY, SOURCE, digest
from optrun.optimizer.kernels.rows import ROWS, Rows


@dataclass(frozen=True)
class Library:
    """Either the loaded kernel, or why there is none."""

    loaded: ctypes.CDLL | None
    missing: str


@cache
def library() -> Library:
    """Load the compiled kernel that lies beside its source, once a process."""
    return load(SOURCE.parent)


def load(folder: Path) -> Library:
    """Load the compiled kernel from a folder.

    If it is there and made from the `step.c` of this optrun.
    """
    path = folder / LIBRARY
    if not path.is_file():
        return Library(None, "it is not built: pip builds it where it finds a C compiler")
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.optrun_digest.restype = ctypes.c_char_p
        current = loaded.optrun_digest().decode() == digest()
    except (OSError, AttributeError) as error:
        return Library(None, f"it does not load: {error}")
    if not current:
        return Library(None, "it was built from another step.c: install optrun again")
    return Library(loaded, "")


def step(formula: str, lists: Sequence[list[Tensor]], rows: Rows) -> Tensor | None:
    """Take one step of a formula over tensors in place.

    Args:
        formula: One of `ROWS`.
        lists: Parameters, gradients, each kind of state in the order of its class; of one length,
            on the CPU, contiguous, all float32 or all float64.
        rows: The numbers of each tensor.

    Returns:
        LAMB's ratio of each tensor, shape (n,), in the dtype of the parameters; else None.

    Raises:
        MemoryError: There is no room for the queue; nothing was changed.
    """
    loaded = library().loaded
    assert loaded is not None
    params, count = lists[0], len(rows)
    places = [tensor.data_ptr() for tensors in lists for tensor in tensors]
    ratios = (ctypes.c_double * count)()
    failed = loaded.optrun_step(
        list(ROWS).index(formula),
        int(params[0].dtype == torch.float64),
        ctypes.c_int64(count),
        (ctypes.c_void_p * len(places))(*places),
        (ctypes.c_int64 * count)(*(param.numel() for param in params)),
        (ctypes.c_double * (count * len(rows[0])))(
            *chain.from_iterable(row.values() for row in rows)
        ),
        ratios,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the queue of a step over {count} tensors.")
    return torch.tensor(list(ratios), dtype=params[0].dtype) if formula == "lamb" else None
