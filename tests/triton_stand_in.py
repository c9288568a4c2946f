"""What the kernels use of Triton's language, on tensors of torch: for environments without Triton.

Each program runs alone, from its first line to its last. That shows the arithmetic, the tables, the
chunks and the masks; what Triton makes of the kernels is shown where it is installed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

_CTYPES = {
    torch.int64: ctypes.c_int64,
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
}


class Pointer:
    """An address, or many, of numbers of a dtype."""

    def __init__(self, dtype: torch.dtype, address: Tensor | int) -> None:
        self.dtype, self.address = dtype, torch.as_tensor(address)

    def __add__(self, offset: Tensor | int) -> Pointer:
        return Pointer(self.dtype, self.address + offset * self.dtype.itemsize)

    def memory(self, inside: Tensor) -> Iterator[Any]:
        """The numbers themselves, of those addresses that are inside."""
        for address in self.address[inside].tolist():
            yield _CTYPES[self.dtype].from_address(address)


class Value(torch.Tensor):
    """A tensor that becomes a pointer where Triton's would."""

    def to(self, kind: Any) -> Any:  # type: ignore[override]
        return (
            Pointer(kind.dtype, self.as_subclass(Tensor))
            if isinstance(kind, SimpleNamespace)
            else super().to(kind)
        )


def load(pointer: Pointer, mask: Tensor | None = None, other: float = 0.0) -> Tensor:
    inside = (
        torch.ones_like(pointer.address, dtype=torch.bool)
        if mask is None
        else mask.as_subclass(Tensor)
    )
    found = torch.full(pointer.address.shape, other, dtype=pointer.dtype)
    found[inside] = torch.tensor(
        [number.value for number in pointer.memory(inside)], dtype=pointer.dtype
    )
    return found.as_subclass(Value)


def store(pointer: Pointer, value: Tensor, mask: Tensor | None = None) -> None:
    inside = (
        torch.ones_like(pointer.address, dtype=torch.bool)
        if mask is None
        else mask.as_subclass(Tensor)
    )
    assert value.dtype is pointer.dtype
    for number, new in zip(
        pointer.memory(inside), value.as_subclass(Tensor)[inside].tolist(), strict=True
    ):
        number.value = new


class Kernel:
    """`kernel[grid](...)`, or a function of the device."""

    at = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *given: Any) -> Any:
        return self.function(*given)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(
            *given: Tensor, num_warps: int, enable_fp_fusion: bool, **constants: Any
        ) -> None:
            for Kernel.at in range(grid[0]):
                self.function(
                    *(Pointer(tensor.dtype, tensor.data_ptr()) for tensor in given), **constants
                )

        return launch


@contextmanager
def installed() -> Iterator[None]:
    """Let `import triton` find this."""
    language = ModuleType("triton.language")
    language.__dict__.update(
        abs=torch.abs,
        arange=lambda low, high: torch.arange(low, high).as_subclass(Value),
        constexpr=int,
        div_rn=torch.div,
        float32=torch.float32,
        float64=torch.float64,
        full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype).as_subclass(Value),
        load=load,
        minimum=lambda a, b: a.clamp(max=b),
        multiple_of=lambda pointer, by: pointer,
        pointer_type=lambda dtype: SimpleNamespace(dtype=dtype),
        program_id=lambda axis: Kernel.at,
        sqrt=torch.sqrt,
        sqrt_rn=torch.sqrt,
        static_range=range,
        store=store,
        sum=lambda x, axis: x.sum(axis),
        where=torch.where,
    )
    triton = ModuleType("triton")
    triton.__dict__.update(
        jit=Kernel,
        language=language,
        knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=True)),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton", triton)
        patch.setitem(sys.modules, "triton.language", language)
        yield
