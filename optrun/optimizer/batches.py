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

from optrun.base.options import Options, Scalars, State
from optrun.optimizer.numerics import Sharding, local, place_like, sharding_of, stores_its_values

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass
class Batch:
    """The tensors and scalars of one update, as the loop, foreach and the kernels take them.

    `params`, `grads`, `shardings`, `row_of` and each list of `state` have one entry for each
    tensor. All tensors are on one device and have one dtype, float32 or float64. An update changes
    parameters and state in place; then `write_back` has to be called.
    """

    options: Options
    """Options that these tensors share: all but `lr` and `weight_decay`."""
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    """Local shards of DTensors, touched rows of an embedding, float32 copies of 16-bit
    parameters, other parameters themselves."""
    grads: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    shardings: list[Sharding] = field(default_factory=list)
    rows: list[Scalars] = field(default_factory=list)
    """Scalars that tensors share: `step`, from 1, and those of the optimizer, such as `lr`."""
    row_of: list[int] = field(default_factory=list)
    """Index into `rows` of each tensor."""
    write_backs: list[Callable[[], object]] = field(default_factory=list)
    """Write back what was computed on a copy: touched rows, or a float32 copy of a low-precision
    parameter."""
    grad_addresses: list[int] = field(default_factory=list)
    """Addresses of the gradients if kernels can read all tensors by address; else empty."""
    shares_memory: bool = False
    """Whether a tensor shares memory with a parameter of the batch."""
    tables: dict[str, Any] = field(default_factory=dict)
    """Table of addresses that each kernel keeps from step to step, by the kernel's name."""
    found_inf: Tensor | None = None
    """A flag for Triton's kernels, which change nothing if it is set."""

    @property
    def lists(self) -> tuple[list[Tensor], ...]:
        """Parameters, gradients, and each kind of state."""
        return self.params, self.grads, *self.state.values()

    @property
    def scalars(self) -> list[Scalars]:
        """The scalars of each tensor."""
        return [self.rows[row] for row in self.row_of]

    def tensors(self) -> Iterator[tuple[Any, ...]]:
        """Yield (param, grad, each kind of state, scalars) of each tensor."""
        return zip(*self.lists, self.scalars, strict=True)

    def scalar_list(self, key: str) -> list[Any]:
        """List one scalar of every tensor."""
        values = [row[key] for row in self.rows]
        return [values[row] for row in self.row_of]

    def decay_params(self) -> None:
        """Multiply every parameter by its scalar `keep`, unless all are 1."""
        keeps = self.scalar_list("keep")
        if any(keep != 1.0 for keep in keeps):
            torch._foreach_mul_(self.params, keeps)

    def subset(self, chosen: Sequence[int]) -> Batch:
        """Return a batch with the tensors at the chosen indices, in their order.

        It shares the tensors and `rows` with this batch, and has nothing to write back.
        """

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

    def write_back(self) -> None:
        """Copy results into 16-bit parameters and into embeddings; call it after the update."""
        for write in self.write_backs:
            write()

    @property
    def is_sharded(self) -> bool:
        """Whether a tensor has shards on other ranks."""
        if self.grad_addresses:  # kernels that read by address take no DTensor
            return False
        return any(sharding.groups for sharding in self.shardings)

    def append(self, name: str, param: Tensor, grad: Tensor, state: State) -> None:
        """Append the local shard of a parameter, or the rows of a sparse gradient.

        Args:
            name: Name of the parameter.
            param: Any layout and dtype that is real.
            grad: As `usable_gradient` returns it.
            state: Its state, whose tensors named in `self.state` are appended.
        """
        self.names.append(name)
        if grad.is_sparse:
            self._append_rows(param, grad, state)
        else:
            self._append_dense(param, grad, state)

    def _append_dense(self, param: Tensor, grad: Tensor, state: State) -> None:
        """Append the local shard of a parameter with a dense gradient, and the shards of its state.

        They share memory with the parameter and the state, so an update changes these. But a 16-bit
        parameter is appended as a float32 copy: its master weight if it has one, else a new one.
        `write_back` rounds the copy into the parameter.
        """
        dtype = working_dtype(param.dtype)  # float32 for a 16-bit parameter
        shard = local(place_like(grad, param)).to(dtype)
        self.shardings.append(sharding_of(param))
        # A lazily negated gradient, or lazy zeros, get their values in memory by the copy.
        self.grads.append(shard if stores_its_values(shard) else shard.clone())
        for slot, tensors in self.state.items():
            tensors.append(local(state[slot]))
        weights = local(param.detach())
        if param.dtype == dtype:  # no copy: the update changes the parameter itself
            self.params.append(weights)
            return
        if "master_weight" in state:
            working_copy = local(state["master_weight"])
        else:
            working_copy = weights.to(dtype)
        self.params.append(working_copy)
        self.write_backs.append(lambda: weights.copy_(working_copy))

    def _append_rows(self, param: Tensor, grad: Tensor, state: State) -> None:
        """Append copies of the rows listed by a sparse gradient, and of their state.

        `write_back` copies them into the parameter, its master weight and its state. No copy is as
        large as the parameter.
        """
        rows = grad.indices()[0]  # each once: `usable_gradient` has summed repeated rows
        dtype = working_dtype(param.dtype)
        master = state.get("master_weight")
        weights = param.detach() if master is None else master
        working_copy = weights.index_select(0, rows).to(dtype)
        moments = {slot: state[slot].index_select(0, rows) for slot in self.state}
        self.shardings.append(Sharding(()))
        self.grads.append(grad.values().to(dtype))  # (rows, ...), one entry for each index
        for slot, moment in moments.items():
            self.state[slot].append(moment)
        self.params.append(working_copy)

        def write() -> None:
            for slot, moment in moments.items():
                state[slot].index_copy_(0, rows, moment)
            if master is not None:
                master.index_copy_(0, rows, working_copy)
            param.detach().index_copy_(0, rows, working_copy.to(param.dtype))

        self.write_backs.append(write)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of moments and updates: float32 for 16-bit dtypes, else the same one."""
    if dtype in LOW_PRECISION:
        return torch.float32
    return dtype


def is_plain(param: Tensor, grad: Tensor, states: Sequence[Tensor]) -> bool:
    """Tell whether a kernel may read a parameter, its gradient and its state by their addresses.

    They must be contiguous tensors of one dtype (float32 or float64), size and device, with their
    values in memory (`stores_its_values`). False, too, for state that was loaded in another dtype
    or a model that was moved without its optimizer: the loop then raises torch's error.
    """
    return param.dtype in (torch.float32, torch.float64) and all(
        stores_its_values(tensor)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.device == param.device
        and tensor.dtype is param.dtype
        and tensor.numel() == param.numel()
        for tensor in (param, grad, *states)
    )


def usable_gradient(grad: Tensor, name: str, owner: str, policy: str) -> Tensor:
    """Return a gradient in a usable layout: dense, or coalesced and sparse over its rows.

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
    return grad.coalesce()  # sums repeated rows


def keep_master_weight(state: State, param: Tensor, *, wanted: bool) -> None:
    """Create or remove the state entry `master_weight`, the float32 copy of a 16-bit parameter.

    A loaded state may lack the entry, or have it although it is not wanted. It is always removed
    for a float32 or float64 parameter.
    """
    dtype = working_dtype(param.dtype)
    if not wanted or param.dtype == dtype:
        state.pop("master_weight", None)
    elif "master_weight" not in state:
        state["master_weight"] = param.detach().to(dtype=dtype, copy=True)
