"""Tensors that take one update together.

Gathered over all groups, so that many groups cost what one does. Groups that differ in `lr` and
`weight_decay` alone share a batch; another option is another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optrun.base.options import Numbers, Options, State
from optrun.optimizer.numerics import Sharding, has_own_numbers, local, sharding_of

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass
class Batch:
    """What the loop of a paper, its foreach form and the kernels take.

    Lists of equal length, one entry per tensor. All tensors lie on one device and have one dtype,
    float32 or float64. An update changes parameters and state in place.
    """

    options: Options
    """What these tensors share: every option but `lr` and `weight_decay`."""
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    """Local pieces of sharded tensors; touched rows of a table; float32 copies of 16-bit
    parameters."""
    grads: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    shardings: list[Sharding] = field(default_factory=list)
    rows: list[Numbers] = field(default_factory=list)
    """Numbers that tensors share: `step`, from 1, and what the optimizer says, such as `lr`."""
    row_of: list[int] = field(default_factory=list)
    """Which of `rows` each tensor goes by."""
    finish: list[Callable[[], object]] = field(default_factory=list)
    """Write back what was computed on a copy: touched rows, or a float32 copy of a low-precision
    parameter."""
    grad_addresses: list[int] = field(default_factory=list)
    """Of a batch whose tensors are all known to be plain memory; else empty."""
    shares_memory: bool = False
    """Whether a tensor lies where another one is written."""
    tables: dict[str, Any] = field(default_factory=dict)
    """What each kernel keeps of such a batch from step to step."""
    found_inf: Tensor | None = None
    """A flag for Triton's kernels, which change nothing if it is set."""

    @property
    def lists(self) -> tuple[list[Tensor], ...]:
        """Parameters, gradients, and each kind of state."""
        return self.params, self.grads, *self.state.values()

    @property
    def numbers(self) -> list[Numbers]:
        """Numbers of each tensor."""
        return [self.rows[row] for row in self.row_of]

    def tensors(self) -> Iterator[tuple[Any, ...]]:
        """Yield each parameter with its gradient, its state and its numbers."""
        return zip(*self.lists, self.numbers, strict=True)

    def each(self, key: str) -> list[Any]:
        """List a number of every tensor."""
        values = [row[key] for row in self.rows]
        return [values[row] for row in self.row_of]

    def shrink(self) -> None:
        """Decay every parameter outside the update, by its number `keep`, all at once."""
        keeps = self.each("keep")
        if any(keep != 1.0 for keep in keeps):
            torch._foreach_mul_(self.params, keeps)

    def some(self, chosen: Sequence[int]) -> Batch:
        """Return a batch of some of the tensors, in the order chosen."""

        def pick(entries: list[Any]) -> list[Any]:
            return [entries[i] for i in chosen]

        return Batch(
            self.options,
            pick(self.names),
            pick(self.params),
            pick(self.grads),
            {slot: pick(tensors) for slot, tensors in self.state.items()},
            pick(self.shardings),
            self.rows,
            pick(self.row_of),
        )

    def done(self) -> None:
        """Write back; call after the update."""
        for write in self.finish:
            write()

    @property
    def whole(self) -> bool:
        """Whether no tensor has pieces on other ranks."""
        if self.grad_addresses:
            return True
        return not any(sharding.groups for sharding in self.shardings)

    def append(self, name: str, param: Tensor, grad: Tensor, state: State) -> None:
        """Append this process's piece of a parameter, in its working dtype."""
        self.names.append(name)
        if grad.is_sparse:
            self._append_rows(param, grad, state)
        else:
            self._append_dense(param, grad, state)

    def _append_dense(self, param: Tensor, grad: Tensor, state: State) -> None:
        """Append a tensor with a dense gradient.

        A 16-bit parameter is appended as a float32 copy, to be written back.
        """
        dtype = working_dtype(param.dtype)
        if (
            isinstance(param, DTensor)
            and isinstance(grad, DTensor)
            and grad.placements != param.placements
        ):
            grad = grad.redistribute(placements=param.placements)
        piece = local(grad).to(dtype)
        self.shardings.append(sharding_of(param))
        self.grads.append(piece if has_own_numbers(piece) else piece.clone())
        for slot, tensors in self.state.items():
            tensors.append(local(state[slot]))
        weights = local(param.detach())
        if param.dtype == dtype:
            self.params.append(weights)
            return
        work = local(state["master_weight"]) if "master_weight" in state else weights.to(dtype)
        self.params.append(work)
        self.finish.append(lambda: weights.copy_(work))

    def _append_rows(self, param: Tensor, grad: Tensor, state: State) -> None:
        """Append copies of the touched rows, to be written back.

        Nothing here is as large as the table.
        """
        rows = grad.indices()[0]
        dtype = working_dtype(param.dtype)
        master = state.get("master_weight")
        table = param.detach() if master is None else master
        work = table.index_select(0, rows).to(dtype)
        moments = {slot: state[slot].index_select(0, rows) for slot in self.state}
        self.shardings.append(Sharding(()))
        self.grads.append(grad.values().to(dtype))
        for slot, moment in moments.items():
            self.state[slot].append(moment)
        self.params.append(work)

        def write() -> None:
            for slot, moment in moments.items():
                state[slot].index_copy_(0, rows, moment)
            if master is not None:
                master.index_copy_(0, rows, work)
            param.detach().index_copy_(0, rows, work.to(param.dtype))

        self.finish.append(write)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of moments and updates: float32 for 16-bit parameters, else their own."""
    if dtype in LOW_PRECISION:
        return torch.float32
    return dtype


def is_plain(param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> bool:
    """Tell whether a kernel may take a parameter, its gradient and its state by their addresses.

    State may have been loaded in another dtype, or a model moved without its optimizer: the loop
    says so.
    """
    return param.dtype in (torch.float32, torch.float64) and all(
        has_own_numbers(tensor)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.device == param.device
        and tensor.dtype is param.dtype
        and tensor.numel() == param.numel()
        for tensor in (param, grad, *states)
    )


def usable_gradient(grad: Tensor, name: str, owner: str, policy: str) -> Tensor:
    """Return a gradient as an update takes it: dense, or coalesced and sparse over its rows.

    Args:
        grad: As autograd left it.
        name: Name of the parameter, for the message.
        owner: Class of the optimizer, for the message.
        policy: What to do with a sparse gradient: "refuse", "densify" (absent rows are zeros), or
            "rows" (only the listed rows are updated).

    Raises:
        RuntimeError: The gradient is sparse under "refuse", or under "rows" sparse over more
            dimensions than its rows.
    """
    if not grad.is_sparse:
        return grad
    if policy == "refuse":
        raise RuntimeError(
            f"parameter {name!r} has a sparse gradient, which {owner} cannot take. "
            "Use LazyAdam (or AdamWDL with lazy_mode=True), or an embedding with sparse=False."
        )
    if policy == "densify":
        return grad.to_dense()
    if grad.sparse_dim() != 1:
        raise RuntimeError(
            f"parameter {name!r} has a gradient that is sparse over {grad.sparse_dim()} dimensions:"
            f" {owner} takes sparse rows, as torch.nn.Embedding(sparse=True) makes them."
        )
    return grad.coalesce()


def keep_master(state: State, param: Tensor, *, wanted: bool) -> None:
    """Make or drop the float32 copy of a 16-bit parameter.

    The state may have been saved, and loaded, with the other choice.
    """
    dtype = working_dtype(param.dtype)
    if not wanted or param.dtype == dtype:
        state.pop("master_weight", None)
    elif "master_weight" not in state:
        state["master_weight"] = param.detach().to(dtype=dtype, copy=True)
