"""A transformers model for a task: with weights, from scratch, or as shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from optrun.config.model import FromConfigConfig, ModelConfig, PretrainedConfig
from optrun.errors import ConfigError, did_you_mean, nearest
from optrun.model.tokenizer import first_line

_SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


@dataclass
class ModelSpec:
    """What task and tokenizer ask of a model."""

    auto_class: str
    """Name of the transformers class that builds it."""
    config: dict[str, Any] = field(default_factory=dict)
    """Configuration values that the data decides."""
    max_length: int | None = None
    """Positions it must have room for; None: no matter."""
    vocab_size: int | None = None
    """Entries of the tokenizer; None: no text."""
    special_ids: dict[str, int] = field(default_factory=dict)
    """`pad_token_id` and so on, as far as the tokenizer has them."""


def special_ids(tokenizer: Any) -> dict[str, int]:
    """The ids of a tokenizer's special tokens, by their names in a transformers configuration."""
    found = {name: getattr(tokenizer, name, None) for name in _SPECIAL_IDS}
    return {name: int(number) for name, number in found.items() if number is not None}


def build_model(config: ModelConfig, spec: ModelSpec, *, meta: bool = False) -> tuple[Any, list[str]]:
    """Build the model in float32 on the CPU.

    Args:
        config: The model choice.
        spec: What it must be.
        meta: True: shapes alone, on the meta device, whatever its size; no weights are read.

    Returns:
        The model, and notes for the user (which weights are new, which of the file were left out).

    Raises:
        ConfigError: An unknown architecture, path or configuration value; weights that are no safetensors; a model with
            too few positions or no head for the task.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    auto = getattr(transformers, spec.auto_class)
    values, from_scratch = _configuration(config, spec)
    notes: list[str] = []
    options: dict[str, Any] = {}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    if isinstance(config, PretrainedConfig):
        options["trust_remote_code"] = config.trust_remote_code
    try:
        if from_scratch or meta:
            with torch.device("meta" if meta else "cpu"):
                model = auto.from_config(values, dtype=torch.float32, **options)
        else:
            assert isinstance(config, PretrainedConfig)
            model, report = auto.from_pretrained(
                str(Path(config.path).expanduser()),
                config=values,
                revision=config.revision,
                use_safetensors=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
            notes = _loading_notes(report)
    except (OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        where = f"model.path={config.path}" if isinstance(config, PretrainedConfig) else f"model={config.name}"
        raise ConfigError(f"{where}: cannot be built for this task: {first_line(error)}") from error
    _check_vocabulary(model, spec)
    return model, notes


def _configuration(config: ModelConfig, spec: ModelSpec) -> tuple[Any, bool]:
    from transformers import CONFIG_MAPPING, AutoConfig

    if isinstance(config, FromConfigConfig):
        if config.model_type not in CONFIG_MAPPING:
            raise ConfigError(
                f"model.model_type={config.model_type}: transformers has no such architecture. "
                f"{_architectures(config.model_type, list(CONFIG_MAPPING))}"
            )
        values = AutoConfig.for_model(config.model_type)
        if spec.vocab_size is not None:
            _set(values, "vocab_size", spec.vocab_size)
        for name, number in spec.special_ids.items():
            _set(values, name, number)
        if "decoder_start_token_id" not in config.config and getattr(values, "is_encoder_decoder", False):
            values.decoder_start_token_id = spec.special_ids.get("pad_token_id", 0)
        scratch = True
    else:
        assert isinstance(config, PretrainedConfig)
        local = Path(config.path).expanduser()
        if local.is_dir() and not (local / "config.json").is_file():
            raise ConfigError(f"model.path={config.path}: this folder has no config.json, so it holds no transformers model.")
        try:
            values = AutoConfig.from_pretrained(
                str(local), revision=config.revision, trust_remote_code=config.trust_remote_code
            )
        except Exception as error:  # OSError, ValueError, and the hub client's own
            raise ConfigError(
                f"model.path={config.path}: no such local folder, and not to be had from the hub: {first_line(error)}"
            ) from error
        if spec.special_ids.get("pad_token_id") is not None and getattr(values, "pad_token_id", None) is None:
            values.pad_token_id = spec.special_ids["pad_token_id"]
        scratch = False
    known = _attributes(values)
    for name, value in config.config.items():
        if name not in known:
            raise ConfigError(f"model.config.{name}: {type(values).__name__} has no such value. {did_you_mean(name, known)}")
        setattr(values, name, value)
    values = _rebuilt(values) if scratch else values
    for name, value in spec.config.items():
        setattr(values, name, value)
    _make_room(config, values, spec)
    return values, scratch


def _architectures(name: str, known: list[str]) -> str:
    close = nearest(name, known)
    return f"Did you mean {' or '.join(close)}?" if close else f"It has {len(known)}, such as gpt2, bert, llama, t5, vit."


def _attributes(values: Any) -> list[str]:
    names = set(values.to_dict()) | set(getattr(values, "attribute_map", {}))
    return sorted(name for name in names if not name.startswith("_") and name not in ("model_type", "transformers_version"))


def _set(values: Any, name: str, value: Any) -> None:
    """Set a value where the architecture has it, directly or in its text part."""
    target = values if hasattr(values, name) else getattr(values, "text_config", None)
    if target is not None and hasattr(target, name):
        setattr(target, name, value)


def _rebuilt(values: Any) -> Any:
    """The configuration made anew from its values, so that what the class derives from them (layer types, head sizes) fits."""
    plain = values.to_dict()
    defaults = type(values)().to_dict()
    changed = {name: value for name, value in plain.items() if name not in defaults or defaults[name] != value}
    for name in ("transformers_version", "model_type"):
        changed.pop(name, None)
    return type(values)(**changed)


def _make_room(config: ModelConfig, values: Any, spec: ModelSpec) -> None:
    room = getattr(values, "max_position_embeddings", None)
    if spec.max_length is None or not isinstance(room, int) or room < 1:
        return
    # RoBERTa and its kin begin to count at padding_idx + 1.
    reserved = room - 512 if room in (513, 514) else 0
    if room - reserved < spec.max_length:
        raise ConfigError(
            f"data.max_length={spec.max_length}: the model has positions for {room - reserved} tokens. "
            f"Take data.max_length={room - reserved}"
            + (" or a larger model.config.max_position_embeddings." if isinstance(config, FromConfigConfig) else ".")
        )


def _check_vocabulary(model: Any, spec: ModelSpec) -> None:
    embedding = model.get_input_embeddings() if spec.vocab_size is not None else None
    size = getattr(embedding, "num_embeddings", None)
    if size is not None and spec.vocab_size is not None and spec.vocab_size > size:
        raise ConfigError(
            f"model.tokenizer: it has {spec.vocab_size} entries, the model embeds {size}. Take the model's own tokenizer."
        )


def _loading_notes(report: dict[str, Any]) -> list[str]:
    notes = []
    fresh = sorted({*map(str, report.get("missing_keys", ()))})
    if fresh:
        notes.append(f"new, not in the weights: {_some(fresh)}")
    mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report.get("mismatched_keys", ()))
    if mismatched:
        notes.append(f"new, since the weights have another shape: {_some(mismatched)}")
    unused = sorted({*map(str, report.get("unexpected_keys", ()))})
    if unused:
        notes.append(f"in the weights, not in this model: {_some(unused)}")
    return notes


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
