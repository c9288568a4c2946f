"""Give parameters their saved state by name, dtypes kept and sharded as they are.

Read it from a torch state dict.

`torch.optim.Optimizer.load_state_dict` maps by position and turns float32 moments of a bfloat16
parameter into bfloat16; this reads the same layout and does neither. Files have a layout of their
own, see `state.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
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


def refuse_difference(saved: Sequence[str], own: Sequence[str]) -> None:
    """Refuse the first name on one side alone.

    Raises:
        ValueError: Naming the parameter, with the nearest name of the other side.
    """
    saved_names = set(saved)
    own_names = set(own)
    for name in own:
        if name not in saved_names:
            extra = [saved_name for saved_name in saved if saved_name not in own_names]
            hint = f" {did_you_mean(name, extra)}" if extra else ""
            raise ValueError(
                f"the saved state has no parameter {name!r}, which the optimizer has.{hint}"
            )
    for name in saved:
        if name not in own_names:
            raise ValueError(
                f"the saved state has a parameter {name!r}, which the optimizer does not have."
            )


def refuse_foreign(name: str, param: Tensor, value: Tensor, key: str) -> None:
    """Refuse a state tensor of another shape than its parameter.

    It may be a number, have the parameter's shape, or have 1 in place of some of its dimensions
    (factored moments).

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
    """Refuse a state tensor sharded otherwise than its parameter.

    Raises:
        ValueError: Naming parameter, key and both placements.
    """
    if not isinstance(value, DTensor):
        return
    sharding = "is whole"
    if isinstance(param, DTensor):
        same = (param.device_mesh, param.placements) == (value.device_mesh, value.placements)
        if same or value.shape != param.shape:
            return
        sharding = f"as {param.placements}"
    raise ValueError(
        f"state {key!r} of parameter {name!r} is sharded as {value.placements}, the parameter"
        f" {sharding}: give the whole tensor, full_tensor()."
    )


def refuse_other_state(
    optimizer: Optimizer, group: Group, name: str, param: Tensor, entries: PlainMapping
) -> None:
    """Refuse saved state with other keys than the optimizer of the parameter keeps.

    Other libraries' classes are not known.

    Args:
        optimizer: Where a `Composite`, its member is asked.
        group: With the options that will be in force.
        name: The parameter's.
        param: Its shape counts.
        entries: Saved under state keys; nothing where it was never stepped.

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
    """Compute the state by parameter from the state by name.

    The one way in, from a state dict and from files.

    Args:
        optimizer: Says what it keeps; nothing of it is changed.
        groups: Its parameters with the options that will be in force.
        saved: By parameter name; a parameter that was never stepped is missing.

    Raises:
        ValueError: For what is not of the parameter's shape, or not what its optimizer keeps.
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
    """Copy one state value to its parameter's device and sharding, in its own dtype.

    `step` stays on the CPU, where torch keeps it, unless the group runs fused or captured.
    """
    if isinstance(value, Tensor):
        on_device = key != "step" or group.get("fused") or group.get("capturable")
        piece = shard_like(value.detach(), param)
        return piece.to(device=param.device if on_device else torch.device("cpu"), copy=True)
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
    """Cut a tensor of a parameter's shape as the parameter is sharded.

    Every other tensor comes back as it is.

    Args:
        value: Whole, the same on every rank, of which each keeps its piece without communication;
            or a DTensor with the parameter's placements already.
        param: Says mesh and placements, if it has any.
    """
    if isinstance(param, DTensor) and value.shape == param.shape:
        return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)
    return value


def load_by_name(
    optimizer: Optimizer, state_dict: PlainMapping
) -> tuple[defaultdict[Tensor, Any], list[ParamGroup]]:
    """Compute the state and the groups of an optimizer after loading.

    Args:
        optimizer: Says which parameters there are; nothing of it is changed.
        state_dict: In torch's layout; `params` may hold numbers or names.

    Returns:
        State by parameter, and the groups in the optimizer's order with the saved options, and the
        optimizer's own where none was saved.

    Raises:
        ValueError: With the first parameter missing, extra or of another shape, or where the saved
            groups are divided otherwise than the optimizer's.
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
    own_names = [names_of(group, index) for index, group in enumerate(optimizer.param_groups)]
    sources = _sources(optimizer, own_names, saved_groups)
    saved = {
        name: state_dict["state"][key]
        for name, (_, key) in sources.items()
        if key in state_dict["state"]
    }
    groups: list[ParamGroup] = []
    for own_group, names in zip(optimizer.param_groups, own_names, strict=True):
        saved_group = saved_groups[_only_group(names, sources)] if names else own_group
        if saved_group.get("optimizer") != own_group.get("optimizer"):
            raise ValueError(
                f"the group of {names[0]!r} was stepped by {saved_group.get('optimizer')}, "
                f"now by {own_group.get('optimizer')}."
            )
        for name, param in zip(names, own_group["params"], strict=True):
            _refuse_foreign_tensors(name, param, saved.get(name, {}))
        groups.append(_restored_group(own_group, saved_group))
    state = defaultdict[Tensor, Any](dict, restore_state(optimizer, groups, saved))
    for group, names in zip(groups, own_names, strict=True):
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
    for key, value in entries.items():
        if isinstance(value, Tensor):
            refuse_foreign(name, param, value, str(key))


def _restored_group(own: Group, saved: Group) -> dict[str, Any]:
    """Merge the saved options over the optimizer's own.

    Which has keys that torch's optimizers know nothing of.
    """
    merged = dict(own)
    if "step" in saved:
        merged.pop("lr_ratio", None)  # a group of ours without a ratio has an absolute lr
    described = {key: own[key] for key in ("params", "param_names", "functions") if key in own}
    options = {key: deepcopy(value) for key, value in saved.items() if key != "functions"}
    return merged | options | described


def _sources(
    optimizer: Optimizer, own_names: list[list[str]], saved_groups: Sequence[Group]
) -> dict[str, tuple[int, Any]]:
    """Map each own parameter's name to its saved group and its key in the saved state."""
    saved_names = _saved_names(saved_groups)
    flat_own = list(chain.from_iterable(own_names))
    unnamed = any(
        group["params"] and "param_names" not in group for group in optimizer.param_groups
    )
    if saved_names is None or unnamed:
        _refuse_other_sizes(own_names, saved_groups)
        saved_names = own_names
    lookup = {name: name for name in flat_own}
    if set(chain.from_iterable(saved_names)) != set(flat_own):
        saved_names = [list(map(canonical, names)) for names in saved_names]
        lookup = {name: canonical(name) for name in flat_own}
        refuse_difference(list(chain.from_iterable(saved_names)), list(lookup.values()))
    source_of: dict[str, tuple[int, Any]] = {}
    for index, (names, group) in enumerate(zip(saved_names, saved_groups, strict=True)):
        for name, key in zip(names, group["params"], strict=True):
            source_of[name] = (index, key)
    return {name: source_of[lookup[name]] for name in flat_own}


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
    """Find the saved group that all parameters of a group come from; refuse several."""
    indices = list(dict.fromkeys(sources[name][0] for name in names))
    if len(indices) > 1:
        raise ValueError(
            f"the saved groups {indices[0]} and {indices[1]} are one group here ({names[0]!r},"
            " ...): build the optimizer with the groups it was saved with, or load the state alone"
            " with load_named_state."
        )
    return indices[0]


def _refuse_other_sizes(own: Sequence[Sequence[str]], saved: Sequence[Group]) -> None:
    """Refuse saved groups whose number, or numbers of parameters, differ from the optimizer's."""
    if len(own) != len(saved):
        raise ValueError(
            f"the saved state has {len(saved)} parameter groups, the optimizer {len(own)}."
        )
    for index, (names, group) in enumerate(zip(own, saved, strict=True)):
        if len(names) != len(group["params"]):
            raise ValueError(
                f"group {index}: the saved state has {len(group['params'])} parameters, the"
                f" optimizer {len(names)}."
            )
