"""Low-rank factors beside frozen weights: peft's layers, put into a transformers model in place.

The model stays what it was: its class, its forward pass, the names of what was not touched. A
matrix `query.weight` is
`query.base_layer.weight` afterwards, and beside it train `query.lora_A.default.weight` and
`query.lora_B...`: names of peft's, by which groups, state and checkpoints know them.
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

from optrun.base.errors import ConfigError
from optrun.base.formatting import plural
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
from optrun.model.tokenizer import message_in_one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""What peft calls the only adapter of a model."""
_MARK = "_optrun_adapter"
_LAYER = re.compile(r".*\.[^.]*\.(\d+)\.")
"""The number of a layer in the name of a module, as peft finds it."""
_OF_LANGUAGE = (
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
"""peft's words for them."""


@dataclass(frozen=True)
class InjectedAdapter:
    """What was put into a model.

    Attributes:
        names: Parameters and buffers that the adapter has, or trains; the others are the base.
        modules: Modules with factors, and modules that train whole.
        base: Where others find the base: a hub name or a folder; None: its weights were made from a
            seed.
    """

    names: frozenset[str]
    modules: AdapterModules
    base: str | None = None


def adapter_of(model: nn.Module) -> InjectedAdapter | None:
    """Return the adapter of a model; None if it has none."""
    mark = getattr(model, _MARK, None)
    if isinstance(mark, InjectedAdapter):
        return mark
    return None


def require_adapter(config: AdapterConfig) -> None:
    """Refuse an adapter with a missing package, before anything is loaded.

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
    """Freeze a model, and put the factors of peft beside its matrices.

    Args:
        config: The choice.
        model: Changed in place: peft's modules stand for some of its own, and trained parameters
            are float32.
        auto_class: The transformers class that the task asked for; a language model's head belongs
            to its base, any other head to the task, and trains in full.
        new: Names of parameters that are in no file of weights; they must train.
        base: Hub name or folder of the weights; None: they were drawn from a seed.
        quantized: Quantise the frozen linear modules outside of the head.
        dequantized: Replace them by plain modules with the quantised values.
        meta: The model and its factors are on the meta device.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: peft is missing; names that match nothing, or only what they must not; a model
            that a frozen base would not stay frozen in.
    """
    require_adapter(config)
    import peft

    _refuse_running_statistics(model)
    saved = _modules_to_save(config, model, auto_class, list(new))
    targets = _targets(config, model, saved, auto_class)
    notes = []
    if quantized:
        skipped = [*saved, *head_modules(model)]
        frozen = [path for path in linear_modules(model) if not _is_inside_any(path, skipped)]
        notes.append(quantize(model, frozen, meta=meta))
        if dequantized:
            dequantize(model)
    names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on Conv1D, whose transposed weight peft knows
            lora = peft.LoraConfig(
                **{name: getattr(config, name) for name in names},
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
        if param.requires_grad:  # what trains is float32, whatever it stands beside
            param.data = param.data.float()
    modules = _find_adapter_modules(model)
    _refuse_other_modules(modules, AdapterModules(targets, saved))
    setattr(model, _MARK, InjectedAdapter(_adapter_names(model, modules), modules, base))
    note = _note(config, model, modules)
    if meta and base is not None:
        note += "; so does what its weights lack, which are not read here"
    return [note, *notes]


def inject_same_adapter(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Put the adapter of a model, if it has one, into another one of its class, on `meta`."""
    adapter = adapter_of(model)
    if adapter is not None:
        import peft

        plainly = replace(
            model.peft_config[ADAPTER], init_lora_weights=True
        )  # others look at the weights
        peft.inject_adapter_in_model(plainly, plain, ADAPTER, low_cpu_mem_usage=True)
        plain.peft_config = model.peft_config
        setattr(plain, _MARK, adapter)


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Collect weights and persistent buffers of the frozen base under their plain names."""
    adapter = adapter_of(model)
    tensors: dict[str, Tensor] = {}
    inside = () if adapter is None else tuple(f"{path}." for path in adapter.modules.saved)
    adapter_names = frozenset() if adapter is None else adapter.names
    for name, tensor in [*model.named_parameters(), *model.state_dict().items()]:
        plain = name.replace("base_layer.", "")
        if name not in adapter_names and not name.startswith(inside) and plain not in tensors:
            tensors[plain] = tensor.detach()
    return tensors


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Let a model compute as its frozen base alone; one without an adapter is left as it is."""
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
            layer.enable_adapters(True)  # which lets every factor train, frozen ones too
        for param, requires_grad in trains.items():
            param.requires_grad_(requires_grad)


def merge_adapter(model: nn.Module) -> None:
    """Add the factors to the weights they stand beside, in place.

    Afterwards the model is a plain one.
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
    for attribute in ("peft_config", _MARK):
        delattr(model, attribute)
    model.requires_grad_(True)


def _modules_to_save(
    config: LoraConfig, model: PreTrainedModel, auto_class: str, new: Sequence[str]
) -> list[str]:
    """List the modules that train in full.

    Those of `adapter.modules_to_save`; by default the head of a task, and the modules of `new`.

    Args:
        config: The choice.
        model: Without factors.
        auto_class: The transformers class that the task asked for.
        new: Names of parameters that are in no file of weights.

    Raises:
        ConfigError: A name fits no module; a named module shares its weight; a parameter of `new`
            is in none of them.
    """
    modules = {name for name, module in model.named_modules() if name and list(module.parameters())}
    if config.modules_to_save is not None:
        saved = match_modules("adapter.modules_to_save", config.modules_to_save, modules)
        _refuse_to_save(config, model, saved, new)
        return saved
    saved = []
    for path in [] if auto_class in _OF_LANGUAGE else head_modules(model):
        # peft matches the ends of names: a norm above the blocks with the name of one inside of
        # them stays frozen.
        is_norm = "Norm" in type(model.get_submodule(path)).__name__
        ends_another = any(name != path and name.endswith(path) for name in modules)
        if not (is_norm and ends_another):
            saved.append(path)
    others = [name for name in new if not _is_inside_any(name, saved)]
    return [*saved, *dict.fromkeys(name.rpartition(".")[0] for name in others)]


def _refuse_to_save(
    config: LoraConfig, model: PreTrainedModel, saved: Sequence[str], new: Sequence[str]
) -> None:
    """Refuse modules that share a weight, or that leave a parameter of `new` random."""
    key = "adapter.modules_to_save"
    shared = shared_modules(model)
    for path in saved:
        if path in shared:
            raise ConfigError(
                f"{key}: {path} shares its weight with {shared[path]}: a copy of it would train"
                " apart."
            )
    for name in new:
        if not _is_inside_any(name, saved):
            raise ConfigError(
                f"{key}={config.modules_to_save}: {name} is not in the model's weights, so it"
                f" would stay random. Name its module, too, such as {name.rpartition('.')[0]}, or"
                f" leave {key} null."
            )


def _targets(
    config: LoraConfig, model: PreTrainedModel, saved: Sequence[str], auto_class: str
) -> list[str]:
    """List the modules that get factors.

    Args:
        config: Of its keys, `target_modules`, then `exclude_modules`, then `layers_to_transform`
            choose; `rank_pattern` and `alpha_pattern` must match one of what is left.
        model: Without factors.
        saved: Modules that train in full; neither they nor what is inside of them get factors.
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
            " beside. Leave one in."
        )
    return targets


def _default_targets(
    config: LoraConfig, model: PreTrainedModel, saved: Sequence[str], auto_class: str
) -> list[str]:
    """List all linear modules outside of the head and of `saved`.

    Raises:
        ConfigError: There is none.
    """
    skipped = list(saved)
    if auto_class in _OF_LANGUAGE:
        skipped += head_modules(model)
    targets = [path for path in linear_modules(model) if not _is_inside_any(path, skipped)]
    if not targets:
        raise ConfigError(
            f"adapter.target_modules={config.target_modules or 'null'}: {type(model).__name__} has"
            " no linear module besides its head. Name others."
        )
    return targets


def _named_targets(
    names: str | Sequence[str], model: PreTrainedModel, saved: Sequence[str]
) -> list[str]:
    """List the modules that `adapter.target_modules` names, outside of `saved`.

    Raises:
        ConfigError: A name fits no module, or only some in `saved`; a module shares its weight with
            another one.
    """
    key = "adapter.target_modules"
    modules = [name for name, _ in model.named_modules() if name]
    named = match_modules(key, names, modules, linear_modules(model))
    targets = [path for path in named if not _is_inside_any(path, saved)]
    if not targets:
        raise ConfigError(
            f"{key}={names}: matches only modules that train whole ({', '.join(saved)}): factors"
            " would stand beside nothing that is frozen. Name others, or take them out by"
            " adapter.modules_to_save."
        )
    shared = shared_modules(model)
    for path in targets:
        if path in shared:
            raise ConfigError(
                f"{key}={names}: {path} shares its weight with {shared[path]}: factors beside one"
                " of them would make two weights of one."
            )
    return targets


def _select_layers(layers: int | Sequence[int], targets: Sequence[str]) -> list[str]:
    """Return the modules inside of some layers; one outside of all layers is left out.

    Raises:
        ConfigError: A layer has none of them.
    """
    wanted = [layers] if isinstance(layers, int) else list(layers)
    layer_of: dict[str, int] = {}
    for path in targets:
        match = _LAYER.match(path)
        if match is not None:
            layer_of[path] = int(match[1])
    existing = sorted(set(layer_of.values()))
    for layer in wanted:
        if layer not in existing:
            raise ConfigError(
                f"adapter.layers_to_transform={layers}: no layer {layer} to put factors in:"
                f" {', '.join(map(str, existing)) or 'none'}."
            )
    return [path for path in targets if layer_of.get(path) in wanted]


def _refuse_unused_patterns(config: LoraConfig, targets: Sequence[str]) -> None:
    """Refuse a pattern of `rank_pattern` or `alpha_pattern` that matches no module.

    A pattern matches the whole name of a module or its end behind a dot, as in peft.
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


def _is_inside_any(name: str, paths: Iterable[str]) -> bool:
    """Tell whether a module or parameter is one of some modules, or inside of one."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _refuse_running_statistics(model: nn.Module) -> None:
    """Refuse a base with batch norms, whose running statistics would change."""
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ConfigError(
                f"adapter=lora: {path} is a {type(module).__name__}, whose running statistics"
                " change with every batch, so that the base would not stay frozen. Train this"
                " model with adapter=none."
            )


def _find_adapter_modules(model: nn.Module) -> AdapterModules:
    """Find the modules that peft has replaced, by their names in the model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    named = list(model.named_modules())
    return AdapterModules(
        [path for path, module in named if isinstance(module, BaseTunerLayer)],
        [path for path, module in named if isinstance(module, ModulesToSaveWrapper)],
    )


def _refuse_other_modules(replaced: AdapterModules, wanted: AdapterModules) -> None:
    """Refuse names whose ends fit further modules, since peft has replaced those, too.

    Raises:
        ConfigError: With the first module that peft should not have taken.
    """
    for key, paths, wanted_paths in (
        ("target_modules", replaced.targets, wanted.targets),
        ("modules_to_save", replaced.saved, wanted.saved),
    ):
        differing = set(paths) ^ set(wanted_paths)
        if differing:
            raise ConfigError(
                f"adapter.{key}: peft takes {min(differing)} for one of"
                f" {', '.join(wanted_paths[:4])}, by the end of its name. Give names that no other"
                " module ends with."
            )


def _adapter_names(model: nn.Module, modules: AdapterModules) -> frozenset[str]:
    """Name the parameters and buffers of the adapter.

    These are all parameters that train now, and all tensors of modules that train in full.
    """
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    copies = tuple(f"{path}.modules_to_save.{ADAPTER}." for path in modules.saved)
    return frozenset([*trained, *(name for name in model.state_dict() if name.startswith(copies))])


def _note(config: LoraConfig, model: nn.Module, modules: AdapterModules) -> str:
    """Describe the adapter for the user: rank, modules, and the share of parameters that train."""
    kinds = list(dict.fromkeys(path.rpartition(".")[2] for path in modules.targets))
    if len(kinds) > 6:
        kinds[6:] = ["..."]
    rank = f"{config.r}"
    if config.rank_pattern:
        rank += ", others by adapter.rank_pattern"
    saved = ""
    if modules.saved:
        saved = (
            f"; {', '.join(modules.saved)} {'trains' if len(modules.saved) == 1 else 'train'} whole"
        )
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    total = sum(tensor_sizes(model).values())
    for path in modules.saved:  # peft keeps the original beside the copy that trains
        original = model.get_submodule(f"{path}.original_module")
        total -= sum(param.numel() for param in original.parameters())
    ratio = config.loraplus_lr_ratio
    plus = "" if ratio is None else f"; B at {ratio:g} times the lr of A"
    return (
        f"adapter={config.name}: factors of rank {rank} beside"
        f" {plural(len(modules.targets), 'module')} ({', '.join(kinds)}){saved}: {trained:,} of"
        f" {total:,} parameters train, {trained / total:.2%}{plus}"
    )
