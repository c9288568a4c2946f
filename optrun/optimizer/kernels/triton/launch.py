"""The papers' formulas by the Triton kernels.

Nothing here waits for the device: what a step needs to know goes there in two copies from pinned
memory, and LAMB's ratios stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from optrun.optimizer.kernels.rows import Rows

FORMULAS = ("adam", "adamax", "lamb")
"""Those of `ROWS` that have kernels here."""
ALIGNMENT = 16
"""Bytes of the widest load of a thread."""


def step(formula: str, lists: Sequence[list[Tensor]], rows: Rows) -> Tensor | None:
    """Take one step of a formula over tensors in place.

    Args:
        formula: One of `FORMULAS`.
        lists: Parameters, gradients, first moments, second moments or running maxima; of one
            length, on one device, contiguous, all float32 or all float64.
        rows: The numbers of each tensor.

    Returns:
        LAMB's ratio of each tensor, shape (n,), in the dtype and on the device of the parameters;
        else None.

    Raises:
        RuntimeError: A CUDA graph is being captured.
    """
    from optrun.optimizer.kernels.triton import device as kernels

    params = lists[0]
    where, dtype = params[0].device, params[0].dtype
    if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph would repeat the learning rate and the step number of the step it"
            " captured: optrun's optimizers are not capturable."
        )
    sizes = tuple(param.numel() for param in params)
    addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in zip(*lists, strict=True)]
    places, numbers = _table(addresses, sizes, kernels.CHUNK, rows, where)
    chunks = _chunks(sizes, kernels.CHUNK, where.type).to(where, non_blocking=True)
    common = {
        "REAL": kernels.REALS[dtype],
        "CHUNK": kernels.CHUNK,
        "BLOCK": kernels.BLOCK,
        **kernels.OPTIONS,
    }
    aligned = all(address % ALIGNMENT == 0 for own in addresses for address in own)
    grid = (len(chunks),)
    with _current(where):
        if not len(chunks):  # no device launches nothing
            return torch.ones(len(params), dtype=dtype, device=where) if formula == "lamb" else None
        if formula != "lamb":
            getattr(kernels, formula)[grid](places, numbers, chunks, ALIGNED=aligned, **common)
            return None
        sums = torch.empty(2 * len(chunks), dtype=torch.float64, device=where)
        ratios = torch.empty(len(params), dtype=dtype, device=where)
        kernels.lamb_moments[grid](places, numbers, chunks, sums, ALIGNED=aligned, **common)
        kernels.lamb_ratios[(len(params),)](places, numbers, sums, ratios, **common)
        kernels.lamb_update[grid](places, numbers, chunks, ratios, ALIGNED=aligned, **common)
    return ratios


def _current(where: torch.device) -> AbstractContextManager[object]:
    """Select the device of a tensor: Triton launches on the current one."""
    return torch.cuda.device(where) if where.type == "cuda" else nullcontext()


@lru_cache(maxsize=32)
def _chunks(sizes: tuple[int, ...], chunk: int, kind: str) -> Tensor:
    """List for each chunk its tensor and its first element: shape (chunks, 2), int64, on the CPU.

    Read-only.
    """
    counts = torch.tensor([-(-size // chunk) for size in sizes], device="cpu")
    tensors = torch.arange(len(sizes), device="cpu").repeat_interleave(counts)
    begins = torch.arange(len(tensors), device="cpu") - (counts.cumsum(0) - counts)[tensors]
    made = torch.stack([tensors, chunk * begins], dim=1)
    return made.pin_memory() if kind == "cuda" else made


def _table(
    addresses: Sequence[Sequence[int]],
    sizes: Sequence[int],
    chunk: int,
    rows: Rows,
    where: torch.device,
) -> tuple[Tensor, Tensor]:
    """Copy everything that a step knows of each tensor at once.

    `device.PLACES`, int64, and its numbers, float64.
    """
    counts = [-(-size // chunk) for size in sizes]
    firsts = [0, *accumulate(counts[:-1])]
    own = [[*four, size, first] for four, size, first in zip(addresses, sizes, firsts, strict=True)]
    places = torch.tensor(own, dtype=torch.int64, device="cpu")
    numbers = torch.tensor([list(row.values()) for row in rows], dtype=torch.float64, device="cpu")
    together = torch.cat([places.flatten(), numbers.view(torch.int64).flatten()])
    if (
        where.type == "cuda"
    ):  # the allocator keeps pinned memory from others until the copy is through
        together = together.pin_memory()
    moved = together.to(where, non_blocking=True)
    return moved[: places.numel()], moved[places.numel() :].view(torch.float64)
