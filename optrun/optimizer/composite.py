"""Several optimizers behind the interface of one.

Built for Muon, whose companion steps what is no hidden matrix, and for a rule of
`param_groups.rules` that names another optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from optrun.base.options import Options, ParamGroup, State, StateDict
from optrun.base.plain import PlainDict
from optrun.optimizer.base import NamedOptimizer, Numeric, Params, evaluate_closure
from optrun.optimizer.classes import class_of_member
from optrun.optimizer.groups import (
    are_same_objects,
    list_params,
    name_param_pairs,
    refuse_repeats,
)


class Composite(NamedOptimizer):
    """Step each parameter group by the optimizer in its key `optimizer`.

    The optimizers are its `members`. They share one state, one base lr and the dicts of the groups,
    which keep the order in which they were given: a scheduler, a checkpoint and `set_lr` see a
    single torch optimizer.

    Args:
        params: Group dicts, each with a key `optimizer`; without one it goes to the first member.
        lr: Base learning rate of all members.
        members: From names of optimizers to their keywords; a name that is not listed here may
            still be used by a group, with its class's defaults.

    Raises:
        TypeError: For parameters that are not groups.
        ValueError: For an optimizer that does not exist.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = Composite([{"params": [("weight", model.weight)]},
        ...                        {"params": [("bias", model.bias)], "optimizer": "sgd"}],
        ...                       lr=0.1, members={"lamb": {}})
        >>> [type(member).__name__ for member in optimizer.members.values()]
        ['Lamb', 'SGD']
    """

    def __init__(
        self, params: Params, lr: Numeric = 1e-3, members: Mapping[str, Options] | None = None
    ):
        if not members:
            raise ValueError("members: expected at least one optimizer by name, got none.")
        for name in members:
            class_of_member(name)
        self.members: dict[str, NamedOptimizer] = {}
        self._options = {name: dict(options) for name, options in members.items()}
        self._first_member = next(iter(members))
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        super().__init__(params, {"lr": lr})
        self._build_members()

    def _register_hooks(self) -> None:
        """Register no hooks: the members' hooks count steps and set functions of the step."""

    @property
    def _lr_driven_by(self) -> str | None:
        return self._driver

    @_lr_driven_by.setter
    def _lr_driven_by(self, value: str | None) -> None:
        self._driver = value
        for member in self.members.values():
            member._lr_driven_by = value

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group to the member named by its key `optimizer`, else to the first member.

        If there is no such member yet, it is built; its step count begins at that of the others.
        While the constructor runs, groups are only collected, and `_build_members` builds each
        member from all of its groups.

        Raises:
            TypeError: For anything but a dict with `params`.
            ValueError: For an optimizer that does not exist, or a name that is taken.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError("Composite takes group dicts with the key 'params'.")
        group = {**param_group, "params": list_params(param_group["params"], may_be_empty=True)}
        name = group.pop("optimizer", self._first_member)
        if not self._built:  # called by torch's constructor: `_build_members` follows
            self._waiting.append((name, group))
            return
        pairs = name_param_pairs(group["params"], len(self.param_groups))
        refuse_repeats([*self.named_params().items(), *pairs])
        # The member appends the group to its own groups, with all options filled in.
        if name in self.members:
            self.members[name].add_param_group(group)
        else:
            steps_done = max(member_group["step"] for member_group in self.param_groups)
            self._add_member(name, [{"step": steps_done, **group}])
        self._append_group(name, self.members[name].param_groups[-1])
        self._offer_momentum()

    def _build_members(self) -> None:
        """Build each member from all groups collected for it by the constructor.

        All at once, since its patterns and its `name_dict` are checked against all of its names.
        The composite keeps the groups in the order in which they were passed.
        """
        pairs = [
            name_param_pairs(group["params"], index)
            for index, (_, group) in enumerate(self._waiting)
        ]
        refuse_repeats(chain.from_iterable(pairs))
        groups_by_member: dict[str, list[ParamGroup]] = {}
        for name, group in self._waiting:
            groups_by_member.setdefault(name, []).append(group)
        for name, groups in groups_by_member.items():
            self._add_member(name, groups)
        # A member keeps the order of its groups, so its next one is that of the next waiting group.
        built_groups = {name: iter(self.members[name].param_groups) for name in groups_by_member}
        for name, _ in self._waiting:
            self._append_group(name, next(built_groups[name]))
        self._waiting = []
        self._offer_momentum()

    def _offer_momentum(self) -> None:
        """Set `betas` or `momentum` in the defaults, for torch's OneCycleLR and CyclicLR.

        These schedulers write `betas` of every group if the defaults have that key, else
        `momentum` of every group. The defaults get `betas` if all groups have it. Otherwise they
        get `momentum`, and `step` copies a momentum that was written into the first beta of groups
        with betas.
        """
        for key in ("betas", "momentum"):
            self.defaults.pop(key, None)
        if all("betas" in group for group in self.param_groups):
            self.defaults["betas"] = self.param_groups[0]["betas"]
        elif any("betas" in group or "momentum" in group for group in self.param_groups):
            self.defaults["momentum"] = None  # the schedulers only look whether the key is there

    def _copy_momentum_to_betas(self) -> None:
        """Set the first beta of groups into which a scheduler of torch wrote a momentum."""
        for group in self.param_groups:
            # The key stands in a group of a member with betas only if a scheduler wrote it.
            if "momentum" in group and "betas" in self.members[group["optimizer"]].defaults:
                group["betas"] = (group["momentum"], *group["betas"][1:])

    def _add_member(self, name: str, groups: list[ParamGroup]) -> None:
        """Build the member of a name over its groups; it shares the state of the composite.

        Args:
            name: Name of its optimizer, such as `adamw`.
            groups: The groups without the key `optimizer`; copied.
        """
        lr = self._base_functions.get("lr", self.defaults["lr"])
        options = {"lr": lr, **self._options.get(name, {})}
        member = class_of_member(name)(groups, **options)
        member.state = self.state
        member._lr_driven_by = self._lr_driven_by
        self.members[name] = member

    def _append_group(self, name: str, group: ParamGroup) -> None:
        """Append a member's group, the same dict, to the groups of the composite."""
        group["optimizer"] = name
        self.param_groups.append(group)
        self._shared_groups = list(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member, the optimizer of each kind of group.

        Returns:
            What `closure` returned, which is called once before the step; None without one.

        Raises:
            RuntimeError: The lr is a function of the step, and a scheduler drives it, too.
        """
        loss = evaluate_closure(closure)
        self._refuse_two_drivers()
        self._share_with_members()
        self._copy_momentum_to_betas()
        for member in self.members.values():
            member.step()
        return loss

    def _share_with_members(self) -> None:
        """Give the members the state and the groups of the composite before a step.

        Accelerate, FSDP and other hosts replace the state, the list of groups, or its dicts.
        """
        groups = self.param_groups
        were_replaced = not are_same_objects(groups, self._shared_groups)
        for name, member in self.members.items():
            member.state = self.state
            if were_replaced:
                member.param_groups = [group for group in groups if group["optimizer"] == name]
        self._shared_groups = list(groups)

    def set_lr(self, value: float) -> None:
        """Set the base learning rate of all members, see `NamedOptimizer.set_lr`."""
        super().set_lr(value)
        for member in self.members.values():
            member.defaults["lr"] = self.defaults["lr"]

    @property
    def trust_ratios(self) -> dict[str, float]:
        """Trust ratios of the last step by parameter name, of all members with trust ratios."""
        ratios: dict[str, float] = {}
        for member in self.members.values():
            ratios.update(getattr(member, "trust_ratios", {}))
        return ratios

    def get_config(self) -> PlainDict:
        """Return `lr`, and under `members` the keywords of each member but its `lr`."""
        members = {name: member.get_config() for name, member in self.members.items()}
        for config in members.values():
            del config["lr"]
        return {**super().get_config(), "members": members}

    def __getstate__(self) -> StateDict:
        """Return the attributes to pickle: as in `NamedOptimizer`, with the members."""
        keys = ("members", "_options", "_first_member", "_driver")
        state = super().__getstate__()
        del state["_lr_driven_by"]
        return {**state, **{key: self.__dict__[key] for key in keys}}

    def __setstate__(self, state: State) -> None:
        """Restore from `__getstate__`; the members share the restored state and groups."""
        super().__setstate__(state)
        for name, member in self.members.items():
            groups = [group for group in self.param_groups if group["optimizer"] == name]
            member.__setstate__({"state": self.state, "param_groups": groups})
        self._shared_groups = list(self.param_groups)
