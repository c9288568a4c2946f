"""The transformers configuration of a model.

Its own values, the user's on top, then what the data decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from optrun.base.errors import ConfigError, did_you_mean, nearest
from optrun.config.schema.checks import expect_count
from optrun.config.schema.model import FromConfigConfig, ModelConfig, PretrainedConfig
from optrun.data import hub_access as hub
from optrun.model.folder import refuse_broken_weights, refuse_no_model
from optrun.model.tokenizer import in_one_line, vocab_size

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
"""Of every architecture, by the names of transformers; none of them may be 0."""
_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
_FOR_TASK = {
    "causal_lm": "a decoder such as gpt2 or llama",
    "masked_lm": "an encoder such as bert or roberta",
}


@dataclass
class ModelSpec:
    """What task and tokenizer ask of a model."""

    auto_class: str
    """Name of the transformers class that builds it."""
    config: dict[str, object] = field(default_factory=dict)
    """Configuration values that the data decides."""
    max_length: int | None = None
    """Positions it must have room for; None: no matter."""
    vocab_size: int | None = None
    """Entries of the tokenizer; None: no text."""
    special_ids: dict[str, int] = field(default_factory=dict)
    """`pad_token_id` and so on, as far as the tokenizer has them."""

    @classmethod
    def of_tokenizer(
        cls,
        auto_class: str,
        config: dict[str, object],
        max_length: int | None,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> ModelSpec:
        """Take the entries and special tokens of a tokenizer; None: the model reads no text."""
        if tokenizer is None:
            return cls(auto_class, config, max_length)
        return cls(auto_class, config, max_length, vocab_size(tokenizer), special_ids(tokenizer))


def special_ids(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int]:
    """Return the ids of special tokens by their names in a transformers configuration."""
    ids = {name: getattr(tokenizer, name, None) for name in _SPECIAL_IDS}
    # An encoder's tokenizer ends a text with [SEP]; a model that looks for the end must find that
    # one.
    for name, stand_in in (("eos_token_id", "sep_token_id"), ("bos_token_id", "cls_token_id")):
        ids[name] = ids[stand_in] if ids[name] is None else ids[name]
    return {name: int(number) for name, number in ids.items() if number is not None}


def configuration(config: ModelConfig, spec: ModelSpec) -> TransformersConfig:
    """Return the transformers configuration.

    Raises:
        ConfigError: An unknown architecture, path or value; too few positions; no head for the
            task.
    """
    if isinstance(config, FromConfigConfig):
        values = scratch_configuration(config, spec)
    else:
        values = _load_configuration(config)
        if (
            spec.special_ids.get("pad_token_id") is not None
            and getattr(values, "pad_token_id", None) is None
        ):
            values.pad_token_id = spec.special_ids["pad_token_id"]
        _change(values, config.config, "model.config")
    _refuse_kernels(config, values)
    _refuse_no_head(config, values, spec.auto_class)
    if getattr(values, "architectures", None) is None:
        # where one architecture has several heads, transformers looks through the list
        values.architectures = []
    for name, value in spec.config.items():
        setattr(values, name, value)
    _refuse_other_direction(config, values, spec.auto_class)
    room = getattr(values.get_text_config(), "max_position_embeddings", None)
    if isinstance(room, int) and room > 0:
        refuse_long(config, room, spec)
    return values


def head_classes(config: ModelConfig, auto_class: str) -> list[str] | None:
    """List the classes of a pretrained model's head, by number.

    None: its weights have no such head, or it is one of a single number.
    """
    if not isinstance(config, PretrainedConfig) or "id2label" in config.config:
        return None
    values = _load_configuration(config)
    head = auto_class.removeprefix("AutoModel")
    if not any(name.endswith(head) for name in values.architectures or ()):
        return None
    if len(values.id2label) < 2:
        return None
    return [str(values.id2label[number]) for number in sorted(values.id2label)]


def router_loss_coef(model: PreTrainedModel) -> float | None:
    """Return the coefficient of a model's router loss; None: it returns no such loss."""
    values = model.config.get_text_config()
    if not getattr(values, "output_router_logits", False):
        return None
    return float(getattr(values, "router_aux_loss_coef", 0.0))


def stored_vocab_size(config: PretrainedConfig) -> int | None:
    """Return how many entries the embedding has in the weights of a pretrained model."""
    return getattr(_load_configuration(config).get_text_config(), "vocab_size", None)


def name_of_model(config: ModelConfig) -> str:
    """Name the model in a message, by its key."""
    if isinstance(config, PretrainedConfig):
        return f"model.path={config.path}"
    return f"model={config.name}"


def refuse_unknown(
    config: ModelConfig, auto_class: str, base: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Refuse wrong model keys before any data is read.

    Args:
        config: The model choice.
        auto_class: The transformers class that is to build it.
        base: Keys of `parametrization.base`.

    Raises:
        ConfigError: An architecture that does not exist, or one without a head for the task; a path
            that is no model; a name that the architecture's configuration does not have.
    """
    if isinstance(config, FromConfigConfig):
        values = _defaults(config)
    else:
        values = _load_configuration(config)
    _refuse_unknown_names(values, config.config, "model.config")
    _refuse_unknown_names(values, base, "parametrization.base")
    _refuse_no_head(config, values, auto_class)
    if "is_decoder" in config.config:
        values.is_decoder = config.config["is_decoder"]
    _refuse_other_direction(config, values, auto_class)


def _defaults(config: FromConfigConfig) -> TransformersConfig:
    """Load the architecture's own configuration."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if config.model_type not in CONFIG_MAPPING:
        close = nearest(config.model_type, list(CONFIG_MAPPING))
        if close:
            hint = f"Did you mean {' or '.join(close)}?"
        else:
            hint = "Such as gpt2, bert, llama, t5, vit."
        raise ConfigError(
            f"model.model_type={config.model_type}: transformers has no such architecture. {hint}"
        )
    try:
        return AutoConfig.for_model(config.model_type)
    except Exception as error:  # composites ask for their parts, each with an error of its own
        raise ConfigError(
            f"model.model_type={config.model_type}: it cannot be made from scratch without parts:"
            f" {in_one_line(error)}"
        ) from error


def scratch_configuration(
    config: FromConfigConfig, spec: ModelSpec | None = None
) -> TransformersConfig:
    """Make the configuration of an architecture from scratch.

    Args:
        config: The model choice.
        spec: Vocabulary and special tokens; None: the architecture's own.

    Raises:
        ConfigError: An unknown architecture or value.
    """
    values = _defaults(config)
    defaults = values.to_dict()
    if spec is not None and spec.vocab_size is not None:
        _set(values, "vocab_size", spec.vocab_size)
        for name, number in spec.special_ids.items():
            _set(values, name, number)
        if getattr(values, "is_encoder_decoder", False):
            values.decoder_start_token_id = spec.special_ids.get("pad_token_id", 0)
        if getattr(values, "forced_eos_token_id", None) is not None:
            values.forced_eos_token_id = spec.special_ids.get("eos_token_id")
    try:
        _change(values, config.config, "model.config")
        return _rebuilt(values, defaults)
    except ConfigError:
        raise
    except Exception as error:  # the checks of each configuration class
        raise ConfigError(
            f"model.config: {type(values).__name__} refuses it: {in_one_line(error)}"
        ) from error


def _load_configuration(config: ModelConfig) -> TransformersConfig:
    """Load the transformers configuration of `model.path`; refuse it with what helps."""
    from transformers import AutoConfig

    assert isinstance(config, PretrainedConfig)
    local = Path(config.path).expanduser()
    refuse_no_model(config.path)
    if not local.exists() and not hub.may_be_name(config.path):
        raise ConfigError(
            f"model.path={config.path}: no such local folder (looked from {Path.cwd()})."
        )
    missing = hub.why_cache_only(config.path)
    try:
        values = AutoConfig.from_pretrained(
            str(local), revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # OSError, ValueError, and the hub client's own
        raise ConfigError(
            f"model.path={config.path}: {_why_not(config, error, missing)}"
        ) from error
    if config.quantization is not None and getattr(values, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.quantization={config.quantization}: the weights of model.path={config.path} are"
            " quantised already. Name the model that they were made of."
        )
    refuse_broken_weights(config.path)
    return values


def _why_not(config: PretrainedConfig, error: Exception, missing: str | None) -> str:
    """Explain in a sentence why a configuration could not be loaded."""
    if "custom code" in str(error):
        return (
            "it comes with code of its own, which is not run. Where you trust it:"
            " model.trust_remote_code=true on the command line."
        )
    if not Path(config.path).expanduser().is_dir():
        return hub.why_not_fetched(config.path, missing, error)
    model_type = re.search(r"model type `(.+?)`", str(error))
    if model_type is not None:
        from transformers import CONFIG_MAPPING, __version__

        close = nearest(model_type[1], list(CONFIG_MAPPING))
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        return (
            f"model_type={model_type[1]} of its config.json: transformers {__version__} has no such"
            f" architecture.{hint}"
        )
    return f"its config.json cannot be read: {in_one_line(error)}"


def _refuse_kernels(config: ModelConfig, values: TransformersConfig) -> None:
    """Refuse an implementation called OWNER/NAME.

    It is code of the hub, which transformers fetches and runs.

    A model's own config.json may ask for one, as it may ask for code of its own.
    """
    if getattr(config, "trust_remote_code", False):
        return
    implementations = {"model.attn_implementation": config.attn_implementation}
    for part in (values, *(part for part in vars(values).values() if hasattr(part, "model_type"))):
        for name in ("attn_implementation", "experts_implementation"):
            implementations.setdefault(
                f"{name} of its {type(part).__name__}", getattr(part, f"_{name}", None)
            )
    for key, value in implementations.items():
        chosen = value.values() if isinstance(value, dict) else [value]
        code = next((name for name in chosen if isinstance(name, str) and "/" in name), None)
        if code is not None:
            where = f"model.path={config.path}: " if isinstance(config, PretrainedConfig) else ""
            raise ConfigError(
                f"{where}{key}={code}: this is code of the hub, which is not run. Expected an"
                " implementation of transformers itself, such as sdpa or eager."
            )


def _settable_names(values: TransformersConfig) -> list[str]:
    """List the public attributes that a user may set in a configuration."""
    names = set(values.to_dict()) | set(getattr(values, "attribute_map", {}))
    return sorted(
        name
        for name in names
        if not name.startswith("_") and name not in ("model_type", "transformers_version")
    )


def _change(values: TransformersConfig, changes: Mapping[str, object], key: str) -> None:
    """Set the user's values.

    Raises:
        ConfigError: A name that the configuration does not have.
    """
    _refuse_unknown_names(values, changes, key)
    for name, value in changes.items():
        part = getattr(values, name, None)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            _change(part, value, f"{key}.{name}")
        else:
            setattr(values, name, value)
            size_names = {*_SIZES, *(values.attribute_map.get(size) for size in _SIZES)}
            if name in size_names and isinstance(value, int):
                expect_count(f"{key}.{name}", value)


def _refuse_unknown_names(
    values: TransformersConfig, changes: Mapping[str, object], key: str
) -> None:
    """Refuse changes to attributes that a configuration does not have, nested ones, too."""
    attributes = _settable_names(values)
    for name, value in changes.items():
        if name not in attributes:
            raise ConfigError(
                f"{key}.{name}: {type(values).__name__} has no such value. {_few(name, attributes)}"
            )
        part = getattr(values, name, None)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            _refuse_unknown_names(part, value, f"{key}.{name}")


def _few(name: str, known: list[str]) -> str:
    if nearest(name, known):
        return did_you_mean(name, known)
    return f"Such as {', '.join(known[:12])}, ..."


def _set(values: TransformersConfig, name: str, value: object) -> None:
    """Set a value of the configuration, or of its text part."""
    target = values if hasattr(values, name) else getattr(values, "text_config", None)
    if target is not None and hasattr(target, name):
        setattr(target, name, value)


def _rebuilt(values: TransformersConfig, defaults: Mapping[str, object]) -> TransformersConfig:
    """Make the configuration anew from its values.

    So that what its class derives from them fits.
    """
    changed = {
        name: value
        for name, value in values.to_dict().items()
        if name not in defaults or defaults[name] != value
    }
    for name in ("transformers_version", "model_type"):
        changed.pop(name, None)
    return type(values)(**changed)


def _refuse_no_head(config: ModelConfig, values: TransformersConfig, auto_class: str) -> None:
    """Refuse an architecture for which transformers has no model of the task."""
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
    """Refuse to make an encoder a decoder, or the reverse, unless a person or its file says so.

    Raises:
        ConfigError: With the architecture, and the value that says so knowingly.
    """
    import transformers

    decodes = getattr(values, "is_decoder", None)
    both_ways = type(values) in transformers.AutoModelForMaskedLM._model_mapping
    halves = bool(getattr(values, "is_encoder_decoder", False))
    if auto_class == "AutoModelForCausalLM" and decodes is False and (both_ways or halves):
        if halves:
            kind = "an encoder-decoder, and its decoder alone would train"
        else:
            kind = "an encoder, which reads both ways"
        other_task = "task=seq2seq_lm" if halves else "task=masked_lm"
    elif auto_class == "AutoModelForMaskedLM" and decodes and both_ways:
        kind = "made a decoder by is_decoder=true, and sees nothing behind a mask"
        other_task = "task=causal_lm"
    else:
        return
    task = "causal_lm" if auto_class == "AutoModelForCausalLM" else "masked_lm"
    raise ConfigError(
        f"{name_of_model(config)}: {values.model_type} is {kind}. For task={task} take"
        f" {_FOR_TASK[task]},"
        f" or {other_task}; model.config.is_decoder={str(not decodes).lower()} makes it one"
        " knowingly."
    )


def refuse_long(config: ModelConfig, room: int, spec: ModelSpec) -> None:
    """Refuse texts longer than a model has positions for.

    Raises:
        ConfigError: With the longest that fits, and how to change the model.
    """
    if spec.max_length is None or spec.max_length <= room:
        return
    if isinstance(config, FromConfigConfig):
        grow = " or a larger model.config.max_position_embeddings"
    else:
        grow = ""
    targets = " and task.max_target_length" if spec.auto_class == "AutoModelForSeq2SeqLM" else ""
    raise ConfigError(
        f"data.max_length={spec.max_length}: the model has positions for {room} tokens. "
        f"Take data.max_length={room}{targets}{grow}."
    )
