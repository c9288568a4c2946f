"""muP for a model: compare it with its base, set keys of its configuration, scale its weights."""

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
"""Keys that scale attention scores -> their power of head_dim such that scores go by 1/head_dim.

`attention_multiplier` is the scale itself; that of `query_pre_attn_scalar` is 1/sqrt(its value).
"""
_INSTEAD = "Take parametrization=standard"


@dataclass(frozen=True)
class Parametrized:
    """The configuration of a model after its parametrization, and its growth over the base."""

    model: ModelConfig
    """Configuration of the model, with the keys that the parametrization sets."""
    base: ModelConfig | None = None
    """Configuration of the base model; None under `standard`."""
    sizes: Mapping[str, Growth] = field(default_factory=dict)
    """How each parameter grew, by name; empty under `standard`."""


def parametrize(config: RunConfig, build: Callable[[ModelConfig], Any]) -> Parametrized:
    """Compare the model of a run with its base, and set the keys for muP.

    Under `standard` the configuration is returned as it is, and nothing is built. The base is the
    same configuration with the smaller sizes in `parametrization.base`.

    Args:
        config: Configuration of the run.
        build: Builds the model of a configuration on the meta device.

    Raises:
        ConfigError: A LoRA adapter or pretrained weights; a base of the same size, larger, or with
            other parameters; a tied head or another width of attention heads that neither a key of
            the architecture nor a norm can correct.
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
            f"{KEY}={_format_mapping(chosen.base)}: the base is as large as the model, so nothing"
            f" would be scaled. {_INSTEAD}, which is the same run, or give the smaller sizes at"
            " which lr was tuned."
        )
    keys = _scale_attention_scores(model, base)
    keys |= _scale_tied_logits(config.model, model, base, sizes)
    return Parametrized(
        replace(config.model, config=merged(config.model.config, keys)), smaller, sizes
    )


def _format_mapping(base: PlainMapping) -> str:
    """Write a mapping as on the command line: `{hidden_size: 64, ...}`."""
    return "{" + ", ".join(f"{key}: {value}" for key, value in base.items()) + "}"


def _scale_tied_logits(
    config: ModelConfig, model: Any, base: Any, sizes: dict[str, Growth]
) -> dict[str, float]:
    """Scale the logits of a head tied to the embedding by 1 / width, as muP asks.

    muP scales the weights of a head down with the width, but not those of an embedding; a tied
    weight cannot have both, so its logits are scaled instead. width: that of the model over that of
    the base. Nothing happens if the head is not tied.

    Args:
        config: Configuration of the model, for messages.
        model: The model, on the meta device.
        base: The base model.
        sizes: How each parameter grew. Changed if the norm before the head has to carry the factor:
            `logits` is set for the parameters of the norm.

    Returns:
        The key of the architecture's configuration that scales logits, with the value to set. Empty
        if there is no such key, or if the head is not tied.

    Raises:
        ConfigError: There is neither a key nor a norm that can take the factor.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    table = model.get_input_embeddings() if head is not None else None
    if head is None or table is None:
        return {}
    weight = getattr(head, "weight", None)
    if weight is None or weight is not getattr(table, "weight", None):  # not tied
        return {}
    name = next(name for name, param in model.named_parameters() if param is weight)
    width = sizes[name].fan_out  # the outputs of an embedding are the width
    # By a key of the architecture: `logits_scaling` divides the logits, the others multiply them.
    for key, power in _LOGITS.items():
        if isinstance(getattr(model.config, key, None), int | float):
            return {key: getattr(base.config, key) * width**power}
    try:
        path, factor = carrier_of_logits(model)
        _, base_factor = carrier_of_logits(base)
    except NoCarrierError as error:
        raise ConfigError(
            f"parametrization=mup: {name} of model={config.name} is both embedding and head, which"
            f" muP scales differently, and {error}. Set model.config.tie_word_embeddings=false, or"
            " use parametrization=standard."
        ) from error
    # Beside the norm's output the logits have the model's own `factor`, as T5's 1/sqrt(width). So
    # the norm has to carry what this lacks of 1 / width.
    carried_by_norm = base_factor / factor / width
    for leaf, _ in model.get_submodule(path).named_parameters():
        param_name = f"{path}.{leaf}"
        sizes[param_name] = replace(sizes[param_name], logits=carried_by_norm)
    return {}


def _scale_attention_scores(model: Any, base: Any) -> dict[str, float]:
    """Choose the configuration key and value that scale attention scores by 1/head_dim.

    The caller sets it; the model is not changed. The usual scale is 1/sqrt(head_dim). In muP
    queries and keys become correlated in training, and their product grows with head_dim (Yang et
    al. 2022).

    Returns:
        One key of `_ATTENTION` -> its value in the base times (head_dim / head_dim of the base) to
        the power there; such as {"attention_multiplier": 0.0625} for 0.125 in a base with heads
        half as wide. Empty if heads are as wide as in the base, or if the model has none.

    Raises:
        ConfigError: Heads are wider or narrower, and the architecture has no such key.
    """
    width = _head_width(model.config)
    base_width = _head_width(base.config)
    if width is None or base_width is None or width == base_width:
        return {}
    for key, power in _ATTENTION.items():
        if isinstance(getattr(model.config, key, None), int | float):
            return {key: getattr(base.config, key) * (width / base_width) ** power}
    raise ConfigError(
        f"{KEY}: a head of attention is {base_width:g} wide in the base, and {width:g} in the"
        " model, whose architecture has no key that scales its scores. Let the number of heads grow"
        f" with the width in place of each head: give {KEY}.num_attention_heads (n_head, num_heads)"
        " in the ratio of the widths."
    )


def _head_width(config: object) -> float | None:
    """Read the width of an attention head from a configuration; None without heads.

    Raises:
        ConfigError: Width or number of heads is no number, such as one for each stage.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for key in ("head_dim", "d_kv"):  # the latter is T5's
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
    """Scale initial weights, in place, to the standard deviation of the base times `Growth.init`.

    So it makes no difference whether the architecture initialises by its width, as 1/sqrt(fan_in),
    or by one constant for all widths. The standard deviations of both initialisations count as
    equal if the log of their ratio is below four standard errors (of n normal values, the log of
    the deviation has the variance 1 / 2n); then only `Growth.init` is applied. A tensor that is
    constant here or in the base is multiplied by `Growth.carried` instead.

    Args:
        model: Initialised; changed in place.
        base: Initialised.
        sizes: How each parameter of the model grew.
    """
    base_params = dict(base.named_parameters())
    for name, param in model.named_parameters():
        size = sizes[name]
        base_param = base_params[size.base_name]
        deviation = _standard_deviation(param)
        base_deviation = _standard_deviation(base_param)
        if not deviation or not base_deviation:
            param.mul_(size.carried)
            continue
        base_over_model = base_deviation / deviation
        standard_error = math.sqrt(0.5 / base_param.numel() + 0.5 / param.numel())
        if abs(math.log(base_over_model)) < 4 * standard_error:
            base_over_model = 1.0  # the difference may be chance
        param.mul_(size.init * base_over_model)


def _standard_deviation(tensor: Tensor) -> float:
    """Compute the standard deviation in float64; 0 for fewer than two elements."""
    if tensor.numel() > 1:
        return float(tensor.double().std(correction=0))
    return 0.0
