"""The compiled kernel: `step.c` through ctypes. Where it is missing, the reason is kept for those who ask."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from optrun.optimizer.kernels.build import LIBRARY, SOURCE, digest

FORMULAS = ("adam", "adamax", "lamb")
"""In the order of `UPDATES` in step.c."""
NUMBERS: dict[str, float] = {
    "scale": 0.0,
    "keep": 1.0,
    "beta1": 0.0,
    "beta2": 0.0,
    "eps": 0.0,
    "eps_gradient": 0.0,
    "eps_denominator": 0.0,
    "root": 1.0,
    "first": 1.0,
    "l1": 0.0,
    "l2": 0.0,
    "decay": 0.0,
    "unscale": 1.0,
    "adapt": 0.0,
    "nesterov": 0.0,
    "min_norm": 0.0,
    "max_norm": math.inf,
    "eps_ratio": 0.0,
    "min_ratio": 0.0,
    "max_ratio": math.inf,
}
"""Fields of `Numbers` in step.c, in its order, and what they are where a formula has none."""


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
    """Load the compiled kernel from a folder, if it is there and made from the `step.c` of this optrun."""
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


def call(
    formula: str,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    numbers: Sequence[dict[str, float]],
) -> list[float]:
    """Take one step of a formula over tensors in place.

    Args:
        formula: One of `FORMULAS`.
        params: On the CPU, contiguous, all float32 or all float64.
        grads: Of the same shapes, dtype and layout.
        firsts: First moments, likewise.
        seconds: Second moments or running maxima, likewise.
        numbers: Of each tensor, some of `NUMBERS`.

    Returns:
        LAMB's ratio of each tensor; 1 otherwise.

    Raises:
        MemoryError: There is no room for the queue; nothing was changed.
    """
    loaded = library().loaded
    assert loaded is not None
    count = len(params)
    addresses = ctypes.c_void_p * count
    rows = [{**NUMBERS, **row} for row in numbers]
    ratios = (ctypes.c_double * count)()
    failed = loaded.optrun_step(
        FORMULAS.index(formula),
        int(params[0].dtype == torch.float64),
        ctypes.c_int64(count),
        *(addresses(*(tensor.data_ptr() for tensor in tensors)) for tensors in (params, grads, firsts, seconds)),
        (ctypes.c_int64 * count)(*(param.numel() for param in params)),
        (ctypes.c_double * (count * len(NUMBERS)))(*chain.from_iterable(row.values() for row in rows)),
        ratios,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the queue of a step over {count} tensors.")
    return list(ratios)
