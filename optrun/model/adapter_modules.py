"""Where an adapter goes.

The linear modules of a model, its head, and names that people give of either.
"""

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
"""Of modules beside the layers, in the models that have no module for the model without head."""


_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that experts had before they were stacked in one parameter, `gate_up_proj`."""
_COUNTS_OF_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_NO_OUT_PROJ = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Architectures of which peft takes no `out_proj`."""


@dataclass(frozen=True)
class AdapterModules:
    """Dotted names of modules.

    Attributes:
        targets: Modules with factors.
        saved: Modules that train whole.
    """

    targets: list[str]
    saved: list[str]


def linear_modules(model: PreTrainedModel) -> list[str]:
    """List all linear modules without a shared weight, as far as factors can stand beside them.

    transformers' `Conv1D`, which is GPT-2's linear map, is one. The projections of
    `nn.MultiheadAttention` are none,
    nor are two of a Mamba block: their weights are read, and they are never called. A linear module
    with a forward pass of its own, such as Llama 4's router, may return something else than a
    product. Beside stacked experts, peft takes the names of dense projections for those of the
    experts, so that these are left out, too.
    """
    from transformers.pytorch_utils import Conv1D

    shared = shared_modules(model)
    stacked = any(name.endswith(".gate_up_proj") for name, _ in model.named_parameters())
    experts = stacked or any(
        getattr(model.config.get_text_config(), key, None) for key in _COUNTS_OF_EXPERTS
    )
    attention_paths = [
        f"{path}."
        for path, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    ]
    return [
        path
        for path, module in model.named_modules()
        if type(module).forward in (nn.Linear.forward, Conv1D.forward)
        if path not in shared and not path.startswith(tuple(attention_paths))
        if not _read_by_kernel(model, path)
        and not (experts and path.rpartition(".")[2] in _OF_EXPERTS)
    ]


def _read_by_kernel(model: PreTrainedModel, path: str) -> bool:
    """Tell whether a Mamba kernel reads a module's weight directly, past any adapter."""
    parent, _, leaf = path.rpartition(".")
    if leaf not in ("dt_proj", "out_proj"):
        return False
    block = type(model.get_submodule(parent)).__name__.lower()
    refused = leaf == "out_proj" and getattr(model.config, "model_type", None) in _NO_OUT_PROJ
    return "mamba" in block or refused


def head_modules(model: PreTrainedModel) -> list[str]:
    """List the head modules of a model.

    Those beside the model without head, and its output layer.
    """
    children = {name: child for name, child in model.named_children() if list(child.parameters())}
    base = children.get(type(model).base_model_prefix)
    if base is not None:
        # A family may be called `JinaEmbeddingsV3`, and its head is no embedding.
        family = type(base).__name__.removesuffix("Model")
        heads = []
        for name, child in children.items():
            kind = type(child).__name__.removeprefix(family)
            if child is not base and "Embed" not in kind:
                heads.append(name)
        return heads
    outputs = model.get_output_embeddings()
    heads = []
    for name, child in children.items():
        holds_outputs = outputs is not None and outputs in set(child.modules())
        if _HEAD_NAME.search(name) or holds_outputs:
            heads.append(name)
    return heads


def shared_modules(model: nn.Module) -> dict[str, str]:
    """Map each module with a shared parameter to the parameter's other name."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    owners = {
        id(module): path
        for path, module in reversed(list(model.named_modules(remove_duplicate=False)))
    }
    first = set(owners.values())
    shared: dict[str, str] = {}
    for several in names.values():
        owned = [name for name in several if name.rpartition(".")[0] in first]
        for name in owned if len(owned) > 1 else ():
            shared[name.rpartition(".")[0]] = next(twin for twin in owned if twin != name)
    return shared


def match_modules(
    key: str,
    asked: str | Sequence[str],
    modules: Iterable[str],
    shown: Iterable[str] | None = None,
) -> list[str]:
    r"""List the modules matched by names or one regular expression, as peft reads them.

    Args:
        key: For messages.
        asked: What was given.
        modules: All there are.
        shown: Those that a message suggests; None: all.

    Returns:
        In the order of the model.

    Raises:
        ConfigError: One of them matches nothing.

    Example:
        >>> match_modules("key", ["query"], ["layer.0", "layer.0.query", "layer.0.key"])
        ['layer.0.query']
        >>> match_modules("key", r"layer\.\d+\.(query|key)", ["layer.0.key", "layer.0"])
        ['layer.0.key']
    """
    every = list(modules)
    near = every if shown is None else list(shown)
    if isinstance(asked, str):
        fitting_names = [name for name in every if re.fullmatch(asked, name)]
        if not fitting_names:
            raise ConfigError(
                f"{key}={asked}: no module has such a name as a whole. {near_names(asked, near)}"
            )
        return fitting_names
    matches: set[str] = set()
    for end in asked:
        fitting = {name for name in every if name == end or name.endswith(f".{end}")}
        if not fitting:
            raise ConfigError(
                f"{key}={list(asked)}: {end} is the name of no module, nor the end of one."
                f" {_ends(end, near)}"
            )
        matches |= fitting
    return [name for name in every if name in matches]


def _ends(end: str, names: Sequence[str]) -> str:
    """Suggest as many last pieces of names as people wrote."""
    pieces = end.count(".") + 1
    return near_names(end, dict.fromkeys(".".join(name.split(".")[-pieces:]) for name in names))
