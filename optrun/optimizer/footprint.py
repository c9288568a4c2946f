"""Count the bytes of optimizer state before the first step.

A copy of the optimizer takes a step, over parameters on the meta device or over small ones.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from optrun.base.options import State
from optrun.optimizer.round_trip import preserved_random_states

_SIDE = 3
"""Side of the first dimension of a small parameter. Dimension d has side 3 + d, so that the sides
of its state show to which dimensions they belong."""


def state_bytes(optimizer: Optimizer) -> dict[str, int | None]:
    """Count the bytes of optimizer state by parameter name, after every parameter's first gradient.

    Args:
        optimizer: Built with named parameters, on any device, meta included; not changed.

    Returns:
        Bytes by parameter name, for the full tensor and not for a shard. A value is None if a side
        of its state belongs to no dimension of the parameter; all are None if a step over the meta
        device and one over small parameters fail.

    Example:
        >>> from optrun.optimizer import Lamb
        >>> state_bytes(Lamb([("weight", torch.empty(10, 10, device="meta"))]))
        {'weight': 800}
    """
    kinds: dict[str, object] = {}
    param_of_kind: dict[object, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for name, param in zip(group["param_names"], group["params"], strict=True):
            kinds[name] = (index, param.shape, param.dtype)
            param_of_kind.setdefault(kinds[name], param)
    for stand_in, size in ((_shape_alone, _nbytes), (_small, _nbytes_of_small)):
        try:
            with preserved_random_states():
                twin, params = _twin(optimizer, stand_in)
                for param in param_of_kind.values():
                    params[param].grad = torch.ones_like(params[param])
                twin.step()
        except Exception:
            # It reads values, of which the meta device has none, or needs something not copied.
            continue
        sizes = {
            kind: _sum_sizes(twin.state.get(params[param], {}), param, size)
            for kind, param in param_of_kind.items()
        }
        return {name: sizes[kind] for name, kind in kinds.items()}
    return dict.fromkeys(kinds)


def _shape_alone(param: Tensor) -> Tensor:
    """Make a tensor of the same shape and dtype on the meta device."""
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


def _small(param: Tensor) -> Tensor:
    """Make ones of the same number of dimensions and dtype, with the sides 3, 4, 5, ..."""
    return torch.ones([_SIDE + dim for dim in range(param.dim())], dtype=param.dtype)


def _twin(
    optimizer: Optimizer, stand_in: Callable[[Tensor], Tensor]
) -> tuple[Optimizer, dict[Tensor, Tensor]]:
    """Copy an optimizer, without state and without hooks of others, over other parameters.

    Args:
        optimizer: The optimizer to copy.
        stand_in: Makes the tensor that replaces a parameter.

    Returns:
        The copy; and the parameter of the copy by the one that it replaces.
    """
    params: dict[Tensor, Tensor] = {}
    twin: Optimizer = object.__new__(type(optimizer))
    state: defaultdict[Tensor, object] = defaultdict(dict)
    memo: dict[int, object] = {id(optimizer): twin, id(optimizer.state): state}
    for group in optimizer.param_groups:
        for param in group["params"]:
            params[param] = Parameter(stand_in(param))
            memo[id(param)] = params[param]
    # Schedulers of torch patch `step` on the instance, and hooks are functions of others: the copy
    # has neither.
    attributes = {
        key: value for key, value in vars(optimizer).items() if "hooks" not in key and key != "step"
    }
    vars(twin).update(copy.deepcopy(attributes, memo))
    # torch's `__setstate__` makes the dicts of hooks, empty, and patches `step` of the class.
    twin.__setstate__({"state": state, "param_groups": twin.param_groups})
    return twin, params


def _sum_sizes(
    state: State, param: Tensor, size: Callable[[Tensor, Tensor], int | None]
) -> int | None:
    """Sum a size over the tensors of a state; None if the size of one is unknown."""
    total = 0
    for value in _tensors_in(state):
        count = size(value, param)
        if count is None:
            return None
        total += count
    return total


def _tensors_in(value: object) -> list[Tensor]:
    """Collect the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors_in(list(value.values()))
    if isinstance(value, list | tuple):
        return list(chain.from_iterable(map(_tensors_in, value)))
    return []


def _nbytes(value: Tensor, _param: Tensor) -> int:
    """Count the bytes of a state tensor of its real shape."""
    return value.nbytes


def _nbytes_of_small(value: Tensor, param: Tensor) -> int | None:
    """Scale the bytes of a small parameter's state tensor to the real parameter.

    Returns None if a side of it is neither 1 nor a side of the small parameter.
    """
    count = value.itemsize
    for side in value.shape:
        if side == 1:
            continue
        dim = side - _SIDE
        if not 0 <= dim < param.dim():
            return None
        count *= param.shape[dim]
    return count
