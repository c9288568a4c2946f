"""A transformers model for a task: with weights, from scratch, or as shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from optrun.base.errors import ConfigError
from optrun.config.schema.adapter import AdapterConfig, LoraConfig
from optrun.config.schema.model import ModelConfig, PretrainedConfig
from optrun.model.adapter import inject
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
from optrun.model.quantization import quantization_options
from optrun.model.tokenizer import in_one_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig as TransformersConfig
    from transformers import PreTrainedModel

__all__ = ["ModelSpec", "build_model", "special_ids"]

CAUSAL = "AutoModelForCausalLM"
Report = Mapping[str, Iterable[object]]
"""What transformers says of the weights that it loaded."""
_LEAST_USED = 0.5
"""Share of an embedding that a tokenizer reaches: T5 and Qwen leave 1 % as room, ByT5, with 256
bytes, 33 %."""


def build_model(
    config: ModelConfig,
    spec: ModelSpec,
    *,
    adapter: AdapterConfig | None = None,
    meta: bool = False,
) -> tuple[PreTrainedModel, list[str]]:
    """Build the model on the CPU.

    Args:
        config: The model choice.
        spec: What it must be.
        adapter: What is put into it; None: nothing.
        meta: True: shapes alone, on the meta device, whatever its size; no weights are read.

    Returns:
        The model, and notes for the user (which weights are new, which of the file were left out).

    Raises:
        ConfigError: An unknown architecture, path or configuration value; weights that are no
            safetensors; a model with too few positions, with no head for the task, or with one that
            sees the tokens it should predict; an adapter that does not fit it.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    auto = getattr(transformers, spec.auto_class)
    values = configuration(config, spec)
    dtype = _dtype(config)
    options: dict[str, object] = {}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    notes: list[str] = []
    new: list[str] = []
    try:
        if isinstance(config, PretrainedConfig):
            options["trust_remote_code"] = config.trust_remote_code
        if isinstance(config, PretrainedConfig) and not meta:
            model, report = _load(config, auto, values, dtype, options)
            _refuse_strangers(config, model, report)
            new = _new_names(report)
            notes += _loading_notes(report) + _grow_vocabulary(model, values, new)
            notes += _renew_head(auto, model, config, spec, new)
        else:
            with torch.device("meta" if meta else "cpu"):
                model = auto.from_config(values, dtype=dtype, **options)
    except ConfigError:
        raise
    except Exception as error:  # each architecture refuses in its own way
        raise ConfigError(
            f"{name_of_model(config)}: cannot be built for this task: {in_one_line(error)}"
        ) from error
    _refuse_other_vocabulary(config, model, spec)
    _refuse_padded_positions(config, model, spec)
    if not meta:
        _refuse_seer_of_task(config, model, spec)
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
    """Put an adapter into a model; new weights train in full. Returns notes."""
    base = _origin(config)
    quantization = quantization_options(config)
    names = _parameters(model, new)
    notes = inject(
        adapter, model, spec.auto_class, names, base=base, quantization=quantization, meta=meta
    )
    if base is None and not meta:
        notes.append(
            f"warning: model={config.name} starts from scratch: what adapter={adapter.name}"
            " freezes is random"
        )
    return notes


def _load(
    config: PretrainedConfig,
    auto: Any,
    values: TransformersConfig,
    dtype: torch.dtype,
    options: Mapping[str, object],
) -> tuple[PreTrainedModel, Report]:
    """Load a pretrained model, with the report of transformers on its weights.

    An embedding that is to be larger is loaded as it is stored.
    """
    stored = copy.deepcopy(values)
    size = stored_vocab_size(config)
    text = stored.get_text_config()
    if size is not None and size < getattr(text, "vocab_size", 0):
        text.vocab_size = size
    model, report = auto.from_pretrained(
        str(Path(config.path).expanduser()),
        config=stored,
        dtype=dtype,
        revision=config.revision,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **options,
    )
    return model, report


def _new_names(report: Report) -> list[str]:
    """List the parameters missing from the weights, or there in another shape."""
    mismatched = (
        str(entry[0] if isinstance(entry, tuple) else entry)
        for entry in report.get("mismatched_keys", ())
    )
    return [*map(str, report.get("missing_keys", ())), *mismatched]


def _has_other_classes(config: ModelConfig, spec: ModelSpec) -> bool:
    """Tell whether the head in the weights tells other classes apart than the rows have."""
    id2label = spec.config.get("id2label")
    if not isinstance(config, PretrainedConfig) or not isinstance(id2label, dict):
        return False
    classes = head_classes(config, spec.auto_class)
    return classes is not None and list(id2label.values()) != classes


def _renew_head(
    auto: Any, model: PreTrainedModel, config: ModelConfig, spec: ModelSpec, new: list[str]
) -> list[str]:
    """Redraw a head with other classes, even if their number is the same.

    Weights are normal with the model's `initializer_range`, biases 0, as transformers draws them.
    `new` takes the names. Returns notes.
    """
    if not _has_other_classes(config, spec):
        return []
    more = copy.deepcopy(model.config)
    more.num_labels = model.config.num_labels + 1
    with torch.device("meta"):
        larger = auto.from_config(more)
    shapes = {name: param.shape for name, param in larger.named_parameters()}
    names = []
    for name, param in model.named_parameters():
        if shapes[name] == param.shape or name in new:
            continue
        names.append(name)
        spread = float(getattr(model.config, "initializer_range", 0.02))
        with torch.no_grad():
            if param.dim() > 1:
                param.normal_(0.0, spread)
            else:
                param.zero_()
    new += names
    if names:
        return [f"new, since its classes are others: {_some(sorted(names))}"]
    return []


def _grow_vocabulary(
    model: PreTrainedModel, values: TransformersConfig, new: list[str]
) -> list[str]:
    """Enlarge the embedding to `model.config.vocab_size`; existing rows stay.

    New rows are drawn around the mean of the old ones, as transformers does. `new` takes the names
    of what grew. Returns notes.
    """
    size = getattr(values.get_text_config(), "vocab_size", None)
    stored = getattr(model.config.get_text_config(), "vocab_size", size)
    if size is None or stored == size:
        return []
    shapes = {name: param.shape for name, param in model.named_parameters()}
    model.resize_token_embeddings(size)
    for name, param in model.named_parameters():
        if shapes[name] != param.shape and name not in new:
            new.append(name)
    return [
        f"model.config.vocab_size={size}: the {stored:,} rows of the embedding stay, and"
        f" {size - stored:,} are added, drawn around their mean"
    ]


def weights_of(
    config: ModelConfig, kind: type[Any], values: TransformersConfig
) -> tuple[PreTrainedModel, str | None]:
    """Build a model of a given class and configuration with its start weights.

    Args:
        config: The model choice.
        kind: Class of transformers.
        values: Its configuration.

    Returns:
        The model, and where its weights lie; None: they were made from the seed of torch's
        generator.

    Raises:
        ConfigError: There are no such weights.
    """
    if not isinstance(config, PretrainedConfig):
        return kind._from_config(values, dtype=_dtype(config)), None
    refuse_no_model(config.path)
    refuse_broken_weights(config.path)
    path = str(Path(config.path).expanduser())
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
            f"model.path={config.path}: the base cannot be loaded: {in_one_line(error)}"
        ) from error
    return model, _origin(config)


def _dtype(config: ModelConfig) -> torch.dtype:
    torch_dtype: torch.dtype = getattr(torch, config.dtype.value)
    return torch_dtype


def _origin(config: ModelConfig) -> str | None:
    """Return the public location of a model's start weights; None from scratch."""
    if not isinstance(config, PretrainedConfig):
        return None
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return str(folder.resolve())
    return config.path


def _parameters(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    new_names_set = set(names)
    return [name for name, _ in model.named_parameters() if name in new_names_set]


def _refuse_other_vocabulary(config: ModelConfig, model: PreTrainedModel, spec: ModelSpec) -> None:
    """Compare the tokenizer with the embedding; a table is often somewhat larger, never smaller.

    Raises:
        ConfigError: Ids without a row in the embedding, or weights of which most rows no token
            reaches.
    """
    embedding = model.get_input_embeddings() if spec.vocab_size is not None else None
    rows = getattr(embedding, "num_embeddings", None)
    if rows is None or spec.vocab_size is None:
        return
    key = "model.path" if config.tokenizer is None else "model.tokenizer"
    message = f"{key}: the tokenizer has {spec.vocab_size:,} entries"
    pretrained = isinstance(config, PretrainedConfig)
    anew = ""
    if pretrained and spec.vocab_size > rows:
        anew = (
            f", or model.config.vocab_size={spec.vocab_size}, which adds rows and keeps those that"
            " are there"
        )
    elif pretrained:
        anew = f", or model.config.vocab_size={spec.vocab_size} for a new embedding"
    advice = f"Take the model's own tokenizer, whole{anew}."
    if spec.vocab_size > rows:
        raise ConfigError(f"{message}, the model embeds {rows:,}: the others have no row. {advice}")
    if pretrained and spec.vocab_size < _LEAST_USED * rows:
        raise ConfigError(
            f"{message}, the model embeds {rows:,}: this is no tokenizer of these weights. {advice}"
        )


def _refuse_padded_positions(config: ModelConfig, model: PreTrainedModel, spec: ModelSpec) -> None:
    """Refuse texts longer than the positions of RoBERTa and its kin.

    Which count from padding_idx + 1.
    """
    if spec.max_length is None:
        return
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if (
            name.endswith("position_embeddings")
            and isinstance(module, torch.nn.Embedding)
            and padding is not None
        ):
            refuse_long(config, module.num_embeddings - padding - 1, spec)


def _refuse_seer_of_task(config: ModelConfig, model: PreTrainedModel, spec: ModelSpec) -> None:
    """Refuse a non-causal model for next-token prediction."""
    if spec.auto_class == CAUSAL:
        refuse_seer(config, model)


def refuse_seer(config: ModelConfig, model: PreTrainedModel) -> None:
    """Refuse a model with predictions that depend on later tokens.

    It learns nothing from predicting the next one.
    """
    size = model.get_input_embeddings().num_embeddings
    ids = torch.arange(8, device=model.device).remainder(size).repeat(2, 1)
    ids[1, 4:] = (ids[1, 4:] + size // 2) % size
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), plain_attention(model):
            logits = model(input_ids=ids).logits[:, :4]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"model={config.name}: it cannot run on eight tokens: {in_one_line(error)}"
        ) from error
    finally:
        model.train(training)
    first, second = logits.float()
    rounding = 1e-5 if model.dtype is logits.dtype is torch.float32 else 1e-2
    if float((first - second).abs().max()) > rounding * max(1.0, float(first.abs().max())):
        if getattr(model.config, "is_decoder", None) is not False:
            knowingly = ""
        else:
            knowingly = " or model.config.is_decoder=true,"
        raise ConfigError(
            f"model={config.name}: {type(model).__name__} sees the tokens after the one it"
            " predicts, so task=causal_lm would teach it nothing. Take a decoder such as gpt2 or"
            f" llama,{knowingly} or task=masked_lm."
        )


def _refuse_strangers(config: ModelConfig, model: PreTrainedModel, report: Report) -> None:
    """Refuse a file without most of the model's weights.

    A head may be new, but such a model was not loaded at all.
    """
    mismatched = list(report.get("mismatched_keys", ()))
    fresh = set(_new_names(report))
    names = [name for name, _ in model.named_parameters()]
    new = [name for name in names if name in fresh]
    if 2 * len(new) > len(names):
        if len(mismatched) > len(new) / 2:
            why = "have another shape than its config.json says"
        else:
            why = "are called otherwise"
        raise ConfigError(
            f"{name_of_model(config)}: {len(new)} of the model's {len(names)} tensors are not in"
            " its"
            f" weights, or {why}: {_some(sorted(new))}. config.json and weights are not of one"
            " model."
        )


def _loading_notes(report: Report) -> list[str]:
    """Describe the weights that are new or left out after loading."""
    names_by_note = {
        "new, not in the weights": {*map(str, report.get("missing_keys", ()))},
        "new, since the weights have another shape": _new_names({**report, "missing_keys": ()}),
        "in the weights, not in this model": {*map(str, report.get("unexpected_keys", ()))},
    }
    return [f"{note}: {_some(sorted(names))}" for note, names in names_by_note.items() if names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
