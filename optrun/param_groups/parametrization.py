"""The model beside its base.

What is refused, which keys of the architecture are set, how weights begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainMapping
from optrun.config.schema.adapter import LoraConfig
from optrun.config.schema.model import ModelConfig, PretrainedConfig
from optrun.config.schema.parametrization import MupConfig, merged
from optrun.config.schema.run import RunConfig
from optrun.param_groups.growth import KEY, Growth, growth_of
from optrun.param_groups.tied_head import NoCarrierError, carrier_of_logits

_LOGITS = {"logits_scaling": 1, "logit_scale": -1, "lm_head_multiplier": -1}
"""Keys of architectures that scale logits -> their power of the width."""
_ATTENTION = {"attention_multiplier": -1, "query_pre_attn_scalar": 2}
"""Keys that scale attention scores -> their power of head_dim such that scores go by 1/head_dim."""
_INSTEAD = "Take parametrization=standard"


@dataclass(frozen=True)
class Parametrized:
    """A model choice with what its parametrization asks of it."""

    model: ModelConfig
    """With the keys that the parametrization sets."""
    base: ModelConfig | None = None
    """The base's choice; None under `standard`."""
    sizes: Mapping[str, Growth] = field(default_factory=dict)
    """How each parameter grew, by name; empty under `standard`."""


def parametrize(config: RunConfig, build: Callable[[ModelConfig], Any]) -> Parametrized:
    """Compare the model with its base model of tuned lr.

    Args:
        config: The whole configuration.
        build: From a model choice to the model as shapes, on the meta device.

    Raises:
        ConfigError: A base that is the model itself, or larger, or of other parameters; pretrained
            weights; a head that is the embedding, or another head_dim, where neither a key of the
            architecture nor a norm makes it right.
    """
    chosen = config.parametrization
    if not isinstance(chosen, MupConfig):
        return Parametrized(config.model)
    name = f"parametrization={chosen.name}"
    if isinstance(config.adapter, LoraConfig):
        raise ConfigError(
            f"{name}: the rank of adapter=lora is no width of the model. {_INSTEAD} with"
            " adapter.use_rslora=true, whose lora_alpha over the square root of r keeps lr as the"
            " rank grows."
        )
    if isinstance(config.model, PretrainedConfig):
        raise ConfigError(
            f"{name}: it scales initial weights, and those of model={config.model.name} are"
            f" trained. {_INSTEAD}, or a model from scratch."
        )
    smaller = replace(config.model, config=merged(config.model.config, chosen.base))
    model = build(config.model)
    try:
        base = build(smaller)
    except ConfigError as error:
        raise ConfigError(f"{KEY}: the base is refused: {error}") from error
    sizes = growth_of(model, base)
    if all(size.kind == "of one size" and size.branch == 1 for size in sizes.values()):
        raise ConfigError(
            f"{KEY}={_shown(chosen.base)}: the base is as large as the model, so nothing would be"
            f" scaled. {_INSTEAD}, which is the same run, or give the smaller sizes at which lr was"
            " tuned."
        )
    keys = _head_dim(model, base)
    keys |= _tied(config.model, model, base, sizes)
    return Parametrized(
        replace(config.model, config=merged(config.model.config, keys)), smaller, sizes
    )


def _shown(base: PlainMapping) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in base.items()) + "}"


def _tied(config: ModelConfig, model: Any, base: Any, sizes: dict[str, Growth]) -> dict[str, float]:
    """Scale the logits of a head tied to the embedding.

    By the architecture's own key, or in the norm before it.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    table = model.get_input_embeddings() if head is not None else None
    if (
        head is None
        or table is None
        or getattr(head, "weight", None) is not getattr(table, "weight", 0)
    ):
        return {}
    name = next(name for name, param in model.named_parameters() if param is head.weight)
    width = sizes[name].fan_out
    for key, power in _LOGITS.items():
        if isinstance(getattr(model.config, key, None), int | float):
            return {key: getattr(base.config, key) * width**power}
    try:
        path, now = carrier_of_logits(model)
        _, then = carrier_of_logits(base)
    except NoCarrierError as error:
        raise ConfigError(
            f"parametrization=mup: {name} of model={config.name} is both embedding and head, which"
            f" muP scales apart, and {error}. Give model.config.tie_word_embeddings=false, or take"
            " parametrization=standard."
        ) from error
    for leaf, _ in model.get_submodule(path).named_parameters():
        param_name = f"{path}.{leaf}"
        sizes[param_name] = replace(sizes[param_name], logits=then / now / width)
    return {}


def _head_dim(model: Any, base: Any) -> dict[str, float]:
    """Keep attention scores by the architecture's own key, if heads grew wider."""
    now, then = (_width_of_heads(net.config) for net in (model, base))
    if now is None or then is None or now == then:
        return {}
    for key, power in _ATTENTION.items():
        if isinstance(getattr(model.config, key, None), int | float):
            return {key: getattr(base.config, key) * (now / then) ** power}
    raise ConfigError(
        f"{KEY}: a head of attention is {then:g} wide in the base, and {now:g} in the model, whose"
        " architecture has no key that scales its scores. Let the number of heads grow with the"
        f" width in place of each head: give {KEY}.num_attention_heads (n_head, num_heads) in the"
        " ratio of the widths."
    )


def _width_of_heads(config: object) -> float | None:
    """Read the width of one head; None for an architecture without heads."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("head_dim", "d_kv"):
        if isinstance(getattr(text, key, None), int):
            return float(getattr(text, key))
    width, heads = (getattr(text, key, None) for key in ("hidden_size", "num_attention_heads"))
    if heads is None or width is None:
        return None
    if not isinstance(width, int) or not isinstance(heads, int):
        raise ConfigError(
            f"{KEY}: the width of a head of {type(config).__name__} cannot be told. {_INSTEAD}."
        )
    return width / heads


@torch.no_grad()
def scale_initial_weights(model: nn.Module, base: nn.Module, sizes: Mapping[str, Growth]) -> None:
    """Scale fresh weights to the standard deviation of the base times the table's factor.

    The two deviations count as equal where samples of these sizes may differ so. Constant tensors
    stay as they are.

    Args:
        model: Initialised; changed in place.
        base: Initialised.
        sizes: How each parameter of the model grew.
    """
    narrow = dict(base.named_parameters())
    for name, param in model.named_parameters():
        size = sizes[name]
        small = narrow[size.counterpart]
        spread, spread_of_base = (_spread(tensor) for tensor in (param, small))
        if not spread or not spread_of_base:
            param.mul_(size.carried)
            continue
        ratio = spread_of_base / spread
        noise = math.sqrt(0.5 / small.numel() + 0.5 / param.numel())
        param.mul_(size.init * (1.0 if abs(math.log(ratio)) < 4 * noise else ratio))


def _spread(tensor: Tensor) -> float:
    return float(tensor.double().std(correction=0)) if tensor.numel() > 1 else 0.0
