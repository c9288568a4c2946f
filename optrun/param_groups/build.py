"""(name, parameter) pairs -> group dicts: each trainable parameter in exactly one, with all that is known about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from optrun.config.choice import choice
from optrun.config.param_groups import SCHEMAS, LayerwiseConfig, ParamGroupsConfig, StandardConfig
from optrun.errors import ConfigError
from optrun.param_groups.roles import BIAS, EMBEDDING, NORM, VECTOR, roles_of, roles_of_names
from optrun.param_groups.rules import claims, overrides

ModelOrParameters: TypeAlias = nn.Module | Iterable[tuple[str, Tensor]]
"""A model, whose module types are then known, or (name, parameter) pairs."""

UNDECAYED = (BIAS, NORM, VECTOR)
"""Roles without weight decay, embeddings by choice."""


def build_param_groups(
    model_or_named_parameters: ModelOrParameters,
    config_or_name: ParamGroupsConfig | str = "standard",
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Group the trainable parameters of a model by what an optimizer should do with them.

    Args:
        model_or_named_parameters: A model, or (name, parameter) pairs where only names and shapes are known.
        config_or_name: A configuration, or the name of a choice: `standard`, `layerwise`, `single`.
        lr: Base learning rate; a group's own is this times its scale. None: groups carry `lr_scale` alone, which the
            optimizers of this package fold themselves and those of torch do not know.
        weight_decay: Coefficient for what decays. None: groups that decay take the optimizer's own.
        **options: Beside a name: keys of that choice, such as `decay_rate=0.8`.

    Returns:
        Groups as torch.optim takes them, in the order of the parameters: `params` as (name, parameter) pairs, `lr`,
        `lr_scale`, `weight_decay`, the overrides of a rule, and to read: `layer_id`, `layer`, `role`, `rule`.

    Raises:
        ConfigError: Nothing to train, a rule that matches nothing, a model whose layers cannot be told under
            `layerwise`, or a value out of range.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> for group in build_param_groups(model, "standard", lr=0.1, weight_decay=0.01):
        ...     print(group["role"], [name for name, _ in group["params"]], group["weight_decay"])
        matrix ['0.weight'] 0.01
        bias ['0.bias', '1.bias'] 0.0
        norm ['1.weight'] 0.0
    """
    config = choice("param_groups", SCHEMAS, config_or_name, options)
    params, roles, tied = _read(model_or_named_parameters)
    taken = claims(config.rules, params, tied)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, param in params.items():
        rule_index = taken.get(name)
        rule = {} if rule_index is None else config.rules[rule_index]
        if rule.get("freeze"):
            param.requires_grad_(False)
        if not param.requires_grad:
            continue
        role = roles[name]
        key = (role, rule_index)
        if key not in groups:
            scale = float(rule.get("lr_scale", 1.0))
            decay = 0.0 if _undecayed(role, config) else weight_decay
            groups[key] = _group(scale, decay, role, rule_index, rule, lr)
        groups[key]["params"].append((name, param))
    if not groups:
        raise ConfigError("param_groups: no parameter trains; every one is frozen.")
    return list(groups.values())


def _read(
    source: ModelOrParameters,
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    """Parameters by first name, their roles, and the further names of tied ones."""
    if isinstance(source, nn.Module):
        params: dict[str, Tensor] = dict(source.named_parameters())
        first = {id(param): name for name, param in params.items()}
        every = source.named_parameters(remove_duplicate=False)
        tied = {name: first[id(param)] for name, param in every if name not in params}
        return params, roles_of(source), tied
    params, tied, first = {}, {}, {}
    for entry in source:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise TypeError(
                f"param_groups: expected a model or (name, parameter) pairs, got {type(entry).__name__}. "
                "Pass the model, or model.named_parameters()."
            )
        name, param = entry
        if name in params:
            raise ValueError(f"param_groups: two parameters are called {name}.")
        if id(param) in first:
            tied[name] = first[id(param)]
        else:
            params[name], first[id(param)] = param, name
    return params, roles_of_names(params.items()), tied


def _undecayed(role: str, config: ParamGroupsConfig) -> bool:
    if not isinstance(config, StandardConfig):
        return False
    return role in UNDECAYED or (role == EMBEDDING and not config.decay_embeddings)


def _group(
    scale: float, decay: float | None, role: str, rule_index: int | None, rule: Mapping[str, Any], lr: float | None
) -> dict[str, Any]:
    """An empty group with its options; a rule's own overrides come last."""
    group: dict[str, Any] = {"params": []}
    if "lr" not in rule:
        group["lr_scale"] = scale
        if lr is not None:
            group["lr"] = lr * scale
    if decay is not None:
        group["weight_decay"] = decay
    group |= {
        "layer_id": None,
        "layer": "all",
        "role": role,
        "rule": role if rule_index is None else f"rules[{rule_index}] {rule['pattern']}",
    }
    return group | overrides(rule)


__all__ = ["LayerwiseConfig", "build_param_groups"]
