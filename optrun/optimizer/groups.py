"""Parameter groups: which keys they may carry, and how `lr_scale` becomes a learning rate."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FlatParameter
from torch.nn import Parameter

from optrun.base.errors import did_you_mean
from optrun.base.options import Group
from optrun.config.foreign_names import explain_translation, optimizer_option
from optrun.config.schema.ranges import not_negative

DESCRIPTIVE_KEYS = frozenset(
    {
        "param_names",
        "lr_scale",
        "lr_ratio",
        "layer_id",
        "layer",
        "role",
        "rule",
        "base_lr",
        "initial_lr",
    }
)
"""Keys that are no hyper-parameters: read and logged, or the lr that a schedule started from."""


def refuse_unknown_keys(keys: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Refuse the first unknown key, and suggest a valid one.

    If another package uses this name for one of our options, our name is suggested, else the
    nearest valid one.

    Args:
        keys: Keywords or keys of a group that a user passed.
        allowed: The valid ones.
        where: Subject of the message, such as "Lamb" or "a parameter group of Lamb".

    Raises:
        TypeError: A key is unknown.

    Example:
        >>> refuse_unknown_keys(["bettas"], ["lr", "betas"], "Lamb")
        Traceback (most recent call last):
        TypeError: Lamb has no option 'bettas'. Did you mean betas?
    """
    pool = sorted(allowed)
    for key in keys:
        if key not in pool:
            name_here = optimizer_option(str(key))  # None unless another package has this name
            hint = did_you_mean(str(key), pool)
            if name_here is not None:
                hint = explain_translation(name_here).replace("optimizer.", "")
            raise TypeError(f"{where} has no option {key!r}. {hint}")


def are_same_objects(one: Sequence[object], other: Sequence[object]) -> bool:
    """Tell whether two sequences have the same objects (`is`) in the same order.

    Runs at every step, hence `map` over a C function.

    Example:
        >>> are_same_objects([None, "a"], [None, "a"]), are_same_objects([None], [])
        (True, False)
    """
    return len(one) == len(other) and all(map(operator.is_, one, other))


@dataclass
class StepFunction:
    """The function of the step behind an option; a group has it under `functions`."""

    function: Callable[[int], float]
    written: float
    """Value that the optimizer wrote into the group last; another one there was set by a user."""


def placeholder_name(group_index: int, position: int) -> str:
    """Make a name for a parameter without one, for messages and tables."""
    return f"group {group_index} parameter {position}"


def names_of(group: Group, group_index: int) -> list[str]:
    """List the names of a group's parameters, in order.

    A group without `param_names` gets names made of its index and the position.

    Example:
        >>> names_of({"params": [1, 2], "param_names": ["a", "b"]}, 0), names_of({"params": [1]}, 3)
        (['a', 'b'], ['group 3 parameter 0'])
    """
    names = group.get("param_names")
    if names is not None:
        return list(names)
    return [placeholder_name(group_index, position) for position in range(len(group["params"]))]


def name_param_pairs(params: Iterable[object], group_index: int) -> list[tuple[str, Any]]:
    """List (name, parameter) pairs of a group's `params`, each of them a pair or a parameter.

    A parameter without a name gets one made of `group_index` and its position.
    """
    pairs = []
    for position, entry in enumerate(params):
        if isinstance(entry, tuple) and len(entry) == 2:
            pairs.append(entry)
        else:
            pairs.append((placeholder_name(group_index, position), entry))
    return pairs


def refuse_repeats(named: Iterable[tuple[str, Any]]) -> None:
    """Refuse a repeated name, or a tensor under two names.

    Raises:
        ValueError: Naming the name, or both names of the tensor.

    Example:
        >>> weight = object()
        >>> refuse_repeats(  # doctest: +ELLIPSIS
        ...     [("wte.weight", weight), ("lm_head.weight", weight)]
        ... )
        Traceback (most recent call last):
        ValueError: 'wte.weight' and 'lm_head.weight' are one parameter: it would be stepped ...
    """
    tensors: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name, tensor in named:
        if name in tensors and tensors[name] is not tensor:
            raise ValueError(f"two parameters are called {name!r}: give each its own name.")
        if name in tensors:
            raise ValueError(
                f"parameter {name!r} appears twice: it would be stepped twice. Give it once."
            )
        if id(tensor) in names:
            first = names[id(tensor)]
            raise ValueError(
                f"{first!r} and {name!r} are one parameter: it would be stepped twice. Give it"
                " once."
            )
        tensors[name] = tensor
        names[id(tensor)] = name


def list_params(params: object, *, may_be_empty: bool = False) -> list[Any]:
    """Convert the `params` argument of an optimizer or of a group to a list.

    Args:
        params: Any iterable of parameters, (name, parameter) pairs or group dicts.
        may_be_empty: Whether no entry is allowed: peft and transformers make such groups.

    Raises:
        TypeError: For one tensor, a mapping, a set, a string, or anything that is no iterable.
        ValueError: For an empty list.
    """
    if isinstance(params, (Tensor, Mapping, set, str)) or not isinstance(params, Iterable):
        raise TypeError(
            "params: expected parameters, (name, parameter) pairs or group dicts, got"
            f" {type(params).__name__}. Pass model.named_parameters(), model.parameters() or a list"
            " of groups."
        )
    entries = list(params)
    if not entries and not may_be_empty:
        raise ValueError("params: expected at least one parameter, got none.")
    return entries


def has_names(listed: Iterable[object]) -> bool:
    """Tell whether any parameter comes as a (name, parameter) pair, alone or in a group.

    Example:
        >>> has_names([{"params": []}, {"params": [("weight", 1)]}]), has_names([1, 2])
        (True, False)
    """
    for entry in listed:
        inner = entry.get("params", ()) if isinstance(entry, dict) else [entry]
        if isinstance(inner, list | tuple) and any(isinstance(param, tuple) for param in inner):
            return True
    return False


def refuse_flat_pieces(named: Sequence[tuple[str, Any]], owner: str) -> None:
    """Refuse the parameters of FSDP1: flat slices of a buffer, without their shape.

    They are recognised by type or name. If a process group exists, also by their layout (with
    `use_orig_params=True` they are plain parameters): all are 1-D, and one is empty or lies in a
    larger buffer.

    Args:
        named: (name, parameter) pairs.
        owner: Class name, for the message.

    Raises:
        ValueError: Naming the first such parameter.
    """
    wrapped = [
        name
        for name, param in named
        if isinstance(param, FlatParameter) or "_fsdp_wrapped_module" in name
    ]
    if not wrapped and dist.is_available() and dist.is_initialized() and _all_in_buffers(named):
        wrapped = [name for name, _ in named]
    if wrapped:
        raise ValueError(
            f"parameter {wrapped[0]!r} is a flat piece of FSDP1 (FullyShardedDataParallel), and"
            f" {owner} needs whole tensors. Shard with fully_shard (FSDP2), or use an elementwise"
            " optimizer, such as adamw."
        )


def _all_in_buffers(named: Sequence[tuple[str, Any]]) -> bool:
    """Tell whether all tensors are 1-D parameters, and one is empty or in a larger buffer.

    False without tensors, or if one is on the meta device.
    """
    tensors = [param for _, param in named]
    # Values of a tensor on the meta device are in no buffer.
    plain = [t for t in tensors if type(t) is Parameter and t.dim() == 1 and not t.is_meta]
    if not plain or len(plain) < len(tensors):
        return False
    return any(t.numel() == 0 or t.untyped_storage().nbytes() > t.nbytes for t in plain)


def fold_lr_scale(
    group: Group, *, base_lr: float, allowed: Iterable[str], owner: str
) -> dict[str, Any]:
    """Return a copy of a group with its `lr` filled in, and with `lr_scale` renamed to `lr_ratio`.

    | keys of the group | lr | lr_ratio | follows `set_lr` |
    | --- | --- | --- | --- |
    | `lr` | as it is | none | no |
    | `lr_scale` | base_lr * lr_scale | lr_scale | yes |
    | both | as it is | lr_scale | yes |
    | neither | base_lr | 1, or the `lr_ratio` it has | yes |

    The key `lr_scale` is renamed because timm's schedulers multiply the lr of a group by it.

    Args:
        group: A group that a user passed.
        base_lr: Learning rate of the optimizer.
        allowed: Hyper-parameters a group may override.
        owner: Class name, for messages.

    Raises:
        TypeError: For a key that is neither a hyper-parameter nor descriptive, with the nearest
            valid one.
        ValueError: For an `lr_scale` below 0, or a group without `params`.

    Example:
        >>> group = {"params": [], "lr_scale": 0.5}
        >>> fold_lr_scale(group, base_lr=0.1, allowed=["lr"], owner="Lamb")
        {'params': [], 'lr_ratio': 0.5, 'lr': 0.05}
    """
    if "params" not in group:
        raise ValueError(
            f"a parameter group of {owner} needs the key 'params', got {sorted(group)}."
        )
    refuse_unknown_keys(
        group,
        {*allowed, *DESCRIPTIVE_KEYS, "params", "functions", "step"},
        f"a parameter group of {owner}",
    )
    folded = dict(group)
    if "lr_scale" in folded:
        folded["lr_ratio"] = not_negative("lr_scale", folded.pop("lr_scale"))
        folded.setdefault("lr", base_lr * folded["lr_ratio"])  # an `lr` beside it stays
    elif "lr" not in folded:
        folded["lr_ratio"] = folded.get("lr_ratio", 1.0)
        folded["lr"] = base_lr * folded["lr_ratio"]
    return folded
