"""How many bytes of state each parameter will take, known before there is any: for tables, on the meta device too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from optrun.config.schema.optimizer import OptimizerConfig, PytorchOptimizerConfig
from optrun.optimizer.batches import working_dtype
from optrun.optimizer.build import choice_of, divided, options_of

STEP = 4
"""torch keeps a parameter's step as one float32; ours is a Python number."""


def state_bytes(config: OptimizerConfig | str, param_groups: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """Bytes of optimizer state by parameter name, once every parameter has had a gradient.

    Args:
        config: As for `build_optimizer`.
        param_groups: Group dicts with (name, parameter) pairs; parameters may be on the meta device.

    Returns:
        Bytes of the whole tensor, not of a shard; None for optimizers of other libraries, which are not known here.

    Example:
        >>> import torch
        >>> state_bytes("lamb", [{"params": [("weight", torch.empty(10, 10, device="meta"))]}])
        {'weight': 800}
    """
    if isinstance(config, PytorchOptimizerConfig):
        return {name: None for group in param_groups for name, _ in group["params"]}
    choice, options = (config, {}) if isinstance(config, str) else (choice_of(config), options_of(config))
    groups, members = divided(choice, options, param_groups)
    return {
        name: _SIZES[group["optimizer"]](param, {**members.get(group["optimizer"], {}), **group})
        for group in groups
        for name, param in group["params"]
    }


def _own(param: Tensor, options: Mapping[str, Any]) -> int:
    dtype = working_dtype(param.dtype)
    master = bool(options.get("master_weights")) and param.dtype != dtype
    return (2 + master) * param.numel() * dtype.itemsize


def _adam(param: Tensor, options: Mapping[str, Any]) -> int:
    return (2 + bool(options.get("amsgrad"))) * param.numel() * param.itemsize + STEP


def _nadam(param: Tensor, options: Mapping[str, Any]) -> int:
    return _adam(param, options) + STEP  # the running product of its momentum schedule


def _sgd(param: Tensor, options: Mapping[str, Any]) -> int:
    return param.numel() * param.itemsize if options.get("momentum") else 0


def _rmsprop(param: Tensor, options: Mapping[str, Any]) -> int:
    averages = 1 + bool(options.get("momentum")) + bool(options.get("centered"))
    return averages * param.numel() * param.itemsize + STEP


def _adafactor(param: Tensor, _: Mapping[str, Any]) -> int:
    if param.dim() <= 1:
        return param.numel() * param.itemsize + STEP
    rows, columns = param.shape[-2:]
    return param.numel() // max(rows * columns, 1) * (rows + columns) * param.itemsize + STEP


def _muon(param: Tensor, _: Mapping[str, Any]) -> int:
    return param.numel() * param.itemsize


_SIZES: dict[str, Callable[[Tensor, Mapping[str, Any]], int]] = {
    "lamb": _own,
    "adamax": _own,
    "adamwdl": _own,
    "lazy_adam": _own,
    "adamw": _adam,
    "adam": _adam,
    "sgd": _sgd,
    "rmsprop": _rmsprop,
    "nadam": _nadam,
    "radam": _adam,
    "adafactor": _adafactor,
    "muon": _muon,
}
