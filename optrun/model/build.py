"""A transformers model for a task: with weights, from scratch, or as shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from optrun.base.errors import ConfigError, message_in_one_line
from optrun.base.formatting import list_names
from optrun.base.reading import expand_home
from optrun.config.schema.adapter import AdapterConfig, LoraConfig
from optrun.config.schema.model import ModelConfig, PretrainedConfig
from optrun.model.adapter import inject_adapter
from optrun.model.attention import plain_attention
from optrun.model.configuration import (
    ModelSpec,
    configuration,
    head_classes,
    name_of_model,
    refuse_long,
    special_ids,
    stored_vocab_size,
)
from optrun.model.folder import refuse_broken_weights, refuse_no_model
from optrun.model.forward import evaluation_mode
from optrun.model.quantization import is_quantized

if TYPE_CHECKING:
    from transformers import PretrainedConfig as TransformersConfig
    from transformers import PreTrainedModel

__all__ = ["ModelSpec", "build_model", "special_ids"]

CAUSAL = "AutoModelForCausalLM"
Report = Mapping[str, Iterable[object]]
"""The loading info of transformers: `missing_keys`, `mismatched_keys`, `unexpected_keys`."""
_LEAST_USED_SHARE = 0.5
"""Least share of an embedding's rows that its own tokenizer uses: T5 and Qwen leave 1 % unused,
ByT5, with 256 bytes, 33 %."""


def build_model(
    config: ModelConfig,
    spec: ModelSpec,
    *,
    adapter: AdapterConfig | None = None,
    meta: bool = False,
) -> tuple[PreTrainedModel, list[str]]:
    """Build the model of a task on the CPU, with its start weights and its adapter.

    Args:
        config: The model choice.
        spec: What task and tokenizer need.
        adapter: The adapter to put into it; None, or one without factors: no adapter.
        meta: Build shapes alone, on the meta device; no weights are read.

    Returns:
        The model, and notes for the user: which weights are new, and which of the file are unused.

    Raises:
        ConfigError: An unknown architecture, path or configuration value; weights that are no
            safetensors; a model with too few positions, with no head for the task, or that sees the
            tokens it should predict; an adapter that does not fit it.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    auto = getattr(transformers, spec.auto_class)  # such as AutoModelForCausalLM
    values = configuration(config, spec)
    options: dict[str, object] = {}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    if isinstance(config, PretrainedConfig):
        options["trust_remote_code"] = config.trust_remote_code
    notes: list[str] = []
    new: list[str] = []  # parameters that do not come from a file of weights as they are
    # 1. Load the weights, or draw them.
    try:
        if isinstance(config, PretrainedConfig) and not meta:
            model, report = _load(config, auto, values, _dtype(config), options)
            _refuse_other_weights(config, model, report)  # raises if the file lacks most
            new = [*_missing_names(report), *_mismatched_names(report)]
            # `grown` and `redrawn` are names of parameters with drawn values; often empty.
            grown, grown_notes = _grow_vocabulary(model, values)
            new += grown
            redrawn, redrawn_notes = _redraw_head(auto, model, config, spec, new)
            new += redrawn
            notes = [*_loading_notes(report), *grown_notes, *redrawn_notes]
        else:
            with torch.device("meta" if meta else "cpu"):
                model = auto.from_config(values, dtype=_dtype(config), **options)
    except ConfigError:
        raise
    except Exception as error:  # each architecture refuses in its own way
        raise ConfigError(
            f"{name_of_model(config)}: cannot be built for this task: {message_in_one_line(error)}"
        ) from error
    # 2. Refuse a model that does not fit the tokenizer, the texts or the task.
    _refuse_other_vocabulary(config, model, spec)
    _refuse_padded_positions(config, model, spec)
    if not meta and spec.auto_class == CAUSAL:
        refuse_noncausal_model(config, model)
    # 3. Freeze it, and add the factors of the adapter.
    if isinstance(adapter, LoraConfig):
        notes += _inject(config, spec, adapter, model, new, meta=meta)
    return model, notes


def _inject(
    config: ModelConfig,
    spec: ModelSpec,
    adapter: LoraConfig,
    model: PreTrainedModel,
    new: Iterable[str],
    *,
    meta: bool,
) -> list[str]:
    """Put an adapter into a model, and return notes for the user.

    new: Names of parameters that are in no file of weights; they train in full. A note warns of a
    base from scratch, whose frozen weights are random.
    """
    base = _origin(config)
    new = set(new)
    # In the order of the model, and without names of tensors that are no parameters.
    notes = inject_adapter(
        adapter,
        model,
        spec.auto_class,
        [name for name, _ in model.named_parameters() if name in new],
        base=base,
        quantized=is_quantized(config),
        meta=meta,
    )
    if base is None and not meta:
        notes.append(
            f"warning: model={config.name} starts from scratch, so the weights that"
            f" adapter={adapter.name} freezes are random"
        )
    return notes


def _load(
    config: PretrainedConfig,
    auto: Any,
    values: TransformersConfig,
    dtype: torch.dtype,
    options: Mapping[str, object],
) -> tuple[PreTrainedModel, Report]:
    """Load a pretrained model, with the loading info of transformers.

    The embedding has its stored size, even if `values` has a larger vocabulary;
    `_grow_vocabulary` enlarges it afterwards.
    """
    loadable = copy.deepcopy(values)
    size = stored_vocab_size(config)
    text_config = loadable.get_text_config()
    if size is not None and size < getattr(text_config, "vocab_size", 0):
        text_config.vocab_size = size
    model, report = auto.from_pretrained(
        str(expand_home(config.path)),
        config=loadable,
        dtype=dtype,
        revision=config.revision,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    return model, report


def _missing_names(report: Report) -> list[str]:
    """List the parameters that are not in the weights, and so are drawn."""
    return list(map(str, report.get("missing_keys", ())))


def _mismatched_names(report: Report) -> list[str]:
    """List the parameters that the weights have in another shape, and that are drawn instead."""
    names = []
    for entry in report.get("mismatched_keys", ()):  # a name, or a name with two shapes
        names.append(str(entry[0] if isinstance(entry, tuple) else entry))
    return names


def _has_other_classes(config: ModelConfig, spec: ModelSpec) -> bool:
    """Tell whether the stored head and the rows have different classes.

    Another order differs, too. False for a model from scratch, weights without a head for the task,
    and rows without classes.
    """
    id2label = spec.config.get("id2label")  # the classes of the rows
    if not isinstance(config, PretrainedConfig) or not isinstance(id2label, dict):
        return False
    stored_classes = head_classes(config, spec.auto_class)
    return stored_classes is not None and list(id2label.values()) != stored_classes


def _redraw_head(
    auto: Any, model: PreTrainedModel, config: ModelConfig, spec: ModelSpec, new: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Redraw the head in place if its classes differ from those of the rows.

    Also if their number is equal. The parameters of the head are those whose shape depends on the
    number of classes. Weights are normal with the model's `initializer_range`, biases 0, as
    transformers draws them.

    Args:
        auto: The transformers class that builds the model.
        model: Changed in place.
        config: The model choice.
        spec: Has the classes of the rows.
        new: Parameters that are drawn already; they stay.

    Returns:
        Names of the redrawn parameters, and notes for the user; both empty if the classes are the
        same.
    """
    if not _has_other_classes(config, spec):
        return [], []
    # 1. Find the head: its shapes differ in a model with one class more, built without memory.
    values = copy.deepcopy(model.config)
    values.num_labels = model.config.num_labels + 1
    with torch.device("meta"):
        larger = auto.from_config(values)
    larger_shapes = {name: param.shape for name, param in larger.named_parameters()}
    # 2. Draw it.
    std = float(getattr(model.config, "initializer_range", 0.02))
    redrawn = []
    for name, param in model.named_parameters():
        if larger_shapes[name] == param.shape or name in new:
            continue
        redrawn.append(name)
        with torch.no_grad():
            if param.dim() > 1:
                param.normal_(0.0, std)
            else:
                param.zero_()
    if not redrawn:
        return [], []
    return redrawn, [f"new, since its classes are others: {list_names(sorted(redrawn), 4)}"]


def _grow_vocabulary(
    model: PreTrainedModel, values: TransformersConfig
) -> tuple[list[str], list[str]]:
    """Enlarge the embedding in place to the configured vocabulary; existing rows stay.

    New rows are drawn around the mean of the old ones, as transformers does.

    Args:
        model: As `_load` returns it.
        values: Its configuration, with the configured `vocab_size`.

    Returns:
        Names of the parameters that grew, and notes for the user; both empty if the size is the
        stored one.
    """
    size = getattr(values.get_text_config(), "vocab_size", None)
    stored_size = getattr(model.config.get_text_config(), "vocab_size", size)
    if size is None or stored_size == size:
        return [], []
    shapes = {name: param.shape for name, param in model.named_parameters()}
    model.resize_token_embeddings(size)
    grown = [name for name, param in model.named_parameters() if shapes[name] != param.shape]
    return grown, [
        f"model.config.vocab_size={size}: the {stored_size:,} rows of the embedding stay, and"
        f" {size - stored_size:,} are added, drawn around their mean"
    ]


def build_with_start_weights(
    config: ModelConfig, kind: type[Any], values: TransformersConfig
) -> tuple[PreTrainedModel, str | None]:
    """Build a model of a given class and configuration with its weights before training.

    Args:
        config: The model choice.
        kind: Class of transformers.
        values: Its configuration.

    Returns:
        The model, and the hub name or folder of its weights; None: they were drawn from the seed of
        torch's generator.

    Raises:
        ConfigError: The weights cannot be loaded.
    """
    if not isinstance(config, PretrainedConfig):
        return kind._from_config(values, dtype=_dtype(config)), None
    refuse_no_model(config.path)
    refuse_broken_weights(config.path)
    path = str(expand_home(config.path))
    try:
        model = kind.from_pretrained(
            path,
            config=values,
            revision=config.revision,
            use_safetensors=True,
            dtype=_dtype(config),
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # OSError, ValueError, and the hub client's own
        raise ConfigError(
            f"model.path={config.path}: this model cannot be loaded: {message_in_one_line(error)}"
        ) from error
    return model, _origin(config)


def _dtype(config: ModelConfig) -> torch.dtype:
    """Convert `model.dtype` to a dtype of torch."""
    torch_dtype: torch.dtype = getattr(torch, config.dtype.value)
    return torch_dtype


def _origin(config: ModelConfig) -> str | None:
    """Return the hub name or absolute folder of a model's start weights.

    None for a model from scratch.
    """
    if not isinstance(config, PretrainedConfig):
        return None
    folder = expand_home(config.path)
    if folder.is_dir():
        return str(folder.resolve())
    return config.path


def _refuse_other_vocabulary(config: ModelConfig, model: PreTrainedModel, spec: ModelSpec) -> None:
    """Refuse a tokenizer with more entries than the embedding has rows, or with far fewer.

    One that uses less than half of a pretrained embedding belongs to other weights. Models without
    text, or without an embedding of known size, pass.

    Raises:
        ConfigError: With both sizes, and what to change.
    """
    size = spec.vocab_size
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if size is None or rows is None:
        return
    is_pretrained = isinstance(config, PretrainedConfig)
    key = "model.path" if config.tokenizer is None else "model.tokenizer"
    message = f"{key}: the tokenizer has {size:,} entries, the embedding {rows:,} rows:"
    advice = "Take the model's own tokenizer, unchanged"
    if size > rows:
        if is_pretrained:
            advice += f", or model.config.vocab_size={size}, which adds rows and keeps the old ones"
        raise ConfigError(f"{message} the other entries have no row. {advice}.")
    if is_pretrained and size < _LEAST_USED_SHARE * rows:
        raise ConfigError(
            f"{message} this is not the tokenizer of these weights. {advice}, or"
            f" model.config.vocab_size={size} for a new embedding."
        )


def _refuse_padded_positions(config: ModelConfig, model: PreTrainedModel, spec: ModelSpec) -> None:
    """Refuse texts longer than the positions of models such as RoBERTa.

    Their position ids begin at `padding_idx + 1`, so that this many rows of the embedding of
    positions are never used by a token: with `padding_idx` 1, of 514 rows 512 are.

    Raises:
        ConfigError: As `refuse_long`.
    """
    if spec.max_length is None:
        return
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        is_position_embedding = name.endswith("position_embeddings") and isinstance(
            module, nn.Embedding
        )
        if is_position_embedding and padding is not None:
            refuse_long(config, module.num_embeddings - padding - 1, spec)


def refuse_noncausal_model(config: ModelConfig, model: PreTrainedModel) -> None:
    """Refuse a model if later tokens change its prediction of the next token.

    It is run on two texts of eight tokens that differ in the last four; the logits of the first
    four must be the same. Mode and random state are restored.

    Raises:
        ConfigError: They are not, or the model cannot run on eight tokens.
    """
    # 1. Two texts: equal ids at 0 to 3, other ids at 4 to 7.
    size = model.get_input_embeddings().num_embeddings
    ids = torch.arange(8, device=model.device).remainder(size).repeat(2, 1)
    ids[1, 4:] = (ids[1, 4:] + size // 2) % size
    # 2. Their logits at 0 to 3.
    try:
        with evaluation_mode(model), torch.random.fork_rng(devices=[]), plain_attention(model):
            logits = model(input_ids=ids).logits[:, :4]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"model={config.name}: it cannot run on eight tokens: {message_in_one_line(error)}"
        ) from error
    # 3. Compare them, up to rounding, which grows with the logits.
    first, second = logits.float()
    tolerance = 1e-5 if model.dtype is logits.dtype is torch.float32 else 1e-2
    scale = max(1.0, float(first.abs().max()))
    if float((first - second).abs().max()) <= tolerance * scale:
        return
    alternative = ""
    if getattr(model.config, "is_decoder", None) is False:
        alternative = " or model.config.is_decoder=true,"
    raise ConfigError(
        f"model={config.name}: {type(model).__name__} sees the tokens after the one it predicts, so"
        " task=causal_lm would teach it nothing. Take a decoder such as gpt2 or"
        f" llama,{alternative} or task=masked_lm."
    )


def _refuse_other_weights(config: ModelConfig, model: PreTrainedModel, report: Report) -> None:
    """Refuse weights of another model: more than half of the parameters would be new.

    Raises:
        ConfigError: With up to four of their names.
    """
    mismatched = _mismatched_names(report)
    new_names = {*_missing_names(report), *mismatched}
    names = [name for name, _ in model.named_parameters()]
    new = sorted(name for name in names if name in new_names)
    if 2 * len(new) <= len(names):
        return
    reason = "have other names there"
    if len(mismatched) > len(new) / 2:
        reason = "have another shape than its config.json says"
    raise ConfigError(
        f"{name_of_model(config)}: {len(new)} of the model's {len(names)} tensors are not in its"
        f" weights, or {reason}: {list_names(new, 4)}. Its config.json and its weights belong to"
        " different models: take both from one folder."
    )


def _loading_notes(report: Report) -> list[str]:
    """Describe new and unused weights after loading, one note for each reason.

    A note, such as `new, not in the weights: score.weight`, names four weights, and counts the
    others.
    """
    names_by_reason = {
        "new, not in the weights": {*_missing_names(report)},
        "new, since the weights have another shape": _mismatched_names(report),
        "in the weights, not in this model": {*map(str, report.get("unexpected_keys", ()))},
    }
    notes = []
    for reason, names in names_by_reason.items():
        if names:
            notes.append(f"{reason}: {list_names(sorted(names), 4)}")
    return notes
