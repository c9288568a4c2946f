"""Weights of 4 bits in a frozen base, by bitsandbytes: QLoRA's nf4.

Source: Dettmers et al. 2023, arXiv:2305.14314. Weights are quantised on the CPU, whatever device
trains, so that the same file gives the same base everywhere: transformers' `BitsAndBytesConfig`
quantises on the device.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BITS = "4bit"
_NF4 = "nf4"
_WEIGHTS_PER_SCALE = 64


def is_quantized(config: ModelConfig) -> bool:
    """Tell whether a model choice asks for a quantised base."""
    return getattr(config, "quantization", None) is not None


def require_quantization(config: ModelConfig) -> None:
    """Refuse a quantised base if bitsandbytes is not installed, before anything is loaded.

    Raises:
        ConfigError: With the command that installs it.
    """
    if is_quantized(config) and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.quantization={_BITS}: the package bitsandbytes is not installed."
            " pip install 'optrun[quantization]'"
        )


def quantize(model: PreTrainedModel, paths: Iterable[str], *, meta: bool) -> str:
    """Replace linear modules by 4-bit ones, in place.

    Args:
        model: On the CPU, or on the meta device.
        paths: Dotted names of the modules, `nn.Linear` or transformers' `Conv1D`.
        meta: Whether the model is on the meta device.

    Returns:
        A note for the user.

    Raises:
        ConfigError: There is no module to quantise.
    """
    linear_paths = list(paths)
    if not linear_paths:
        raise ConfigError(
            f"model.quantization={_BITS}: {type(model).__name__} has no linear module that stays"
            " frozen."
        )
    before = sum(tensor_bytes(model).values())
    for path in linear_paths:
        model.set_submodule(path, _build_4bit_linear(model.get_submodule(path), meta=meta))
    model.is_loaded_in_4bit = True  # peft reads it
    after = sum(tensor_bytes(model).values())
    return (
        f"model.quantization={_BITS}: {len(linear_paths)} linear modules of the base in 4 bits"
        f" (nf4): its weights take {after / 2**20:,.1f} MiB in place of {before / 2**20:,.1f}"
    )


def quantization_of(model: nn.Module) -> str | None:
    """Return the `model.quantization` of a built model; None: it has plain weights."""
    return _BITS if any(_quantized_modules(model)) else None


def dequantize(model: PreTrainedModel) -> None:
    """Replace 4-bit modules by plain ones with the same values, in place."""
    import bitsandbytes.functional as bnb

    for path, module in list(_quantized_modules(model)):
        weight = module.weight
        values = bnb.dequantize_4bit(weight.data, weight.quant_state)
        model.set_submodule(path, _build_linear(module, values))
    model.is_loaded_in_4bit = False


def tensor_bytes(model: nn.Module) -> dict[str, int]:
    """Count the bytes of each parameter by name; a 4-bit weight includes its scales.

    On the meta device, the bytes that it would take. A 4-bit weight of n elements takes n / 2
    bytes, 4 bytes for each 64 elements, and 64 bytes for the values of the 16 codes.
    """
    sizes = {name: param.numel() * param.itemsize for name, param in model.named_parameters()}
    for path, module in _quantized_modules(model):
        count = module.in_features * module.out_features
        scale_bytes = 4 * math.ceil(count / _WEIGHTS_PER_SCALE)  # float32
        nf4_table_bytes = 4 * 16  # the value of each of the 16 codes, float32
        sizes[f"{path}.weight"] = math.ceil(count / 2) + scale_bytes + nf4_table_bytes
    return sizes


def tensor_sizes(model: nn.Module) -> dict[str, int]:
    """Count the elements of each parameter by name, before any packing into 4 bits."""
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    for path, module in _quantized_modules(model):
        sizes[f"{path}.weight"] = module.in_features * module.out_features
    return sizes


def _quantized_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of each module built by `quantize`."""
    for path, module in model.named_modules():
        if hasattr(module, "optrun_source"):
            yield path, module


def _build_4bit_linear(module: Any, *, meta: bool) -> nn.Module:
    """Build the 4-bit module of an `nn.Linear` or `Conv1D`; with `meta` only its shapes.

    Its attribute `optrun_source` holds class and dtype of the original, for `dequantize`. The bias
    is shared with the original.
    """
    import bitsandbytes.nn as bnb

    weight: Tensor = module.weight.detach()
    if not isinstance(module, nn.Linear):  # Conv1D, whose weight is transposed
        weight = weight.T.contiguous()
    layer: Any
    with torch.device("meta"):
        layer = bnb.Linear4bit(
            weight.shape[1],
            weight.shape[0],
            bias=module.bias is not None,
            compute_dtype=weight.dtype,
            compress_statistics=False,
            quant_type=_NF4,
        )
    # If this were true, an evaluation would change the layout of the weights.
    layer.support_avx512bf16_for_cpu = False
    if not meta:
        layer.weight = bnb.Params4bit(
            weight, requires_grad=False, compress_statistics=False, quant_type=_NF4, module=layer
        ).to("cpu")
    layer.bias = module.bias
    layer.optrun_source = type(module), weight.dtype
    quantized_layer: nn.Module = layer.train(module.training)
    return quantized_layer


def _build_linear(module: Any, weight: Tensor) -> nn.Module:
    """Build a plain module with given weights in place of a 4-bit module.

    Its class, `nn.Linear` or `Conv1D`, and its dtype are those of the module before `quantize`.
    """
    source, dtype = module.optrun_source
    layer: nn.Module
    with torch.device("meta"):
        if issubclass(source, nn.Linear):
            layer = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        else:
            layer = source(module.out_features, module.in_features)
            weight = weight.T
    layer.weight = nn.Parameter(weight.to(dtype).contiguous())
    layer.bias = module.bias
    return layer.train(module.training)
