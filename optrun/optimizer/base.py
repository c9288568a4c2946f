"""The base class of every optimizer here: all that is not the update itself.

Parameter names, groups with `lr_scale`, options checked by type and range, lr and weight decay as
functions of the step, `set_lr`, `get_config`, and state that is loaded by name.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, ClassVar, Self, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from optrun.base.options import Group, Options, ParamGroup, State, StateDict
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.schema.optimizer_base import OptimizerConfig
from optrun.config.schema.ranges import Check, checks, finite, not_negative
from optrun.optimizer.groups import (
    StepFunction,
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
from optrun.optimizer.patterns import matching
from optrun.optimizer.restore import load_by_name

Params: TypeAlias = Any
"""Parameters, (name, parameter) pairs or group dicts, in any iterable."""

Numeric: TypeAlias = float | Callable[[int], float]
"""A number, or a function from the step counted from 0 to one."""

NO_KEYWORDS = frozenset({"name", "default_lr", "dialect"})
"""Fields of a schema that are no keywords of its class."""

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
            if isinstance(functions, list):  # a group out of a state dict, which holds their names
                group["functions"] = self._functions_of(functions, group)
        pairs = list(self.named_params().items())
        if not self.TAKES_SHARDS:
            self._refuse_shards(pairs)
        if self.NEEDS_FULL_TENSORS:
            refuse_flat_pieces(pairs, type(self).__name__)
        self._resolve()
        self._seen_group_entries = self._group_entries()

    def _group_entries(self) -> list[object]:
        """List the replaceable entries of all groups: tensors, names and `RULES`."""
        entries: list[object] = []
        for group in self.param_groups:
            entries += map(group.get, ("params", "param_names", *self.RULES))
        return entries

    def _refresh_changed_groups(self) -> None:
        """Call `_refresh_groups` if a host has replaced tensors, names or rules of a group.

        Runs before every step, so it compares identities and no values.
        """
        now = self._group_entries()
        before = self._seen_group_entries
        if len(now) != len(before) or not all(map(operator.is_, now, before)):
            self._refresh_groups()

    def _functions_of(self, options: Sequence[str], group: Group) -> dict[str, StepFunction]:
        """Find the functions of a loaded group by the names of its options.

        A state dict holds no function, so the optimizer's own ones are taken.

        Raises:
            ValueError: The optimizer was not given such a function itself.
        """
        for key in options:
            if key not in self._base_functions:
                raise ValueError(
                    f"{key} of a parameter group was a function of the step, which no state dict"
                    f" holds: give {type(self).__name__} the function as {key}, or the group"
                    " a number."
                )
        return {key: StepFunction(self._base_functions[key], group[key]) for key in options}

    # -- groups
    # ----------------------------------------------------------------------------------------------

    def _check_options(self, options: dict[str, Any]) -> dict[str, Callable[[int], float]]:
        """Check options by `CHECKS`, and return the functions of the step among them.

        Changes `options`: a function is replaced by its value at step 0, and each value by what its
        checker returns for it, such as a tuple for a list.

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
        allowed = self.defaults.keys() - self.OPTIMIZER_WIDE
        group = fold_lr_scale(
            param_group, base_lr=self.defaults["lr"], allowed=allowed, owner=type(self).__name__
        )
        functions = self._check_options(group)
        # A group without a value of its own takes over the optimizer's function.
        for key, function in self._base_functions.items():
            if key not in param_group and key not in functions:
                functions[key] = function
        group["params"] = list_params(group["params"], may_be_empty=True)
        pairs = name_param_pairs(group["params"], len(self.param_groups))
        refuse_repeats([*self.named_params().items(), *pairs])
        if not self.TAKES_SHARDS:
            self._refuse_shards(pairs)
        if self.NEEDS_FULL_TENSORS:
            of_tensors = [(name, param) for name, param in pairs if isinstance(param, Tensor)]
            refuse_flat_pieces(of_tensors, type(self).__name__)
        if not group["params"] and self._has_names:
            group["param_names"] = []
        group.setdefault("step", self.param_groups[0]["step"] if self.param_groups else 0)
        super().add_param_group(group)
        added = self.param_groups[-1]
        for key, function in functions.items():
            added.setdefault("functions", {})[key] = StepFunction(function, added.get(key, 0.0))
        if self._built:
            self._refresh_groups()

    def _refuse_shards(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Refuse the first parameter sharded over several processes, with a ValueError."""
        for name, param in named:
            if isinstance(param, Tensor) and sharding_of(param).groups:
                raise ValueError(
                    f"parameter {name!r} is sharded, and {type(self).__name__} cannot step sharded"
                    " parameters. Use another optimizer, such as lamb or adamw, or do not shard."
                )

    def named_params(self) -> dict[str, Tensor]:
        """Map each name to its parameter, in the order of the groups.

        A parameter without a name is called by its position: `group 0 parameter 1`.
        """
        params: dict[str, Tensor] = {}
        for index, group in enumerate(self.param_groups):
            params.update(zip(names_of(group, index), group["params"], strict=True))
        return params

    def decays(self, name: str) -> bool:
        """Tell whether an option such as `exclude_from_weight_decay` leaves a parameter its decay.

        The coefficient of its group may still be 0. True for a name that is not known.

        Args:
            name: Name of the parameter.
        """
        return name not in self._undecayed

    def _excluded(self, option: str, *, must_match: bool, exempt: Sequence[str] = ()) -> set[str]:
        """Collect the names of parameters excluded by an option with a list of patterns.

        Each group is searched with the patterns that stand in it. A list that several groups share
        has to match somewhere in one of them.

        Args:
            option: Key of the pattern list in the groups and the defaults.
            must_match: Refuse a pattern that matches nothing.
            exempt: A pattern list that may match nothing all the same.

        Raises:
            ValueError: For patterns over unnamed parameters, or one that matches nothing.
        """
        excluded: set[str] = set()
        pools: dict[tuple[str, ...], list[str]] = {}
        for group in self.param_groups:
            texts = tuple(group[option] or ())
            if not texts:
                continue
            if "param_names" not in group:
                if texts == tuple(exempt):
                    continue
                raise ValueError(
                    f"{option}={list(texts)!r}: the parameters have no names to search. "
                    "Pass model.named_parameters() instead of model.parameters()."
                )
            pools.setdefault(texts, []).extend(group["param_names"])
        for texts, names in pools.items():
            required = must_match and texts != tuple(exempt)
            excluded |= matching(option, texts, names, must_match=required)
        return excluded

    # -- steps that the device leaves out
    # ----------------------------------------------------------------------------------------------

    def skips_on_device(self) -> bool:
        """Tell whether all kernels of a step read `found_inf`, as `step_unless` needs."""
        return False

    def step_unless(self, found_inf: Tensor) -> None:
        """Take a step that changes no weight and no state tensor if a flag on the device is set.

        The host does not read the flag, so the step counts in any case: if it was set, the caller
        restores the counters by `set_counters`.

        Args:
            found_inf: 1.0 if nothing may change, else 0.0; shape (), float32, on the device.
        """
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
        """Describe the driver of the learning rate; None if `set_lr` may set it.

        A scheduler is named before a function of the step.
        """
        scheduler = self._lr_scheduler()
        if scheduler is not None:
            return scheduler
        if any("lr" in group.get("functions", ()) for group in self.param_groups):
            return "a function of the step, given as lr"
        return None

    def _lr_scheduler(self) -> str | None:
        """Name the scheduler of the lr; None without one.

        One of optrun's has its name; one of torch's is noticed because it wraps `step`.
        """
        if self._lr_driven_by is not None:
            return self._lr_driven_by
        if hasattr(self.step, "_wrapped_by_lr_sched"):
            return "a torch lr scheduler"
        return None

    def get_lr(self) -> float:
        """Return the base learning rate in force now, before any group's `lr_scale`.

        It is computed from a group that follows the base, preferably one of scale 1. If all groups
        have an absolute lr or a scale of 0, it is that of the constructor or of `set_lr`.
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

        Groups follow by their `lr_scale`, absolute ones stay.

        Raises:
            RuntimeError: While a function of the step or a scheduler that wraps `step`, as torch's
                do, drives the learning rate. `ReduceLROnPlateau` and timm's schedulers leave no
                trace: what they write later wins.
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
        """Return the keywords of the constructor, besides `params`, with the values in force.

        Values are plain, so that YAML and JSON can hold them: a tuple becomes a list. Only a
        function stays a function. Overrides of single groups are not included.
        """
        config: PlainDict = {}
        for key in _keywords(type(self)):
            if key in self._base_functions:
                config[key] = self._base_functions[key]
            elif key in self.defaults or key in self._apart:
                value = self.defaults.get(key, self._apart.get(key))
                config[key] = list(value) if isinstance(value, tuple) else value
        return config

    @classmethod
    def from_config(cls, params: Params, config: Options) -> Self:
        """Build from the result of `get_config`.

        Raises:
            TypeError: For a key that is no keyword of the constructor, with the nearest one.
        """
        return cls(params, **config)

    # -- state
    # ----------------------------------------------------------------------------------------------

    def state_keys(self, param: Tensor, group: Group) -> set[str]:
        """List the keys of a parameter's state after a step, besides `step` and `master_weight`."""
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
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        self._refuse_other_formula(state_dict)
        state, groups = load_by_name(self, state_dict)
        for group in groups:
            functions = group.get("functions")
            if isinstance(functions, dict):
                for key, of_step in functions.items():
                    of_step.written = group[key]
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _refuse_other_formula(self, state_dict: PlainMapping) -> None:
        """Refuse a state of torch's with `maximize` or decoupled decay that this class lacks.

        A state of optrun, which names its optimizer, is not checked here. Nor is an option that
        the constructor takes: it is loaded like any other.
        """
        if "optimizer" in state_dict:
            return
        for key, fixed in (("maximize", False), ("decoupled_weight_decay", None)):
            value = self.defaults.get(key, fixed)
            if value is None or key in _keywords(type(self)):
                continue
            for group in state_dict.get("param_groups", ()):
                if "optimizer" not in group and group.get(key, value) != value:
                    raise ValueError(
                        f"the state was saved with {key}={group[key]}: {type(self).__name__} has"
                        f" {value}."
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

        A rate of 0 that somebody wrote since the last step holds for this step: torch's distributed
        checkpoint makes state by such a step.

        Raises:
            RuntimeError: Somebody wrote another value, or a scheduler drives the rate, too.
        """
        driven = [group for group in self.param_groups if group.get("functions")]
        if driven:
            self._refuse_two_drivers()
        self._lr_forced_to_zero = False
        for group in driven:
            for key, of_step in group["functions"].items():
                if group[key] == of_step.written:
                    self._write_value(group, key, of_step)
                elif key == "lr" and group[key] == 0:
                    self._lr_forced_to_zero = True
                else:
                    raise RuntimeError(
                        f"{key} of a parameter group was set to {group[key]!r}, and it is a"
                        " function of the step, which would overwrite that: keep one of the two."
                    )

    def _refuse_two_drivers(self) -> None:
        """Refuse an lr that is both a function of the step and driven by a scheduler."""
        scheduler = self._lr_scheduler()
        if scheduler is None:
            return
        if any("lr" in group.get("functions", ()) for group in self.param_groups):
            raise RuntimeError(
                f"lr is a function of the step and {scheduler} drives it too: keep one of the two."
            )

    def _write_value(self, group: ParamGroup, key: str, of_step: StepFunction) -> None:
        """Write the value of a function at the group's step into the group, `lr` times its scale.

        Raises:
            TypeError: The function returned no number.
            ValueError: The number is out of range.
        """
        value = self.CHECKS.get(key, finite)(key, of_step.function(group["step"]))
        group[key] = value * group.get("lr_ratio", 1.0) if key == "lr" else value
        of_step.written = group[key]


def _keywords(cls: type[Optimizer]) -> list[str]:
    """List the keywords of a constructor besides `params`."""
    names = inspect.signature(cls.__init__).parameters
    return [name for name in names if name not in ("self", "params")]


def _before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Look at replaced groups, and set functions of the step; a hook of torch."""
    assert isinstance(optimizer, NamedOptimizer)
    optimizer._refresh_changed_groups()
    optimizer._set_functions()


def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Count a step in every group, unless it changed nothing; a hook of torch.

    A step without any gradient, with an lr function held at 0, or with a set `found_inf` changes
    nothing. `step_unless` does not read the flag: its steps count, and its caller sets them back.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    counts_unread = getattr(optimizer, "_counts_without_flag", False)
    if found_inf is not None and not counts_unread and found_inf.item():
        return  # torch.amp.GradScaler lets a fused step run, which then changes nothing
    if getattr(optimizer, "_lr_forced_to_zero", False):
        return
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    if any(param.grad is not None for param in params):
        for group in optimizer.param_groups:
            group["step"] += 1
