"""Presets by the name of a package: options to compute the numbers of its optimizer.

A preset says only where a package differs from optrun's own defaults. In a YAML an option that some
package has otherwise is written `${dialect:DEFAULT}`, so that whatever a file, a recipe or the
command line gives itself comes first, and the resolved configuration holds plain values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from optrun.base.errors import ConfigError, did_you_mean


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
    """Refuse a dialect unknown to an optimizer.

    Raises:
        ConfigError: With the optimizers that have it, or the nearest name.

    Example:
        >>> expect_dialect("adamax", "kears")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        optrun.base.errors.ConfigError: optimizer.dialect=kears: no such dialect of adamax...
    """
    presets_of_choice = DIALECTS[choice]
    if dialect is None or dialect in presets_of_choice:
        return
    optimizers = [
        f"optimizer={optimizer}" for optimizer, presets in DIALECTS.items() if dialect in presets
    ]
    if optimizers:
        near = f"{' and '.join(optimizers)} has it."
    else:
        near = did_you_mean(dialect, presets_of_choice)
    raise ConfigError(
        f"optimizer.dialect={dialect}: no such dialect of {choice}. {near} Expected null or one of"
        f" {', '.join(presets_of_choice)}."
    )


def dialect_options(choice: str, dialect: str | None, **given: object) -> dict[str, object]:
    """Collect the keywords to reproduce the optimizer of a package.

    Args:
        choice: `lamb`, `adamax` or `adamw`.
        dialect: Name of the package; None: optrun's own defaults.
        **given: Keywords of yours, which come first.

    Returns:
        Keywords of the class; what it leaves out has the class's default.

    Raises:
        ConfigError: There is no such dialect.

    Example:
        >>> dialect_options("lamb", "optax", weight_decay=0.1)
        {'weight_decay': 0.1, 'always_adapt': True, 'step_count': 'optimizer'}
    """
    if choice not in DIALECTS:
        raise ConfigError(f"optimizer={choice} has no dialects; {', '.join(DIALECTS)} have.")
    expect_dialect(choice, dialect)
    preset = {} if dialect is None else DIALECTS[choice][dialect]
    merged = {**preset, **given}
    return {
        key: given.get(value.option) if isinstance(value, SameAs) else value
        for key, value in merged.items()
    }


def own_default(value: object) -> object:
    """Resolve `${dialect:DEFAULT}` without a dialect, to its default.

    Example:
        >>> own_default("${dialect:1.0e-6}"), own_default("${dialect:null}"), own_default("${lr}")
        (1e-06, None, '${lr}')
    """
    written = _WRITTEN.match(value) if isinstance(value, str) else None
    if written is None:
        return value
    return OmegaConf.create(f"value: {written[1]}").value


def resolve(default: Any, *, _node_: Any, _parent_: DictConfig) -> Any:
    """Resolve `${dialect:DEFAULT}` in a YAML.

    What the dialect beside it says of this key, else the default.
    """
    presets = DIALECTS.get(getattr(OmegaConf.get_type(_parent_), "DIALECTS_OF", ""), {})
    key = _node_._key()
    dialect = _parent_.get("dialect")
    value = presets.get(dialect, {}).get(key, default)
    if isinstance(value, SameAs):
        return _parent_.get(value.option)
    return value
