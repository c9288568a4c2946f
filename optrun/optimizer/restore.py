"""Assign saved state to parameters by name, in its own dtype, sharded as the parameters are.

`torch.optim.Optimizer.load_state_dict` maps by position and turns float32 moments of a bfloat16
parameter into bfloat16; this reads the same layout and does neither. Files have a layout of their
own, see `state.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from optrun.base.errors import did_you_mean
from optrun.base.options import Group, ParamGroup
from optrun.base.plain import PlainMapping
from optrun.optimizer.groups import names_of


class _Location(NamedTuple):
    """Where a state dict has a parameter."""

    group_index: int
    """Index of its group in `param_groups`."""
    key: Any
    """Key of its state in `state`: a number, or a name."""


_WRAPPER = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.|^module\.")


def canonical(name: str) -> str:
    """Strip the prefixes of wrappers from a parameter name.

    The wrappers are those of torch.compile, of checkpointing and of data parallel training.

    Example:
        >>> canonical("module._orig_mod.fc.weight")
        'fc.weight'
    """
    return _WRAPPER.sub("", name)


def refuse_difference(saved: Sequence[str], current: Sequence[str]) -> None:
    """Refuse names of saved parameters unless they are the optimizer's, in any order.

    Args:
        saved: Names of the parameters in the saved state.
        current: Names of the parameters of the optimizer.

    Raises:
        ValueError: Naming the first parameter that is missing, with the nearest saved name, or else
            the first one that is extra.
    """
    saved_names = set(saved)
    current_names = set(current)
    for name in current:
        if name not in saved_names:
            extra = [saved_name for saved_name in saved if saved_name not in current_names]
            hint = f" {did_you_mean(name, extra)}" if extra else ""
            raise ValueError(
                f"the saved state has no parameter {name!r}, which the optimizer has.{hint}"
            )
    for name in saved:
        if name not in current_names:
            raise ValueError(
                f"the saved state has a parameter {name!r}, which the optimizer does not have."
            )


def refuse_other_shape(name: str, param: Tensor, value: Tensor, key: str) -> None:
    """Refuse a state tensor if its shape cannot belong to its parameter.

    Accepted are the parameter's shape; that shape with 1 in place of some sides, as factored
    moments have it; and one element in another number of dimensions, such as a step count. For a
    parameter of shape (4, 3) these are (4, 3), (4, 1), (1, 3), (1, 1), () and (1,), for example.

    Raises:
        ValueError: Naming parameter, key and both shapes.
    """
    if value.dim() == param.dim():
        fits = all(side in (1, full) for side, full in zip(value.shape, param.shape, strict=True))
    else:
        fits = value.numel() == 1
    if not fits:
        raise ValueError(
            f"state {key!r} of parameter {name!r} has shape {tuple(value.shape)}, "
            f"the parameter has {tuple(param.shape)}."
        )


def refuse_other_sharding(name: str, param: Tensor, value: Tensor, key: str) -> None:
    """Refuse a DTensor in the state with another mesh or other placements than its parameter.

    A plain tensor is accepted. So is a DTensor of another shape than its parameter, if that is a
    DTensor, too.

    Raises:
        ValueError: Naming parameter, key and both placements.
    """
    if not isinstance(value, DTensor):
        return
    expected = "is not sharded"
    if isinstance(param, DTensor):
        if value.shape != param.shape:
            return
        if (param.device_mesh, param.placements) == (value.device_mesh, value.placements):
            return
        expected = f"as {param.placements}"
    raise ValueError(
        f"state {key!r} of parameter {name!r} is sharded as {value.placements}, the parameter"
        f" {expected}: give the full tensor, full_tensor()."
    )


def refuse_other_state(
    optimizer: Optimizer, group: Group, name: str, param: Tensor, entries: PlainMapping
) -> None:
    """Refuse saved state of a parameter with a missing or an unknown key.

    Nothing is checked if `entries` is empty, or if the optimizer is another library's, whose state
    keys are not known.

    Args:
        optimizer: The optimizer; of a `Composite`, the keys are those of the member that steps the
            group.
        group: The parameter's group, with the options that will be in force.
        name: Name of the parameter.
        param: The parameter; its shape may decide which keys there are.
        entries: Its saved state; empty if it was never stepped.

    Raises:
        ValueError: Naming parameter and state key.
    """
    # Of a `Composite` the member, else the optimizer itself.
    stepper = getattr(optimizer, "members", {}).get(group.get("optimizer"), optimizer)
    if not entries or not hasattr(stepper, "state_keys"):
        return
    # 1. No key may be missing. The message names the option that needs it, else the class.
    required = stepper.state_keys(param, group)
    for key in sorted(required - entries.keys()):
        needed_by = type(stepper).__name__
        for option, slot in stepper.SLOTS.items():
            if slot == key:
                needed_by = f"{option}={group[option]}"
        raise ValueError(
            f"parameter {name!r}: the saved state has no {key!r}, which {needed_by} needs."
        )
    # 2. No key may be unknown. The tensor of an option that is not set is accepted, too.
    accepted = {*required, *stepper.SLOTS.values(), "step", "master_weight"}
    for key in sorted(entries.keys() - accepted):
        raise ValueError(
            f"parameter {name!r}: the saved state has {key!r}, which {type(stepper).__name__} does"
            " not keep: it was saved by another optimizer."
        )


def restore_state(
    optimizer: Optimizer, groups: Sequence[Group], saved: Mapping[str, PlainMapping]
) -> dict[Tensor, dict[str, Any]]:
    """Copy saved state to the device and sharding of each parameter; return it by parameter.

    Both a state dict and a checkpoint are loaded through this function.

    Args:
        optimizer: Determines which state keys are valid; it is not changed.
        groups: Its groups with the options that will be in force.
        saved: State by parameter name. A parameter that was never stepped has no entry, here and in
            the result.

    Raises:
        ValueError: A state tensor is sharded in another way than its parameter, or a state key is
            missing or extra.
    """
    state = {}
    for index, group in enumerate(groups):
        for name, param in zip(names_of(group, index), group["params"], strict=True):
            if name not in saved:
                continue
            # 1. A tensor is full, or has its parameter's mesh and placements.
            for key, value in saved[name].items():
                if isinstance(value, Tensor):
                    refuse_other_sharding(name, param, value, str(key))
            # 2. The keys are those of the optimizer, if it is one of optrun's.
            refuse_other_state(optimizer, group, name, param, saved[name])
            # 3. Copy all entries, full tensors into shards like the parameter's. The dict has no
            # key itself; each entry is copied with its own.
            state[param] = copy_to_param(dict(saved[name]), param, group, key="")
    return state


def copy_to_param(value: object, param: Tensor, group: Group, key: str) -> Any:
    """Copy one value of a state to the device and the sharding of its parameter; keep its dtype.

    Dicts, lists, tuples and deques are copied entry by entry; other values are deep copies. The
    tensor of a key `step` goes to the CPU, where torch expects it, unless the group is fused or
    capturable.

    Args:
        value: A tensor, a container of tensors, or any other value.
        param: Its parameter.
        group: The parameter's group, or an empty mapping.
        key: State key of the value.
    """
    if isinstance(value, Tensor):
        device = param.device
        if key == "step" and not (group.get("fused") or group.get("capturable")):
            device = torch.device("cpu")
        return shard_like(value.detach(), param).to(device=device, copy=True)
    if isinstance(value, dict):
        return {
            inner: copy_to_param(entry, param, group, str(inner)) for inner, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(copy_to_param(entry, param, group, key) for entry in value)
    if isinstance(value, deque):
        return deque(
            (copy_to_param(entry, param, group, key) for entry in value), maxlen=value.maxlen
        )
    return deepcopy(value)


def shard_like(value: Tensor, param: Tensor) -> Tensor:
    """Shard a tensor as a parameter is sharded, if the two have the same shape.

    Otherwise, or if the parameter is no DTensor, the tensor itself is returned.

    Args:
        value: A full tensor, the same on every rank, of which each rank takes its shard without
            communication; or a DTensor with the parameter's placements already.
        param: Its mesh and placements are those of the result.
    """
    if isinstance(param, DTensor) and value.shape == param.shape:
        return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    return value


def load_by_name(
    optimizer: Optimizer, state_dict: PlainMapping
) -> tuple[defaultdict[Tensor, Any], list[ParamGroup]]:
    """Return the state and the groups of an optimizer after loading a state dict.

    The step count of a group is the saved one. torch saves none for a group; then it is the largest
    step count of the group's parameters.

    Args:
        optimizer: Has the parameters; it is not changed.
        state_dict: In torch's layout; `params` of its groups may be numbers or names.

    Returns:
        State by parameter; and the groups in the optimizer's order: saved options win over those of
        the optimizer.

    Raises:
        ValueError: It is no state dict, or another optimizer's; a parameter is missing, extra or
            of another shape; or parameters of one group come from several saved groups.
    """
    _refuse_other_class(optimizer, state_dict)
    # 1. Find the saved group and the saved state of each parameter. A parameter that was never
    # stepped has no state.
    saved_groups = state_dict["param_groups"]
    names_of_groups = [names_of(group, index) for index, group in enumerate(optimizer.param_groups)]
    locations = _locate_params(optimizer, names_of_groups, saved_groups)
    saved: dict[str, PlainMapping] = {}
    for name, location in locations.items():
        if location.key in state_dict["state"]:
            saved[name] = state_dict["state"][location.key]
    # 2. Check and merge the groups.
    groups: list[ParamGroup] = []
    for current_group, names in zip(optimizer.param_groups, names_of_groups, strict=True):
        saved_group = _saved_group_of(current_group, names, saved_groups, locations)
        if saved_group.get("optimizer") != current_group.get("optimizer"):
            raise ValueError(
                f"the group of {names[0]!r} was stepped by {saved_group.get('optimizer')}, "
                f"now by {current_group.get('optimizer')}."
            )
        for name, param in zip(names, current_group["params"], strict=True):
            for key, value in saved.get(name, {}).items():
                if isinstance(value, Tensor):
                    refuse_other_shape(name, param, value, str(key))
        group = _merge_groups(current_group, saved_group)
        if "step" not in saved_group:  # saved by torch
            group["step"] = _largest_step(saved, names)
        groups.append(group)
    # 3. Copy the state to the parameters.
    state = defaultdict[Tensor, Any](dict, restore_state(optimizer, groups, saved))
    return state, groups


def _largest_step(saved: Mapping[str, PlainMapping], names: Sequence[str]) -> int:
    """Return the largest step count in the saved state of some parameters; 0 if none has one."""
    steps = [int(saved[name]["step"]) for name in names if "step" in saved.get(name, ())]
    return max(steps, default=0)


def _refuse_other_class(optimizer: Optimizer, state_dict: PlainMapping) -> None:
    """Refuse a dict without `state` and `param_groups`, or of another class of optimizer.

    The class may be a base class of the optimizer. torch's state dicts name none.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"this is no optimizer's state dict: it has no key {key!r}, but"
                f" {list(state_dict)[:6]}."
            )
    saved_by = state_dict.get("optimizer")
    classes = {base.__name__ for base in type(optimizer).__mro__ if hasattr(base, "state_keys")}
    if saved_by is not None and saved_by not in classes:
        raise ValueError(
            f"the state was saved by {saved_by}, the optimizer is {type(optimizer).__name__}."
        )


def _merge_groups(current: Group, saved: Group) -> dict[str, Any]:
    """Return the current group with the saved options; parameters, names and functions stay.

    A group that torch saved lacks some keys of optrun: those keep their current values.
    """
    merged = dict(current)
    if "step" in saved:  # saved by optrun
        # Without an lr_ratio its lr is absolute, so the current ratio goes; a saved one is copied
        # below.
        merged.pop("lr_ratio", None)
    for key, value in saved.items():
        if key not in ("params", "param_names", "functions"):
            merged[key] = deepcopy(value)
    return merged


def _locate_params(
    optimizer: Optimizer, current_names: list[list[str]], saved_groups: Sequence[Group]
) -> dict[str, _Location]:
    """Find where a state dict has each parameter of an optimizer.

    Parameters are matched by name; if the names differ, by their `canonical` names; if either side
    has no names, by position.

    Args:
        optimizer: Has the parameters.
        current_names: Names of its parameters, one list for each group.
        saved_groups: Groups of a state dict.

    Returns:
        Name of each parameter of the optimizer -> the location.

    Raises:
        ValueError: Canonical names, or without names the sizes of groups, differ.
    """
    saved_names = _saved_names(saved_groups)
    is_unnamed = any(
        group["params"] and "param_names" not in group for group in optimizer.param_groups
    )
    if saved_names is None or is_unnamed:
        # By position: each saved parameter is taken to have the name of the one in its place.
        _refuse_other_sizes(current_names, saved_groups)
        saved_names = current_names
    locations: dict[str, _Location] = {}  # by saved name
    for index, group in enumerate(saved_groups):
        for name, key in zip(saved_names[index], group["params"], strict=True):
            locations[name] = _Location(index, key)
    names = list(chain.from_iterable(current_names))
    if locations.keys() == set(names):
        return locations
    return _match_by_canonical_name(locations, names)


def _match_by_canonical_name(
    locations: Mapping[str, _Location], names: Sequence[str]
) -> dict[str, _Location]:
    """Return the saved location of each parameter, matched by names without wrapper prefixes.

    Args:
        locations: The locations, by saved name.
        names: Names of the optimizer's parameters.

    Raises:
        ValueError: Two names of one side are equal without prefixes, so the match is ambiguous; or
            a name matches none of the other side.
    """
    _refuse_equal_names(locations)
    _refuse_equal_names(names)
    by_canonical_name = {canonical(name): location for name, location in locations.items()}
    refuse_difference(list(by_canonical_name), [canonical(name) for name in names])
    return {name: by_canonical_name[canonical(name)] for name in names}


def _refuse_equal_names(names: Iterable[str]) -> None:
    """Refuse two parameter names with no difference except prefixes of wrappers.

    Raises:
        ValueError: Naming both.
    """
    first_names: dict[str, str] = {}
    for name in names:
        first = first_names.setdefault(canonical(name), name)
        if first != name:
            raise ValueError(
                f"parameters {first!r} and {name!r} differ only in the prefixes of wrappers, so no"
                " saved state can be matched to them. Give both sides the same names."
            )


def _saved_names(groups: Sequence[Group]) -> list[list[str]] | None:
    """List the names of the saved parameters by group; None if a parameter has no name.

    Example:
        >>> _saved_names([{"params": [0, 1], "param_names": ["a", "b"]}, {"params": ["c"]}])
        [['a', 'b'], ['c']]
        >>> _saved_names([{"params": [0, 1]}]) is None
        True
    """
    names_of_groups = []
    for group in groups:
        keys = list(group["params"])
        # torch.distributed.checkpoint writes names in place of numbers.
        if keys and all(isinstance(key, str) for key in keys):
            names_of_groups.append(keys)
        elif group.get("param_names") is not None:
            names_of_groups.append(list(group["param_names"]))
        elif not keys:
            names_of_groups.append([])
        else:
            return None
    return names_of_groups


def _saved_group_of(
    current_group: Group,
    names: Sequence[str],
    saved_groups: Sequence[Group],
    locations: Mapping[str, _Location],
) -> Group:
    """Return the saved group with all parameters of a group.

    Args:
        current_group: Is returned if the group has no parameters.
        names: Names of its parameters.
        saved_groups: Groups of the state dict.
        locations: See `_locate_params`.

    Raises:
        ValueError: The parameters come from several saved groups.
    """
    if not names:
        return current_group
    indices = list(dict.fromkeys(locations[name].group_index for name in names))
    if len(indices) > 1:
        raise ValueError(
            f"the saved groups {indices[0]} and {indices[1]} are one group here ({names[0]!r},"
            " ...). Build the optimizer with the groups it was saved with, or load only the state"
            " with load_named_state."
        )
    return saved_groups[indices[0]]


def _refuse_other_sizes(current: Sequence[Sequence[str]], saved: Sequence[Group]) -> None:
    """Refuse another number of saved groups, or of parameters in one, than the optimizer has.

    Args:
        current: Names of the optimizer's parameters, one list for each group.
        saved: The saved groups.

    Raises:
        ValueError: With both numbers.
    """
    if len(current) != len(saved):
        raise ValueError(
            f"the saved state has {len(saved)} parameter groups, the optimizer {len(current)}."
        )
    for index, (names, group) in enumerate(zip(current, saved, strict=True)):
        if len(names) != len(group["params"]):
            raise ValueError(
                f"group {index}: the saved state has {len(group['params'])} parameters, the"
                f" optimizer {len(names)}."
            )
