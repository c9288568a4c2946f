"""LoRA: low-rank factors beside frozen weights, by peft's layers in a transformers model.

The model is changed in place: its class, its forward pass and the names of all other modules stay.
A matrix `query.weight` becomes `query.base_layer.weight`, and its factors are
`query.lora_A.default.weight` and `query.lora_B.default.weight`, as peft names them.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from optrun.base.errors import ConfigError, message_in_one_line
from optrun.base.formatting import plural
from optrun.base.plain import is_inside_any
from optrun.config.names import near_names
from optrun.config.schema.adapter import AdapterConfig, LoraConfig
from optrun.model.adapter_modules import (
    AdapterModules,
    head_modules,
    linear_modules,
    match_modules,
    shared_modules,
)
from optrun.model.quantization import dequantize, quantize, tensor_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""peft's name for the only adapter of a model."""
_ADAPTER_ATTRIBUTE = "_optrun_adapter"
_LAYER_NUMBER = re.compile(r".*\.[^.]*\.(\d+)\.")
"""The number of a layer in the name of a module, as peft finds it."""
_LANGUAGE_MODELS = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
)
"""Classes whose head comes with the weights, and is often the embedding itself."""
_TASK_TYPES = {
    "AutoModel": "FEATURE_EXTRACTION",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
}
"""The `task_type` of peft for each."""


@dataclass(frozen=True)
class InjectedAdapter:
    """The adapter of a model.

    Attributes:
        names: Parameters and buffers that belong to the adapter; all others are the frozen base.
        modules: Modules with factors, and modules that train in full.
        base: Hub name or folder of the base; None: its weights were drawn from a seed.
    """

    names: frozenset[str]
    modules: AdapterModules
    base: str | None


def adapter_of(model: nn.Module) -> InjectedAdapter | None:
    """Return the adapter of a model; None if it has none."""
    mark = getattr(model, _ADAPTER_ATTRIBUTE, None)
    if isinstance(mark, InjectedAdapter):
        return mark
    return None


def require_adapter(config: AdapterConfig) -> None:
    """Refuse an adapter if its package is not installed, before anything is loaded.

    Raises:
        ConfigError: With the command that installs it.
    """
    if config.package is not None and importlib.util.find_spec(config.package) is None:
        raise ConfigError(
            f"adapter={config.name}: the package {config.package} is not installed. pip install"
            " 'optrun[lora]'"
        )


def inject_adapter(
    config: LoraConfig,
    model: PreTrainedModel,
    auto_class: str,
    new: Iterable[str] = (),
    *,
    base: str | None = None,
    quantized: bool = False,
    dequantized: bool = False,
    meta: bool = False,
) -> list[str]:
    """Freeze a model, and put the factors of LoRA beside its matrices.

    Args:
        config: The choice.
        model: Changed in place: peft's modules replace some of its own, and trained parameters
            become float32.
        auto_class: The transformers class that the task asked for. The head of a language model
            belongs to the frozen base; any other head belongs to the task, and trains in full.
        new: Names of parameters that are in no file of weights; they must train.
        base: Hub name or folder of the weights; None: they were drawn from a seed.
        quantized: Quantise the frozen linear modules outside of the head.
        dequantized: Then replace them by plain modules with the quantised values.
        meta: The model and its factors are on the meta device.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: peft is missing; a name matches no module, or only modules that it must not
            match; or the model has a base that would not stay frozen.
    """
    require_adapter(config)
    import peft

    # 1. Decide which modules train in full, and which get factors.
    _refuse_running_statistics(model)
    saved = _modules_to_save(config, model, auto_class, list(new))
    targets = _target_modules(config, model, saved, auto_class)
    # 2. Quantise the others.
    notes = []
    if quantized:
        skipped = [*saved, *head_modules(model)]
        frozen = [path for path in linear_modules(model) if not is_inside_any(path, skipped)]
        notes.append(quantize(model, frozen, meta=meta))
        if dequantized:
            dequantize(model)
    # 3. Let peft replace modules.
    same_names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about Conv1D, whose weight is transposed
            lora = peft.LoraConfig(
                **{name: getattr(config, name) for name in same_names},
                target_modules=list(targets),
                modules_to_save=saved or None,
                bias=config.bias.value,
                rank_pattern=dict(config.rank_pattern),
                alpha_pattern=dict(config.alpha_pattern),
                init_lora_weights=meta or config.init_lora_weights,
                task_type=_TASK_TYPES.get(auto_class),
                base_model_name_or_path=base,
            )
            peft.inject_adapter_in_model(lora, model, ADAPTER, low_cpu_mem_usage=meta)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        raise ConfigError(
            f"adapter={config.name}: peft cannot take this model: {message_in_one_line(error)}"
        ) from error
    for param in model.parameters():
        if param.requires_grad:  # in float32, also beside a base in 16 bits
            param.data = param.data.float()
    # 4. Record what peft has replaced.
    modules = _find_adapter_modules(model)
    _refuse_other_modules(modules, AdapterModules(targets, saved))
    setattr(
        model, _ADAPTER_ATTRIBUTE, InjectedAdapter(_adapter_names(model, modules), modules, base)
    )
    note = _describe_adapter(config, model, modules)
    if meta and base is not None:
        note += "; parameters that the weights lack train, too, but weights are not read here"
    return [note, *notes]


def inject_same_adapter(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Put the adapter of a model into another model of its class, on the meta device.

    Does nothing if the first model has no adapter.

    Args:
        model: The model with the adapter.
        plain: The other model; changed in place, to the same names and shapes of parameters.
    """
    adapter = adapter_of(model)
    if adapter is None:
        return
    import peft

    # Other ways to initialise factors read the weights, and there are none on meta.
    config = replace(model.peft_config[ADAPTER], init_lora_weights=True)
    peft.inject_adapter_in_model(config, plain, ADAPTER, low_cpu_mem_usage=True)
    plain.peft_config = model.peft_config
    setattr(plain, _ADAPTER_ATTRIBUTE, adapter)


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Collect weights and persistent buffers of the frozen base by their names without adapter.

    `query.base_layer.weight` is `query.weight` there; LoRA factors (the matrices A and B) are left
    out, and so are modules that train in full, with the originals that peft keeps of them. All
    tensors of a model without an adapter. Each name once, parameters first.
    """
    # 1. What is left out: factors and other tensors of the adapter, and all of some modules.
    adapter = adapter_of(model)
    adapter_names = frozenset[str]()
    trained_prefixes: tuple[str, ...] = ()  # such as `classifier.`
    if adapter is not None:
        adapter_names = adapter.names
        trained_prefixes = tuple(f"{path}." for path in adapter.modules.saved)
    # 2. Parameters, and then buffers: a state dict has the parameters once more.
    tensors: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.state_dict().items()]:
        base_name = name.replace("base_layer.", "")
        is_of_adapter = name in adapter_names or name.startswith(trained_prefixes)
        if not is_of_adapter and base_name not in tensors:
            tensors[base_name] = tensor.detach()
    return tensors


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Let a model compute as its frozen base alone inside this context.

    Afterwards the adapter is enabled, and the same parameters train as before. A model without an
    adapter is not changed.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    layers = [
        module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)
    ]
    trains = {param: param.requires_grad for param in model.parameters()}
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)  # peft lets all factors train then, also frozen ones
        for param, requires_grad in trains.items():
            param.requires_grad_(requires_grad)


def merge_adapter(model: nn.Module) -> None:
    """Add the factors to their weights, and remove the adapter, in place.

    Afterwards the model is a plain one, whose parameters all train.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for path, module in list(model.named_modules()):
        parent, _, leaf = path.rpartition(".")
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            setattr(model.get_submodule(parent), leaf, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            setattr(model.get_submodule(parent), leaf, module.modules_to_save[ADAPTER])
    for attribute in ("peft_config", _ADAPTER_ATTRIBUTE):
        delattr(model, attribute)
    model.requires_grad_(True)


def _modules_to_save(
    config: LoraConfig, model: PreTrainedModel, auto_class: str, new: Sequence[str]
) -> list[str]:
    """List the modules to train in full.

    Those of `adapter.modules_to_save`; by default the head of a task, and the modules of `new`. Of
    `BertForSequenceClassification` the default is `["classifier"]`, and of `BertForMaskedLM` none,
    unless its weights lack a parameter.

    Args:
        config: The choice.
        model: Without factors.
        auto_class: The transformers class that the task asked for; the head of a language model is
            frozen.
        new: Names of parameters that are in no file of weights.

    Raises:
        ConfigError: A name fits no module; a named module shares its weight; a parameter of `new`
            is in none of them.
    """
    modules = {name for name, module in model.named_modules() if name and list(module.parameters())}
    # 1. The modules that the user names.
    if config.modules_to_save is not None:
        saved = match_modules("adapter.modules_to_save", config.modules_to_save, modules)
        _refuse_to_save(config, model, saved, new)
        return saved
    # 2. The head, unless it is a language model's. A norm above the blocks, such as `norm`, stays
    #    frozen if the name of a norm in the blocks ends like it, as `layers.0.input_norm` does:
    #    peft matches the ends of names, and would let these train, too.
    head = [] if auto_class in _LANGUAGE_MODELS else head_modules(model)
    saved = []
    for path in head:
        is_norm = "Norm" in type(model.get_submodule(path)).__name__
        ends_other_name = any(name != path and name.endswith(path) for name in modules)
        if not (is_norm and ends_other_name):
            saved.append(path)
    # 3. The modules of new parameters that are not in it, each once.
    new_modules = [name.rpartition(".")[0] for name in new if not is_inside_any(name, saved)]
    return [*saved, *dict.fromkeys(new_modules)]


def _refuse_to_save(
    config: LoraConfig, model: PreTrainedModel, saved: Sequence[str], new: Sequence[str]
) -> None:
    """Refuse saved modules if one shares its weight, or if a new parameter is in none of them.

    Args:
        config: Its `modules_to_save` is quoted in the message.
        model: Without LoRA factors.
        saved: The modules that `adapter.modules_to_save` matches; they train in full.
        new: Names of parameters that are in no file of weights: outside of `saved` they would stay
            random.

    Raises:
        ConfigError: The message names the first such module or parameter, and says what to do.
    """
    key = "adapter.modules_to_save"
    shared = shared_modules(model)  # module -> another name of its weight
    for path in saved:
        if path in shared:
            raise ConfigError(
                f"{key}: {path} shares its weight with {shared[path]}: a copy of it would train"
                " apart. Leave it out."
            )
    for name in new:
        if not is_inside_any(name, saved):
            raise ConfigError(
                f"{key}={config.modules_to_save}: {name} is not in the model's weights, so it"
                f" would stay random. Name its module, too, such as {name.rpartition('.')[0]}, or"
                f" leave {key} null."
            )


def _target_modules(
    config: LoraConfig, model: PreTrainedModel, saved: Sequence[str], auto_class: str
) -> list[str]:
    """List the modules to put LoRA factors beside.

    `target_modules` chooses, then `exclude_modules` and `layers_to_transform` take away.

    Args:
        config: The choice. Each of its `rank_pattern` and `alpha_pattern` must match a chosen
            module.
        model: Without factors.
        saved: Modules that train in full; neither they nor modules inside of them get factors.
        auto_class: The transformers class that the task asked for.

    Raises:
        ConfigError: A name, a layer or a pattern that fits no module; no module is left; a named
            module shares its weight with another one.
    """
    if config.target_modules in (None, "all-linear"):
        targets = _default_targets(config, model, saved, auto_class)
    else:
        targets = _named_targets(config.target_modules, model, saved)
    if config.exclude_modules is not None:
        excluded = match_modules("adapter.exclude_modules", config.exclude_modules, targets)
        targets = [path for path in targets if path not in excluded]
    if config.layers_to_transform is not None:
        targets = _select_layers(config.layers_to_transform, targets)
    _refuse_unused_patterns(config, targets)
    if not targets:
        raise ConfigError(
            f"adapter.exclude_modules={config.exclude_modules}: no module is left to put factors"
            " beside. Exclude fewer."
        )
    return targets


def _default_targets(
    config: LoraConfig, model: PreTrainedModel, saved: Sequence[str], auto_class: str
) -> list[str]:
    """List all linear modules outside of `saved`, and outside of a language model's head.

    saved: Modules that train in full.

    Raises:
        ConfigError: There is none.
    """
    skipped = list(saved)
    if auto_class in _LANGUAGE_MODELS:
        skipped += head_modules(model)
    targets = [path for path in linear_modules(model) if not is_inside_any(path, skipped)]
    if not targets:
        raise ConfigError(
            f"adapter.target_modules={config.target_modules or 'null'}: {type(model).__name__} has"
            " no linear module besides its head. Name other modules."
        )
    return targets


def _named_targets(
    names: str | Sequence[str], model: PreTrainedModel, saved: Sequence[str]
) -> list[str]:
    """List the modules named in `adapter.target_modules`, without those inside of `saved`.

    Args:
        names: Names, or one regular expression, as `match_modules` reads them.
        model: Without factors.
        saved: Modules that train in full.

    Raises:
        ConfigError: A name fits no module, or all are inside of `saved`; a module shares its weight
            with another one.
    """
    key = "adapter.target_modules"
    modules = [name for name, _ in model.named_modules() if name]
    matched = match_modules(key, names, modules, linear_modules(model))
    targets = [path for path in matched if not is_inside_any(path, saved)]
    if not targets:
        raise ConfigError(
            f"{key}={names}: matches only modules that train in full ({', '.join(saved)}), and"
            " factors go beside frozen ones. Name other modules, or name in"
            " adapter.modules_to_save what is to train in full."
        )
    shared = shared_modules(model)
    for path in targets:
        if path in shared:
            raise ConfigError(
                f"{key}={names}: {path} shares its weight with {shared[path]}: factors beside one"
                " of them would make two weights of one. Leave it out."
            )
    return targets


def _select_layers(layers: int | Sequence[int], targets: Sequence[str]) -> list[str]:
    """Select the modules inside of some layers; a module outside of all layers is left out.

    Args:
        layers: The number of a layer, or several: `adapter.layers_to_transform`.
        targets: Names of the modules to select from.

    Raises:
        ConfigError: A layer has none of them.

    Example:
        >>> _select_layers(1, ["bert.layer.0.query", "bert.layer.1.query", "pooler.dense"])
        ['bert.layer.1.query']
    """
    selected = [layers] if isinstance(layers, int) else list(layers)
    layer_of: dict[str, int] = {}
    for path in targets:
        match = _LAYER_NUMBER.match(path)
        if match is not None:
            layer_of[path] = int(match[1])
    existing = sorted(set(layer_of.values()))
    for layer in selected:
        if layer not in existing:
            raise ConfigError(
                f"adapter.layers_to_transform={layers}: layer {layer} has no module to put factors"
                f" beside. Layers that have: {', '.join(map(str, existing)) or 'none'}."
            )
    return [path for path in targets if layer_of.get(path) in selected]


def _refuse_unused_patterns(config: LoraConfig, targets: Sequence[str]) -> None:
    """Refuse a key of `rank_pattern` or `alpha_pattern` without a module to match.

    A pattern matches the whole name of a module with factors, or its end behind a dot, as in peft:
    `query` matches `layer.0.query`, and not `layer.0.my_query`.
    """
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if any(re.match(rf"(.*\.)?({pattern})$", path) for path in targets):
                continue
            leaves = dict.fromkeys(path.rpartition(".")[2] for path in targets)
            raise ConfigError(
                f"adapter.{key}={pattern}: no module with factors has such a name."
                f" {near_names(pattern, list(leaves))}"
            )


def _refuse_running_statistics(model: nn.Module) -> None:
    """Refuse a base with batch norms: their running statistics would not stay frozen."""
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ConfigError(
                f"adapter=lora: {path} is a {type(module).__name__}, whose running statistics"
                " change with every batch, so that the base would not stay frozen. Train this"
                " model with adapter=none."
            )


def _find_adapter_modules(model: nn.Module) -> AdapterModules:
    """Find the modules of a model that peft has replaced: with LoRA factors, or copied."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    modules = list(model.named_modules())
    return AdapterModules(
        [path for path, module in modules if isinstance(module, BaseTunerLayer)],
        [path for path, module in modules if isinstance(module, ModulesToSaveWrapper)],
    )


def _refuse_other_modules(replaced: AdapterModules, wanted: AdapterModules) -> None:
    """Refuse names if peft has replaced other modules than the wanted ones.

    peft matches the ends of names, so that a name may fit further modules.

    Raises:
        ConfigError: With the first module that peft should not have replaced.
    """
    for key, paths, wanted_paths in (
        ("target_modules", replaced.targets, wanted.targets),
        ("modules_to_save", replaced.saved, wanted.saved),
    ):
        differing = set(paths) ^ set(wanted_paths)  # in one of them, but not in both
        if differing:
            raise ConfigError(
                f"adapter.{key}: peft takes {min(differing)} for one of"
                f" {', '.join(wanted_paths[:4])}, by the end of its name. Give names that no other"
                " module ends with."
            )


def _adapter_names(model: nn.Module, modules: AdapterModules) -> frozenset[str]:
    """List the parameters and buffers of the adapter.

    These are all parameters that train now, and all tensors of modules that train in full.
    """
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    # peft trains a copy of such a module, whose buffers belong to the adapter as well.
    copies = tuple(f"{path}.modules_to_save.{ADAPTER}." for path in modules.saved)
    return frozenset([*trained, *(name for name in model.state_dict() if name.startswith(copies))])


def _describe_adapter(config: LoraConfig, model: nn.Module, modules: AdapterModules) -> str:
    """Describe the adapter for the user: rank, modules, and the share of trained parameters.

    Such as `adapter=lora: factors of rank 8 beside 24 modules (query, value); classifier trains in
    full: 296,450 of 109,780,228 parameters train, 0.27%`.
    """
    rank = f"{config.r}"
    if config.rank_pattern:
        rank += ", others by adapter.rank_pattern"
    kinds = list(dict.fromkeys(path.rpartition(".")[2] for path in modules.targets))
    if len(kinds) > 6:
        kinds[6:] = ["..."]
    saved = ""
    if modules.saved:
        verb = "trains" if len(modules.saved) == 1 else "train"
        saved = f"; {', '.join(modules.saved)} {verb} in full"
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    total = sum(tensor_sizes(model).values())
    for path in modules.saved:  # peft keeps the original beside the copy that trains
        original = model.get_submodule(f"{path}.original_module")
        total -= sum(param.numel() for param in original.parameters())
    plus = ""
    if config.loraplus_lr_ratio is not None:
        plus = f"; B at {config.loraplus_lr_ratio:g} times the lr of A"
    return (
        f"adapter={config.name}: factors of rank {rank} beside"
        f" {plural(len(modules.targets), 'module')} ({', '.join(kinds)}){saved}: {trained:,} of"
        f" {total:,} parameters train, {trained / total:.2%}{plus}"
    )
