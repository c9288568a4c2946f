"""Convert optimizer state to tensors by name and a dict for JSON, and load it from them.

Works for every torch optimizer whose groups have names, those of other libraries included.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from optrun.base.errors import refuse_format
from optrun.base.options import Group, ParamGroup, State
from optrun.base.plain import PlainMapping
from optrun.optimizer.base import NamedOptimizer
from optrun.optimizer.evaluation_weights import averaged_params
from optrun.optimizer.groups import DESCRIPTIVE_KEYS
from optrun.optimizer.restore import copy_to_param, refuse_difference, restore_state, shard_like

FORMAT = 1

TRAINED = "training_weight"
"""Key of the training weights of a model that is saved with its evaluation weights."""

_NOT_OPTIONS = DESCRIPTIVE_KEYS | {"params"}


def named_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert the state of an optimizer to tensors by name, and a dict for JSON with all else.

    The inverse is `load_named_state`.

    Args:
        optimizer: Built with named parameters.

    Returns:
        The tensors, which are references and not copies, and the dict. Keys of the tensors are

            <parameter>/<state key>         state of a parameter
            <parameter>/training_weight     if the model holds other weights for evaluation
            optimizer/<key>                 state that belongs to no parameter
            groups/<index>/<key>            counters of a group
            attributes/<name>               counters of another library's optimizer

        The dict has the key of each tensor, the state values that are no tensors, the options and
        counters of every group, and the shape of every parameter.

    Raises:
        ValueError: Parameters have no names.
        TypeError: A state value is neither tensor, number, string, None, nor a container of these.
    """
    tensors: dict[str, Tensor] = {}
    params = _params_by_name(optimizer)
    # `_pack` returns a value for JSON, and puts its tensors into `tensors`.
    state: dict[str, State] = {}
    for name, param in params.items():
        if param in optimizer.state:
            state[name] = {
                key: _pack(value, f"{name}/{key}", tensors)
                for key, value in optimizer.state[param].items()
            }
    shared = [
        [key, _pack(value, f"optimizer/{key}", tensors)]
        for key, value in optimizer.state.items()
        if not isinstance(key, Tensor)
    ]
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: _pack_option(group[key]) for key in _option_keys(optimizer, group)}
        counted = {
            key: _pack(value, f"groups/{index}/{key}", tensors)
            for key, value in group.items()
            if key not in options and key not in ("params", "param_names", "functions")
        }
        groups.append({"param_names": list(group["param_names"]), **options, **counted})
    meta = {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__,
        "params": {name: list(param.shape) for name, param in params.items()},
        "state": state,
        "shared": shared,
        "attributes": {
            key: _pack(
                value.state_dict() if hasattr(value, "state_dict") else value,
                f"attributes/{key}",
                tensors,
            )
            for key, value in _counting_attributes(optimizer).items()
        },
        "groups": groups,
    }
    averaged = averaged_params(optimizer)
    for name, param in params.items():
        if param in averaged:
            tensors[f"{name}/{TRAINED}"] = param.detach()
    return tensors, meta


def load_named_state(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], meta: PlainMapping
) -> None:
    """Load the result of `named_state` into an optimizer; if it does not fit, change nothing.

    The order of parameters and their division into groups may differ. State keeps its saved dtype.
    Counters of groups, such as `step`, are loaded; their options stay as built. Training weights in
    `tensors` are copied into the parameters.

    Args:
        optimizer: Built with named parameters, of the class that saved the state.
        tensors: Full tensors, of which each rank takes its shard without communication; or DTensors
            that are sharded as their parameters.
        meta: The dict that `named_state` returned with them.

    Raises:
        ValueError: A parameter or tensor is missing, extra or of another shape; an option needs a
            tensor that was not saved; joined groups counted differently; or a counter is no number.
        OtherFormatError: The state has another format.
    """
    # 1. Compare format, class, names and shapes; both raise.
    _refuse_other_optimizer(optimizer, meta)
    params = _params_by_name(optimizer)
    _refuse_other_params(params, meta)

    # 2. Convert and check all that was saved. `unpack` and `take` look up tensors by path, and
    # remove these paths from `saved.unused`.
    saved = _SavedTensors(tensors)
    saved_state: dict[str, State] = {}
    for name, entries in meta["state"].items():
        saved_state[name] = {key: saved.unpack(value) for key, value in entries.items()}
    # Checked copies on the devices of the parameters, sharded as these; by parameter.
    state: dict[Any, Any] = {**restore_state(optimizer, optimizer.param_groups, saved_state)}
    first_param = next(iter(params.values()))
    for key, value in meta["shared"]:
        # State that belongs to no parameter goes to the device of the first one.
        state[key] = copy_to_param(saved.unpack(value), first_param, {}, str(key))
    counters_of_groups = _load_counters(optimizer, meta, saved)  # only read; loaded in step 3
    for group, counters in zip(optimizer.param_groups, counters_of_groups, strict=True):
        _refuse_nonnumeric_counters(group, counters)
    # The model was saved with the evaluation weights of these parameters, so the weights to train
    # are in the state.
    averaged = averaged_params(optimizer)
    training_weights: dict[str, Tensor] = {}
    for name, param in params.items():
        if param in averaged:
            training_weights[name] = saved.take(f"{name}/{TRAINED}", list(param.shape))
    attributes = {key: saved.unpack(value) for key, value in meta["attributes"].items()}
    if saved.unused:
        raise ValueError(
            f"the saved state has a tensor {min(saved.unused)!r}, which belongs to nothing."
        )

    # 3. Everything fits: change the optimizer.
    _load_attributes(optimizer, attributes)
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, counters in zip(optimizer.param_groups, counters_of_groups, strict=True):
        group.update(counters)
    with torch.no_grad():
        for name, weights in training_weights.items():
            param = params[name]
            param.copy_(shard_like(weights, param).to(param.device))


def _refuse_other_optimizer(optimizer: Optimizer, meta: PlainMapping) -> None:
    """Refuse state of another format, or of another optimizer class.

    Raises:
        OtherFormatError: The format differs.
        ValueError: The class differs.
    """
    refuse_format("optimizer state", meta.get("format"), FORMAT)
    if meta["optimizer"] != type(optimizer).__name__:
        raise ValueError(
            f"the state was saved by {meta['optimizer']}, the optimizer is"
            f" {type(optimizer).__name__}."
        )


def _refuse_other_params(params: Mapping[str, Tensor], meta: PlainMapping) -> None:
    """Refuse state of other parameter names or shapes.

    Raises:
        ValueError: Naming the first parameter that is missing, extra or of another shape.
    """
    refuse_difference(list(meta["params"]), list(params))
    for name, param in params.items():
        if list(param.shape) != list(meta["params"][name]):
            raise ValueError(
                f"parameter {name!r}: saved with shape {tuple(meta['params'][name])}, "
                f"the optimizer's has {tuple(param.shape)}."
            )


def _refuse_nonnumeric_counters(group: Group, counters: PlainMapping) -> None:
    """Refuse a saved counter that is no number if the group has a number under its key.

    Args:
        group: A group of the optimizer.
        counters: Its saved counters, such as {"step": 7}.
    """
    for key, value in counters.items():
        if isinstance(group.get(key), (int, float)) and not isinstance(value, (int, float)):
            raise ValueError(
                f"the group of {group['param_names'][0]!r} counted {key}={value!r}, which is no"
                " number."
            )


def _load_attributes(optimizer: Optimizer, saved: PlainMapping) -> None:
    """Set the counting attributes of another library's optimizer to their saved values.

    Those with a `load_state_dict` load the saved dict. An attribute that was not saved stays.

    Args:
        optimizer: Changed in place; for an optimizer of optrun nothing is done.
        saved: Saved values by the name of the attribute.
    """
    for key, attribute in _counting_attributes(optimizer).items():
        if key not in saved:
            continue
        if hasattr(attribute, "load_state_dict"):
            attribute.load_state_dict(saved[key])
        else:
            setattr(optimizer, key, saved[key])


def _params_by_name(optimizer: Optimizer) -> dict[str, Tensor]:
    """Map names to parameters; raise ValueError for an optimizer built without names."""
    if not all("param_names" in group for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} was built without parameter names: pass"
            " model.named_parameters() or groups of (name, parameter) pairs."
        )
    params: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        params.update(zip(group["param_names"], group["params"], strict=True))
    return params


def _option_keys(optimizer: Optimizer, group: Group) -> list[str]:
    """List the options among the keys of a group, without counters, names and descriptions.

    For an optimizer of optrun these are its defaults and those of its members; for any other one
    the keywords of its constructor.
    """
    if isinstance(optimizer, NamedOptimizer):
        members = getattr(optimizer, "members", {}).values()
        options = set(optimizer.defaults).union(*(member.defaults for member in members))
    else:
        options = set(inspect.signature(type(optimizer)).parameters)
    return [key for key in group if key in options and key not in _NOT_OPTIONS]


def _counting_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Collect the possible counters among the attributes of another library's optimizer.

    These are public attributes that are no keywords of its constructor, with a number or an object
    that has a `state_dict`. Empty for an optimizer of optrun.
    """
    if isinstance(optimizer, NamedOptimizer):
        return {}
    keywords = inspect.signature(type(optimizer)).parameters
    counting: dict[str, Any] = {}
    for key, value in vars(optimizer).items():
        if key in keywords or key.startswith("_"):
            continue
        if type(value) in (int, float) or hasattr(value, "load_state_dict"):
            counting[key] = value
    return counting


def _load_counters(
    optimizer: Optimizer, meta: PlainMapping, saved: _SavedTensors
) -> list[PlainMapping]:
    """Return the saved counters, such as `step`, of each group of the optimizer.

    A counter is any saved entry of a group that is no option.

    Args:
        optimizer: Its groups may divide the parameters in another way than the saved ones.
        meta: See `named_state`.
        saved: The tensors that the counters are restored from.

    Returns:
        Counters by key, one mapping for each group of the optimizer, in its order.

    Raises:
        ValueError: As `_common_counters`; or a parameter was stepped by another member of a
            `Composite`, or by another library with another option.
    """
    # 1. Read the counters of each saved group: entries that are neither options nor descriptions.
    no_counters = {"optimizer", *_NOT_OPTIONS}
    for group in optimizer.param_groups:
        no_counters.update(_option_keys(optimizer, group))
    index_by_name: dict[str, int] = {}  # parameter -> index of its saved group
    saved_counters: list[ParamGroup] = []
    for index, group in enumerate(meta["groups"]):
        index_by_name.update(dict.fromkeys(group["param_names"], index))
        keys = [key for key in group if key not in no_counters]
        saved_counters.append({key: saved.unpack(group[key]) for key in keys})
    # 2. Give each group the counters of the saved groups that its parameters come from.
    counters_of_groups = []
    for group in optimizer.param_groups:
        indices = [index_by_name[name] for name in group["param_names"]]
        for name, index in zip(group["param_names"], indices, strict=True):
            saved_group = meta["groups"][index]
            before = saved_group.get("optimizer")
            now = group.get("optimizer")
            if before != now:
                raise ValueError(f"parameter {name!r} was stepped by {before}, now by {now}.")
            _refuse_other_options(optimizer, group, saved_group, name)
        # Of the saved groups that are joined in this one, each once; they must be equal.
        distinct = [saved_counters[index] for index in dict.fromkeys(indices)]
        counters_of_groups.append(_common_counters(group, distinct))
    return counters_of_groups


def _common_counters(group: Group, saved_counters: Sequence[PlainMapping]) -> PlainMapping:
    """Return the counters of the saved groups that are joined in a group; empty if there is none.

    Args:
        group: The group, for the message.
        saved_counters: Counters of each of these saved groups.

    Raises:
        ValueError: They have different counters.
    """
    if not saved_counters:
        return {}
    for counters in saved_counters:
        if counters != saved_counters[0]:
            raise ValueError(
                f"the group of {group['param_names'][0]!r} joins saved groups that counted"
                f" differently: {saved_counters[0]} and {counters}."
            )
    return saved_counters[0]


def _refuse_other_options(optimizer: Optimizer, group: Group, saved: Group, name: str) -> None:
    """Refuse state of another library's optimizer saved with other options.

    Such an option may change which state there is, and only that library knows. Compared are
    switches, names and counts: values that are int, str or None before and now. Does nothing for an
    optimizer of optrun.
    """
    if isinstance(optimizer, NamedOptimizer):
        return
    for key in _option_keys(optimizer, group):
        if key not in saved:
            continue
        before = saved[key]
        now = _pack_option(group[key])
        are_compared = all(isinstance(value, int | str | None) for value in (before, now))
        if are_compared and before != now:
            raise ValueError(
                f"parameter {name!r}: {key} was {before}, is {now}; the state was saved with"
                f" {key}={before}. Give that value."
            )


def _pack(value: object, where: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value for JSON, and put its tensors into `tensors`.

    Numbers, strings and None stay. Other values become a dict of one entry: kind -> content. The
    inverse is `_SavedTensors.unpack`.

    Args:
        value: A tensor, number, string, None, or a list, tuple, deque or dict of these.
        where: Path of the value, the key of its tensor, and for the message.
        tensors: Gets each tensor under its path.

    Raises:
        TypeError: For any other type.

    Example:
        >>> tensors: dict[str, Tensor] = {}
        >>> _pack((1, torch.zeros(2, 3)), "weight/pair", tensors)
        {'tuple': [1, {'tensor': ['weight/pair/1', [2, 3]]}]}
        >>> list(tensors)
        ['weight/pair/1']
    """
    if isinstance(value, Tensor):
        tensors[where] = value
        content: list[Any] = [where, list(value.shape)]
        order = _dimension_order(value)
        if order is not None:
            content.append(order)
        return {"tensor": content}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple, deque)):
        entries = [_pack(entry, f"{where}/{i}", tensors) for i, entry in enumerate(value)]
        if isinstance(value, deque):
            return {"deque": [value.maxlen, entries]}
        return {"list" if isinstance(value, list) else "tuple": entries}
    if isinstance(value, Mapping):
        return {
            "dict": [[key, _pack(entry, f"{where}/{key}", tensors)] for key, entry in value.items()]
        }
    raise TypeError(
        f"optimizer state {where} is a {type(value).__name__}, which cannot be kept in a file."
    )


def _dimension_order(value: Tensor) -> list[int] | None:
    """Return the order of dimensions in memory, outermost first; None if contiguous.

    A file holds contiguous tensors. The order is saved because sums over another order round
    differently. None, too, for a tensor with gaps.

    Example:
        >>> _dimension_order(torch.zeros(2, 3).T), _dimension_order(torch.zeros(2, 3))
        ([1, 0], None)
    """
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    if value.is_contiguous() or not value.permute(order).is_contiguous():
        return None
    return order


def _restore_dimension_order(value: Tensor, order: list[int]) -> Tensor:
    """Copy a tensor so that its dimensions have this order in memory; its shape stays."""
    inverse = [order.index(dim) for dim in range(len(order))]
    return value.permute(order).contiguous().permute(inverse)


def _pack_option(value: object) -> Any:
    """Convert an option of a group as `_pack` does; to its `repr` if JSON cannot hold it."""
    try:
        return _pack(value, "", {})
    except TypeError:
        return {"repr": [repr(value)]}


class _SavedTensors:
    """The tensors of a saved state, by path.

    Attributes:
        unused: Paths of the tensors that were not taken yet.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.unused = set(tensors)

    def take(self, path: str, shape: list[int]) -> Tensor:
        """Return a tensor, and remove its path from `unused`.

        Raises:
            ValueError: It is missing, or has another shape.
        """
        if path not in self._tensors:
            raise ValueError(f"the saved state lacks the tensor {path!r}.")
        tensor = self._tensors[path]
        if list(tensor.shape) != shape:
            raise ValueError(
                f"the tensor {path!r} has shape {tuple(tensor.shape)}, it was saved with"
                f" {tuple(shape)}."
            )
        self.unused.discard(path)
        return tensor

    def unpack(self, value: object) -> Any:
        """Convert a value back from the form of `_pack`; its tensors are taken.

        Raises:
            ValueError: As `take`; or the kind of a value is unknown.

        Example:
            >>> saved = _SavedTensors({"weight/pair/1": torch.zeros(2)})
            >>> saved.unpack({"tuple": [1, {"tensor": ["weight/pair/1", [2]]}]})
            (1, tensor([0., 0.]))
        """
        if not isinstance(value, Mapping):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            path, shape, *orders = content  # the order is missing if the tensor was contiguous
            tensor = self.take(path, shape)
            return _restore_dimension_order(tensor, orders[0]) if orders else tensor
        if kind == "float":
            return float(content)
        if kind == "dict":
            return {key: self.unpack(entry) for key, entry in content}
        if kind == "deque":
            maxlen, entries = content
            return deque(map(self.unpack, entries), maxlen=maxlen)
        if kind not in ("list", "tuple"):
            raise ValueError(f"the saved state holds a {kind!r}, which this version does not know.")
        entries = list(map(self.unpack, content))
        return entries if kind == "list" else tuple(entries)
