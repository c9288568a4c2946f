"""Load the compiled kernel, `step.c`, and call it through ctypes."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optrun.optimizer.kernels.build import LIBRARY, SOURCE, digest
from optrun.optimizer.kernels.rows import ROWS, Row

FORMULAS = list(ROWS)
"""In the order of step.c."""


@dataclass(frozen=True)
class Library:
    """The loaded kernel, or why there is none."""

    loaded: ctypes.CDLL | None
    missing: str
    """The reason; empty if it is loaded."""


@cache
def library() -> Library:
    """Load the compiled kernel beside its source; cached for the process."""
    return load(SOURCE.parent)


def load(folder: Path) -> Library:
    """Load the compiled kernel from a folder, or say why it cannot be loaded.

    It must have been compiled from this `step.c` with the same flags: it holds a digest of both.
    Raises nothing.
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


class Table:
    """The addresses and sizes of the tensors of a batch, as step.c reads them.

    Args:
        formula: One of `ROWS`.
        lists: Parameters, gradients, each kind of state in the order of its class; of one length,
            on the CPU, contiguous, all float32 or all float64.
    """

    def __init__(self, formula: str, lists: Sequence[list[Tensor]]) -> None:
        params = lists[0]
        self._formula = formula
        self._dtype = params[0].dtype
        self._count = len(params)
        self._addresses = array("q", [t.data_ptr() for t in chain.from_iterable(lists)])
        self._sizes = array("q", [param.numel() for param in params])
        self._ratios = torch.ones(len(params), dtype=torch.float64, device="cpu")

    def step(self, grads: list[int], rows: Sequence[Row], row_of: list[int]) -> Tensor | None:
        """Take one step over the tensors in place.

        Args:
            grads: Addresses of the gradients.
            rows: Scalars that tensors share.
            row_of: Index into `rows` of each tensor.

        Returns:
            LAMB's trust ratio of each tensor, shape (n,), in the dtype of the parameters; None for
            other formulas.

        Raises:
            MemoryError: There is no memory for the kernel's queue; nothing was changed.
        """
        loaded = library().loaded
        assert loaded is not None  # `pick` chooses this kernel only if it is built
        count = self._count
        # The addresses are those of all parameters, of all gradients, and of each kind of state.
        # Only gradients may have moved since the last step.
        self._addresses[count : 2 * count] = array("q", grads)
        rows_of_tensors = array("q", row_of)
        numbers = array("d", chain.from_iterable(row.values() for row in rows))
        # Arguments in the order of step.c; a result other than 0 is an error.
        failed = loaded.optrun_step(
            FORMULAS.index(self._formula),
            int(self._dtype == torch.float64),
            ctypes.c_int64(count),
            _address_of_values(self._addresses),
            _address_of_values(self._sizes),
            _address_of_values(rows_of_tensors),
            _address_of_values(numbers),
            ctypes.c_void_p(self._ratios.data_ptr()),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the queue of a step over {count} tensors.")
        if self._formula == "lamb":  # the next step overwrites `_ratios`, so a copy
            return self._ratios.to(self._dtype, copy=True)
        return None


def _address_of_values(numbers: array[Any]) -> ctypes.c_void_p:
    """Return the address of an array's values."""
    address, _ = numbers.buffer_info()
    return ctypes.c_void_p(address)
