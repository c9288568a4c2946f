"""The transformers configuration of a model.

It begins with the values of the architecture or of the pretrained model. The user's values replace
some of them, and values that follow from the data replace others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError, did_you_mean, message_in_one_line
from optrun.base.reading import expand_home
from optrun.config.schema.checks import expect_count
from optrun.config.schema.model import FromConfigConfig, ModelConfig, PretrainedConfig
from optrun.data import hub_access as hub
from optrun.model.folder import refuse_broken_weights, refuse_no_model
from optrun.model.tokenizer import vocab_size

if TYPE_CHECKING:
    from transformers import PretrainedConfig as TransformersConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SIZES = (
    "hidden_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""Sizes of an architecture, by the names of transformers; none of them may be 0."""
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


@dataclass
class ModelSpec:
    """Requirements of task and tokenizer on a model."""

    auto_class: str
    """Name of the transformers class that builds it, such as `AutoModelForCausalLM`."""
    config: dict[str, object] = field(default_factory=dict)
    """Configuration values that the data decide, such as `num_labels`."""
    max_length: int | None = None
    """Tokens of the longest example; None: any number of positions will do."""
    vocab_size: int | None = None
    """Rows that the embedding needs for the tokenizer; None: the model reads no text."""
    special_ids: dict[str, int] = field(default_factory=dict)
    """As `special_ids` returns them."""

    @classmethod
    def of_tokenizer(
        cls,
        auto_class: str,
        config: dict[str, object],
        max_length: int | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> ModelSpec:
        """Construct the requirements of a task with a tokenizer; None: the model reads no text."""
        if tokenizer is None:
            return cls(auto_class, config, max_length)
        return cls(auto_class, config, max_length, vocab_size(tokenizer), special_ids(tokenizer))


def special_ids(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int]:
    """Return the ids of special tokens by their names in a transformers configuration.

    Tokens that the tokenizer lacks are left out, except that `sep_token_id` replaces a missing
    `eos_token_id`, and `cls_token_id` a missing `bos_token_id`. Empty without a tokenizer.

    Example: GPT-2's tokenizer gives `{"bos_token_id": 50256, "eos_token_id": 50256}`.
    """
    ids = {name: getattr(tokenizer, name, None) for name in _SPECIAL_IDS}
    # An encoder's tokenizer ends a text with [SEP], which a model that looks for the end must find.
    for name, stand_in in (("eos_token_id", "sep_token_id"), ("bos_token_id", "cls_token_id")):
        if ids[name] is None:
            ids[name] = ids[stand_in]
    return {name: int(number) for name, number in ids.items() if number is not None}


def configuration(config: ModelConfig, spec: ModelSpec) -> TransformersConfig:
    """Build the transformers configuration of a model for a task.

    A pretrained configuration without a padding token gets the tokenizer's.

    Raises:
        ConfigError: An unknown architecture, path or value; code of the hub as an attention
            implementation; an encoder for a decoder's task, or the reverse; too few positions; no
            head for the task.
    """
    # 1. The values of the architecture or model, changed by the user.
    if isinstance(config, FromConfigConfig):
        values = scratch_configuration(config, spec)
    else:
        values = _load_configuration(config)
        if getattr(values, "pad_token_id", None) is None and "pad_token_id" in spec.special_ids:
            values.pad_token_id = spec.special_ids["pad_token_id"]
        _set_values(values, config.config, "model.config")
    _refuse_hub_kernels(config, values)
    _refuse_no_head(config, values, spec.auto_class)
    if getattr(values, "architectures", None) is None:
        # transformers iterates over it if an architecture has several heads
        values.architectures = []
    # 2. Values that follow from the data.
    for name, value in spec.config.items():
        setattr(values, name, value)
    # 3. Refuse what only the final values show: an encoder in place of a decoder, or the reverse,
    #    and too few positions.
    _refuse_other_direction(config, values, spec.auto_class)
    positions = getattr(values.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        refuse_long(config, positions, spec)
    return values


def head_classes(config: ModelConfig, auto_class: str) -> list[str] | None:
    """List the class names of a pretrained model's head, by number.

    None for a model from scratch, if the user sets `id2label`, for weights without a head of this
    auto class, and for a head with a single output.
    """
    if not isinstance(config, PretrainedConfig) or "id2label" in config.config:
        return None
    values = _load_configuration(config)
    head = auto_class.removeprefix("AutoModel")
    if not any(name.endswith(head) for name in values.architectures or ()):
        return None
    names = _names_by_number(config) or values.id2label
    if len(names) < 2:
        return None
    return [str(names[number]) for number in sorted(names)]


def _names_by_number(config: PretrainedConfig) -> dict[int, str]:
    """Read the class names of a model with `label2id`, but no `id2label`, in its config.json.

    transformers would call its classes LABEL_0, LABEL_1. Empty for all other models.

    Example: `"label2id": {"bad": 0, "good": 1}` gives `{0: "bad", 1: "good"}`.
    """
    from transformers import PretrainedConfig as TransformersConfig

    folder = str(expand_home(config.path))
    stored, _ = TransformersConfig.get_config_dict(folder, revision=config.revision)
    label2id = stored.get("label2id") or {}
    has_all_numbers = sorted(label2id.values()) == list(range(len(label2id)))
    if "id2label" in stored or not has_all_numbers:
        return {}
    return {number: name for name, number in label2id.items()}


def router_loss_coef(model: PreTrainedModel) -> float | None:
    """Return the coefficient of a model's load-balancing loss; None: it returns no such loss."""
    values = model.config.get_text_config()
    if not getattr(values, "output_router_logits", False):
        return None
    return float(getattr(values, "router_aux_loss_coef", 0.0))


def stored_vocab_size(config: PretrainedConfig) -> int | None:
    """Return the vocabulary size in a pretrained model's configuration; None: it has none."""
    return getattr(_load_configuration(config).get_text_config(), "vocab_size", None)


def name_of_model(config: ModelConfig) -> str:
    """Name the model in a message, by its key."""
    if isinstance(config, PretrainedConfig):
        return f"model.path={config.path}"
    return f"model={config.name}"


def refuse_unknown(config: ModelConfig, auto_class: str, base: Mapping[str, object]) -> None:
    """Refuse wrong model keys before any data is read.

    Args:
        config: The model choice.
        auto_class: The transformers class that is to build it.
        base: `parametrization.base`, whose keys must be those of the model; may be empty.

    Raises:
        ConfigError: An unknown architecture, or one without a head for the task; a path without a
            model; a name that the architecture's configuration does not have; an encoder as a
            causal model, or a decoder as a masked one, by `is_decoder` in `model.config` or else in
            the architecture's own configuration.
    """
    if isinstance(config, FromConfigConfig):
        values = _default_configuration(config)
    else:
        values = _load_configuration(config)
    _refuse_unknown_names(values, config.config, "model.config")
    _refuse_unknown_names(values, base, "parametrization.base")
    _refuse_no_head(config, values, auto_class)
    if "is_decoder" in config.config:  # the other values make no difference here
        values.is_decoder = config.config["is_decoder"]
    _refuse_other_direction(config, values, auto_class)


def _default_configuration(config: FromConfigConfig) -> TransformersConfig:
    """Build the default configuration of an architecture.

    Raises:
        ConfigError: transformers does not know it, or it is composed of other configurations, which
            must be given.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if config.model_type not in CONFIG_MAPPING:
        hint = did_you_mean(
            config.model_type, CONFIG_MAPPING, "Such as gpt2, bert, llama, t5, vit."
        )
        raise ConfigError(
            f"model.model_type={config.model_type}: transformers has no such architecture. {hint}"
        )
    try:
        return AutoConfig.for_model(config.model_type)
    except Exception as error:  # composites ask for their parts, each with an error of its own
        raise ConfigError(
            f"model.model_type={config.model_type}: its configuration has parts that must be given,"
            f" so that it cannot be made from scratch: {message_in_one_line(error)}"
        ) from error


def scratch_configuration(
    config: FromConfigConfig, spec: ModelSpec | None = None
) -> TransformersConfig:
    """Build the configuration of a model from scratch, with the values of `model.config`.

    Args:
        config: The model choice.
        spec: Vocabulary and special tokens replace those of the architecture; None, or one without
            a vocabulary: they stay.

    Raises:
        ConfigError: An unknown architecture or value, or one that the architecture's own checks
            refuse.
    """
    values = _default_configuration(config)
    defaults = values.to_dict()
    if spec is not None and spec.vocab_size is not None:
        _set_if_present(values, "vocab_size", spec.vocab_size)
        for name, number in spec.special_ids.items():
            _set_if_present(values, name, number)
        if getattr(values, "is_encoder_decoder", False):
            values.decoder_start_token_id = spec.special_ids.get("pad_token_id", 0)
        if getattr(values, "forced_eos_token_id", None) is not None:
            values.forced_eos_token_id = spec.special_ids.get("eos_token_id")
    try:
        _set_values(values, config.config, "model.config")
        return _rebuild_with_derived_values(values, defaults)
    except ConfigError:
        raise
    except Exception as error:  # the checks of each configuration class
        raise ConfigError(
            f"model.config: {type(values).__name__} refuses these values:"
            f" {message_in_one_line(error)}"
        ) from error


def _load_configuration(config: ModelConfig) -> TransformersConfig:
    """Load the transformers configuration of `model.path`.

    Raises:
        ConfigError: There is no such folder or hub name; the folder has no model, or broken
            weights; the weights are quantised already, and `model.quantization` is set.
    """
    from transformers import AutoConfig

    assert isinstance(config, PretrainedConfig)
    local = expand_home(config.path)
    refuse_no_model(config.path)
    if not local.exists() and not hub.may_be_name(config.path):
        raise ConfigError(
            f"model.path={config.path}: no such local folder (looked from {Path.cwd()}), and no"
            " name of the hub."
        )
    missing = hub.why_cache_only(config.path)
    try:
        values = AutoConfig.from_pretrained(
            str(local), revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # OSError, ValueError, and the hub client's own
        raise ConfigError(
            f"model.path={config.path}: {_why_not_loaded(config, error, missing)}"
        ) from error
    if config.quantization is not None and getattr(values, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.quantization={config.quantization}: the weights of model.path={config.path} are"
            " quantised already. Name the model that they were quantised from."
        )
    refuse_broken_weights(config.path)
    return values


def _why_not_loaded(config: PretrainedConfig, error: Exception, missing: str | None) -> str:
    """Explain in a sentence why a configuration could not be loaded, and what to do.

    Args:
        config: The model choice.
        error: What transformers raised.
        missing: What `hub.why_cache_only` returned before.
    """
    if "custom code" in str(error):
        return (
            "it comes with Python code of its own, which optrun does not run. If you trust it:"
            " model.trust_remote_code=true on the command line."
        )
    if not expand_home(config.path).is_dir():
        return hub.why_not_fetched(config.path, missing, error)
    model_type = re.search(r"model type `(.+?)`", str(error))
    if model_type is not None:
        from transformers import CONFIG_MAPPING, __version__

        problem = (
            f"model_type={model_type[1]} in its config.json: transformers {__version__} does not"
            " know this architecture."
        )
        return f"{problem} {did_you_mean(model_type[1], CONFIG_MAPPING, '')}".rstrip()
    return f"its config.json cannot be read: {message_in_one_line(error)}"


def _refuse_hub_kernels(config: ModelConfig, values: TransformersConfig) -> None:
    """Refuse an attention or experts implementation called OWNER/NAME, unless code is trusted.

    It is code of the hub, which transformers would fetch and run. The user may ask for it, or the
    model's own config.json, also in a nested configuration, or for one part of the model:
    `{"text_config": "OWNER/NAME"}`.

    Raises:
        ConfigError: With the key and the implementation.
    """
    if getattr(config, "trust_remote_code", False):
        return
    where = f"model.path={config.path}: " if isinstance(config, PretrainedConfig) else ""
    # 1. Collect each key with its implementation: a name, None, or a mapping from parts to names.
    implementations: list[tuple[str, object]] = [
        ("model.attn_implementation", config.attn_implementation)
    ]
    nested = [part for part in vars(values).values() if hasattr(part, "model_type")]
    for part in (values, *nested):
        for name in ("attn_implementation", "experts_implementation"):
            key = f"{name} of its {type(part).__name__}"
            implementations.append((key, getattr(part, f"_{name}", None)))
    # 2. Refuse the first one with a slash in its name.
    for key, value in implementations:
        for chosen in value.values() if isinstance(value, dict) else [value]:
            if isinstance(chosen, str) and "/" in chosen:
                raise ConfigError(
                    f"{where}{key}={chosen}: this is code of the hub, which optrun does not run."
                    " Take an implementation of transformers itself, such as sdpa or eager."
                )


def _settable_names(values: TransformersConfig) -> list[str]:
    """List the public attributes of a configuration, except its type and version; sorted."""
    names = set(values.to_dict()) | set(getattr(values, "attribute_map", {}))
    names -= {"model_type", "transformers_version"}
    return sorted(name for name in names if not name.startswith("_"))


def _set_values(values: TransformersConfig, changes: Mapping[str, object], key: str) -> None:
    """Set the user's values in place, also those of nested configurations.

    Args:
        values: Changed in place.
        changes: The user's values; a mapping changes a nested configuration.
        key: Key of the values, such as `model.config`, for messages.

    Raises:
        ConfigError: A name that the configuration does not have, or a size below 1.
    """
    _refuse_unknown_names(values, changes, key)
    for name, value in changes.items():
        part = getattr(values, name, None)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            _set_values(part, value, f"{key}.{name}")
        else:
            setattr(values, name, value)
            size_names = {*_SIZES, *(values.attribute_map.get(size) for size in _SIZES)}
            if name in size_names and isinstance(value, int):
                expect_count(f"{key}.{name}", value)


def _refuse_unknown_names(
    values: TransformersConfig, changes: Mapping[str, object], key: str
) -> None:
    """Refuse changes to unknown attributes of a configuration, also of nested ones.

    Raises:
        ConfigError: With the name, and the nearest one that exists.
    """
    attributes = _settable_names(values)
    for name, value in changes.items():
        if name not in attributes:
            examples = f"Such as {', '.join(attributes[:12])}, ..."
            raise ConfigError(
                f"{key}.{name}: {type(values).__name__} has no such value."
                f" {did_you_mean(name, attributes, examples)}"
            )
        part = getattr(values, name, None)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            _refuse_unknown_names(part, value, f"{key}.{name}")


def _set_if_present(values: TransformersConfig, name: str, value: object) -> None:
    """Set a value of a configuration, or of its text part; do nothing if neither has it."""
    target = values if hasattr(values, name) else getattr(values, "text_config", None)
    if target is not None and hasattr(target, name):
        setattr(target, name, value)


def _rebuild_with_derived_values(
    values: TransformersConfig, defaults: Mapping[str, object]
) -> TransformersConfig:
    """Construct a configuration anew from its changed values.

    Its constructor then derives other values from them, such as the head size from the hidden size:
    values that are as in the default configuration are not passed on to it.

    Args:
        values: The configuration with its changes.
        defaults: `to_dict` of the architecture's default configuration.
    """
    changed = {}
    for name, value in values.to_dict().items():
        is_changed = name not in defaults or defaults[name] != value
        if is_changed and name not in ("transformers_version", "model_type"):
            changed[name] = value
    return type(values)(**changed)


def _refuse_no_head(config: ModelConfig, values: TransformersConfig, auto_class: str) -> None:
    """Refuse an architecture without a model for the task in transformers.

    A model with code of its own (`auto_map`) passes: only that code knows its heads.

    Raises:
        ConfigError: With the auto class and the architecture.
    """
    import transformers

    mapping = getattr(transformers, auto_class)._model_mapping
    if type(values) in mapping or getattr(values, "auto_map", None):
        return
    raise ConfigError(
        f"{name_of_model(config)}: transformers has no {auto_class} of the architecture"
        f" {values.model_type}, which this task needs. Take another model or another task."
    )


def _refuse_other_direction(
    config: ModelConfig, values: TransformersConfig, auto_class: str
) -> None:
    """Refuse an encoder as a causal model, and a decoder as a masked one.

    Refused are

    - a causal model of an encoder-decoder, such as BART, with `is_decoder=false`;
    - a causal model with `is_decoder=false` of an architecture that has a masked model, too, such
      as BERT;
    - a masked model of such an architecture with `is_decoder=true`.

    The other value of `model.config.is_decoder` makes each of them pass.

    Raises:
        ConfigError: With the architecture, a better choice, and the value of `is_decoder`.
    """
    import transformers

    is_decoder = getattr(values, "is_decoder", None)
    is_encoder_decoder = getattr(values, "is_encoder_decoder", False)
    # An architecture without one, such as GPT-2, is causal whatever `is_decoder` says.
    has_masked_model = type(values) in transformers.AutoModelForMaskedLM._model_mapping
    if auto_class == "AutoModelForCausalLM" and is_decoder is False and is_encoder_decoder:
        kind = "an encoder-decoder, and its decoder alone would train"
        advice = "task=causal_lm take a decoder such as gpt2 or llama, or task=seq2seq_lm"
    elif auto_class == "AutoModelForCausalLM" and is_decoder is False and has_masked_model:
        kind = "an encoder, which reads both ways"
        advice = "task=causal_lm take a decoder such as gpt2 or llama, or task=masked_lm"
    elif auto_class == "AutoModelForMaskedLM" and is_decoder and has_masked_model:
        kind = "made a decoder by is_decoder=true, and sees nothing behind a mask"
        advice = "task=masked_lm take an encoder such as bert or roberta, or task=causal_lm"
    else:
        return
    raise ConfigError(
        f"{name_of_model(config)}: {values.model_type} is {kind}. For {advice}. To train it all the"
        f" same: model.config.is_decoder={str(not is_decoder).lower()}."
    )


def refuse_long(config: ModelConfig, positions: int, spec: ModelSpec) -> None:
    """Refuse examples longer than a model has positions for.

    Raises:
        ConfigError: With the largest length that fits, and how to change a model from scratch.
    """
    if spec.max_length is None or spec.max_length <= positions:
        return
    target_key = ""
    if spec.auto_class == "AutoModelForSeq2SeqLM":
        target_key = " and task.max_target_length"
    larger = ""
    if isinstance(config, FromConfigConfig):
        larger = " or a larger model.config.max_position_embeddings"
    raise ConfigError(
        f"data.max_length={spec.max_length}: the model has positions for {positions} tokens."
        f" Take data.max_length={positions}{target_key}{larger}."
    )
