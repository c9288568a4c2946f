"""The division of parameters into batches, computed once and checked at each step.

What a step asks of every tensor (device, dtype, options, addresses) almost never changes. A plan
is valid until groups, options, state, memory or the kind of a gradient change. It references no
tensor but the parameters, which the groups reference anyway.
"""

from __future__ import annotations

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
from optrun.optimizer.groups import are_same_objects
from optrun.optimizer.numerics import Sharding


class Memory:
    """The addresses of tensors of one dtype and device, for kernels that read by address.

    Lists are compared at once, attribute by attribute: half the cost of a loop over tensors.

    Args:
        params: Tensors for which `is_plain` is true, at least one.
        states: For each kind of state, its tensor for each parameter.
    """

    def __init__(self, params: list[Tensor], states: Sequence[list[Tensor]]) -> None:
        self._layouts = [torch.strided] * len(params)
        self._device = params[0].get_device()
        self._sizes = [param.nbytes for param in params]
        self._single_numbers = [i for i, param in enumerate(params) if param.numel() == 1]
        self._param_addresses = _addresses(params)
        # Weak, so that state that is dropped or moved to another device frees its memory at once.
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

    def is_unchanged(self, params: list[Tensor], states: Sequence[list[Tensor]]) -> bool:
        """Tell whether parameters and state are still contiguous tensors at the same addresses.

        Args:
            params: The same objects as before; their data may have been replaced.
            states: As in the constructor.
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
            before = [reference() for reference in seen]  # None for a tensor that is gone
            if not are_same_objects(tensors, before) or _addresses(tensors) != addresses:
                return False
        return True

    def accepts_grads(self, grads: list[Tensor]) -> bool:
        """Tell whether kernels can read gradients by address; stores their `grad_addresses`.

        The gradients must be plain contiguous tensors of the parameters' sizes and device, with
        their values in memory, and must not overlap a parameter. If all addresses are those of the
        last accepted gradients, the overlap is not checked again.
        """
        if not self._are_like_params(grads):
            return False
        addresses = _addresses(grads)
        if addresses == self.grad_addresses:
            return True
        begins = torch.tensor(addresses, device="cpu")
        if bool(((begins == 0) & (self._grad_sizes > 0)).any()):  # torch's lazy zeros
            return False  # they have no memory
        # A gradient overlaps a parameter if the first parameter that ends after the gradient begins
        # also begins before the gradient ends: with parameters at [0, 8) and [16, 24) a gradient at
        # [8, 16) does not, and one at [12, 20) does. Parameters are sorted and do not overlap each
        # other.
        ends = begins + self._grad_sizes
        # Index of that parameter; after the last one the begin is larger than every address.
        next_params = torch.searchsorted(self._param_ends, begins, right=True)
        if bool((self._param_begins[next_params] < ends).any()):
            return False
        self.grad_addresses = addresses
        return True

    def _are_like_params(self, grads: list[Tensor]) -> bool:
        """Tell whether gradients are plain contiguous tensors of the parameters' sizes and device.

        Lazily negated ones are refused, too: their memory holds the values without the sign.
        """
        return (
            set(map(type, grads)) == {Tensor}  # no subclass, such as DTensor
            and [grad.layout for grad in grads] == self._layouts  # none is sparse
            # In bytes: torch keeps `.grad` in the dtype of the parameter, and other data would have
            # another size.
            and [grad.nbytes for grad in grads] == self._sizes
            and set(map(Tensor.get_device, grads)) == {self._device}
            and all(map(Tensor.is_contiguous, grads))
            # Negated views are imaginary parts of complex tensors, of every second number in
            # memory: contiguous only with one element, so only these are asked.
            and not any(grads[i].is_neg() for i in self._single_numbers)
        )


@dataclass
class PlannedBatch:
    """Parameters with a gradient, to be stepped by one update.

    The lists have one entry for each parameter.
    """

    positions: list[int] = field(default_factory=list)
    """Its index among the parameters of all groups."""
    names: list[str] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    group_of: list[int] = field(default_factory=list)
    """Index of its group."""
    kinds: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    """(index of a group, traits) -> number of the kind; tensors of a kind share their scalars."""
    kind_of: list[int] = field(default_factory=list)
    """Number of its kind."""
    is_plain: bool = False
    """Whether kernels may read parameters, state and gradients by address; see `is_plain`."""
    memory: Memory | None = None
    """Addresses of the tensors; None: the batch is gathered tensor by tensor at each step."""
    tables: dict[str, Any] = field(default_factory=dict)
    """`Batch.tables`, which outlive a step."""

    @property
    def shares_memory(self) -> bool:
        """Whether a tensor that kernels could read by address shares memory with a parameter."""
        return self.is_plain and self.memory is None

    def append(self, position: int, name: str, param: Tensor, group: int, traits: Hashable) -> None:
        """Append a parameter, and number its kind; tensors of equal group and traits share one.

        Args:
            position: Index of the parameter among those of all groups.
            name: Its name.
            param: The parameter.
            group: Index of its group.
            traits: See `BatchOptimizer._traits`.
        """
        self.positions.append(position)
        self.names.append(name)
        self.params.append(param)
        self.group_of.append(group)
        self.kind_of.append(self.kinds.setdefault((group, traits), len(self.kinds)))

    def set_memory(self, states: Sequence[list[Tensor]], grads: list[Tensor]) -> None:
        """Set `memory`, unless parameters share memory with each other or with gradients."""
        memory = Memory(self.params, states)
        if not memory.overlaps and memory.accepts_grads(grads):
            self.memory = memory

    def make_plain_batch(
        self, options: Options, grads: list[Tensor], states: list[State], slots: Sequence[str]
    ) -> Batch | None:
        """Make a batch for kernels by address; None if the memory of its tensors has changed.

        Args:
            options: Options that the tensors share.
            grads: Gradient of each parameter.
            states: State of each parameter.
            slots: State keys whose tensors the formula takes.

        Raises:
            KeyError: A state lacks one of the keys, as torch's optimizers raise it.
        """
        assert self.memory is not None
        by_slot: dict[str, list[Tensor]] = {}
        for slot in slots:
            by_slot[slot] = [state[slot] for state in states]
        if not self.memory.is_unchanged(self.params, list(by_slot.values())):
            return None
        if not self.memory.accepts_grads(grads):
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
    """The batches of an optimizer's parameters, and the inputs of their computation."""

    params: list[Tensor]
    """The parameters of all groups."""
    have_gradient: list[bool]
    """Whether each of `params` had a gradient."""
    options: list[list[Any]]
    """For each group, its values of the `shared_options`."""
    batches: list[PlannedBatch]

    def is_valid_for(
        self, params: list[Tensor], have_gradient: list[bool], options: list[list[Any]]
    ) -> bool:
        """Tell whether the plan is still valid for a step; stores changed options.

        It is if the parameters are the same objects, and the same ones of them have gradients.
        Options may change, as a momentum that a scheduler cycles does, as long as all groups of a
        batch have equal ones. A plan is never valid if tensors of a batch share memory.
        """
        if not are_same_objects(params, self.params):
            return False
        if have_gradient != self.have_gradient:
            return False
        if any(batch.shares_memory for batch in self.batches):
            return False
        if options == self.options:
            return True
        # They changed: the batches stay valid if the groups of each still agree.
        self.options = options
        for batch in self.batches:
            options_of_first = options[batch.group_of[0]]
            if any(options[index] != options_of_first for index in set(batch.group_of)):
                return False
        return True


def shared_options(optimizer: Optimizer) -> list[str]:
    """List the options shared within a batch: all defaults but `lr` and `weight_decay`."""
    return [key for key in optimizer.defaults if key not in ("lr", "weight_decay")]


def _addresses(tensors: list[Tensor]) -> list[int]:
    """List the address of the first element of each tensor."""
    return list(map(Tensor.data_ptr, tensors))
