"""The role of a parameter: matrix, bias, norm, vector, embedding, LoRA factor.

The type of its module decides first, its name last. A matrix above the blocks of a model is a
`head`; `layer_map` says where a parameter lies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

MATRIX = "matrix"
BIAS = "bias"
NORM = "norm"
VECTOR = "vector"
EMBEDDING = "embedding"
HEAD = "head"
LORA = "lora"

_NORM_TYPES: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
)
_WEIGHTED_TYPES: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.modules.conv._ConvNd,
)
_NORM_CLASS = re.compile(r"norm(?!al)|normali[sz]ation|GRN$", re.IGNORECASE)
_NOT_NORM_CLASS = re.compile(
    r"(linear|conv(\dd)?|attention|embeddings?|dense|projection|mlp|layer|block)$", re.IGNORECASE
)
_EMBEDDING_CLASS = re.compile(r"embed", re.IGNORECASE)
_BIAS_NAME = re.compile(r"(^|_)bias(es)?(_|\d|$)")
_LORA_NAME = re.compile(r"(^|\.)lora_(embedding_)?[ab](\.|$)", re.IGNORECASE)
_EMBEDDING_NAME = re.compile(r"embed|(^|_)emb(_|$)|(^|_)(rel|abs)?_?pos(_|$)")
_TOKEN_NAME = re.compile(r"(^|_)tokens?$")
"""Learnt tokens of a sequence, one (`cls_token`) or several (`register_tokens`)."""


def roles_of(model: nn.Module) -> dict[str, str]:
    """Map every parameter of a model to its role.

    Example:
        >>> roles_of(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1)))
        {'0.weight': 'embedding', '1.weight': 'matrix', '1.bias': 'bias'}
    """
    return roles_of_named(model.named_parameters(), dict(model.named_modules()))


def roles_of_named(
    named_parameters: Iterable[tuple[str, Tensor]], modules: Mapping[str, nn.Module]
) -> dict[str, str]:
    """Map parameters to roles.

    Without `modules`, by path, names and shapes decide; an embedding may be taken for a matrix.
    """
    roles = {}
    for name, param in named_parameters:
        path, _, leaf = name.rpartition(".")
        roles[name] = LORA if is_lora(name) else role_of(leaf, param, modules.get(path))
    return roles


def is_lora(name: str) -> bool:
    """Tell whether a parameter is a factor of a low-rank adapter (peft, loralib, torchtune).

    Example:
        >>> is_lora("q_proj.lora_A.default.weight"), is_lora("q_proj.base_layer.weight")
        (True, False)
    """
    return _LORA_NAME.search(name) is not None


def is_lora_b(name: str) -> bool:
    """Tell whether a parameter is matrix B of a LoRA pair, initially zero.

    Example:
        >>> is_lora_b("q_proj.lora_B.default.weight"), is_lora_b("q_proj.lora_A.default.weight")
        (True, False)
    """
    match = _LORA_NAME.search(name)
    return match is not None and match[0].strip(".").lower().endswith("b")


def role_of(leaf: str, param: Tensor, module: nn.Module | None) -> str:
    """Find the role of one parameter.

    Args:
        leaf: Its name within the module.
        param: Any shape, any dtype.
        module: The module that has it; None if it is not known.

    Returns:
        The first that applies:

        - `bias`: by its name.
        - `norm`: in a normalisation layer, or weight_norm's magnitude.
        - `vector`: of at most one dimension. Also with one axis longer than 1, or the learnt tokens
          of a sequence; but not if it is a `weight`, or in a linear layer, a convolution or an
          embedding.
        - `embedding`: in an embedding layer, or by its name.
        - `matrix`: any other.

        Not `lora` and `head`, which depend on more.

    Example:
        >>> norm = nn.LayerNorm(4)
        >>> role_of("weight", norm.weight, norm), role_of("bias", norm.bias, norm)
        ('norm', 'bias')
    """
    if _BIAS_NAME.search(leaf):
        return BIAS
    if module is not None and (is_norm(module) or _is_weight_norm_magnitude(leaf, module)):
        return NORM
    if param.dim() <= 1:
        return VECTOR
    in_weighted_layer = isinstance(module, _WEIGHTED_TYPES)
    may_be_vector = not in_weighted_layer and leaf != "weight"
    has_one_long_axis = sum(size > 1 for size in param.shape) <= 1
    if may_be_vector and (has_one_long_axis or _TOKEN_NAME.search(leaf)):
        return VECTOR
    if in_weighted_layer:
        embeds = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    else:
        embeds = _EMBEDDING_CLASS.search(type(module).__name__) is not None
    if embeds or (leaf != "weight" and _EMBEDDING_NAME.search(leaf)):
        return EMBEDDING
    return MATRIX


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module is a normalisation layer, by its type.

    One of torch's; or any other module, without parameters in its children, whose class or a base
    class of it is named like a norm: `LlamaRMSNorm`, `T5LayerNorm`, `MobileBertNoNorm`,
    `ConvNextV2GRN`. Names of attributes (`ln_1`, `q_a`) tell less.

    Example:
        >>> is_norm(nn.GroupNorm(2, 4)), is_norm(nn.Linear(2, 4))
        (True, False)
    """
    if isinstance(module, _NORM_TYPES):
        return True
    if isinstance(module, _WEIGHTED_TYPES):
        return False
    if any(list(child.parameters()) for child in module.children()):
        return False
    names = [
        cls.__name__
        for cls in type(module).__mro__
        if issubclass(cls, nn.Module) and cls is not nn.Module
    ]
    # `NormLinear` and `NormAttention` are no norms.
    return any(_NORM_CLASS.search(name) and not _NOT_NORM_CLASS.search(name) for name in names)


def _is_weight_norm_magnitude(leaf: str, module: nn.Module) -> bool:
    """Recognise the magnitude parameter of torch's `weight_norm`."""
    if leaf != "original0" or not isinstance(
        module, torch.nn.utils.parametrize.ParametrizationList
    ):
        return False
    return any(type(part).__name__ == "_WeightNorm" for part in module)
