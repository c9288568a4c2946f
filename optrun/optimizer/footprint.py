"""Count the bytes of optimizer state before the first step.

A copy of the optimizer takes a step, over parameters on the meta device or over small ones.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

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
        Bytes by parameter name, for the full tensor and not for a shard. None for a parameter if
        its bytes cannot be inferred from a small one; None for all if the copy of the optimizer
        fails to step.

    A copy of the optimizer is stepped over parameters on the meta device. If that fails, it is
    stepped over small parameters, and the sizes of their state are scaled. Parameters of one group,
    shape and dtype are measured once.

    Example:
        >>> from optrun.optimizer import Lamb
        >>> state_bytes(Lamb([("weight", torch.empty(10, 10, device="meta"))]))
        {'weight': 800}
    """
    # 1. Choose one parameter of each kind.
    kind_of: dict[str, object] = {}
    param_of_kind: dict[object, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for name, param in zip(group["param_names"], group["params"], strict=True):
            kind_of[name] = (index, param.shape, param.dtype)
            param_of_kind.setdefault(kind_of[name], param)
    # 2. Step a copy on the meta device; if that fails, one over small parameters.
    for make_replacement, count_bytes in (
        (_make_on_meta, _count_nbytes),
        (_make_small, _scale_nbytes_of_small),
    ):
        try:
            with preserved_random_states():
                copied, replacements = _copy_with_new_params(optimizer, make_replacement)
                for param in param_of_kind.values():
                    replacements[param].grad = torch.ones_like(replacements[param])
                copied.step()
        except Exception:
            # It reads values, which the meta device does not have, or needs something not copied.
            continue
        # 3. Count the state of the replacements, as if it were that of the parameters.
        sizes = {
            kind: _sum_nbytes(copied.state.get(replacements[param], {}), param, count_bytes)
            for kind, param in param_of_kind.items()
        }
        return {name: sizes[kind] for name, kind in kind_of.items()}
    return dict.fromkeys(kind_of)  # None for all: neither copy could step


def _make_on_meta(param: Tensor) -> Tensor:
    """Make a tensor of the same shape and dtype on the meta device."""
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


def _make_small(param: Tensor) -> Tensor:
    """Make ones of the same number of dimensions and dtype, with the sides 3, 4, 5, ..."""
    return torch.ones([_SIDE + dim for dim in range(param.dim())], dtype=param.dtype)


def _copy_with_new_params(
    optimizer: Optimizer, make_replacement: Callable[[Tensor], Tensor]
) -> tuple[Optimizer, dict[Tensor, Tensor]]:
    """Copy an optimizer with a new parameter for each, with empty state and without hooks.

    The optimizer is not changed, and its constructor is not called again: its arguments are not
    known.

    Args:
        optimizer: The optimizer to copy.
        make_replacement: Makes the tensor in place of a parameter: `_make_on_meta`, `_make_small`.

    Returns:
        The copy; and for each parameter of the optimizer, its replacement in the copy.
    """
    # 1. Make the new parameters and the empty state. `memo` maps the id of an object to what
    # `deepcopy` puts in its place, so the copied attributes refer to these.
    replacements: dict[Tensor, Tensor] = {}
    copied: Optimizer = object.__new__(type(optimizer))
    state: defaultdict[Tensor, object] = defaultdict(dict)
    memo: dict[int, object] = {id(optimizer): copied, id(optimizer.state): state}
    for group in optimizer.param_groups:
        for param in group["params"]:
            replacements[param] = Parameter(make_replacement(param))
            memo[id(param)] = replacements[param]
    # 2. Copy the attributes; not hooks, which are functions of others, nor a `step` that one of
    # torch's schedulers has patched.
    attributes = {
        key: value for key, value in vars(optimizer).items() if "hooks" not in key and key != "step"
    }
    vars(copied).update(copy.deepcopy(attributes, memo))
    # torch's `__setstate__` creates empty dicts of hooks, and patches `step` of the class.
    copied.__setstate__({"state": state, "param_groups": copied.param_groups})
    return copied, replacements


def _sum_nbytes(
    state: State, param: Tensor, nbytes: Callable[[Tensor, Tensor], int | None]
) -> int | None:
    """Sum `nbytes(tensor, param)` over the tensors in a nested state; None if one is None.

    Args:
        state: State of a parameter's replacement; empty: 0 bytes.
        param: The parameter.
        nbytes: Counts the bytes of one tensor of its state; None: unknown.
    """
    total = 0
    for leaf in tree_leaves(state):
        if not isinstance(leaf, Tensor):
            continue
        count = nbytes(leaf, param)
        if count is None:
            return None
        total += count
    return total


def _count_nbytes(value: Tensor, _param: Tensor) -> int:
    """Count the bytes of a state tensor of its real shape."""
    return value.nbytes


def _scale_nbytes_of_small(value: Tensor, param: Tensor) -> int | None:
    """Scale the bytes of a small parameter's state tensor to the real parameter.

    Each side of `value` but 1 is one of the small parameter's, and is replaced by the side of the
    same dimension of `param`. Returns None if a side is none of these.

    Example:
        >>> row_moments = torch.zeros(3, 1)  # of a small parameter with the shape (3, 4)
        >>> _scale_nbytes_of_small(row_moments, torch.empty(100, 50, device="meta"))
        400
    """
    count = value.itemsize
    for side in value.shape:
        if side == 1:
            continue
        dim = side - _SIDE  # the dimension of the small parameter with this side
        if not 0 <= dim < param.dim():
            return None
        count *= param.shape[dim]
    return count
