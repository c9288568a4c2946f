"""The modules of a model that an adapter may change: linear ones, the head, and named ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from optrun.base.errors import ConfigError
from optrun.config.names import near_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD_NAME = re.compile(r"head|classif|score|logits|predict|^cls$|qa_outputs|pooler")
"""Names of head modules in models that do not keep the model without head in a module."""
_NAMES_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that experts had before they were stacked in one parameter, `gate_up_proj`."""
_COUNTS_OF_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_NO_OUT_PROJ = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Architectures of which peft takes no `out_proj`."""


@dataclass(frozen=True)
class AdapterModules:
    """Dotted names of modules.

    Attributes:
        targets: Modules with factors.
        saved: Modules that train in full.
    """

    targets: list[str]
    saved: list[str]


def linear_modules(model: PreTrainedModel) -> list[str]:
    """List the linear modules open to factors, GPT-2's `Conv1D` included.

    Left out are

    - modules that share their weight with another one;
    - the projections of `nn.MultiheadAttention` and two of a Mamba block: a kernel reads their
      weights, and they are never called;
    - subclasses with a forward pass of their own, such as Llama 4's router;
    - projections with the names of experts in a model with stacked experts: peft takes one for the
      other.
    """
    from transformers.pytorch_utils import Conv1D

    shared = shared_modules(model)
    has_experts = _has_stacked_experts(model)
    inside_attention: tuple[str, ...] = ()
    paths = []
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            inside_attention += (f"{path}.",)  # its projections come later in this loop
        # Subclasses that keep the forward pass are linear as well.
        if type(module).forward not in (nn.Linear.forward, Conv1D.forward):
            continue
        if path in shared or path.startswith(inside_attention) or _read_by_kernel(model, path):
            continue
        if has_experts and path.rpartition(".")[2] in _NAMES_OF_EXPERTS:
            continue
        paths.append(path)
    return paths


def _has_stacked_experts(model: PreTrainedModel) -> bool:
    """Tell whether experts are stacked in one parameter, or the configuration counts experts."""
    if any(name.endswith(".gate_up_proj") for name, _ in model.named_parameters()):
        return True
    values = model.config.get_text_config()
    return any(getattr(values, key, None) for key in _COUNTS_OF_EXPERTS)


def _read_by_kernel(model: PreTrainedModel, path: str) -> bool:
    """Tell whether a Mamba kernel reads a module's weight directly, past any factors.

    Only `dt_proj` and `out_proj` of Mamba blocks, and every `out_proj` that peft refuses.
    """
    parent, _, leaf = path.rpartition(".")
    if leaf not in ("dt_proj", "out_proj"):
        return False
    if "mamba" in type(model.get_submodule(parent)).__name__.lower():
        return True
    return leaf == "out_proj" and getattr(model.config, "model_type", None) in _NO_OUT_PROJ


def head_modules(model: PreTrainedModel) -> list[str]:
    """List the head modules among the children of a model.

    If the model without its head is a child (`base_model_prefix`), all other children with
    parameters, except embeddings: of `BertForSequenceClassification`, whose children are `bert`,
    `dropout` and `classifier`, that is `classifier`. Else the children with a usual name of a head,
    or with the output layer inside.
    """
    children = {name: child for name, child in model.named_children() if list(child.parameters())}
    base = children.get(type(model).base_model_prefix)
    heads = []
    # 1. The model without its head is a child.
    if base is not None:
        # A family may be called `JinaEmbeddingsV3`, and its head is no embedding.
        family = type(base).__name__.removesuffix("Model")
        for name, child in children.items():
            is_embedding = "Embed" in type(child).__name__.removeprefix(family)
            if child is not base and not is_embedding:
                heads.append(name)
        return heads
    # 2. It is not: go by names, and by the output layer.
    output_layer = model.get_output_embeddings()
    for name, child in children.items():
        holds_output_layer = output_layer is not None and output_layer in set(child.modules())
        if _HEAD_NAME.search(name) or holds_output_layer:
            heads.append(name)
    return heads


def shared_modules(model: nn.Module) -> dict[str, str]:
    """Map each module with a shared parameter to another name of that parameter.

    A module that is in a model under two names does not share by that: its first name counts.

    Example: GPT-2, whose head is its embedding, gives
    `{"transformer.wte": "lm_head.weight", "lm_head": "transformer.wte.weight"}`.
    """
    # 1. All names of each parameter: `named_modules` gives each module once, by its first name.
    paths = {path for path, _ in model.named_modules()}
    names_of_param: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if _module_of(name) in paths:
            names_of_param.setdefault(id(param), []).append(name)
    # 2. Parameters with several names: the module of the first name gets the second name, all other
    #    modules get the first one.
    shared: dict[str, str] = {}
    for first, *others in names_of_param.values():
        if others:
            shared[_module_of(first)] = others[0]
        for other in others:
            shared[_module_of(other)] = first
    return shared


def _module_of(name: str) -> str:
    """Return the name of the module that a parameter belongs to."""
    return name.rpartition(".")[0]


def match_modules(
    key: str,
    names: str | Sequence[str],
    modules: Iterable[str],
    shown: Iterable[str] | None = None,
) -> list[str]:
    r"""List the modules matched by names or one regular expression, as peft reads them.

    Args:
        key: The configuration key, for messages.
        names: A regular expression, which must match whole names of modules; or a list of names:
            each matches a module of this name, and every module whose name ends with it behind a
            dot.
        modules: Names of all modules.
        shown: Names that a message may suggest; None: all.

    Returns:
        The matched names, in the order of `modules`.

    Raises:
        ConfigError: The expression, or one of the names, matches nothing.

    Example:
        >>> match_modules("key", ["query"], ["layer.0", "layer.0.query", "layer.0.key"])
        ['layer.0.query']
        >>> match_modules("key", r"layer\.\d+\.(query|key)", ["layer.0.key", "layer.0"])
        ['layer.0.key']
    """
    all_names = list(modules)
    candidates = all_names if shown is None else list(shown)
    if isinstance(names, str):
        matches = [module for module in all_names if re.fullmatch(names, module)]
        if not matches:
            raise ConfigError(
                f"{key}={names}: this expression matches the whole name of no module."
                f" {near_names(names, candidates)}"
            )
        return matches
    matched: set[str] = set()
    for name in names:
        fitting = [module for module in all_names if f".{module}".endswith(f".{name}")]
        if not fitting:
            raise ConfigError(
                f"{key}={list(names)}: no module is called {name}, or ends with it."
                f" {_suggest_ends(name, candidates)}"
            )
        matched.update(fitting)
    return [module for module in all_names if module in matched]


def _suggest_ends(name: str, modules: Sequence[str]) -> str:
    """Suggest similar ends of module names, with as many parts between dots as a name has."""
    parts = name.count(".") + 1
    return near_names(name, dict.fromkeys(".".join(path.split(".")[-parts:]) for path in modules))
