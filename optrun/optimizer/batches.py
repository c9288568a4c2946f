"""Tensors that take one update together.

Gathered over all groups, so that many groups cost what one does.

Groups that differ in `lr` and `weight_decay` alone share a batch, which holds these for each
tensor; another option is another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from optrun.base.options import Group, Numbers, Options, ParamGroup, State
from optrun.optimizer.groups import names_of
from optrun.optimizer.numerics import Sharding, has_own_numbers, local, sharding_of

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass
class Batch:
    """What the loop of a paper, its foreach form and the kernels take.

    Lists of equal length, one entry per tensor.

    All tensors lie on one device and have one dtype, float32 or float64. An update changes
    parameters and state in place.
    """

    options: Options
    """What these tensors share: every option but `lr` and `weight_decay`."""
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    """Local pieces of sharded tensors; touched rows of a table; float32 copies of 16-bit
    parameters."""
    grads: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Tensor]] = field(default_factory=dict)
    numbers: list[ParamGroup] = field(default_factory=list)
    """Of each tensor: its `step`, from 1, its `sharding`, and what the optimizer says of it, such
    as `lr`."""
    finish: list[Callable[[], object]] = field(default_factory=list)
    """Write back what was computed on a copy: touched rows, or a float32 copy of a low-precision
    parameter."""

    @property
    def lists(self) -> tuple[list[Tensor], ...]:
        """Parameters, gradients, and each kind of state."""
        return self.params, self.grads, *self.state.values()

    def tensors(self) -> Iterator[tuple[Any, ...]]:
        """Yield each parameter with its gradient, its state and its numbers."""
        return zip(*self.lists, self.numbers, strict=True)

    def each(self, key: str) -> list[Any]:
        """List a number of every tensor."""
        return [numbers[key] for numbers in self.numbers]

    def shrink(self) -> None:
        """Decay every parameter outside the update, by its number `keep`, all at once."""
        keeps = self.each("keep")
        if any(keep != 1.0 for keep in keeps):
            torch._foreach_mul_(self.params, keeps)

    def some(self, chosen: Sequence[int]) -> Batch:
        """Return a batch of some of the tensors, in the order chosen."""
        params, grads, *states = ([tensors[i] for i in chosen] for tensors in self.lists)
        numbers, names = [self.numbers[i] for i in chosen], [self.names[i] for i in chosen]
        return Batch(
            self.options, names, params, grads, dict(zip(self.state, states, strict=True)), numbers
        )

    def done(self) -> None:
        """Write back; call after the update."""
        for write in self.finish:
            write()

    @property
    def whole(self) -> bool:
        """Whether no tensor has pieces on other ranks."""
        return not any(numbers["sharding"].groups for numbers in self.numbers)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of moments and updates: float32 for 16-bit parameters, else their own."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def gather(
    optimizer: Optimizer,
    *,
    slots: Sequence[str],
    per_tensor: Callable[[Group, str, Tensor], Numbers],
    sparse: Callable[[Group], str] = lambda _: "refuse",
) -> list[Batch]:
    """Gather everything that has a gradient in batches.

    Make state that is not there yet, and count the step.

    Args:
        optimizer: Its groups and state are read; the state is filled.
        slots: State tensors of the parameter's shape, zero at first.
        per_tensor: From (group, name, parameter) to the numbers of one tensor.
        sparse: From a group to what a sparse gradient is to it: "refuse", "densify" (zero rows
            count), or "rows" (the listed rows alone are updated, at the cost of those rows).

    Raises:
        RuntimeError: For a sparse gradient where that is "refuse", for one sparse over more than
            its rows, and for complex parameters.
    """
    batches: dict[tuple[Any, ...], Batch] = {}
    shared = [key for key in optimizer.defaults if key not in ("lr", "weight_decay")]
    for group_index, group in enumerate(optimizer.param_groups):
        if all(param.grad is None for param in group["params"]):
            continue
        count_globally = group.get("step_count") == "optimizer"
        options = {
            key: group[key] for key in shared if key in group
        }  # torch adds to the defaults of what is loaded
        options_key = tuple(
            tuple(v) if isinstance(v, (list, tuple)) else v for v in options.values()
        )
        for name, param in zip(names_of(group, group_index), group["params"], strict=True):
            grad = param.grad
            if grad is None:
                continue
            if torch.is_complex(param):
                raise RuntimeError(
                    f"parameter {name!r} is complex: {type(optimizer).__name__} takes real tensors."
                )
            if grad.is_sparse:
                grad = _sparse(grad, name, type(optimizer).__name__, sparse(group))
            state = optimizer.state[param]
            if not state:
                _fill(state, param, slots)
            _keep_master(state, param, wanted=bool(group.get("master_weights")))
            state["step"] = (group["step"] if count_globally else state["step"]) + 1
            batch = batches.setdefault(
                (param.device, working_dtype(param.dtype), *options_key),
                Batch(options, state={slot: [] for slot in slots}),
            )
            sharding = Sharding(()) if grad.is_sparse else sharding_of(param)
            batch.names.append(name)
            batch.numbers.append(
                {"step": state["step"], "sharding": sharding, **per_tensor(group, name, param)}
            )
            if grad.is_sparse:
                _append_rows(batch, param, grad, state, slots)
            else:
                _append(batch, param, grad, state, slots)
    return list(batches.values())


def _sparse(grad: Tensor, name: str, owner: str, policy: str) -> Tensor:
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


def _fill(state: State, param: Tensor, slots: Sequence[str]) -> None:
    dtype = working_dtype(param.dtype)
    state["step"] = 0
    for slot in slots:
        state[slot] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


def _keep_master(state: State, param: Tensor, *, wanted: bool) -> None:
    """Make or drop the float32 copy.

    The state may have been saved, and loaded, with the other choice.
    """
    dtype = working_dtype(param.dtype)
    if not wanted or param.dtype == dtype:
        state.pop("master_weight", None)
    elif "master_weight" not in state:
        state["master_weight"] = param.detach().to(dtype=dtype, copy=True)


def _append(batch: Batch, param: Tensor, grad: Tensor, state: State, slots: Sequence[str]) -> None:
    dtype = working_dtype(param.dtype)
    if (
        isinstance(param, DTensor)
        and isinstance(grad, DTensor)
        and grad.placements != param.placements
    ):
        grad = grad.redistribute(placements=param.placements)
    piece = local(grad).to(dtype)
    batch.grads.append(piece if has_own_numbers(piece) else piece.clone())
    for slot in slots:
        batch.state[slot].append(local(state[slot]))
    own = local(param.detach())
    if param.dtype == dtype:
        batch.params.append(own)
        return
    work = local(state["master_weight"]) if "master_weight" in state else own.to(dtype)
    batch.params.append(work)
    batch.finish.append(lambda: own.copy_(work))


def _append_rows(
    batch: Batch, param: Tensor, grad: Tensor, state: State, slots: Sequence[str]
) -> None:
    """Append copies of the touched rows, to be written back.

    Nothing here is as large as the table.
    """
    rows = grad.indices()[0]
    dtype = working_dtype(param.dtype)
    master = state.get("master_weight")
    held = param.detach() if master is None else master
    work = held.index_select(0, rows).to(dtype)
    moments = [state[slot].index_select(0, rows) for slot in slots]
    batch.grads.append(grad.values().to(dtype))
    for slot, moment in zip(slots, moments, strict=True):
        batch.state[slot].append(moment)
    batch.params.append(work)

    def write() -> None:
        for slot, moment in zip(slots, moments, strict=True):
            state[slot].index_copy_(0, rows, moment)
        if master is not None:
            master.index_copy_(0, rows, work)
        param.detach().index_copy_(0, rows, work.to(param.dtype))

    batch.finish.append(write)
