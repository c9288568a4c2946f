"""Weights of 4 bits in a frozen base, by bitsandbytes: QLoRA's nf4.

Source: Dettmers et al. 2023, arXiv:2305.14314. Weights are
quantised on the CPU, whatever device trains, so that the same file gives the same base everywhere.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optrun.base.errors import ConfigError
from optrun.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Quantization = dict[str, str | bool]
"""Options of quantised weights, by the names of `model.quantization` and what goes with it.
"""
_MARK = "_optrun_quantization"
_TYPE = "nf4"
_BLOCK = 64
_BLOCKS = 256
"""Weights that share a constant; constants that share one, where they are quantised again."""


def quantization_options(config: ModelConfig) -> Quantization | None:
    """Pick the options of quantisation out of the model's configuration.

    Returns:
        Name of an option -> value; None without `model.quantization`.
    """
    bits = getattr(config, "quantization", None)
    if bits is None:
        return None
    name = "bnb_4bit_use_double_quant"
    return {"quantization": bits, name: getattr(config, name)}


def require_quantization(config: ModelConfig) -> None:
    """Refuse quantised weights without bitsandbytes, before anything is loaded.

    Raises:
        ConfigError: With the command that installs it.
    """
    quantization = quantization_options(config)
    if quantization is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"model.quantization={quantization['quantization']}: the package bitsandbytes is not"
            " installed. pip install 'optrun[quantization]'"
        )


def quantize(
    options: Quantization, model: PreTrainedModel, paths: Iterable[str], *, meta: bool = False
) -> str:
    """Put quantised weights in place of linear modules.

    Args:
        options: From `quantization_options`.
        model: On the CPU, or on the meta device; changed in place.
        paths: Dotted names of the modules.
        meta: The modules have shapes and no values.

    Returns:
        A note for the user.

    Raises:
        ConfigError: There is nothing to quantise.
    """
    bits = options["quantization"]
    linear_paths = list(paths)
    if not linear_paths:
        raise ConfigError(
            f"model.quantization={bits}: {type(model).__name__} has no linear module that stays"
            " frozen."
        )
    before = sum(tensor_bytes(model).values())
    for path in linear_paths:
        model.set_submodule(path, _build_4bit_linear(options, model.get_submodule(path), meta=meta))
    setattr(model, _MARK, dict(options))
    model.is_loaded_in_4bit = True  # by which peft knows
    after = sum(tensor_bytes(model).values())
    twice = ", its constants quantised, too" if options["bnb_4bit_use_double_quant"] else ""
    return (
        f"model.quantization={bits}: {len(linear_paths)} linear modules of the base in 4 bits"
        f" (nf4{twice}): its weights take {after / 2**20:,.1f} MiB in place of"
        f" {before / 2**20:,.1f}"
    )


def quantized(model: nn.Module) -> Quantization | None:
    """Tell how a model's base is quantised; None: it is not."""
    quantization: Quantization | None = getattr(model, _MARK, None)
    return quantization


def dequantize(model: nn.Module) -> None:
    """Put plain modules with the same weights in place of the quantised ones."""
    import bitsandbytes.functional as bnb

    for path, module in list(_quantized_modules(model)):
        weight = module.weight
        values = bnb.dequantize_4bit(weight.data, weight.quant_state)
        model.set_submodule(path, _build_linear(module, values))
    for mark in (_MARK, "is_loaded_in_4bit"):
        if hasattr(model, mark):
            delattr(model, mark)


def tensor_bytes(model: nn.Module) -> dict[str, int]:
    """Count the bytes of each parameter with its quantisation constants.

    On meta devices those it will take.
    """
    sizes = {name: param.numel() * param.itemsize for name, param in model.named_parameters()}
    for path, module in _quantized_modules(model):
        count = module.in_features * module.out_features
        name = f"{path}.weight"
        blocks = -(-count // _BLOCK)
        constants = 4 * blocks
        if module.weight.compress_statistics:
            constants = blocks + 4 * -(-blocks // _BLOCKS) + 4 * 256 + 4
        sizes[name] = -(-count // 2) + constants + 4 * 16
    return sizes


def tensor_sizes(model: nn.Module) -> dict[str, int]:
    """Count the elements of each parameter; packed 4-bit ones by their unpacked size."""
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    return sizes | {
        f"{path}.weight": m.in_features * m.out_features for path, m in _quantized_modules(model)
    }


def _quantized_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if hasattr(module, "optrun_source"):
            yield path, module


def _build_4bit_linear(options: Quantization, module: Any, *, meta: bool) -> nn.Module:
    """Build the 4-bit module of a linear one; with `meta` only its shapes."""
    import bitsandbytes.nn as bnb

    turned = not isinstance(
        module, nn.Linear
    )  # transformers' Conv1D, whose weight lies the other way round
    weight: Tensor = module.weight.detach()
    weight = weight.T.contiguous() if turned else weight
    out, into = weight.shape
    layer: Any
    with torch.device("meta"):
        layer = bnb.Linear4bit(
            into,
            out,
            bias=module.bias is not None,
            compute_dtype=weight.dtype,
            compress_statistics=options["bnb_4bit_use_double_quant"],
            quant_type=_TYPE,
        )
    # Else an evaluation would lay the weights out otherwise.
    layer.support_avx512bf16_for_cpu = False
    if not meta:
        layer.weight = bnb.Params4bit(
            weight,
            requires_grad=False,
            compress_statistics=False,
            quant_type=_TYPE,
            module=layer,
        ).to("cpu")
        if options["bnb_4bit_use_double_quant"]:
            _compress(layer.weight)
    layer.bias = module.bias
    layer.optrun_source = type(module), weight.dtype
    quantized_layer: nn.Module = layer.train(module.training)
    return quantized_layer


def _compress(weight: Any) -> None:
    """Quantise the constants, too, as bitsandbytes does.

    Their mean in float64, which is the same in any threads.
    """
    import bitsandbytes.functional as bnb

    state = weight.quant_state
    offset = state.absmax.double().mean().float()
    state.absmax, state.state2 = bnb.quantize_blockwise(state.absmax - offset, blocksize=_BLOCKS)
    state.offset = offset
    state.nested = True
    weight.compress_statistics = True


def _build_linear(module: Any, weight: Tensor) -> nn.Module:
    """Build the linear module (or Conv1D) that a 4-bit module was made from, with given weights."""
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
