"""The base class of every optimizer here: all that is not the update itself.

Parameter names, groups with `lr_scale`, options checked by type and range, lr and weight decay as
functions of the step, `set_lr`, `get_config`, and state that is loaded by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from optrun.base.options import Group, Options, ParamGroup, State, StateDict
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.schema.optimizer_base import OptimizerConfig
from optrun.config.schema.ranges import Check, checks, finite, not_negative
from optrun.optimizer.groups import (
    StepFunction,
    are_same_objects,
    fold_lr_scale,
    has_names,
    list_params,
    name_param_pairs,
    names_of,
    refuse_flat_pieces,
    refuse_repeats,
    refuse_unknown_keys,
)
from optrun.optimizer.numerics import sharding_of
from optrun.optimizer.patterns import match_names
from optrun.optimizer.restore import load_by_name

Params: TypeAlias = Any
"""Parameters, (name, parameter) pairs or group dicts, in any iterable."""

Numeric: TypeAlias = float | Callable[[int], float]
"""A number, or a function from the step counted from 0 to one."""

NO_KEYWORDS = frozenset({"name", "default_lr", "dialect"})
"""Fields of a schema that are no keywords of its class.

`dialect` names a package, such as `timm`, as whose options the others are set."""

SCHEDULABLE = ("lr", "weight_decay")
"""Options that may be a function of the step."""


class NamedOptimizer(Optimizer):
    """A torch optimizer that knows names and refuses what it does not understand.

    A subclass lists its options in its constructor, as torch's do, and names its schema in
    `OPTIONS`, whose types say their ranges. A group may override all of them. `lr` and
    `weight_decay` may be functions of the step, counted from 0 and kept in `group["step"]`; the
    group then holds the value of the last step, of step 0 before any. The class also goes over
    torch's own optimizers: `class SGD(NamedOptimizer, torch.optim.SGD)`.
    """

    OPTIONS: ClassVar[type[OptimizerConfig] | None] = None
    """The schema; None: the class checks its options itself."""
    CHECKS: ClassVar[Mapping[str, Check]] = {}
    """Option -> checker: the schema's, with those that the class adds."""
    OPTIMIZER_WIDE: ClassVar[frozenset[str]] = frozenset()
    """Options that no group may override."""
    APART: ClassVar[frozenset[str]] = frozenset()
    """Options that stand in no group at all; they are kept in `_apart`."""
    STATE: ClassVar[tuple[str, ...]] = ()
    """State keys of every parameter that was stepped, besides `step`."""
    SLOTS: ClassVar[Mapping[str, str]] = {}
    """Option -> the state tensor that it needs if it is set.

    Only for classes that make this tensor in the first step of a parameter: they cannot go on from
    a state that was saved without it.
    """

    RULES: ClassVar[tuple[str, ...]] = ()
    """Options of a group that `_resolve` reads beside the names."""
    NEEDS_FULL_TENSORS: ClassVar[bool] = False
    """Whether its update needs the shape of a tensor, so that FSDP1's flat pieces are refused."""
    TAKES_SHARDS: ClassVar[bool] = True
    """Whether it steps sharded parameters (DTensors) as one process steps the full tensors."""

    _lr_driven_by: str | None
    """Name of the schedule that writes the groups' lr; set by whoever drives it."""
    _undecayed: Set[str] = frozenset()
    """Names of parameters that an option exempts from decay; looked up in `_resolve`."""
    _lr_forced_to_zero: bool = False
    """Whether somebody set an lr that is a function of the step to 0 for this step."""
    _counts_without_flag: bool = False
    """Whether the step under way is counted without reading `found_inf`."""

    def __init_subclass__(cls, **keywords: object) -> None:
        """Read the checkers of options from the schema of a class."""
        super().__init_subclass__(**keywords)
        if "OPTIONS" in cls.__dict__ and cls.OPTIONS is not None:
            cls.CHECKS = {"lr": not_negative, **checks(cls.OPTIONS), **cls.CHECKS}

    def __new__(cls, *_args: Any, **options: Any) -> Self:
        """Refuse an unknown keyword, with the name here of one of another package.

        Raises:
            TypeError: Naming it.
        """
        parameters = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            refuse_unknown_keys(options, parameters.keys() - {"self"}, cls.__name__)
        return super().__new__(cls)

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        """Check the options, then let torch build the groups.

        Args:
            params: Parameters, (name, parameter) pairs, or groups.
            defaults: Options by name. Over one of torch's optimizers they are its keywords.
        """
        self._lr_driven_by = None
        self._built = False
        options = dict(defaults)
        self._base_functions = self._check_options(options)
        self._apart = {key: options.pop(key) for key in self.APART if key in options}
        entries = list_params(params)
        self._grouped = isinstance(entries[0], dict)
        self._has_names = has_names(entries)
        torch_keywords = inspect.signature(super().__init__).parameters
        if "defaults" in torch_keywords:
            super().__init__(entries, options)
        else:
            beside_torch = {
                key: options.pop(key) for key in self.OPTIMIZER_WIDE - torch_keywords.keys()
            }
            super().__init__(entries, **options)
            for target in (self.defaults, *self.param_groups):
                target.update(beside_torch)
        self._register_hooks()
        self._built = True
        self._refresh_groups()

    def _register_hooks(self) -> None:
        """Register the hooks around `step`, unless they are registered already."""
        if _before_step not in self._optimizer_step_pre_hooks.values():
            self.register_step_pre_hook(_before_step)
            self.register_step_post_hook(_after_step)

    def _resolve(self) -> None:
        """Apply the options of a class to the names of parameters; a hook for subclasses."""

    def _refresh_groups(self) -> None:
        """Check the groups, and apply their options to the names of parameters again.

        Called after a change of the groups: by the constructor, `add_param_group`, `__setstate__`,
        or, noticed before a step, by a host such as accelerate. Names of functions in a loaded
        group become functions again.

        Raises:
            ValueError: A sharded parameter or one of FSDP1 that the class cannot step, a function
                that the optimizer was not given, or whatever `_resolve` refuses.
        """
        for group in self.param_groups:
            functions = group.get("functions")
            if isinstance(functions, list):  # out of a state dict, which holds the options' names
                group["functions"] = self._restore_functions(functions, group)
        self._refuse_parts_of_tensors(list(self.named_params().items()))
        self._resolve()
        # For `_refresh_changed_groups`, which compares with it before each step.
        self._seen_group_entries = self._group_entries()

    def _group_entries(self) -> list[object]:
        """List the replaceable entries of all groups: tensors, names and `RULES`."""
        entries: list[object] = []
        for group in self.param_groups:
            entries += map(group.get, ("params", "param_names", *self.RULES))
        return entries

    def _refresh_changed_groups(self) -> None:
        """Call `_refresh_groups` if a host has replaced tensors, names or rules of a group.

        Hosts are programs such as accelerate or FSDP, and rules the options in `RULES`. Runs before
        every step, so it compares identities and no values.
        """
        if not are_same_objects(self._group_entries(), self._seen_group_entries):
            self._refresh_groups()

    def _restore_functions(self, keys: Sequence[str], group: Group) -> dict[str, StepFunction]:
        """Restore the functions of the step of a group loaded from a state dict.

        A state dict holds only the names of these options, so the functions are those that this
        optimizer was built with.

        Args:
            keys: Options of the group that were functions.
            group: The loaded group, with their last values.

        Raises:
            ValueError: This optimizer was built without a function for one of them.
        """
        for key in keys:
            if key not in self._base_functions:
                raise ValueError(
                    f"{key} of a parameter group was a function of the step, which no state dict"
                    f" holds: give {type(self).__name__} the function as {key}, or the group"
                    " a number."
                )
        return {key: StepFunction(self._base_functions[key], group[key]) for key in keys}

    # -- groups
    # ----------------------------------------------------------------------------------------------

    def _check_options(self, options: dict[str, Any]) -> dict[str, Callable[[int], float]]:
        """Check options in place, and return the functions of the step among them.

        In `options` a function is replaced by its value at step 0, and then each value by the
        result of its checker in `CHECKS`, such as a tuple for a list.

        Raises:
            TypeError: For a value of a wrong type.
            ValueError: For a value out of range.
        """
        functions: dict[str, Callable[[int], float]] = {}
        for key in SCHEDULABLE:
            if callable(options.get(key)):
                functions[key] = options[key]
                options[key] = functions[key](0)
        for key, check in self.CHECKS.items():
            if key in options:
                options[key] = check(key, options[key])
        return functions

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; it may override every hyper-parameter, `lr` absolutely or by `lr_scale`.

        Raises:
            TypeError: For an unknown key, or a value of a wrong type.
            ValueError: For a value out of range, a parameter or name that is there already, a mix
                of named and unnamed groups, or a sharded parameter where the class takes none.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group is a dict, got {type(param_group).__name__}.")
        # 1. Check the options, in a copy of the group whose `lr` is filled in.
        allowed = self.defaults.keys() - self.OPTIMIZER_WIDE
        group = fold_lr_scale(
            param_group, base_lr=self.defaults["lr"], allowed=allowed, owner=type(self).__name__
        )
        functions = self._check_options(group)
        # A group that does not set an option takes over the optimizer's function for it.
        for key, function in self._base_functions.items():
            if key not in param_group:
                functions[key] = function
        # 2. Check the parameters.
        group["params"] = list_params(group["params"], may_be_empty=True)
        pairs = name_param_pairs(group["params"], len(self.param_groups))
        refuse_repeats([*self.named_params().items(), *pairs])
        self._refuse_parts_of_tensors(pairs)
        # 3. Append the group; it counts steps from where the others are.
        if not group["params"] and self._has_names:
            group["param_names"] = []
        group.setdefault("step", self.param_groups[0]["step"] if self.param_groups else 0)
        super().add_param_group(group)
        added = self.param_groups[-1]
        for key, function in functions.items():
            added.setdefault("functions", {})[key] = StepFunction(function, added.get(key, 0.0))
        if self._built:
            self._refresh_groups()

    def _refuse_parts_of_tensors(self, named: Sequence[tuple[str, Any]]) -> None:
        """Refuse shards and FSDP1's flat pieces, if the class cannot step these.

        Raises:
            ValueError: Naming the first such parameter.
        """
        tensors = [(name, param) for name, param in named if isinstance(param, Tensor)]
        if not self.TAKES_SHARDS:
            for name, param in tensors:
                if sharding_of(param).groups:
                    raise ValueError(
                        f"parameter {name!r} is sharded, and {type(self).__name__} cannot step"
                        " sharded parameters. Use another optimizer, such as lamb or adamw, or do"
                        " not shard."
                    )
        if self.NEEDS_FULL_TENSORS:
            refuse_flat_pieces(tensors, type(self).__name__)

    def named_params(self) -> dict[str, Tensor]:
        """Map each name to its parameter, in the order of the groups.

        A parameter without a name is called by its position: `group 0 parameter 1`.
        """
        params: dict[str, Tensor] = {}
        for index, group in enumerate(self.param_groups):
            params.update(zip(names_of(group, index), group["params"], strict=True))
        return params

    def decays(self, name: str) -> bool:
        """Tell whether weight decay applies to a parameter, by its name alone.

        False if an option such as `exclude_from_weight_decay` exempts it. True for any other name,
        even if the `weight_decay` of its group is 0.

        Args:
            name: Name of the parameter.
        """
        return name not in self._undecayed

    def _find_excluded_names(
        self, option: str, *, must_match: bool, optional: Sequence[str] = ()
    ) -> set[str]:
        """Collect the names of parameters excluded by an option with a list of patterns.

        Each group is searched with its own patterns. A pattern of a list that several groups share
        must match a name in one of them. With ["bias"] in the groups of `fc.weight` and `fc.bias`
        the result is {"fc.bias"}.

        Args:
            option: Key of the pattern list in the groups, such as `exclude_from_weight_decay`.
            must_match: Refuse a pattern that matches nothing.
            optional: A pattern list that is not refused: its patterns may match nothing, and the
                parameters may have no names.

        Raises:
            ValueError: For patterns over unnamed parameters, or one that matches nothing.
        """
        # 1. Collect the names to search with each list of patterns.
        excluded: set[str] = set()
        names_by_patterns: dict[tuple[str, ...], list[str]] = {}
        for group in self.param_groups:
            patterns = tuple(group[option] or ())
            if "param_names" in group:
                names_by_patterns.setdefault(patterns, []).extend(group["param_names"])
            elif patterns and patterns != tuple(optional):
                raise ValueError(
                    f"{option}={list(patterns)!r}: the parameters have no names to search. "
                    "Pass model.named_parameters() instead of model.parameters()."
                )
        # 2. Search them; `match_names` refuses a pattern that must match and does not.
        for patterns, names in names_by_patterns.items():
            is_required = must_match and patterns != tuple(optional)
            excluded |= match_names(option, patterns, names, must_match=is_required)
        return excluded

    # -- steps that the device leaves out
    # ----------------------------------------------------------------------------------------------

    def skips_on_device(self) -> bool:
        """Tell whether all kernels of a step read `found_inf`, as `step_unless` needs.

        If so, a step with that flag changes no weight and no state tensor, and the host need not
        wait to read it.
        """
        return False

    def step_unless(self, found_inf: Tensor) -> None:
        """Take a step, but change no weight and no state tensor if a flag on the device is set.

        The host does not read the flag, so the step counts in any case: if it was set, the caller
        restores the counters by `set_counters`.

        Args:
            found_inf: 1.0 if nothing may change, else 0.0; shape (), float32, on the device.
        """
        # torch's fused kernels read an attribute of this name, which torch.amp.GradScaler sets.
        flagged: Any = self
        flagged.found_inf = found_inf
        self._counts_without_flag = True
        try:
            self.step()
        finally:
            self._counts_without_flag = False
            del flagged.found_inf

    def counters(self) -> Any:
        """Return the step count of each group, for `set_counters`."""
        return [group["step"] for group in self.param_groups]

    def set_counters(self, counters: Any) -> None:
        """Restore counters from the result of `counters`."""
        for group, step in zip(self.param_groups, counters, strict=True):
            group["step"] = step

    # -- learning rate
    # ----------------------------------------------------------------------------------------------

    def lr_driver(self) -> str | None:
        """Describe the driver of the learning rate; None without one, so `set_lr` may set it.

        A scheduler is named first, then a function of the step.
        """
        scheduler = self._lr_scheduler()
        if scheduler is not None:
            return scheduler
        if any("lr" in group.get("functions", ()) for group in self.param_groups):
            return "a function of the step, given as lr"
        return None

    def _lr_scheduler(self) -> str | None:
        """Name the scheduler driving the lr; None without one.

        A scheduler of optrun sets `_lr_driven_by`; one of torch is recognised because it wraps
        `step`.
        """
        if self._lr_driven_by is not None:
            return self._lr_driven_by
        if hasattr(self.step, "_wrapped_by_lr_sched"):
            return "a torch lr scheduler"
        return None

    def get_lr(self) -> float:
        """Return the base learning rate in force now, before any group's `lr_scale`.

        It is read from a group of scale 1, else computed from the first group with another scale.
        If all groups have an absolute lr or a scale of 0, it is the lr of the constructor or of the
        last `set_lr`.
        """
        scaled = [group for group in self.param_groups if group.get("lr_ratio")]
        for group in scaled:
            if group["lr_ratio"] == 1.0:
                return float(group["lr"])
        if scaled:
            return float(scaled[0]["lr"] / scaled[0]["lr_ratio"])
        return float(self.defaults["lr"])

    def set_lr(self, value: float) -> None:
        """Set the base learning rate from the next step on.

        Each group gets it times its `lr_scale`, which the group holds as `lr_ratio`. A group with
        an absolute `lr` has no ratio and keeps its lr. `base_lr`, by which "corrected" decay
        scales, becomes the unscaled value.

        Raises:
            RuntimeError: A function of the step or a scheduler drives the learning rate.
                `ReduceLROnPlateau` and timm's schedulers cannot be recognised: what they write
                later wins.
            TypeError: For anything but a number.
            ValueError: For a number that is negative or not finite.
        """
        driver = self.lr_driver()
        if driver is not None:
            raise RuntimeError(
                f"set_lr({value!r}) refused: {driver} drives the learning rate and would overwrite"
                " it. Change the schedule, or train with scheduler=constant."
            )
        base = not_negative("lr", value)
        self.defaults["lr"] = base
        for group in self.param_groups:
            if "lr_ratio" in group:
                group["lr"] = base * group["lr_ratio"]
            if "base_lr" in group:
                group["base_lr"] = base

    # -- configuration
    # ----------------------------------------------------------------------------------------------

    def get_config(self) -> PlainDict:
        """Return the keywords of the constructor, except `params`, with the values in force.

        Values are those that YAML and JSON can hold: a tuple becomes a list. A function stays a
        function. Overrides of single groups are not included.
        """
        values = {**self._apart, **self.defaults, **self._base_functions}
        config: PlainDict = {}
        for key in _keywords(type(self)):
            if key in values:
                value = values[key]
                config[key] = list(value) if isinstance(value, tuple) else value
        return config

    @classmethod
    def from_config(cls, params: Params, config: Options) -> Self:
        """Build from the result of `get_config`.

        Raises:
            TypeError: For a key that is no keyword of the constructor, with the nearest one.
        """
        return cls(params, **config)  # the constructor raises, and names the nearest keyword

    # -- state
    # ----------------------------------------------------------------------------------------------

    def state_keys(self, param: Tensor, group: Group) -> set[str]:
        """Return the keys of a parameter's state after a step, except `step`, `master_weight`."""
        del param
        return {*self.STATE, *(slot for option, slot in self.SLOTS.items() if group[option])}

    def state_dict(self) -> StateDict:
        """Return torch's state dict, with the name of the class under `optimizer`.

        A group lists the options that are functions by name only, under `functions`.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if "functions" in group:
                group["functions"] = sorted(group["functions"])
        return {**saved, "optimizer": type(self).__name__}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load by parameter name, keep every dtype; without names by position, as torch does.

        Args:
            state_dict: From `state_dict()`, or from torch's `get_optimizer_state_dict`.

        Raises:
            ValueError: Another optimizer's state; or with the first parameter that is missing,
                extra or of another shape.
        """
        # As torch does: a hook may return another state dict, or None.
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        self._refuse_other_formula(state_dict)
        state, groups = load_by_name(self, state_dict)
        for group in groups:
            functions = group.get("functions")
            if isinstance(functions, dict):
                # Otherwise the loaded value would be taken for one that a user has set.
                for key, step_function in functions.items():
                    step_function.written = group[key]
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _refuse_other_formula(self, state_dict: PlainMapping) -> None:
        """Refuse a torch optimizer's state with another `maximize` or `decoupled_weight_decay`.

        torch's Adam and AdamW have the same state; only their groups tell which formula they had.
        Not checked: a state of optrun, which names its optimizer, and an option that the
        constructor takes, which is loaded like any other.

        Raises:
            ValueError: Naming the option and both values.
        """
        if "optimizer" in state_dict:
            return
        # What the formula of this class has; torch's classes have it in their defaults.
        fixed_values = {"maximize": False, **self.defaults}
        for key in ("maximize", "decoupled_weight_decay"):
            if key not in fixed_values or key in _keywords(type(self)):  # an option
                continue
            fixed = fixed_values[key]
            for group in state_dict.get("param_groups", ()):
                if "optimizer" not in group and group.get(key, fixed) != fixed:
                    raise ValueError(
                        f"the state was saved with {key}={group[key]}: {type(self).__name__} has"
                        f" {fixed}."
                    )

    def __getstate__(self) -> StateDict:
        """Return the attributes to pickle: torch's entries, and those of this class."""
        keys = ("_lr_driven_by", "_base_functions", "_built", "_apart", "_grouped", "_has_names")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in keys}}

    def __setstate__(self, state: State) -> None:
        """Restore as torch does, register the hooks, and look at the restored groups."""
        super().__setstate__(state)
        self._register_hooks()
        self._refresh_groups()

    def _set_functions(self) -> None:
        """Write the values of functions of the step into the groups.

        If other code has set the lr to 0 since the last step, it stays 0 for this step, which
        `_after_step` does not count: torch's distributed checkpoint creates state by such a step.
        It then puts the value from before back, from which the function goes on.

        Raises:
            RuntimeError: Other code has set another value, or a scheduler also drives the lr.
        """
        driven = [group for group in self.param_groups if group.get("functions")]
        if driven:
            self._refuse_two_drivers()
        self._lr_forced_to_zero = False
        for group in driven:
            for key, step_function in group["functions"].items():
                # `written` is what this method wrote before the last step: nobody has changed it.
                if group[key] == step_function.written:
                    self._write_value(group, key, step_function)
                elif key == "lr" and group[key] == 0:
                    self._lr_forced_to_zero = True
                else:
                    raise RuntimeError(
                        f"{key} of a parameter group was set to {group[key]!r}, and it is a"
                        " function of the step, which would overwrite that: keep one of the two."
                    )

    def _refuse_two_drivers(self) -> None:
        """Refuse an lr given as a function of the step if a scheduler drives it, too.

        Raises:
            RuntimeError: Naming the scheduler.
        """
        scheduler = self._lr_scheduler()
        if scheduler is None:
            return
        if any("lr" in group.get("functions", ()) for group in self.param_groups):
            raise RuntimeError(
                f"lr is a function of the step and {scheduler} drives it too: keep one of the two."
            )

    def _write_value(self, group: ParamGroup, key: str, step_function: StepFunction) -> None:
        """Write the value of a function at the group's step into the group.

        `lr` is multiplied by the group's `lr_ratio`.

        Raises:
            TypeError: The function returned no number.
            ValueError: The number is out of range.
        """
        check = self.CHECKS.get(key, finite)
        value = check(key, step_function.function(group["step"]))
        if key == "lr":
            value *= group.get("lr_ratio", 1.0)
        group[key] = value
        step_function.written = value


def evaluate_closure(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of `step` with gradients enabled; return its loss, None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _keywords(cls: type[Optimizer]) -> list[str]:
    """List the keywords of a constructor besides `params`."""
    names = inspect.signature(cls.__init__).parameters
    return [name for name in names if name not in ("self", "params")]


def _before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Check groups replaced by a host, and set functions of the step; a hook of torch."""
    assert isinstance(optimizer, NamedOptimizer)
    optimizer._refresh_changed_groups()
    optimizer._set_functions()


def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Count a step in every group, unless the step changed nothing; a hook of torch.

    A step changes nothing if `found_inf` is set, if an lr that is a function was set to 0, or if no
    parameter has a gradient. Within `step_unless` the flag is not read: the step counts, and the
    caller restores the counters.
    """
    assert isinstance(optimizer, NamedOptimizer)
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is not None and not optimizer._counts_without_flag and found_inf.item():
        return  # torch.amp.GradScaler lets a fused step run, which then changes nothing
    if optimizer._lr_forced_to_zero:
        return
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    if any(param.grad is not None for param in params):
        for group in optimizer.param_groups:
            group["step"] += 1
