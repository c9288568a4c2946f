"""(name, parameter) pairs -> group dicts.

Each trainable parameter in exactly one, with all that is known about it.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.base.options import Group, ParamGroup
from optrun.base.plain import PlainDict, PlainMapping
from optrun.config.choice import choice
from optrun.config.schema.param_groups import (
    SCHEMAS,
    Dialect,
    LayerwiseConfig,
    ParamGroupsConfig,
    StandardConfig,
)
from optrun.param_groups.layer_map import (
    STARTED,
    Layers,
    Place,
    as_begun,
    scale_of,
    with_final_norm,
)
from optrun.param_groups.layerwise import NamedParam, SetParamLrFun
from optrun.param_groups.name_dict import places_of_names, structured_names
from optrun.param_groups.order import Uses, look_at_uses
from optrun.param_groups.roles import (
    BIAS,
    EMBEDDING,
    HEAD,
    NORM,
    VECTOR,
    is_lora_b,
    roles_of,
    roles_of_names,
)
from optrun.param_groups.rules import claims, overrides

ModelOrParameters: TypeAlias = nn.Module | Iterable[tuple[str, Tensor]]
"""A model, whose module types are then known, or (name, parameter) pairs."""

UNDECAYED = (BIAS, NORM, VECTOR)
"""Roles without weight decay; embeddings by choice."""


def build_param_groups(
    model_or_named_parameters: ModelOrParameters,
    config_or_name: ParamGroupsConfig | str = "standard",
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    set_param_lr_fun: SetParamLrFun | None = None,
    loraplus_lr_ratio: float | None = None,
    batch: PlainMapping | None = None,
    started: Sequence[Group] = (),
    notes: list[str] | None = None,
    **options: Any,
) -> list[ParamGroup]:
    """Group the trainable parameters of a model by what an optimizer should do with them.

    Args:
        model_or_named_parameters: A model, or (name, parameter) pairs where only names and shapes
            are known.
        config_or_name: A configuration, or the name of a choice: `standard`, `layerwise`, `single`.
        lr: Base learning rate; a group's own is this times its scale. None: groups carry `lr_scale`
            alone, which the optimizers of this package fold themselves and those of torch do not
            know.
        weight_decay: Coefficient for what decays. None: groups that decay take the optimizer's own.
        set_param_lr_fun: With `layerwise`: a function in place of the dialect,
            `(decay_rate, name_dict, n_layers, param) -> scale`, such as `layerwise_lr_decay`.
            `name_dict` gives it
            `encoder.layers.<number>...`, `embeddings` or `head` for each parameter of any model, or
            what the user's own `name_dict` says.
        loraplus_lr_ratio: LoRA+: factor B of each low-rank pair takes the lr of its place times
            this, unless a rule says its lr. None: 1. Source: Hayou et al. 2024, arXiv:2402.12354.
        batch: With `layerwise` and a model: keyword arguments of its `forward`, for one pass over
            shapes. What lies beside the blocks belongs to the side on which it is used; without a
            pass, to the one that its name and registration say. None: an example, for models of
            transformers. See `uses_of`.
        started: Groups, with `param_names`, that a run was started with: their layers and roles
            hold.
        notes: Takes how layers were found.
        **options: Beside a name: keys of that choice, such as `decay_rate=0.8`.

    Returns:
        Groups as torch.optim takes them, in the order of the parameters: `params` as (name,
        parameter) pairs, `lr`,
        `lr_scale`, `weight_decay`, the overrides of a rule, and to read: `layer_id`, `layer`,
        `role`, `rule`.

    Raises:
        ConfigError: Nothing to train, a rule that matches nothing, a model whose layers cannot be
            told under
            `layerwise`, or a value out of range.
        TypeError: An argument of another kind; `set_param_lr_fun` beside another choice, or one
            that does not return a number.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> for group in build_param_groups(model, "standard", lr=0.1, weight_decay=0.01):
        ...     print(group["role"], [name for name, _ in group["params"]], group["weight_decay"])
        matrix ['0.weight'] 0.01
        bias ['0.bias', '1.bias'] 0.0
        norm ['1.weight'] 0.0
    """
    config = choice("param_groups", SCHEMAS, config_or_name, options)
    _refuse_no_number("lr", lr)
    _refuse_no_number("weight_decay", weight_decay)
    if set_param_lr_fun is not None and not callable(set_param_lr_fun):
        raise TypeError(f"set_param_lr_fun={set_param_lr_fun!r}: expected a function or None.")
    params, roles, tied = _read(model_or_named_parameters)
    model = model_or_named_parameters if isinstance(model_or_named_parameters, nn.Module) else None
    began = {
        name: group
        for group in started
        for name in group["param_names"]
        if name in params and "layer" in group
    }
    told = [] if notes is None else notes
    uses: Uses = {}
    if model is not None and isinstance(config, LayerwiseConfig) and config.name_dict is None:
        uses, looked = look_at_uses(model, batch)
        told.append(looked)
    layers = Layers(params, roles, model, uses)
    places, scales = _places_and_scales(config, layers, set_param_lr_fun, began)
    told += _kept_layers(places)
    roles |= dict.fromkeys(layers.heads(), HEAD)
    roles |= {name: group["role"] for name, group in began.items()}
    undecayed: tuple[str, ...] = ()
    if isinstance(config, StandardConfig):
        undecayed = UNDECAYED if config.decay_embeddings else (*UNDECAYED, EMBEDDING)
    taken = claims(config.rules, params, tied)
    groups: dict[tuple[Any, ...], PlainDict] = {}
    for name, param in params.items():
        rule_index = taken.get(name)
        rule = {} if rule_index is None else config.rules[rule_index]
        role, place = roles[name], places.get(name)
        ratio = loraplus_lr_ratio if loraplus_lr_ratio is not None and is_lora_b(name) else 1.0
        scale = float(rule.get("lr_scale", scales.get(name, 1.0) * ratio))
        if rule.get("freeze") or (
            "lr" not in rule and scale < (getattr(config, "no_opt_scale", None) or 0.0)
        ):
            param.requires_grad_(False)
        if not param.requires_grad:
            continue
        key = (None if place is None else place.label, role, rule_index, scale)
        if key not in groups:
            decay = 0.0 if role in undecayed else weight_decay
            groups[key] = {
                **_hyper_parameters(scale, lr, decay, rule),
                "layer_id": None if place is None else place.layer_id,
                "layer": "all" if place is None else place.label,
                "role": role,
                "rule": (
                    _reason(config, place, rule_index, rule)
                    + ("" if rule or ratio == 1 else f", LoRA+ x{ratio:g}")
                ),
            }
        groups[key]["params"].append((name, param))
    if not groups:
        raise ConfigError("param_groups: no parameter trains; every one is frozen.")
    return list(groups.values())


def _kept_layers(places: Mapping[str, Place]) -> list[str]:
    """Name the parameters whose layer differs from the one at the start of the run."""
    kept = [f"{name} ({place.label})" for name, place in places.items() if place.why == STARTED]
    more = f" and {len(kept) - 4} more" if len(kept) > 4 else ""
    said = (
        f"param_groups=layerwise: {', '.join(kept[:4])}{more} stay where this run was started with"
        " them; a new run has them in another layer, see optrun explain"
    )
    return [said] if kept else []


def _refuse_no_number(key: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{key}={value!r}: expected a number or None, got {type(value).__name__}.")


def _read(
    source: ModelOrParameters,
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, str]]:
    """Read parameters by first name, their roles, and the further names of tied ones."""
    pairs = (
        source.named_parameters(remove_duplicate=False) if isinstance(source, nn.Module) else source
    )
    if not isinstance(pairs, Iterable):
        raise TypeError(_no_parameters(source))
    params: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for entry in pairs:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise TypeError(_no_parameters(entry))
        name, param = entry
        if name in params:
            raise ValueError(f"param_groups: two parameters are called {name}.")
        if id(param) in first:
            tied[name] = first[id(param)]
        else:
            params[name], first[id(param)] = param, name
    return (
        params,
        roles_of(source) if isinstance(source, nn.Module) else roles_of_names(params.items()),
        tied,
    )


def _no_parameters(got: object) -> str:
    return (
        f"param_groups: expected a model or (name, parameter) pairs, got {type(got).__name__}. "
        "Pass the model, or model.named_parameters()."
    )


def _places_and_scales(
    config: ParamGroupsConfig,
    layers: Layers,
    function: SetParamLrFun | None,
    began: Mapping[str, PlainMapping],
) -> tuple[dict[str, Place], dict[str, float]]:
    """Place and scale of every parameter under `layerwise`; nothing under the others."""
    if not isinstance(config, LayerwiseConfig):
        if function is not None:
            raise TypeError(
                f"param_groups={config.name} has no layers for set_param_lr_fun; take layerwise."
            )
        return {}, {}
    params = layers.params
    if config.name_dict is None:
        places = layers.places(config.n_layers)
        if config.dialect is Dialect.timm:
            places = with_final_norm(places, layers.roles)
        places |= {
            name: as_begun(places[name], group["layer_id"], group["layer"])
            for name, group in began.items()
        }
    else:
        places = places_of_names(params, config.name_dict, n_layers=config.n_layers)
    if function is None:
        scales = {
            name: max(scale_of(place, config.decay_rate, config.dialect.value), config.min_scale)
            for name, place in places.items()
        }
        return places, scales
    deepest = max(place.n_layers for place in places.values())
    names = {name: _structured(name, place, deepest) for name, place in places.items()}
    if config.name_dict is not None:
        names |= structured_names(params, config.name_dict)
    scales = {}
    for name, param in params.items():
        scale = function(config.decay_rate, names, deepest, NamedParam(name, param))
        if not isinstance(scale, int | float) or isinstance(scale, bool):
            raise TypeError(
                f"set_param_lr_fun returned {scale!r} for {name}: expected the scale of its lr, a"
                " number."
            )
        if not 0 <= scale < math.inf:
            raise ValueError(
                f"set_param_lr_fun returned {scale} for {name}: expected a number of 0 or more."
            )
        scales[name] = max(float(scale), config.min_scale)
    return places, scales


def _structured(name: str, place: Place, deepest: int) -> str:
    """Name a parameter as PaddleNLP would have.

    Towers of less depth count their top block alike.
    """
    if place.layer_id > place.n_layers:
        return "head"
    if place.layer_id == 0:
        return "embeddings"
    return f"encoder.layers.{place.layer_id - 1 + deepest - place.n_layers}.{name}"


def _hyper_parameters(
    scale: float, lr: float | None, decay: float | None, rule: Group
) -> dict[str, object]:
    """Collect what the optimizer reads; a rule's own overrides come last."""
    group: ParamGroup = {"params": []}
    if "lr" not in rule:
        group["lr_scale"] = scale
        if lr is not None:
            group["lr"] = lr * scale
    if decay is not None:
        group["weight_decay"] = decay
    return group | overrides(rule)


def _reason(
    config: ParamGroupsConfig, place: Place | None, rule_index: int | None, rule: Group
) -> str:
    """Explain what claimed the parameters, in a few words."""
    if rule_index is not None:
        return f"rules[{rule_index}] {rule['pattern']}"
    return config.name if place is None else place.why
