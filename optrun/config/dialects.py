"""Presets by the name of a package: options to compute the numbers of its optimizer.

A preset says only where a package differs from optrun's own defaults. An option with another
default in some package is written `${dialect:DEFAULT}` in YAML. So a value from a file, a recipe or
the command line wins over the preset, and the resolved configuration holds plain values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.base.errors import ConfigError, did_you_mean
from optrun.base.formatting import list_names


@dataclass(frozen=True, slots=True)
class SameAs:
    """In a preset: the value of another option."""

    option: str


Preset = Mapping[str, Any]

_WRITTEN = re.compile(r"^\$\{dialect:(.*)\}$")

_ADAPTS_ALL = {"weight_decay": 0.0, "always_adapt": True}
_COUNTS_STEPS = {"step_count": "optimizer"}

LAMB: Mapping[str, Preset] = {
    "timm": _COUNTS_STEPS,
    "apex": _COUNTS_STEPS,
    "nvlamb": {**_COUNTS_STEPS, "always_adapt": True},
    "deepspeed": {
        **_ADAPTS_ALL,
        "eps": 1e-8,
        "bias_correction": "lr",
        "min_trust": 0.01,
        "max_trust": 10.0,
    },
    "optax": {**_ADAPTS_ALL, **_COUNTS_STEPS},
    "keras": {**_ADAPTS_ALL, **_COUNTS_STEPS, "eps": 1e-7, "weight_decay_mode": "decoupled"},
    "pytorch_optimizer": {
        **_ADAPTS_ALL,
        **_COUNTS_STEPS,
        "bias_correction": "lr_first",
        "weight_decay_mode": "decoupled",
        "max_param_norm": 10.0,
        "eps_in_trust": True,
    },
    "torch_optimizer": {**_ADAPTS_ALL, "bias_correction": "none", "max_param_norm": 10.0},
    "paddle": {},
    "tensorflow": {
        **_ADAPTS_ALL,
        **_COUNTS_STEPS,
        "exclude_from_layer_adaptation": SameAs("exclude_from_weight_decay"),
    },
}
"""Each package's LAMB; `tensorflow` is the Model Garden's. Sources in docs/optimizers.md."""

ADAMAX: Mapping[str, Preset] = {
    "paddle": {},
    "torch": {"eps_form": "gradient"},
    "optax": {"eps_form": "gradient", "weight_decay_mode": "decoupled"},
    "keras": {"eps": 1e-7, "eps_form": "denominator", "weight_decay_mode": "decoupled"},
}

ADAMW: Mapping[str, Preset] = {
    "torch": {},
    "optax": {"weight_decay": 1e-4},
    "paper": {"weight_decay_mode": "scheduled"},
}
"""`paper`: Loshchilov & Hutter 2019, whose decay goes by the schedule and not by the rate."""

DIALECTS: Mapping[str, Mapping[str, Preset]] = {"lamb": LAMB, "adamax": ADAMAX, "adamw": ADAMW}


def expect_dialect(choice: str, dialect: str | None) -> None:
    """Refuse an unknown dialect: the package whose numbers the optimizer computes; None passes.

    Raises:
        ConfigError: The message names the optimizers that have the dialect, or the nearest one.

    Example:
        >>> expect_dialect("adamax", "kears")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        optrun.base.errors.ConfigError: optimizer.dialect=kears: adamax has no such dialect...
    """
    presets_of_choice = DIALECTS[choice]
    if dialect is None or dialect in presets_of_choice:
        return
    optimizers = [
        f"optimizer={optimizer}" for optimizer, presets in DIALECTS.items() if dialect in presets
    ]
    if optimizers:
        hint = f"It belongs to {list_names(optimizers, 3)}."
    else:
        hint = did_you_mean(dialect, presets_of_choice)
    raise ConfigError(
        f"optimizer.dialect={dialect}: {choice} has no such dialect. {hint} Expected null or one of"
        f" {', '.join(presets_of_choice)}."
    )


def dialect_options(choice: str, dialect: str | None, **given: object) -> dict[str, object]:
    """Collect the keywords for reproducing the optimizer of a package.

    Args:
        choice: `lamb`, `adamax` or `adamw`.
        dialect: Name of the package; None: optrun's own defaults.
        **given: Your keywords, which win over the preset.

    Returns:
        Keywords of the optimizer's class, without those that keep the class's default.

    Raises:
        ConfigError: There is no such dialect.

    Example:
        >>> dialect_options("lamb", "optax", weight_decay=0.1)
        {'weight_decay': 0.1, 'always_adapt': True, 'step_count': 'optimizer'}
        >>> options = dialect_options("lamb", "tensorflow", exclude_from_weight_decay=["bias"])
        >>> options["exclude_from_layer_adaptation"]  # in the preset: `SameAs` that option
        ['bias']
    """
    if choice not in DIALECTS:
        raise ConfigError(
            f"optimizer={choice} has no dialects. Choices with dialects: {', '.join(DIALECTS)}."
        )
    expect_dialect(choice, dialect)
    preset = {} if dialect is None else DIALECTS[choice][dialect]
    keywords = {**preset, **given}
    for key, value in keywords.items():
        if isinstance(value, SameAs):
            keywords[key] = given.get(value.option)
    return keywords


def own_default(value: object) -> object:
    """Return the default in the text `${dialect:DEFAULT}`; return any other value as it is.

    Example:
        >>> own_default("${dialect:1.0e-6}"), own_default("${dialect:null}"), own_default("${lr}")
        (1e-06, None, '${lr}')
    """
    match = _WRITTEN.match(value) if isinstance(value, str) else None
    if match is None:
        return value
    return OmegaConf.create(f"value: {match[1]}").value


def resolve(*arguments: Any, _node_: Any, _parent_: DictConfig) -> Any:
    """Resolve `${dialect:DEFAULT}`: the value in the preset of the dialect, else the default.

    A preset value `SameAs(OPTION)` is the value of that option in the same mapping.

    Args:
        *arguments: The default alone.
        _node_: The key with the interpolation.
        _parent_: The mapping around it, which also holds the key `dialect`.

    Raises:
        ConfigError: There is not exactly one argument.
    """
    if len(arguments) != 1:
        raise ConfigError("the resolver dialect takes one value: ${dialect:DEFAULT}.")
    optimizer = getattr(OmegaConf.get_type(_parent_), "DIALECTS_OF", "")
    presets = DIALECTS.get(optimizer, {})
    preset = presets.get(_parent_.get("dialect"), {})
    value = preset.get(_node_._key(), arguments[0])
    if isinstance(value, SameAs):
        return _parent_.get(value.option)
    return value
