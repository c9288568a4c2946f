"""Cases of optimizers that were written for torch.

Keywords by the name they have in their package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from optrun.optimizer import AdEMAMix, Lion, Mars, ScheduleFreeAdamW, Soap
from optrun.optimizer.base import NamedOptimizer
from tests.reference.reference_format import FormatError, fields
from tests.reference.reference_player import CASE, Player, named, parameters, tensors


@dataclass(frozen=True)
class Package:
    """How one class of a package is said here.

    Attributes:
        cls: Ours.
        keywords: Its keywords and their defaults there.
        slots: State tensors, which have the same names.
        renamed: From a keyword there to ours, where it is another.
        fixed: Keywords there whose value is what ours always does.
    """

    cls: type[NamedOptimizer]
    keywords: Mapping[str, Any]
    slots: tuple[str, ...]
    renamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Our keywords for keywords of the package."""
        return {
            name: value for key, value in given.items() for name in self.renamed.get(key, (key,))
        }


PACKAGES = {
    "lion_pytorch": Package(
        Lion, {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0}, ("exp_avg",)
    ),
    "pytorch_optimizer_ademamix": Package(
        AdEMAMix,
        {
            "lr": 1e-3,
            "betas": [0.9, 0.999, 0.9999],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "alpha": 5.0,
            "t_alpha_beta3": None,
        },
        ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
        renamed={"t_alpha_beta3": ("alpha_warmup_steps", "beta3_warmup_steps")},
        fixed={"weight_decouple": True},
    ),
    "pytorch_optimizer_soap": Package(
        Soap,
        {
            "lr": 3e-3,
            "betas": [0.95, 0.95],
            "shampoo_beta": None,
            "eps": 1e-8,
            "weight_decay": 0.01,
            "precondition_frequency": 10,
            "max_precondition_dim": 10000,
            "precondition_1d": False,
        },
        ("exp_avg",),
    ),
    "timm_mars": Package(
        Mars,
        {
            "lr": 3e-3,
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "gamma": 0.025,
            "optimize_1d": False,
            "betas_1d": [0.9, 0.99],
        },
        ("exp_avg", "exp_avg_sq", "last_grad"),
    ),
    "schedulefree_adamw": Package(
        ScheduleFreeAdamW,
        {
            "lr": 2.5e-3,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "r": 0.0,
            "weight_lr_power": 2.0,
        },
        ("z", "exp_avg_sq"),
    ),
}


def of_torch(
    where: str, raw: dict[str, Any], dtype: torch.dtype, foreach: bool, _driver: str
) -> Player:
    """A case of one of `PACKAGES`; an lr that changes is a function of the step."""
    package = PACKAGES[where.split()[0]]
    averaging = hasattr(package.cls, "eval")
    case = fields(
        where, raw, *CASE, covers=[], groups=None, **({"evaluated": None} if averaging else {})
    )
    config = vars(fields(f"{where} config", case.config, *package.fixed, **package.keywords))
    for key, value in package.fixed.items():
        if config.pop(key) != value:
            raise FormatError(f"{where} config: {key} has to be {value!r}.")
    params = tensors(parameters(where, case.params, dtype))
    groups = []
    for group in case.groups or [{"params": list(params)}]:
        given = dict(group)
        names = given.pop("params")
        for key in given:
            if key not in package.keywords:
                raise FormatError(f"{where} groups: unknown key {key!r}.")
        groups.append({"params": named(params, names), **package.options(given)})
    rates = case.lr
    config["lr"] = (
        config["lr"]
        if set(rates) == {config["lr"]}
        else lambda step: rates[min(step, len(rates) - 1)]
    )
    way = {"foreach": foreach} if "foreach" in package.cls.CHECKS else {}
    optimizer = package.cls(groups, **way, **package.options(config))  # type: ignore[call-arg]
    return Player(case, optimizer, params, config["lr"])
