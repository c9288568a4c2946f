"""Build parameter groups from a model or from (name, parameter) pairs.

Each trainable parameter is in exactly one group, with its layer, its role and the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.base.formatting import list_names
from optrun.base.options import Group, ParamGroup
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.choice import choice
from optrun.config.schema.param_groups import (
    SCHEMAS,
    LayerwiseConfig,
    ParamGroupsConfig,
    StandardConfig,
)
from optrun.config.schema.ranges import number, optional
from optrun.param_groups.layer_map import (
    WHY_RESTORED,
    Layer,
    Layers,
    lr_scale_of,
    restore_layer,
)
from optrun.param_groups.name_dict import layers_from_name_dict
from optrun.param_groups.order import Uses, describe_uses
from optrun.param_groups.roles import (
    BIAS,
    EMBEDDING,
    HEAD,
    NORM,
    VECTOR,
    is_lora_b,
    roles_of,
    roles_of_named,
)
from optrun.param_groups.rules import assign_rules, group_options

ModelOrParameters: TypeAlias = nn.Module | Iterable[tuple[str, Tensor]]
"""A model, whose module types are then known, or (name, parameter) pairs."""

_check_number = optional(number("a number or None"))

UNDECAYED = (BIAS, NORM, VECTOR)
"""Roles without weight decay under `standard`; `decay_embeddings` decides on embeddings."""


def build_param_groups(
    model_or_named_parameters: ModelOrParameters,
    config_or_name: ParamGroupsConfig | str = "standard",
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    loraplus_lr_ratio: float | None = None,
    batch: PlainMapping | None = None,
    started: Sequence[Group] = (),
    notes: list[str] | None = None,
    **options: Any,
) -> list[ParamGroup]:
    """Group the trainable parameters of a model by their optimizer settings.

    Parameters that a rule freezes get `requires_grad=False`, and are in no group.

    Args:
        model_or_named_parameters: A model, or (name, parameter) pairs, of which only names and
            shapes are known.
        config_or_name: A configuration, or the name of a choice: `standard`, `layerwise`, `single`.
        lr: Base learning rate; the `lr` of a group is this times its scale. None: groups have only
            `lr_scale`, which the optimizers of this package read and those of torch do not.
        weight_decay: Coefficient of groups that decay. None: they take that of the optimizer.
        loraplus_lr_ratio: LoRA+: factor on the lr of matrix B of each low-rank pair, unless a rule
            sets `lr_scale`. None: 1. Source: Hayou et al. 2024, arXiv:2402.12354.
        batch: With `layerwise` and a model: keyword arguments of its `forward`, for one pass over
            shapes. A parameter beside the blocks belongs to the side on which it is used; without a
            pass its name and registration decide. None: an example, for models of transformers.
            See `uses_of`.
        started: Groups that a run was started with, with `param_names`. Parameters keep the layers
            and roles in them.
        notes: Sentences on how layers were found are appended to it.
        **options: With a name: keys of that choice, such as `decay_rate=0.8`.

    Returns:
        Groups as torch.optim takes them, in the order of the parameters: `params` as (name,
        parameter) pairs, `lr`, `lr_scale`, `weight_decay`, the overrides of a rule; and for tables
        `layer_id`, `layer`, `role`, `rule`.

    Raises:
        ConfigError: Nothing trains, a rule matches nothing, `layerwise` finds no blocks, or a value
            is out of range.
        TypeError: An argument has another type.
        ValueError: Two parameters have one name.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> for group in build_param_groups(model, "standard", lr=0.1, weight_decay=0.01):
        ...     print(group["role"], [name for name, _ in group["params"]], group["weight_decay"])
        matrix ['0.weight'] 0.01
        bias ['0.bias', '1.bias'] 0.0
        norm ['1.weight'] 0.0
    """
    config = choice("param_groups", SCHEMAS, config_or_name, options)
    _check_number("lr", lr)
    _check_number("weight_decay", weight_decay)
    source = _read_parameters(model_or_named_parameters)
    roles = source.roles
    started_groups = _started_groups(started, source.params)
    sentences = [] if notes is None else notes
    uses: Uses = {}
    if (
        source.model is not None
        and isinstance(config, LayerwiseConfig)
        and config.name_dict is None
    ):
        uses, sentence = describe_uses(source.model, batch)
        sentences.append(sentence)
    layers = Layers(source.params, roles, source.model, uses)
    layer_of: Mapping[str, Layer] = {}
    scales: Mapping[str, float] = {}
    if isinstance(config, LayerwiseConfig):
        layer_of = _map_to_layers(config, layers, started_groups)
        scales = {name: lr_scale_of(layer, config.decay_rate) for name, layer in layer_of.items()}
    sentences += _note_restored_layers(layer_of)
    roles |= dict.fromkeys(layers.heads(), HEAD)
    roles |= {name: group["role"] for name, group in started_groups.items()}
    undecayed: tuple[str, ...] = ()
    if isinstance(config, StandardConfig):
        undecayed = UNDECAYED if config.decay_embeddings else (*UNDECAYED, EMBEDDING)
    rule_of = assign_rules(config.rules, source.params, source.tied)
    groups: dict[tuple[Any, ...], PlainDict] = {}
    for name, param in source.params.items():
        rule_index = rule_of.get(name)
        rule = {} if rule_index is None else config.rules[rule_index]
        if rule.get("freeze"):
            param.requires_grad_(False)
        if not param.requires_grad:
            continue
        role = roles[name]
        layer = layer_of.get(name)
        ratio = _loraplus_scale(name, loraplus_lr_ratio)
        scale = float(rule.get("lr_scale", scales.get(name, 1.0) * ratio))
        key = (None if layer is None else layer.label, role, rule_index, scale)
        if key not in groups:
            decay = 0.0 if role in undecayed else weight_decay
            reason = _explain_claim(config, layer, rule_index, rule)
            if not rule and ratio != 1:
                reason += f", LoRA+ x{ratio:g}"
            groups[key] = {
                **_hyper_parameters(scale, lr, decay, rule),
                "layer_id": None if layer is None else layer.layer_id,
                "layer": "all" if layer is None else layer.label,
                "role": role,
                "rule": reason,
            }
        groups[key]["params"].append((name, param))
    if not groups:
        raise ConfigError("param_groups: no parameter trains; every one is frozen.")
    return list(groups.values())


def _loraplus_scale(name: str, ratio: float | None) -> float:
    """Return the LoRA+ factor on the lr of a parameter: `ratio` for a matrix B, else 1."""
    if ratio is None or not is_lora_b(name):
        return 1.0
    return ratio


def _started_groups(
    started: Sequence[Group], params: Mapping[str, Tensor]
) -> dict[str, PlainMapping]:
    """Map parameters of the model to their group at the start of the run.

    Groups without the key `layer`, which other programs saved, and names that the model lacks are
    left out.
    """
    groups: dict[str, PlainMapping] = {}
    for group in started:
        if "layer" in group:
            groups |= {name: group for name in group["param_names"] if name in params}
    return groups


def _note_restored_layers(layer_of: Mapping[str, Layer]) -> list[str]:
    """Write one note on the parameters that `restore_layer` put back into another layer, or none.

    A resumed run keeps each parameter in the layer of its start, though this version of optrun
    would put it into another one. The note names four of them at most.
    """
    restored_params = [
        f"{name} ({layer.label})" for name, layer in layer_of.items() if layer.why == WHY_RESTORED
    ]
    if not restored_params:
        return []
    return [
        f"param_groups=layerwise: {list_names(restored_params, 4)} stay in the layer that this"
        " run was started with; a new run puts them into another one, see optrun explain"
    ]


@dataclass(frozen=True)
class _Source:
    """The parameters to group."""

    params: dict[str, Tensor]
    """Parameters by name; a tied one once, by its first name."""
    roles: dict[str, str]
    """Role of each parameter."""
    tied: dict[str, str]
    """Further names of tied parameters -> their first name."""
    model: nn.Module | None
    """None for (name, parameter) pairs."""


def _read_parameters(source: ModelOrParameters) -> _Source:
    """Read the parameters of a model, or (name, parameter) pairs, frozen ones included.

    A tensor with several names is in `params` by its first name, and in `tied` by the others. Roles
    of pairs are found by name and shape, those of a model by its modules, too.

    Raises:
        TypeError: It is neither.
        ValueError: Two parameters have one name.
    """
    model: nn.Module | None = None
    pairs: Iterable[tuple[str, Tensor]]
    if isinstance(source, nn.Module):
        model = source
        pairs = model.named_parameters(remove_duplicate=False)
    else:
        pairs = source
    if not isinstance(pairs, Iterable):
        raise TypeError(_no_parameters(source))
    params: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for entry in pairs:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise TypeError(_no_parameters(entry))
        name, param = entry
        if name in params:
            raise ValueError(f"param_groups: two parameters are called {name}.")
        if id(param) in first_names:
            tied[name] = first_names[id(param)]
        else:
            params[name] = param
            first_names[id(param)] = name
    roles = roles_of_named(params.items(), {}) if model is None else roles_of(model)
    return _Source(params, roles, tied, model)


def _no_parameters(got: object) -> str:
    """Write the message for an argument, or an entry of it, of a wrong type."""
    return (
        f"param_groups: expected a model or (name, parameter) pairs, got {type(got).__name__}. "
        "Pass the model, or model.named_parameters()."
    )


def _map_to_layers(
    config: LayerwiseConfig, layers: Layers, started_groups: Mapping[str, PlainMapping]
) -> dict[str, Layer]:
    """Map every parameter to its layer for `layerwise`.

    With `name_dict`, it decides alone, and `started_groups` is ignored. Without it the model
    decides, and then a parameter in `started_groups` keeps the layer that it had at the start of
    the run.
    """
    if config.name_dict is not None:
        return layers_from_name_dict(layers.params, config.name_dict, n_layers=config.n_layers)
    layer_of = layers.by_param(config.n_layers)
    for name, group in started_groups.items():
        layer_of[name] = restore_layer(layer_of[name], group["layer_id"], group["layer"])
    return layer_of


def _hyper_parameters(
    scale: float, lr: float | None, decay: float | None, rule: Group
) -> dict[str, object]:
    """Make a group without parameters: lr, weight decay, and the overrides of a rule over them.

    Args:
        scale: Factor on the base lr; left out if the rule sets an absolute `lr`.
        lr: Base learning rate; None: the group gets `lr_scale` only.
        decay: Weight decay; None: that of the optimizer.
        rule: A rule, or an empty mapping.

    Example:
        >>> _hyper_parameters(0.5, 0.1, 0.0, {"pattern": "bias", "eps": 1e-6})
        {'params': [], 'lr_scale': 0.5, 'lr': 0.05, 'weight_decay': 0.0, 'eps': 1e-06}
    """
    group: ParamGroup = {"params": []}
    if "lr" not in rule:
        group["lr_scale"] = scale
        if lr is not None:
            group["lr"] = lr * scale
    if decay is not None:
        group["weight_decay"] = decay
    return group | group_options(rule)


def _explain_claim(
    config: ParamGroupsConfig, layer: Layer | None, rule_index: int | None, rule: Group
) -> str:
    """Return the reason for a group: a rule, the reason of the layer, or the choice.

    Such as "rules[0] bias$", "encoder.layer 3" (the list of blocks and the block) or "standard".

    Args:
        config: Its `name` is the choice.
        layer: Layer of the group's parameters; None unless the choice is `layerwise`.
        rule_index: Index of their rule; None without one.
        rule: The rule, or an empty mapping.
    """
    if rule_index is not None:
        return f"rules[{rule_index}] {rule['pattern']}"
    if layer is None:
        return config.name
    return layer.why
