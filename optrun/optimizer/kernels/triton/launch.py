"""The papers' formulas by the Triton kernels.

Nothing here waits for the device. What does not change from step to step stays there; addresses of
gradients and numbers go there in one copy, and LAMB's ratios stay there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate, chain

import torch
from torch import Tensor

from optrun.optimizer.kernels.rows import SCALARS, Row

ALIGNMENT = 16
"""Bytes of the widest load of a thread."""


class Table:
    """The addresses and sizes of the tensors of a batch, in tables on their device.

    Args:
        formula: One of `ROWS`.
        lists: Parameters, gradients, each kind of state in the order of its class; of one length,
            on one device, contiguous, all float32 or all float64.
    """

    def __init__(self, formula: str, lists: Sequence[list[Tensor]]) -> None:
        from optrun.optimizer.kernels.triton import device as kernels

        params, _, *states = lists
        self._kernels = kernels
        self._formula = formula
        self._dtype = params[0].dtype
        self._device = params[0].device
        self._count = len(params)
        sizes = tuple(param.numel() for param in params)
        counts = [-(-size // kernels.CHUNK) for size in sizes]
        self._chunk_count = sum(counts)
        addresses = [list(map(Tensor.data_ptr, tensors)) for tensors in (params, *states)]
        self._aligned = _are_aligned(chain.from_iterable(addresses))
        absent = [[0] * len(params)] * (kernels.MOST_STATES + 1 - len(addresses))
        first_chunks = [0, *accumulate(counts[:-1])]
        columns = [*addresses, *absent, sizes, first_chunks]
        tensor_table = torch.tensor(columns, dtype=torch.int64, device="cpu").t().contiguous()
        self._tensor_table = _copy_to_device(tensor_table, self._device)
        self._chunks = _copy_to_device(_list_chunks(sizes, kernels.CHUNK), self._device)
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] = []

    def step(
        self,
        grads: list[int],
        rows: Sequence[Row],
        row_of: list[int],
        found_inf: Tensor | None = None,
    ) -> Tensor | None:
        """Take one step over the tensors in place.

        Addresses of gradients and scalars are sent to the device in one message, and nothing waits.

        Args:
            grads: Addresses of the gradients.
            rows: Scalars that tensors share.
            row_of: Index into `rows` of each tensor.
            found_inf: The kernels read it, and change nothing if it is 1.0; shape (), on the
                device.

        Returns:
            LAMB's trust ratio of each tensor, shape (n,), in the dtype and on the device of the
            parameters; None for other formulas.

        Raises:
            RuntimeError: A CUDA graph is being captured.
        """
        device = self._device
        kernels = self._kernels
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph would repeat the learning rate and the step number of the step it"
                " captured: optrun's optimizers are not capturable. Step outside of the graph."
            )
        if not self._chunk_count:  # all tensors are empty, and a launch needs at least one program
            if self._formula == "lamb":
                return torch.ones(self._count, dtype=self._dtype, device=device)
            return None
        # 1. Write the message: numbers of 64 bits, for n tensors n addresses of gradients, n row
        # indices, `found_inf` (0.0 at first), and the scalars of all rows. `_launch` divides it
        # again.
        floats = array("d", chain([0.0], *(row.values() for row in rows)))
        message = array("q", chain(grads, row_of))
        message.frombytes(floats.tobytes())
        # 2. Send it, put the flag into its place there, and launch the kernels.
        with _current_device(device):
            sent = self._send(message)
            if found_inf is not None:
                # On the device, so that the host need not wait for its value.
                sent[2 * self._count].view(torch.float64).copy_(found_inf)
            constants = {"DTYPE": kernels.DTYPES[self._dtype], **kernels.OPTIONS}
            aligned = self._aligned and _are_aligned(grads)
            return self._launch(sent, constants, aligned=aligned)

    def _launch(
        self, sent: Tensor, constants: dict[str, object], *, aligned: bool
    ) -> Tensor | None:
        """Launch the kernels of the formula: one, or three if it needs norms (`TWO_PASSES`).

        The three are: a first pass over the chunks, which writes their sums of squares; the ratio
        of each tensor from the sums of its chunks; a second pass, which updates the chunks.

        Args:
            sent: int64 on the device, for n tensors: their n addresses of gradients; n indices,
                each of the row of scalars (lr, betas and so on) of a tensor; then the bits of
                float64 values: `found_inf`, and the rows of scalars one after another.
            constants: Constants that all kernels are compiled for.
            aligned: Whether all addresses are multiples of `ALIGNMENT`.

        Returns:
            LAMB's ratios; None for other formulas.
        """
        kernels = self._kernels
        count = self._count
        grads = sent[:count]
        row_of = sent[count : 2 * count]
        scalar_table = sent[2 * count :].view(torch.float64)
        tables = (self._tensor_table, grads, row_of, scalar_table)
        grid = (self._chunk_count,)  # one program for each chunk
        if self._formula not in kernels.TWO_PASSES:
            getattr(kernels, self._formula)[grid](
                *tables, self._chunks, ALIGNED=aligned, **constants
            )
            return None
        # Two sums for each chunk: of its squared weights, and of its squared directions.
        first, second = kernels.TWO_PASSES[self._formula]
        sums = torch.empty(2 * self._chunk_count, dtype=torch.float64, device=self._device)
        ratios = torch.empty(count, dtype=self._dtype, device=self._device)
        getattr(kernels, first)[grid](*tables, self._chunks, sums, ALIGNED=aligned, **constants)
        kernels.set_ratios[(count,)](
            self._tensor_table, row_of, scalar_table, sums, ratios, **constants
        )
        getattr(kernels, second)[grid](*tables, self._chunks, ratios, ALIGNED=aligned, **constants)
        if self._formula == "lamb":
            return ratios
        return None

    def _send(self, message: array[int]) -> Tensor:
        """Copy a message to the device without waiting, by way of reused pinned memory.

        Args:
            message: Values of 64 bits.

        Returns:
            The message as an int64 tensor on the device.
        """
        values = torch.frombuffer(message, dtype=torch.int64)
        if self._device.type != "cuda":
            return values.clone()
        pinned, copied = self._find_free_pinned_memory()
        pinned[: len(values)].copy_(values)
        sent = pinned[: len(values)].to(self._device, non_blocking=True)
        copied.record()
        return sent

    def _find_free_pinned_memory(self) -> tuple[Tensor, torch.cuda.Event]:
        """Return free pinned memory, and the event to record after the next copy from it.

        It is free if the last copy from it is through. Else memory is allocated, for the longest
        message: a row of scalars for each tensor.
        """
        for pinned, copied in self._pinned:
            if copied.query():  # the copy is through
                return pinned, copied
        longest = self._count * (2 + len(SCALARS)) + 1  # see `step`
        pinned = torch.empty(longest, dtype=torch.int64, device="cpu", pin_memory=True)
        self._pinned.append((pinned, torch.cuda.Event()))
        return self._pinned[-1]


def _are_aligned(addresses: Iterable[int]) -> bool:
    """Tell whether all addresses are multiples of `ALIGNMENT`."""
    return all(address % ALIGNMENT == 0 for address in addresses)


def _copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a table to a device, to stay."""
    if device.type != "cuda":
        return values.clone()
    # The allocator keeps pinned memory from others until the copy is through.
    return values.pin_memory().to(device, non_blocking=True)


def _current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one in a `with` block, because Triton launches kernels there."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    return nullcontext()


@lru_cache(maxsize=32)
def _list_chunks(sizes: tuple[int, ...], chunk: int) -> Tensor:
    """Return for each chunk the index of its tensor and its first element there.

    Tensors are cut into chunks of `chunk` elements; the last one of a tensor may be shorter. Shape
    (chunks, 2), int64, on the CPU. The result is cached: do not change it.

    Example:
        >>> _list_chunks((5, 2), 4).tolist()
        [[0, 0], [0, 4], [1, 0]]
    """
    chunks: list[tuple[int, int]] = []
    for index, size in enumerate(sizes):
        chunks += [(index, begin) for begin in range(0, size, chunk)]
    return torch.tensor(chunks, dtype=torch.int64, device="cpu").view(len(chunks), 2)
