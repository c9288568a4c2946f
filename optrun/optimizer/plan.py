"""What a step asks of every tensor although it changes almost never: found once, then compared.

A plan holds until groups, options, state, memory or the kind of a gradient change. It keeps no
tensor alive but the parameters, which the groups hold anyway.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optrun.base.options import Options, State
from optrun.optimizer.batches import Batch
from optrun.optimizer.numerics import Sharding

_PLAIN_TYPES = {Tensor}


class Memory:
    """Where plain tensors of one dtype and device lie, for kernels that go by addresses.

    Whole lists are compared at once, attribute by attribute: half the cost of a loop over tensors.
    """

    def __init__(self, params: list[Tensor], states: Sequence[list[Tensor]]) -> None:
        self._layouts = [torch.strided] * len(params)
        self._device = params[0].get_device()
        self._sizes = [param.nbytes for param in params]
        self._single_numbers = [i for i, param in enumerate(params) if param.numel() == 1]
        self._param_addresses = _addresses(params)
        # Weak: who throws state away, or moves it to another device, gets the memory back at once.
        self._states = [[weakref.ref(tensor) for tensor in tensors] for tensors in states]
        self._state_addresses = [_addresses(tensors) for tensors in states]
        self.grad_addresses: list[int] = []
        spans = sorted(
            (begin, begin + size)
            for begin, size in zip(self._param_addresses, self._sizes, strict=True)
            if size
        )
        self.overlaps = any(end > begin for (_, end), (begin, _) in pairwise(spans))
        """Whether two of the parameters share memory."""
        behind_all = torch.iinfo(torch.int64).max
        begins = [begin for begin, _ in spans]
        ends = [end for _, end in spans]
        self._param_begins = torch.tensor([*begins, behind_all], device="cpu")
        self._param_ends = torch.tensor(ends, dtype=torch.int64, device="cpu")
        self._grad_sizes = torch.tensor(self._sizes, device="cpu")

    def is_unchanged(self, params: list[Tensor], states: Sequence[list[Any]]) -> bool:
        """Tell whether parameters and state still lie in the same plain memory.

        Args:
            params: The same objects; their data may have been exchanged.
            states: Each kind of state; None where a parameter has none.
        """
        if (
            _addresses(params) != self._param_addresses
            or [param.nbytes for param in params] != self._sizes
            or not all(map(Tensor.is_contiguous, params))
        ):
            return False
        for tensors, seen, addresses in zip(
            states, self._states, self._state_addresses, strict=True
        ):
            before = [reference() for reference in seen]
            if not all(map(operator.is_, tensors, before)) or _addresses(tensors) != addresses:
                return False
        return True

    def takes(self, grads: list[Tensor]) -> bool:
        """Note the addresses of gradients; False if a kernel cannot read them as they are."""
        if (
            set(map(type, grads)) != _PLAIN_TYPES
            or [grad.layout for grad in grads] != self._layouts
            # Torch holds dtypes together; who exchanges `.grad.data` mostly changes the size.
            or [grad.nbytes for grad in grads] != self._sizes
            or set(map(Tensor.get_device, grads)) != {self._device}
            or not all(map(Tensor.is_contiguous, grads))
            # A view of negative numbers is the imaginary part of others, which leaves gaps.
            or any(grads[i].is_neg() for i in self._single_numbers)
        ):
            return False
        addresses = _addresses(grads)
        if addresses == self.grad_addresses:
            return True
        self.grad_addresses = addresses
        begins = torch.tensor(addresses, device="cpu")
        if bool(((begins == 0) & (self._grad_sizes > 0)).any()):  # torch's lazy zeros
            return False
        ends = begins + self._grad_sizes
        next_params = torch.searchsorted(self._param_ends, begins, right=True)
        return not bool((self._param_begins[next_params] < ends).any())


@dataclass
class Part:
    """Parameters with a gradient that take one update together."""

    positions: list[int] = field(default_factory=list)
    """Where each stands among the parameters of all groups."""
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    """Index of the group of each."""
    kinds: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    """Index of a group and traits -> number of a kind, whose tensors go by the same numbers."""
    kind_of: list[int] = field(default_factory=list)
    """Kind of each."""
    is_plain: bool = False
    """Whether parameters, state and gradients were plain memory; see `is_plain`."""
    memory: Memory | None = None
    """None: the tensors are laid out anew at each step."""
    tables: dict[str, Any] = field(default_factory=dict)
    """What each kernel keeps of the tensors from step to step."""

    @property
    def shares_memory(self) -> bool:
        """Whether plain tensors share memory with weights."""
        return self.is_plain and self.memory is None

    def append(self, position: int, name: str, param: Tensor, group: int, traits: Hashable) -> None:
        """Append a parameter of a group."""
        self.positions.append(position)
        self.names.append(name)
        self.params.append(param)
        self.group_of.append(group)
        self.kind_of.append(self.kinds.setdefault((group, traits), len(self.kinds)))

    def find_memory(self, states: Sequence[list[Tensor]], grads: list[Tensor]) -> None:
        """Note the addresses of plain tensors, unless weights share memory with others."""
        memory = Memory(self.params, states)
        if not memory.overlaps and memory.takes(grads):
            self.memory = memory

    def plain_batch(
        self, options: Options, grads: list[Tensor], states: list[State], slots: Sequence[str]
    ) -> Batch | None:
        """Make a batch of the tensors in their memory; None if that has changed."""
        assert self.memory is not None
        by_slot: dict[str, list[Any]] = {}
        for slot in slots:
            by_slot[slot] = [state.get(slot) for state in states]
        if not self.memory.is_unchanged(self.params, list(by_slot.values())):
            return None
        if not self.memory.takes(grads):
            return None
        return Batch(
            options,
            self.names,
            self.params,
            grads,
            by_slot,
            [Sharding(())] * len(grads),
            grad_addresses=self.memory.grad_addresses,
            tables=self.tables,
        )


@dataclass
class Plan:
    """How the parameters of an optimizer are stepped."""

    params: list[Tensor]
    """Of all groups."""
    have_gradient: list[bool]
    options: list[list[Any]]
    """Of each group, what its tensors share."""
    parts: list[Part]

    def holds(
        self, params: list[Tensor], have_gradient: list[bool], options: list[list[Any]]
    ) -> bool:
        """Tell whether the plan is still valid; takes over changed options if it is.

        It needs the same parameter objects, and gradients on the same ones. Options may change, as
        a cycled momentum does, if groups that are stepped together still have equal ones.
        """
        if len(params) != len(self.params) or not all(map(operator.is_, params, self.params)):
            return False
        if have_gradient != self.have_gradient or any(part.shares_memory for part in self.parts):
            return False
        if options != self.options:
            self.options = options
            for part in self.parts:
                groups = sorted(set(part.group_of))
                if any(options[index] != options[groups[0]] for index in groups):
                    return False
        return True


def shared_options(optimizer: Optimizer) -> list[str]:
    """List the options shared in a batch: all but `lr` and `weight_decay`."""
    return [key for key in optimizer.defaults if key not in ("lr", "weight_decay")]


def _addresses(tensors: list[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
