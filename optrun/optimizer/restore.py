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
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from optrun.base.errors import did_you_mean
from optrun.base.options import Group, ParamGroup
from optrun.base.plain import PlainMapping
from optrun.optimizer.groups import names_of

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


def refuse_foreign(name: str, param: Tensor, value: Tensor, key: str) -> None:
    """Refuse a state tensor of another shape than its parameter.

    It may have one element and another number of dimensions, the parameter's shape, or 1 in place
    of some of its dimensions (factored moments).

    Raises:
        ValueError: Naming parameter, key and both shapes.
    """
    if value.numel() == 1 and (value.dim() == 0 or value.dim() != param.dim()):
        return
    fits = value.dim() == param.dim() and all(
        a in (1, b) for a, b in zip(value.shape, param.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"state {key!r} of parameter {name!r} has shape {tuple(value.shape)}, "
            f"the parameter has {tuple(param.shape)}."
        )


def refuse_other_sharding(name: str, param: Tensor, value: Tensor, key: str) -> None:
    """Refuse a DTensor in the state with other placements than its parameter.

    A full tensor passes, and so does one of another shape whose parameter is a DTensor.

    Raises:
        ValueError: Naming parameter, key and both placements.
    """
    if not isinstance(value, DTensor):
        return
    sharding = "is not sharded"
    if isinstance(param, DTensor):
        same = (param.device_mesh, param.placements) == (value.device_mesh, value.placements)
        if same or value.shape != param.shape:
            return
        sharding = f"as {param.placements}"
    raise ValueError(
        f"state {key!r} of parameter {name!r} is sharded as {value.placements}, the parameter"
        f" {sharding}: give the full tensor, full_tensor()."
    )


def refuse_other_state(
    optimizer: Optimizer, group: Group, name: str, param: Tensor, entries: PlainMapping
) -> None:
    """Refuse saved state with a key too few or too many for the optimizer of the parameter.

    Nothing is checked if `entries` is empty, or if the optimizer is of another library, whose state
    keys are not known.

    Args:
        optimizer: For a `Composite`, the member that steps the group is meant.
        group: The parameter's group, with the options that will be in force.
        name: Name of the parameter.
        param: The parameter; its shape may decide which keys there are.
        entries: Its saved state; empty if it was never stepped.

    Raises:
        ValueError: Naming parameter and state key.
    """
    stepper = getattr(optimizer, "members", {}).get(group.get("optimizer"), optimizer)
    if not entries or not hasattr(stepper, "state_keys"):
        return
    required = stepper.state_keys(param, group)
    optional = set(stepper.SLOTS.values())
    for key in sorted(required - entries.keys()):
        options = [
            f"{option}={group[option]}" for option, slot in stepper.SLOTS.items() if slot == key
        ]
        needed = options[0] if options else type(stepper).__name__
        raise ValueError(
            f"parameter {name!r}: the saved state has no {key!r}, which {needed} needs."
        )
    for key in sorted(entries.keys() - required - optional - {"step", "master_weight"}):
        raise ValueError(
            f"parameter {name!r}: the saved state has {key!r}, which {type(stepper).__name__} does"
            " not keep: it was saved by another optimizer."
        )


def restore_state(
    optimizer: Optimizer, groups: Sequence[Group], saved: Mapping[str, PlainMapping]
) -> dict[Tensor, dict[str, Any]]:
    """Map each parameter to a copy of the state saved under its name.

    Both a state dict and a checkpoint are loaded through this function.

    Args:
        optimizer: Determines which state keys are valid; nothing of it is changed.
        groups: Its groups with the options that will be in force.
        saved: State by parameter name; a parameter that was never stepped is missing, and is
            missing in the result, too.

    Raises:
        ValueError: A state tensor is sharded otherwise than its parameter, or a state key is
            missing or extra.
    """
    state = {}
    for index, group in enumerate(groups):
        for name, param in zip(names_of(group, index), group["params"], strict=True):
            if name not in saved:
                continue
            for key, value in saved[name].items():
                if isinstance(value, Tensor):
                    refuse_other_sharding(name, param, value, str(key))
            refuse_other_state(optimizer, group, name, param, saved[name])
            state[param] = copy_to_param(dict(saved[name]), param, group, "")
    return state


def copy_to_param(value: object, param: Tensor, group: Group, key: str) -> Any:
    """Copy one value of a state to the device and the sharding of its parameter, dtype unchanged.

    Dicts, lists, tuples and deques are copied entry by entry; other values are deep copies. `step`
    stays on the CPU, where torch has it, unless the group is fused or capturable.

    Args:
        value: A tensor, a container of tensors, or any other value.
        param: Its parameter.
        group: The parameter's group, or an empty mapping.
        key: State key of the value.
    """
    if isinstance(value, Tensor):
        on_device = key != "step" or group.get("fused") or group.get("capturable")
        shard = shard_like(value.detach(), param)
        return shard.to(device=param.device if on_device else torch.device("cpu"), copy=True)
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
    """Compute the state and the groups of an optimizer after loading a state dict.

    Args:
        optimizer: Has the parameters; nothing of it is changed.
        state_dict: In torch's layout; `params` of its groups may be numbers or names.

    Returns:
        State by parameter; and the groups in the optimizer's order, with the saved options, and the
        options of the optimizer that were not saved.

    Raises:
        ValueError: It is no state dict, or of another optimizer; a parameter is missing, extra or
            of another shape; or parameters of one group come from several saved groups.
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
    saved_groups = state_dict["param_groups"]
    names_of_groups = [names_of(group, index) for index, group in enumerate(optimizer.param_groups)]
    sources = _sources(optimizer, names_of_groups, saved_groups)
    saved = {
        name: state_dict["state"][key]
        for name, (_, key) in sources.items()
        if key in state_dict["state"]
    }
    groups: list[ParamGroup] = []
    for current_group, names in zip(optimizer.param_groups, names_of_groups, strict=True):
        saved_group = saved_groups[_only_group(names, sources)] if names else current_group
        if saved_group.get("optimizer") != current_group.get("optimizer"):
            raise ValueError(
                f"the group of {names[0]!r} was stepped by {saved_group.get('optimizer')}, "
                f"now by {current_group.get('optimizer')}."
            )
        for name, param in zip(names, current_group["params"], strict=True):
            _refuse_foreign_tensors(name, param, saved.get(name, {}))
        groups.append(_restored_group(current_group, saved_group))
    state = defaultdict[Tensor, Any](dict, restore_state(optimizer, groups, saved))
    for group, names in zip(groups, names_of_groups, strict=True):
        # Torch counts for each parameter alone.
        if names and "step" not in saved_groups[_only_group(names, sources)]:
            steps = [
                int(state[param]["step"])
                for param in group["params"]
                if "step" in state.get(param, ())
            ]
            group["step"] = max(steps, default=0)
    return state, groups


def _refuse_foreign_tensors(name: str, param: Tensor, entries: PlainMapping) -> None:
    """Refuse state tensors of another shape than their parameter, see `refuse_foreign`."""
    for key, value in entries.items():
        if isinstance(value, Tensor):
            refuse_foreign(name, param, value, str(key))


def _restored_group(current: Group, saved: Group) -> dict[str, Any]:
    """Merge a saved group over the current one; parameters, names and functions stay.

    A group that torch saved lacks some of our keys: those keep their current value.
    """
    merged = dict(current)
    if "step" in saved:
        merged.pop("lr_ratio", None)  # a group of ours without a ratio has an absolute lr
    kept_keys = ("params", "param_names", "functions")
    kept = {key: current[key] for key in kept_keys if key in current}
    options = {key: deepcopy(value) for key, value in saved.items() if key != "functions"}
    return merged | options | kept


def _sources(
    optimizer: Optimizer, current_names: list[list[str]], saved_groups: Sequence[Group]
) -> dict[str, tuple[int, Any]]:
    """Map each parameter's name to the index of its saved group and its key in the saved state.

    Parameters are matched by name; if the names differ, by their `canonical` names; if either side
    has no names, by position.

    Args:
        optimizer: Has the parameters.
        current_names: Names of its parameters, one list for each group.
        saved_groups: Groups of a state dict.

    Raises:
        ValueError: Canonical names, or without names the sizes of groups, differ.
    """
    saved_names = _saved_names(saved_groups)
    is_unnamed = any(
        group["params"] and "param_names" not in group for group in optimizer.param_groups
    )
    if saved_names is None or is_unnamed:
        _refuse_other_sizes(current_names, saved_groups)
        saved_names = current_names
    sources: dict[str, tuple[int, Any]] = {}
    for index, group in enumerate(saved_groups):
        for name, key in zip(saved_names[index], group["params"], strict=True):
            sources[name] = (index, key)
    names = list(chain.from_iterable(current_names))
    if sources.keys() == set(names):
        return sources
    return _match_by_canonical_name(sources, names)


def _match_by_canonical_name(
    sources: Mapping[str, tuple[int, Any]], names: Sequence[str]
) -> dict[str, tuple[int, Any]]:
    """Map each name to the source whose saved name is the same without prefixes of wrappers.

    Args:
        sources: Index of the saved group and key in the saved state, by saved name.
        names: Names of the optimizer's parameters.

    Raises:
        ValueError: Two names of one side are equal without prefixes, so that it is not known which
            state belongs to which; or a name matches no parameter.
    """
    canonical_sources = {canonical(name): source for name, source in sources.items()}
    canonical_names = {name: canonical(name) for name in names}
    for side in (sources, names):
        _refuse_equal_names(side)
    refuse_difference(list(canonical_sources), list(canonical_names.values()))
    return {name: canonical_sources[bare_name] for name, bare_name in canonical_names.items()}


def _refuse_equal_names(names: Iterable[str]) -> None:
    """Refuse names of two parameters that differ in prefixes of wrappers alone.

    Raises:
        ValueError: Naming both.
    """
    first_names: dict[str, str] = {}
    for name in names:
        first = first_names.setdefault(canonical(name), name)
        if first != name:
            raise ValueError(
                f"parameters {first!r} and {name!r} differ in the prefixes of wrappers alone, so no"
                " saved state can be matched to them. Give both sides the same names."
            )


def _saved_names(groups: Sequence[Group]) -> list[list[str]] | None:
    """List the names of the saved parameters by group; None if the state dict carries none."""
    names_of_groups = []
    for group in groups:
        ids = list(group["params"])
        # torch.distributed.checkpoint has names in place of numbers.
        if ids and all(isinstance(entry, str) for entry in ids):
            names_of_groups.append(ids)
        elif group.get("param_names") is not None:
            names_of_groups.append(list(group["param_names"]))
        elif not ids:
            names_of_groups.append([])
        else:
            return None
    return names_of_groups


def _only_group(names: Sequence[str], sources: Mapping[str, tuple[int, Any]]) -> int:
    """Return the index of the one saved group of some parameters.

    Args:
        names: Names of the parameters of a group, at least one.
        sources: See `_sources`.

    Raises:
        ValueError: They come from several saved groups.
    """
    indices = list(dict.fromkeys(sources[name][0] for name in names))
    if len(indices) > 1:
        raise ValueError(
            f"the saved groups {indices[0]} and {indices[1]} are one group here ({names[0]!r},"
            " ...): build the optimizer with the groups it was saved with, or load the state alone"
            " with load_named_state."
        )
    return indices[0]


def _refuse_other_sizes(current: Sequence[Sequence[str]], saved: Sequence[Group]) -> None:
    """Refuse saved groups whose number, or numbers of parameters, differ from the optimizer's."""
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
