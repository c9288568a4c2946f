"""Optimizer state by parameter name, for files: tensors apart from what JSON can hold.

Works for every torch optimizer whose groups carry names, ours or not.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from optrun.errors import refuse_newer
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.groups import DESCRIPTIVE_KEYS
from optrun.optimizer.restore import placed, refuse_difference

FORMAT = 1

_NOT_OPTIONS = DESCRIPTIVE_KEYS | {"params"}


def named_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything an optimizer has learnt, by parameter name.

    Args:
        optimizer: Built with named parameters.

    Returns:
        Tensors under "<parameter>/<state key>", references and not copies; and a dict that JSON can hold: the other
        state values, where each tensor belongs, every group's options and counters, and every parameter's shape.

    Raises:
        ValueError: Where parameters have no names.
        TypeError: For a state value that is neither tensor, number, word, None, nor a list or dict of these.
    """
    tensors: dict[str, Tensor] = {}
    params = _params(optimizer)
    state = {
        name: {key: _packed(value, f"{name}/{key}", tensors) for key, value in optimizer.state[param].items()}
        for name, param in params.items()
        if param in optimizer.state
    }
    shared = [
        [key, _packed(value, f"optimizer/{key}", tensors)]
        for key, value in optimizer.state.items()
        if not isinstance(key, Tensor)
    ]
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: _described(group[key]) for key in _options(optimizer, group)}
        counted = {
            key: _packed(value, f"groups/{index}/{key}", tensors)
            for key, value in group.items()
            if key not in options and key not in ("params", "param_names")
        }
        groups.append({"param_names": list(group["param_names"]), **options, **counted})
    meta = {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__,
        "params": {name: list(param.shape) for name, param in params.items()},
        "state": state,
        "shared": shared,
        "attributes": {key: _packed(vars(optimizer)[key], key, {}) for key in _counting_attributes(optimizer)},
        "groups": groups,
    }
    return tensors, meta


def load_named_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Give an optimizer the state that `named_state` returned; nothing is changed where it refuses.

    The order of parameters and their division into groups may differ. Dtypes are kept. The groups' options stay as
    they were built, see `group_differences`; what a group counts is restored.

    Args:
        optimizer: Built with named parameters, of the class the state was saved from.
        tensors: Whole tensors; a sharded parameter takes its piece.
        meta: What came with them.

    Raises:
        ValueError: With the first parameter or tensor that is missing, extra or of another shape, or that an option
            needs and was not saved.
    """
    refuse_newer("optimizer state", meta.get("format"), FORMAT)
    if meta.get("format") != FORMAT:
        raise ValueError(f"optimizer state of format {meta.get('format')!r}: this version reads format {FORMAT}.")
    if meta["optimizer"] != type(optimizer).__name__:
        raise ValueError(f"the state was saved by {meta['optimizer']}, the optimizer is {type(optimizer).__name__}.")
    params = _params(optimizer)
    refuse_difference(list(meta["params"]), list(params))
    for name, param in params.items():
        if list(param.shape) != list(meta["params"][name]):
            raise ValueError(
                f"parameter {name!r}: saved with shape {tuple(meta['params'][name])}, "
                f"the optimizer's has {tuple(param.shape)}."
            )
    unused = set(tensors)
    loaded: dict[Any, Any] = {}
    own_groups = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    for name, entries in meta["state"].items():
        param = params[name]
        _refuse_missing(optimizer, own_groups[name], name, entries)
        values = {key: _unpacked(value, tensors, unused) for key, value in entries.items()}
        loaded[param] = {
            key: _sharded(placed(value, param, own_groups[name], key), param) for key, value in values.items()
        }
    for key, value in meta["shared"]:
        loaded[key] = placed(_unpacked(value, tensors, unused), next(iter(params.values())), {}, str(key))
    counters = _counters(optimizer, meta, tensors, unused)
    if unused:
        raise ValueError(f"the saved state has a tensor {min(unused)!r}, which belongs to nothing.")
    for key in _counting_attributes(optimizer):
        if key in meta["attributes"]:
            setattr(optimizer, key, _unpacked(meta["attributes"][key], {}, set()))
    optimizer.state.clear()
    optimizer.state.update(loaded)
    for group, values in zip(optimizer.param_groups, counters, strict=True):
        group.update(values)


def group_differences(optimizer: Optimizer, meta: Mapping[str, Any]) -> list[str]:
    """What the groups were saved with and are not built with now, one sentence each.

    Args:
        optimizer: As built from the configuration in force.
        meta: From `named_state`.

    Returns:
        Empty where all options agree. `lr` and `weight_decay` are compared as they were before any schedule where both
        sides know it, and not at all where only one does.
    """
    saved = {name: group for group in meta["groups"] for name in group["param_names"]}
    found: dict[str, list[str]] = {}
    for group in optimizer.param_groups:
        for name in group["param_names"]:
            if name not in saved:
                continue
            for key in _options(optimizer, group):
                initial = f"initial_{key}"
                compared = initial if initial in group or initial in saved[name] else key
                if compared not in group or compared not in saved[name]:
                    continue
                before, now = saved[name][compared], _described(group[compared])
                if before != now:
                    found.setdefault(f"{key} was {_plain(before)}, is {_plain(now)}", []).append(name)
    return [f"{what} ({_listing(names)})" for what, names in found.items()]


def _params(optimizer: Optimizer) -> dict[str, Tensor]:
    if not all("param_names" in group for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} was built without parameter names: pass model.named_parameters() or groups of "
            "(name, parameter) pairs."
        )
    return {
        name: param
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def _refuse_missing(optimizer: Optimizer, group: Mapping[str, Any], name: str, entries: Mapping[str, Any]) -> None:
    """Raise where an option of a group needs a state tensor that the run it was saved by did not keep."""
    stepper = getattr(optimizer, "members", {}).get(group.get("optimizer"), optimizer)
    for option, slot in getattr(stepper, "SLOTS", {}).items():
        if entries and group[option] and slot not in entries:
            raise ValueError(
                f"parameter {name!r}: the saved state has no {slot!r}, which {option}={group[option]} needs."
            )


def _options(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Keys of a group that its builder gave, as against what the optimizer counts there."""
    if isinstance(optimizer, NamedOptimizer):
        given = set(optimizer.defaults).union(
            *(member.defaults for member in getattr(optimizer, "members", {}).values())
        )
    else:
        given = set(inspect.signature(type(optimizer)).parameters)
    return [key for key in group if key in given and key not in _NOT_OPTIONS]


def _counting_attributes(optimizer: Optimizer) -> list[str]:
    """Numbers that optimizers of other libraries keep on themselves and were not given."""
    if isinstance(optimizer, NamedOptimizer):
        return []
    given = inspect.signature(type(optimizer)).parameters
    return [
        key
        for key, value in vars(optimizer).items()
        if type(value) in (int, float) and key not in given and not key.startswith("_")
    ]


def _counters(
    optimizer: Optimizer, meta: Mapping[str, Any], tensors: Mapping[str, Tensor], unused: set[str]
) -> list[dict[str, Any]]:
    """What each group counts besides its options: for ours, the steps."""
    saved = {name: i for i, group in enumerate(meta["groups"]) for name in group["param_names"]}
    known = {"optimizer", *_NOT_OPTIONS}.union(*(_options(optimizer, group) for group in optimizer.param_groups))
    unpacked = [
        {
            key: value if key in known else _unpacked(value, tensors, unused)
            for key, value in group.items()
            if key != "param_names"
        }
        for group in meta["groups"]
    ]
    out = []
    for group in optimizer.param_groups:
        sources = dict.fromkeys(saved[name] for name in group["param_names"])
        found = [{key: value for key, value in unpacked[i].items() if key not in known} for i in sources]
        for name, i in ((name, saved[name]) for name in group["param_names"]):
            before, now = unpacked[i].get("optimizer"), group.get("optimizer")
            if before != now:
                raise ValueError(f"parameter {name!r} was stepped by {before}, now by {now}.")
        if any(other != found[0] for other in found[1:]):
            raise ValueError(
                f"the group of {group['param_names'][0]!r} joins saved groups that counted differently: "
                f"{found[0]} and {next(other for other in found[1:] if other != found[0])}."
            )
        out.append(found[0] if found else {})
    return out


def _packed(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[where] = value
        return {"tensor": [where, list(value.shape)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_packed(entry, f"{where}/{i}", tensors) for i, entry in enumerate(value)]}
    if isinstance(value, deque):
        return {"deque": [value.maxlen, [_packed(entry, f"{where}/{i}", tensors) for i, entry in enumerate(value)]]}
    if isinstance(value, Mapping):
        return {"dict": [[key, _packed(entry, f"{where}/{key}", tensors)] for key, entry in value.items()]}
    raise TypeError(f"optimizer state {where} is a {type(value).__name__}, which cannot be kept in a file.")


def _described(value: Any) -> Any:
    """A group's option for comparison: what no file can hold, by its text."""
    try:
        return _packed(value, "", {})
    except TypeError:
        return {"repr": [repr(value)]}


def _unpacked(value: Any, tensors: Mapping[str, Tensor], unused: set[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        key, shape = content
        if key not in tensors:
            raise ValueError(f"the saved state lacks the tensor {key!r}.")
        if list(tensors[key].shape) != shape:
            raise ValueError(
                f"the tensor {key!r} has shape {tuple(tensors[key].shape)}, it was saved with {tuple(shape)}."
            )
        unused.discard(key)
        return tensors[key]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {key: _unpacked(entry, tensors, unused) for key, entry in content}
    if kind == "deque":
        return deque((_unpacked(entry, tensors, unused) for entry in content[1]), maxlen=content[0])
    entries = [_unpacked(entry, tensors, unused) for entry in content]
    return entries if kind == "list" else tuple(entries)


def _sharded(value: Any, param: Tensor) -> Any:
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if isinstance(param, DTensor) and whole and value.shape == param.shape:
        return distribute_tensor(value, param.device_mesh, param.placements)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        ((_, content),) = value.items()
        return content
    return value


def _listing(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
