"""Build the optimizer of a configuration over parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optrun.base.errors import ConfigError
from optrun.base.options import Group, Options, ParamGroup
from optrun.base.plain import PlainDict
from optrun.config.dialects import dialect_options
from optrun.config.kind import kind_of
from optrun.config.schema.optimizer import SCHEMAS, PytorchOptimizerConfig
from optrun.config.schema.optimizer_base import OptimizerConfig
from optrun.optimizer.base import NO_KEYWORDS, NamedOptimizer
from optrun.optimizer.classes import class_of, is_builtin
from optrun.optimizer.composite import Composite
from optrun.optimizer.groups import name_param_pairs, refuse_flat_pieces
from optrun.optimizer.other_libraries import build_foreign, build_pytorch_optimizer, library_class
from optrun.optimizer.round_trip import Build, build_checked
from optrun.param_groups.roles import LORA, is_lora

COMPANION = "adamw"
"""The optimizer of the parameters that Muon does not step."""

_NO_SHARDS = (
    "Give distributed=ddp, where each rank has full parameters, or another optimizer, such as"
    " optimizer=adamw."
)
_IF_IT_DOES = (
    "If its step goes element by element, or takes whole tensors by optrun.plugin.on_whole and"
    " norms, set TAKES_SHARDS = True in its class."
)

_HINT = "Fix it, or choose another optimizer."

HIDDEN_ROLES = frozenset({"matrix"})
"""Roles of parameters that Muon takes, if they are 2-D.

The factors of a LoRA are none: Muon would orthogonalize each factor, r x d, and not the update of
the matrix, which is their product."""


def choice_of(config: OptimizerConfig) -> str:
    """Name the choice of a configuration by its class: `lamb`, `adamw`, ...

    Raises:
        ConfigError: The class is the schema of no choice.
    """
    return kind_of("optimizer", SCHEMAS, config)


def options_of(config: OptimizerConfig) -> PlainDict:
    """Return the fields of a configuration as keywords of the optimizer's class.

    Enums become their values. `name`, `default_lr` and `dialect` are left out. A dialect is the
    name of another package, and has set the other fields already, to what its optimizer does. There
    is no `lr`, which is a top-level key.
    """
    options: PlainDict = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in NO_KEYWORDS:
            options[field.name] = value.value if isinstance(value, Enum) else value
    return options


def require_optimizer(config: OptimizerConfig) -> None:
    """Refuse an optimizer of pytorch_optimizer if it is not installed or not offered.

    Does nothing for other optimizers. Called before data are read.

    Raises:
        ConfigError: With the reason, and what to take instead.
    """
    if isinstance(config, PytorchOptimizerConfig):
        library_class(config.class_name)


def refuse_unshardable(
    config: OptimizerConfig, distributed: str, rules: Sequence[Group] = ()
) -> None:
    """Refuse optimizers without support for shards under `distributed=fsdp`, before ranks start.

    Those of pytorch_optimizer have none. The class of a plugin must set `TAKES_SHARDS = True`
    itself; an inherited one does not count. Does nothing for other values of `distributed`.

    Args:
        config: Configuration of the run's optimizer.
        distributed: `none`, `ddp` or `fsdp`.
        rules: `param_groups.rules`, which may name other optimizers.

    Raises:
        ConfigError: Naming the key of the optimizer, and what to give instead.
    """
    if distributed != "fsdp":
        return
    if isinstance(config, PytorchOptimizerConfig):
        raise ConfigError(
            f"optimizer.class_name={config.class_name}: the optimizers of pytorch_optimizer step"
            f" whole parameters, and distributed=fsdp shards them. {_NO_SHARDS}"
        )
    choices = {f"optimizer={choice_of(config)}": choice_of(config)}
    for index, rule in enumerate(rules):
        if "optimizer" in rule:
            key = f"param_groups.rules[{index}].optimizer={rule['optimizer']}"
            choices[key] = rule["optimizer"]
    for key, name in choices.items():
        cls = class_of(name)
        reason = f"{key}: {cls.__name__} steps whole parameters, and distributed=fsdp shards them."
        if is_builtin(name) and not getattr(cls, "TAKES_SHARDS", False):
            raise ConfigError(f"{reason} {_NO_SHARDS}")
        # A plugin's class: `vars` does not see an inherited attribute.
        if not is_builtin(name) and not vars(cls).get("TAKES_SHARDS", False):
            raise ConfigError(f"{reason} {_NO_SHARDS} {_IF_IT_DOES}")


def build_optimizer(
    config: OptimizerConfig | str, param_groups: Sequence[Group], *, lr: float, **options: Any
) -> Optimizer:
    """Build the optimizer of a configuration or a name.

    Args:
        config: A configuration, or the name of a choice, for the defaults of its class.
        param_groups: Group dicts with (name, parameter) pairs, options and descriptive keys, as
            `build_param_groups` returns them. A group may name another `optimizer` for itself.
        lr: Base learning rate, see `fold_lr_scale` for groups with a scale.
        **options: Keywords that override those of `config`; with a name also `dialect`, see
            `dialect_options`.

    Returns:
        One torch optimizer; a `Composite` if groups are stepped by different ones, as for Muon. The
        state of one of a plugin or another library has survived a trial, see `build_checked`.

    Raises:
        ConfigError: The name does not exist, or the constructor refuses an option or a group.

    Example:
        >>> import torch
        >>> named = ("fc.weight", torch.nn.Parameter(torch.ones(2)))
        >>> groups = [{"params": [named], "lr_scale": 0.5}]
        >>> optimizer = build_optimizer("lamb", groups, lr=0.1, weight_decay=0.0)
        >>> type(optimizer).__name__, optimizer.param_groups[0]["lr"]
        ('Lamb', 0.05)
    """
    if isinstance(config, str):
        class_of(config)
        choice = config
        keywords: Options = dialect_options(choice, **options) if "dialect" in options else options
    else:
        choice = choice_of(config)
        keywords = options_of(config) | options
    try:
        if isinstance(config, PytorchOptimizerConfig):
            return build_pytorch_optimizer(
                config.class_name,
                param_groups,
                lr=lr,
                weight_decay=config.weight_decay,
                **config.kwargs,
            )
        # An optimizer of a plugin that is no NamedOptimizer.
        cls = class_of(choice)
        labels = {"key": f"optimizer={choice}", "owner": cls.__name__, "hint": _HINT}
        if not issubclass(cls, NamedOptimizer):
            return build_foreign(cls, param_groups, keywords, lr=lr, **labels)
        # A composite if groups are stepped by several optimizers, else the class itself.
        groups, members = divide_groups(choice, keywords, param_groups)
        build: Build = partial(Composite, lr=lr, members=members)
        if len(members) == 1 and all(group["optimizer"] == choice for group in groups):
            for group in groups:
                del group["optimizer"]
            constructor: Callable[..., NamedOptimizer] = cls
            build = partial(constructor, lr=lr, **keywords)
        names = {*members, *(group.get("optimizer", choice) for group in groups)}
        for name in names:
            class_of(name)  # refuses an unknown name
        if all(map(is_builtin, names)):
            return build(groups)
        return build_checked(build, groups, **labels)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer={choice}: {error}") from error


def divide_groups(
    choice: str, options: Options, param_groups: Sequence[Group]
) -> tuple[list[ParamGroup], dict[str, dict[str, Any]]]:
    """Set the optimizer of every group, and divide the groups of Muon with its companion AdamW.

    Args:
        choice: The optimizer of the run.
        options: Its keywords; for Muon those of its companion, too.
        param_groups: Group dicts, which are not changed.

    Returns:
        Copies of the groups with a key `optimizer`, and the keywords of the run's optimizers by
        name. For `muon` these are `muon` and `adamw`: a group of both hidden matrices and other
        parameters becomes two. `betas` and `eps` go to `adamw` alone.

    Raises:
        ConfigError: See `_split_for_muon`.
    """
    groups = [{**group, "optimizer": group.get("optimizer", choice)} for group in param_groups]
    if choice != "muon":
        return groups, {choice: dict(options)}
    # `weight_decay` goes to both.
    not_of_muon = ("betas", "eps", "companion_lr_scale")
    muon_options = {key: value for key, value in options.items() if key not in not_of_muon}
    of_companion = ("betas", "eps", "weight_decay")
    companion_options = {key: value for key, value in options.items() if key in of_companion}
    lr_scale = options.get("companion_lr_scale", 1.0)
    # Before `optimizer=muon` was set in every group.
    named_by_rule = [group.get("optimizer") == "muon" for group in param_groups]
    split = _split_for_muon(groups, named_by_rule, lr_scale)
    return split, {"muon": muon_options, COMPANION: companion_options}


def is_hidden_matrix(param: Tensor, role: str | None) -> bool:
    """Tell whether a parameter is a hidden matrix, to be stepped by Muon.

    It must be 2-D, and its role must be `matrix`. Without a role its shape decides: both sides are
    at least 8, and the longer one is at most 8 times the shorter. Embeddings of a vocabulary and
    heads of a few classes are longer.

    Example:
        >>> import torch
        >>> is_hidden_matrix(torch.empty(64, 256), None)
        True
        >>> is_hidden_matrix(torch.empty(32000, 64), None)
        False
        >>> is_hidden_matrix(torch.empty(64, 64), "embedding")
        False
    """
    if param.dim() != 2:
        return False
    if role is not None:
        return role in HIDDEN_ROLES
    short, long = sorted(param.shape)
    return short >= 8 and long <= 8 * short


def split_hidden_matrices(group: Group, *, factors: bool = False) -> tuple[list[Any], list[Any]]:
    """Divide the entries of a group's `params` between Muon and its companion.

    For Muon are hidden matrices (`is_hidden_matrix`), unless the group's `layer` is `head`.

    Args:
        group: A group dict.
        factors: Whether 2-D factors of a LoRA are for Muon, too.

    Returns:
        The entries for Muon, and the entries for its companion; each in their order.
    """
    hidden: list[Any] = []
    rest: list[Any] = []
    for entry in group["params"]:
        ((name, param),) = name_param_pairs([entry], 0)  # an entry may be a parameter without name
        role = _role_of_param(group, name)
        is_hidden = is_hidden_matrix(param, role) and group.get("layer") != "head"
        is_factor = factors and role == LORA and param.dim() == 2
        if is_hidden or is_factor:
            hidden.append(entry)
        else:
            rest.append(entry)
    return hidden, rest


def _role_of_param(group: Group, name: str) -> str | None:
    """Return the `role` of a group; without one, `lora` for a LoRA factor's name, else None."""
    return group.get("role") or (LORA if is_lora(name) else None)


def _companion_group(group: Group, params: list[Any], lr_scale: float) -> ParamGroup:
    """Copy a group for Muon's companion, with other `params`, and scale its lr if not absolute.

    Args:
        group: The group of Muon; not changed. With `lr` but no `lr_scale` its lr is absolute.
        params: The entries for the companion.
        lr_scale: Factor on the lr of the companion.
    """
    companion_group = {**group, "params": params, "optimizer": COMPANION}
    has_absolute_lr = "lr" in group and "lr_scale" not in group
    if not has_absolute_lr:
        companion_group["lr_scale"] = group.get("lr_scale", 1.0) * lr_scale
        if "lr" in group:
            companion_group["lr"] = group["lr"] * lr_scale
    return companion_group


def _split_for_muon(
    groups: Sequence[Group], named_by_rule: Sequence[bool], lr_scale: float
) -> list[ParamGroup]:
    """Divide each group of Muon into hidden matrices, and the rest for its companion.

    Args:
        groups: Groups with a key `optimizer`; those of other optimizers are only copied.
        named_by_rule: For each group, whether a rule names Muon for it, and not only
            `optimizer=muon` for the run. Then the factors of a LoRA are for Muon, too.
        lr_scale: Factor on the lr of the companion's groups. A group with an absolute lr, which has
            `lr` without `lr_scale`, keeps it.

    Returns:
        New groups; the one with the rest of a group follows the one with its hidden matrices.

    Raises:
        ConfigError: Nothing is left for Muon, because only factors of a LoRA train.
        ValueError: A parameter is a flat piece of FSDP1.
    """
    split: list[ParamGroup] = []
    lora_factors: list[str] = []
    for group, is_named in zip(groups, named_by_rule, strict=True):
        if group["optimizer"] != "muon":
            split.append(dict(group))
            continue
        pairs = name_param_pairs(group["params"], 0)
        refuse_flat_pieces(pairs, "Muon")  # which are 1-D: the companion would step them all
        hidden, rest = split_hidden_matrices(group, factors=is_named)
        if not is_named:
            lora_factors += [name for name, _ in pairs if _role_of_param(group, name) == LORA]
        if hidden:
            split.append({**group, "params": hidden})
        if rest:
            split.append(_companion_group(group, rest, lr_scale))
    # Otherwise the companion would train the whole model under Muon's name.
    if lora_factors and all(group["optimizer"] != "muon" for group in split):
        raise ConfigError(
            f"optimizer=muon: all matrices that train are factors of a LoRA ({lora_factors[0]}"
            f" and {len(lora_factors) - 1} more), which are left to {COMPANION}. So Muon has"
            f" nothing to step. Take optimizer={COMPANION}, or let Muon orthogonalise each factor:"
            " param_groups.rules=[{pattern: lora_, optimizer: muon}]."
        )
    return split
