"""Several optimizers that are one to the outside.

Muon with its companion, or a rule that names another optimizer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from optrun.base.options import Options, ParamGroup, State, StateDict
from optrun.base.plain import PlainDict
from optrun.config.schema.ranges import not_negative
from optrun.optimizer.base import NamedOptimizer, Numeric, Params
from optrun.optimizer.classes import member_class
from optrun.optimizer.groups import given_names, listed_params, refuse_repeats


class Composite(NamedOptimizer):
    """Groups go to the optimizer their key `optimizer` names; state, lr and names are one.

    The groups stand in the order given, whoever steps them, and the members share one state: a
    scheduler, a checkpoint and `set_lr` see a single torch optimizer.

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
            member_class(name)
        self.members: dict[str, NamedOptimizer] = {}
        self._options = {name: dict(options) for name, options in members.items()}
        self._main = next(iter(members))
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        super().__init__(params, {"lr": lr})
        self._build_members()

    def _register_hooks(self) -> None:
        """Register nothing.

        Every member counts its own steps and sets its own functions of them.
        """

    @property
    def _lr_driven_by(self) -> str | None:
        return self._driver

    @_lr_driven_by.setter
    def _lr_driven_by(self, value: str | None) -> None:
        self._driver = value
        for member in self.members.values():
            member._lr_driven_by = value

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Hand a group to its member.

        Raises:
            TypeError: For anything but a dict.
            ValueError: For an optimizer that does not exist, or a name that is taken.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError("Composite takes group dicts with the key 'params'.")
        rest = {**param_group, "params": listed_params(param_group["params"], may_be_empty=True)}
        name = rest.pop("optimizer", self._main)
        if not self._built:
            self._waiting.append((name, rest))
            return
        refuse_repeats(
            [*self.named_params().items(), *given_names(rest["params"], len(self.param_groups))]
        )
        if name in self.members:
            self.members[name].add_param_group(rest)
        else:
            done = max(group["step"] for group in self.param_groups)
            self._add_member(name, [{"step": done, **rest}])
        self._take(name, -1)
        self._offer_momentum()

    def _build_members(self) -> None:
        """Build each member with all of its groups at once.

        Patterns and a `name_dict` see all names.
        """
        pairs = [
            given_names(group["params"], index) for index, (_, group) in enumerate(self._waiting)
        ]
        refuse_repeats(chain.from_iterable(pairs))
        groups: dict[str, list[ParamGroup]] = {}
        for name, group in self._waiting:
            groups.setdefault(name, []).append(group)
        for name, groups_of_member in groups.items():
            self._add_member(name, groups_of_member)
        taken_groups = dict.fromkeys(groups, 0)
        for name, _ in self._waiting:
            self._take(name, taken_groups[name])
            taken_groups[name] += 1
        self._waiting = []
        self._offer_momentum()

    def _offer_momentum(self) -> None:
        """Offer momentum in the defaults, where torch's OneCycleLR and CyclicLR look for it.

        They write `betas` of every group, or `momentum` of every group; with members of both kinds
        that is `momentum`, and `step` hands it on.
        """
        for key in ("betas", "momentum"):
            self.defaults.pop(key, None)
        if all("betas" in group for group in self.param_groups):
            self.defaults["betas"] = self.param_groups[0]["betas"]
        elif any("betas" in group or "momentum" in group for group in self.param_groups):
            self.defaults["momentum"] = None

    def _hand_on_momentum(self) -> None:
        for group in self.param_groups:
            if "momentum" in group and "betas" in self.members[group["optimizer"]].defaults:
                group["betas"] = (group["momentum"], *group["betas"][1:])

    def _add_member(self, name: str, groups: list[ParamGroup]) -> None:
        options: dict[str, Any] = {"lr": self._base_functions.get("lr", self.defaults["lr"])}
        member = member_class(name)(groups, **{**options, **self._options.get(name, {})})
        member.state = self.state
        member._lr_driven_by = self._lr_driven_by
        self.members[name] = member

    def _take(self, name: str, place: int) -> None:
        """Take a member's next group at its place among all groups."""
        member = self.members[name]
        group = member.param_groups[place]
        group["optimizer"] = name
        self.param_groups.append(group)
        self._handed_out = list(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every member; return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_two_drivers()
        self._share_with_members()
        self._hand_on_momentum()
        for member in self.members.values():
            member.step()
        return loss

    def _share_with_members(self) -> None:
        """Give the members state and groups, since a host may have replaced them."""
        now = self.param_groups
        before = self._handed_out
        exchanged = len(now) != len(before) or not all(map(operator.is_, now, before))
        for name, member in self.members.items():
            member.state = self.state
            if exchanged:
                member.param_groups = [group for group in now if group["optimizer"] == name]
        self._handed_out = list(now)

    def set_lr(self, value: float) -> None:
        """Set the learning rate as in `NamedOptimizer`, for every member."""
        super().set_lr(value)
        for member in self.members.values():
            member.defaults["lr"] = not_negative("lr", value)

    @property
    def trust_ratios(self) -> dict[str, float]:
        """Trust ratios of all members, by parameter name."""
        ratios: dict[str, float] = {}
        for member in self.members.values():
            ratios.update(getattr(member, "trust_ratios", {}))
        return ratios

    def get_config(self) -> PlainDict:
        """Return `lr` and, by member, the keywords it was built with."""
        config = super().get_config()
        members: dict[str, PlainDict] = {}
        for name, member in self.members.items():
            members[name] = member.get_config()
            del members[name]["lr"]
        config["members"] = members
        return config

    def __getstate__(self) -> StateDict:
        """As in `NamedOptimizer`, with the members."""
        keys = ("members", "_options", "_main", "_driver")
        state = super().__getstate__()
        del state["_lr_driven_by"]
        return {**state, **{key: self.__dict__[key] for key in keys}}

    def __setstate__(self, state: State) -> None:
        """As in `NamedOptimizer`; the members share state and groups."""
        super().__setstate__(state)
        for name, member in self.members.items():
            groups = [group for group in self.param_groups if group["optimizer"] == name]
            member.__setstate__({"state": self.state, "param_groups": groups})
        self._handed_out = list(self.param_groups)
