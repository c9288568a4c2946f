"""Copy tensors from a device to the host without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch


class HostCopy:
    """Starts to copy tensors to the host; CUDA copies into pinned memory while it computes.

    Tensors on the CPU are not copied, and must not be changed before `lists` is called.

    Args:
        tensors: Tensors on one device; 16-bit floats are converted to float32.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [_to_host(tensor.detach()) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))

    @cached_property
    def lists(self) -> list[list[float]]:
        """The values of each tensor as a flat list; waits until the copy is complete."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.numpy().ravel().tolist() for tensor in self._tensors]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Bring a tensor to the host; 16-bit floats become float32.

    A CPU tensor of another dtype is returned itself, not copied. The copy from a GPU is unfinished
    on return: synchronize before reading it.
    """
    if tensor.dtype in (torch.float16, torch.bfloat16):  # numpy has no bfloat16
        tensor = tensor.float()
    if not tensor.is_cuda:
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
