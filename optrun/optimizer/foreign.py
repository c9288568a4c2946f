"""Optimizers of the pytorch-optimizer library, by their name there; an extra."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.options import Group, Options, ParamGroup
from optrun.config.schema.optimizer import SCHEMAS
from optrun.config.schema.optimizer_base import refuse_few_bits
from optrun.optimizer.groups import known_keys
from optrun.optimizer.rehearsal import (
    ALWAYS_READ,
    builder,
    refuse_group_keys,
    refuse_unread_keys,
    tried,
    without_no_decay,
)

LIBRARY = "pytorch_optimizer"

REFUSED: Mapping[str, tuple[str, str]] = {
    "adahessian": (
        "needs second derivatives of the loss (create_graph), which a step here does not compute",
        "soap",
    ),
    "sophiah": (
        "needs second derivatives of the loss (create_graph), which a step here does not compute",
        "soap",
    ),
    "bsam": (
        (
            "needs the loss again at weights it has moved (a closure), and a step here computes it"
            " once"
        ),
        "adabelief",
    ),
    "demo": (
        (
            "exchanges compressed momenta between processes itself, where the ranks of a run share"
            " gradients"
        ),
        "lion",
    ),
    "distributedmuon": (
        "divides the matrices between processes that it does not ask the run for",
        "muon",
    ),
    "lorarite": (
        "takes the two factors of each LoRA layer in pairs, which are not told apart here",
        "lamb",
    ),
    "muonclip": (
        "clips by the attention logits of each step, which it is not given here: it would be Muon",
        "muon",
    ),
    "spectralsphere": ("takes 2-D parameters alone", "muon"),
}
"""By lower-case name: why one is not offered, and what of the same library is."""

_IGNORED = "lr and the schedule of this run would be ignored"
WANTED: Mapping[str, tuple[str, Any, str]] = {
    "adafactor": ("relative_step", False, f"takes a learning rate of its own, {_IGNORED}"),
    "apollodqn": (
        "warmup_steps",
        0,
        f"warms up by itself from a learning rate of its own, {_IGNORED}",
    ),
    "pid": (
        "momentum",
        0.9,
        "without a momentum keeps neither integral nor derivative, and is plain SGD",
    ),
    "ranger21": ("disable_lr_scheduler", True, f"runs a schedule of its own, {_IGNORED}"),
}
"""A keyword without which one is not what its name says, its value (for a fraction: any above 0), and the reason."""

FLAGS: Mapping[str, str] = {
    "adago": "use_muon",
    "adamuon": "use_muon",
    "muon": "use_muon",
    "normuon": "use_muon",
    "adamwsn": "sn",
}
"""Key of a group that says whether it holds hidden matrices."""

PROJECTED: Mapping[str, Options] = {
    "apollo": {"rank": 256, "update_proj_gap": 200, "scale": 1.0, "projection_type": "std"},
    "fira": {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "projection_type": "std"},
    "galore": {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "projection_type": "std"},
}
"""Keys of the groups of matrices that are projected, with the values of the papers.

Without them nothing is.
"""

MARKED: Mapping[str, str] = {"adamc": "normalized"}
"""Key of a group without which the optimizer is another one, and which only the user can place."""

TAKES_LOSS = frozenset({"emofact", "emolynx", "emonavi"})
"""Those that follow the loss, and stand still in part where `step` is not told it."""

SWITCHES = frozenset({"adam_debias", "adanorm", "adanorm_r", "cautious", "stable_adamw", "use_gc"})
"""Keywords that a constructor takes without naming them; known by being read in the class."""

Divide = Callable[[Group], tuple[list[Any], list[Any]]]
"""A group's (name, parameter) pairs: hidden matrices, and the rest."""

_COMPANION = frozenset({"betas", "eps"})
"""What a group that is no hidden matrix of Muon's kin may set for its Adam."""


def library_class(name: str) -> Any:
    """Find the class behind `optimizer.name`, if it can be offered.

    Raises:
        ConfigError: The library is not installed or has no such name, or what it has cannot do here
            what its name says.
    """
    if importlib.util.find_spec(LIBRARY) is None:
        raise ConfigError(
            "optimizer=pytorch_optimizer needs the library of that name: pip install"
            ' "optrun[optimizers]".'
        )
    members = vars(importlib.import_module(LIBRARY)).values()
    known = {
        cls.__name__.lower(): cls
        for cls in members
        if isinstance(cls, type) and issubclass(cls, Optimizer)
    }
    if name.lower() not in known:
        refuse_few_bits("optimizer.name", name)
        raise ConfigError(
            f"optimizer.name={name}: pytorch_optimizer has no such optimizer."
            f" {did_you_mean(name, known)}"
        )
    cls = known[name.lower()]
    if not cls.__module__.startswith(LIBRARY):
        instead = name.lower() if name.lower() in SCHEMAS else "adamw"
        raise ConfigError(f"optimizer.name={name}: that is torch's own. Take optimizer={instead}.")
    if name.lower() in REFUSED:
        why, instead = REFUSED[name.lower()]
        raise ConfigError(
            f"optimizer.name={name}: not offered: pytorch_optimizer's {cls.__name__} {why}. "
            f"Take optimizer.name={instead}, or one of optrun's own, such as optimizer=adamw."
        )
    if not {"params", "lr"} <= set(inspect.signature(cls).parameters):
        raise ConfigError(
            f"optimizer.name={name}: pytorch_optimizer's {cls.__name__} is not built from"
            " parameters and a learning rate; those that wrap another optimizer or take the model"
            " are not offered here. Take another, such as optimizer=adamw."
        )
    return cls


def build_pytorch_optimizer(
    name: str, param_groups: Sequence[Group], *, lr: float, divide: Divide, **options: object
) -> Optimizer:
    """Build an optimizer of pytorch-optimizer, tried before on small stand-ins with the same options.

    Args:
        name: As in that library's `load_optimizer`; case does not matter.
        param_groups: Group dicts with (name, parameter) pairs; `kwargs` of a group are keywords for
            it alone.
        lr: Base learning rate.
        divide: Which parameters of a group are hidden matrices, for those that treat them apart.
        **options: Its keywords, all checked against its constructor.

    Raises:
        ConfigError: Where it cannot do here what its name says, an option would be ignored, or
            groups name other optimizers.
        TypeError: For a keyword that it does not have.
    """
    cls, kind = library_class(name), name.lower()
    keywords, own = _keywords(cls), _own_keys(kind)
    groups = [{**group, **group.get("kwargs", {})} for group in param_groups]
    for group in groups:
        group.pop("kwargs", None)
    options = without_no_decay(options, keywords)
    known_keys(
        options, keywords | set(PROJECTED.get(kind, ())), f"pytorch_optimizer's {cls.__name__}"
    )
    groups = [without_no_decay(group, keywords) for group in groups]
    refuse_group_keys("pytorch_optimizer", cls, groups, keywords | own)
    _refuse_without(name, cls, groups, options)
    groups, options = _divided(name, cls, groups, options, lr, divide)

    return tried(
        builder(cls, options, lr=lr, takes_loss=kind in TAKES_LOSS, group_keys=own),
        groups,
        refuse=partial(_refuse_unread, groups=groups, options=options, own=own),
        key=f"optimizer.name={name}",
        owner=f"pytorch_optimizer's {cls.__name__}",
        hint="Change optimizer.kwargs, or take another optimizer.",
    )


@functools.cache
def _keywords(cls: type[Optimizer]) -> set[str]:
    """Collect what a constructor takes, by its signature and by the switches that it reads of its `**kwargs`."""
    source = "".join(
        inspect.getsource(base)
        for base in cls.__mro__
        if base.__module__.startswith(f"{LIBRARY}.opt")
    )
    switches = {key for key in SWITCHES if f"'{key}'" in source}
    return (set(inspect.signature(cls).parameters) | switches) - {"params", "kwargs"}


def _own_keys(kind: str) -> frozenset[str]:
    """Collect the keys of a group that its constructor does not have."""
    flag = FLAGS.get(kind)
    keys = {flag, *_COMPANION} if flag == "use_muon" else {flag, MARKED.get(kind)}
    return frozenset({key for key in keys if key} | set(PROJECTED.get(kind, ())))


def _refuse_without(
    name: str, cls: type[Optimizer], groups: Sequence[Group], options: Options
) -> None:
    """Raise where something is not given without which it fails, or is not what its name says."""
    kind = name.lower()
    for key, parameter in inspect.signature(cls).parameters.items():
        wanted = (
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        )
        if wanted and key not in ("params", "lr", *options):
            raise ConfigError(
                f"optimizer.name={name}: {cls.__name__} needs {key}: give"
                f" optimizer.kwargs.{key}=VALUE."
            )
    key, value, why = WANTED.get(kind, ("", None, ""))
    met = bool(options.get(key)) if isinstance(value, float) else options.get(key) == value
    if not met:
        raise ConfigError(
            f"optimizer.name={name}: {cls.__name__} {why}: give"
            f" optimizer.kwargs.{key}={str(value).lower()}."
        )
    if kind in MARKED and not any(group.get(MARKED[kind]) for group in groups):
        raise ConfigError(
            f"optimizer.name={name}: {cls.__name__} is AdamW but for groups that are marked: name"
            " the weights that a normalisation follows, as param_groups.rules=[{pattern: REGEX,"
            f" kwargs: {{{MARKED[kind]}: true}}}}]."
        )
    if kind in PROJECTED and not any(
        set(PROJECTED[kind]) <= set(entry) for entry in (options, *groups)
    ):
        values = ", ".join(f"{key}: {value}" for key, value in PROJECTED[kind].items())
        raise ConfigError(
            f"optimizer.name={name}: {cls.__name__} projects nothing unless it is told how: give"
            f" all of 'optimizer.kwargs={{{values}}}' (the values of its paper) for the hidden"
            " matrices, or the same as kwargs of a rule in param_groups.rules."
        )


def _divided(
    name: str,
    cls: type[Optimizer],
    groups: Sequence[ParamGroup],
    options: Options,
    lr: float,
    divide: Divide,
) -> tuple[list[ParamGroup], dict[str, Any]]:
    """Separate hidden matrices from the rest.

    Each with the keys that the optimizer knows them by.
    """
    kind = name.lower()
    flag, projection = (
        FLAGS.get(kind),
        {key: options[key] for key in PROJECTED.get(kind, ()) if key in options},
    )
    others = {key: value for key, value in options.items() if key not in projection}
    if flag is None and kind not in PROJECTED:
        return list(groups), others
    if "adamw_wd" in options:
        raise ConfigError(
            "optimizer.kwargs.adamw_wd would be ignored: optimizer.weight_decay and param_groups"
            " decide for each group."
        )
    out = []
    for group in groups:
        asked = (flag or "rank") in group
        hidden, rest = (group["params"], []) if asked and group[flag or "rank"] else divide(group)
        if asked and not group[flag or "rank"]:
            hidden, rest = [], group["params"]
        if hidden:
            out.append({**projection, **({flag: True} if flag else {}), **group, "params": hidden})
        if rest:
            out.append({**group, **({flag: False} if flag else {}), "params": rest})
            if flag == "use_muon":
                given = options.get(
                    "adamw_lr", inspect.signature(cls).parameters["adamw_lr"].default
                )
                _scale(out[-1], given / lr if lr else 1.0)
    for group in out:
        _refuse_no_projection(name, group)
    return out, others


def _scale(group: ParamGroup, factor: float) -> None:
    """Scale the base lr of a group; an absolute one stays."""
    if "lr_scale" in group or "lr" not in group:
        group["lr_scale"] = group.get("lr_scale", 1.0) * factor
    if "lr_scale" in group and "lr" in group:
        group["lr"] *= factor


def _refuse_no_projection(name: str, group: Group) -> None:
    for parameter, tensor in group["params"] if "rank" in group else ():
        if tensor.dim() != 2 or min(tensor.shape) <= group["rank"]:
            raise ConfigError(
                f"optimizer.name={name}: rank={group['rank']} projects nothing of {parameter} with"
                f" shape {tuple(tensor.shape)}: give a rank below its shorter side, or a rule with"
                " another one."
            )


def _refuse_unread(
    built: Optimizer, *, groups: Sequence[Group], options: Options, own: frozenset[str]
) -> None:
    """Raise for what the constructor swallowed.

    A switch it does not keep, a key of a group that it keeps on itself.
    """
    for key in options.keys() & SWITCHES:
        if key not in {*built.defaults, *own, *ALWAYS_READ} and not hasattr(built, key):
            raise ConfigError(f"it has no option {key}, which would be ignored")
    signature = set(inspect.signature(type(built)).parameters)
    for group in groups:
        refuse_unread_keys(built, group, own | signature if group.get("use_muon") else own)
