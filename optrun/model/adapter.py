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
from optrun.config.names import near_names
from optrun.config.schema.adapter import AdapterConfig, LoraConfig
from optrun.model.adapter_modules import (
    AdapterModules,
    head_modules,
    linear_modules,
    match_modules,
    shared_modules,
)
from optrun.model.quantization import Quantization, dequantize, quantize, tensor_sizes
from optrun.model.tokenizer import in_one_line

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
class Injected:
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


def injected(model: nn.Module) -> Injected | None:
    """Return the adapter of a model; None if it has none."""
    mark = getattr(model, _MARK, None)
    if isinstance(mark, Injected):
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


def inject(
    config: LoraConfig,
    model: PreTrainedModel,
    auto_class: str,
    new: Iterable[str] = (),
    *,
    base: str | None = None,
    quantization: Quantization | None = None,
    dequantized: bool = False,
    meta: bool = False,
) -> list[str]:
    """Freeze a model, and put factors beside its matrices.

    Args:
        config: Which, where and how large.
        model: Changed in place.
        auto_class: The transformers class it was asked for by: whether its head is a task's own.
        new: Names of parameters that no file of weights had; what is frozen must not be random.
        base: Where its weights come from; None: from a seed.
        quantization: Of the linear modules that are frozen, all but those of the head; None: they
            stay as they are.
        dequantized: Give them the weights that they would have, quantised, in plain modules again.
        meta: Make factors without memory.

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
    if quantization is not None:
        aside = [*saved, *head_modules(model)]
        frozen = [path for path in linear_modules(model) if not _is_inside_any(path, aside)]
        notes.append(quantize(quantization, model, frozen, meta=meta))
        if dequantized:
            dequantize(model)
    names = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of Conv1D, whose weight lies the other way round, which peft sees itself
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
            f"adapter={config.name}: peft cannot take this model: {in_one_line(error)}"
        ) from error
    for param in model.parameters():
        if param.requires_grad:  # what trains is float32, whatever it stands beside
            param.data = param.data.float()
    places = _find_adapter_modules(model)
    _refuse_other_places(places, AdapterModules(targets, saved))
    setattr(model, _MARK, Injected(_adapter_names(model, places), places, base))
    if meta and base is not None:
        unread = "; so does what its weights lack, which are not read here"
    else:
        unread = ""
    return [_note(config, model, places) + unread, *notes]


def inject_same_adapter(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Put the adapter of a model, if it has one, into another one of its class, on `meta`."""
    adapter = injected(model)
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
    adapter = injected(model)
    tensors: dict[str, Tensor] = {}
    inside = () if adapter is None else tuple(f"{path}." for path in adapter.modules.saved)
    adapter_names = frozenset() if adapter is None else adapter.names
    for name, tensor in [*model.named_parameters(), *model.state_dict().items()]:
        plain = name.replace("base_layer.", "")
        if name not in adapter_names and not name.startswith(inside) and plain not in tensors:
            tensors[plain] = tensor.detach()
    return tensors


@contextmanager
def without_factors(model: nn.Module) -> Iterator[None]:
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


def merge(model: nn.Module) -> None:
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
    config: LoraConfig, model: PreTrainedModel, auto_class: str, new: list[str]
) -> list[str]:
    """List the modules trained in full.

    Those that were asked for, or the task's head and whatever else is new.
    """
    modules = {name for name, module in model.named_modules() if name and list(module.parameters())}
    key = "adapter.modules_to_save"
    if config.modules_to_save is not None:
        saved = match_modules(key, config.modules_to_save, modules)
        shared = shared_modules(model)
        for path in saved:
            if path in shared:
                raise ConfigError(
                    f"{key}: {path} shares its weight with {shared[path]}: a copy of it would train"
                    " apart."
                )
        random = [name for name in new if not _is_inside_any(name, saved)]
        if random:
            holder = random[0].rpartition(".")[0]
            raise ConfigError(
                f"{key}={config.modules_to_save}: {random[0]} is not in the model's weights, so it"
                f" would stay random. Name its module, too, such as {holder}, or leave {key} null."
            )
        return saved
    head = [] if auto_class in _OF_LANGUAGE else head_modules(model)
    # peft knows them by the ends of their names; a norm above the blocks that is called like one
    # inside stays frozen.
    saved = [
        path
        for path in head
        if not (
            "Norm" in type(model.get_submodule(path)).__name__ and _is_end_of_others(path, modules)
        )
    ]
    others = [name for name in new if not _is_inside_any(name, saved)]
    holders = dict.fromkeys(name.rpartition(".")[0] for name in others)
    return [*saved, *holders]


def _targets(
    config: LoraConfig,
    model: PreTrainedModel,
    saved: Sequence[str],
    auto_class: str,
) -> list[str]:
    """List the modules to get factors, without the excluded ones.

    Raises:
        ConfigError: A name, a layer or a pattern that fits none of them.
    """
    targets = _find_target_modules(config, model, saved, auto_class)
    if config.exclude_modules is not None:
        out = set(match_modules("adapter.exclude_modules", config.exclude_modules, targets))
        targets = [path for path in targets if path not in out]
    if config.layers_to_transform is not None:
        layers = config.layers_to_transform
        layer_numbers = [layers] if isinstance(layers, int) else list(layers)
        matches = {path: _LAYER.match(path) for path in targets}
        numbers = {path: int(match[1]) for path, match in matches.items() if match}
        for layer in layer_numbers:
            if layer not in numbers.values():
                existing = ", ".join(map(str, sorted(set(numbers.values())))) or "none"
                raise ConfigError(
                    f"adapter.layers_to_transform={layers}: no layer {layer} to put factors in:"
                    f" {existing}."
                )
        targets = [path for path in targets if numbers.get(path) in layer_numbers]
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", path) for path in targets):
                leaves = dict.fromkeys(path.rpartition(".")[2] for path in targets)
                near = near_names(pattern, list(leaves))
                raise ConfigError(
                    f"adapter.{key}={pattern}: no module with factors has such a name. {near}"
                )
    if not targets:
        raise ConfigError(
            f"adapter.exclude_modules={config.exclude_modules}: no module is left to put factors"
            " beside. Leave one in."
        )
    return targets


def _find_target_modules(
    config: LoraConfig,
    model: PreTrainedModel,
    saved: Sequence[str],
    auto_class: str,
) -> list[str]:
    """Find the modules that get factors, by `adapter.target_modules` or by default.

    By default all linear modules but the head and those that train whole, which `saved` names.

    Raises:
        ConfigError: No module is left, or one shares its weight with another module.
    """
    key = "adapter.target_modules"
    wanted_names = config.target_modules
    if wanted_names in (None, "all-linear"):
        aside = [*saved, *(head_modules(model) if auto_class in _OF_LANGUAGE else [])]
        targets = [path for path in linear_modules(model) if not _is_inside_any(path, aside)]
        if not targets:
            wanted_shown = "null" if wanted_names is None else wanted_names
            raise ConfigError(
                f"{key}={wanted_shown}: {type(model).__name__} has no linear module besides its"
                " head. Name others."
            )
        return targets
    modules = {name: module for name, module in model.named_modules() if name}
    paths = [
        path
        for path in match_modules(key, wanted_names, modules, linear_modules(model))
        if not _is_inside_any(path, saved)
    ]
    if not paths:
        raise ConfigError(
            f"{key}={wanted_names}: matches only modules that train whole ({', '.join(saved)}):"
            " factors would stand beside nothing that is frozen. Name others, or take them out by"
            " adapter.modules_to_save."
        )
    shared = shared_modules(model)
    for path in paths:
        if path in shared:
            raise ConfigError(
                f"{key}={wanted_names}: {path} shares its weight with {shared[path]}: factors"
                " beside one of them would make two weights of one."
            )
    return paths


def _is_end_of_others(path: str, names: Iterable[str]) -> bool:
    return any(name != path and name.endswith(path) for name in names)


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
    """Find peft's layers in a model, by their original names."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    places = AdapterModules([], [])
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            places.targets.append(path)
        elif isinstance(module, ModulesToSaveWrapper):
            places.saved.append(path)
    return places


def _refuse_other_places(found: AdapterModules, wanted: AdapterModules) -> None:
    """Refuse name endings that peft matches to unintended modules.

    Raises:
        ConfigError: With the first of them.
    """
    for key, injected_paths, wanted_paths in (
        ("target_modules", found.targets, wanted.targets),
        ("modules_to_save", found.saved, wanted.saved),
    ):
        differing = set(injected_paths) ^ set(wanted_paths)
        if differing:
            raise ConfigError(
                f"adapter.{key}: peft takes {min(differing)} for one of"
                f" {', '.join(list(wanted_paths)[:4])},"
                " by the end of its name. Give names that no other module ends with."
            )


def _adapter_names(model: nn.Module, places: AdapterModules) -> frozenset[str]:
    """List the adapter's parameters and buffers.

    All that trains now, and the buffers of modules that train whole.
    """
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    copies = tuple(f"{path}.modules_to_save.{ADAPTER}." for path in places.saved)
    return frozenset(
        trained | {name for name in model.state_dict() if copies and name.startswith(copies)}
    )


def _note(config: LoraConfig, model: nn.Module, places: AdapterModules) -> str:
    """Describe the adapter for the user: rank, modules, and the share of parameters that train."""
    kinds = list(dict.fromkeys(path.rpartition(".")[2] for path in places.targets))
    plural = "" if len(places.targets) == 1 else "s"
    kinds_shown = ", ".join([*kinds[:6], *(["..."] if len(kinds) > 6 else [])])
    beside = f"{len(places.targets)} module{plural} ({kinds_shown})"
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    sizes = tensor_sizes(model)
    originals = [model.get_submodule(f"{path}.original_module") for path in places.saved]
    copies = sum(param.numel() for original in originals for param in original.parameters())
    total = sum(sizes.values()) - copies
    verb = "trains" if len(places.saved) == 1 else "train"
    saved_note = f"; {', '.join(places.saved)} {verb} whole" if places.saved else ""
    ratio = config.loraplus_lr_ratio
    ranks_note = ", others by adapter.rank_pattern" if config.rank_pattern else ""
    plus = "" if ratio is None else f"; B at {ratio:g} times the lr of A"
    return (
        f"adapter={config.name}: factors of rank {config.r}{ranks_note} beside {beside}{saved_note}"
        f": {trained:,} of {total:,} parameters train, {trained / total:.2%}{plus}"
    )
