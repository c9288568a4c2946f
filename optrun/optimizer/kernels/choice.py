"""Which kernel takes a step: the loop of the paper's file, its foreach form, torch's fused ones, or the compiled one.

The loop is the truth; every other kernel equals it as far as rounding lets it. `foreach=True` and `foreach=False` name
a kernel themselves. Where `foreach` is None, accelerators take foreach, and a CPU the fastest that computes what the
options ask for; the environment variable `OPTRUN_KERNEL` names one instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from optrun.errors import ConfigError, did_you_mean
from optrun.optimizer.kernels import library

VARIABLE = "OPTRUN_KERNEL"
NAMES = ("auto", "loop", "foreach", "fused", "compiled")

Update = Callable[..., Any]
"""A paper's function: lists of tensors, then numbers by keyword, of which lists have an entry for each tensor."""


def pick(foreach: bool | None, device: str, ways: Sequence[str]) -> str:
    """Pick the kernel of a step.

    Args:
        foreach: The option of that name.
        device: Type of the device that the tensors are on.
        ways: Kernels that compute the formula with its options on a CPU, the preferred one first.

    Raises:
        ConfigError: `OPTRUN_KERNEL` is no kernel, or one that is not there.

    Example:
        >>> pick(False, "cpu", ("compiled", "loop")), pick(None, "cuda", ("compiled", "loop"))
        ('loop', 'foreach')
    """
    if foreach is not None:
        return "foreach" if foreach else "loop"
    named = _named()
    if named in ("loop", "foreach") or device != "cpu":
        return "loop" if named == "loop" else "foreach"
    if named != "auto":
        return named if named in ways else ways[0] if ways[0] == "foreach" else "loop"
    return next(way for way in ways if way != "compiled" or library.library().loaded is not None)


def _named() -> str:
    named = os.environ.get(VARIABLE) or "auto"
    if named not in NAMES:
        raise ConfigError(f"{VARIABLE}={named!r}: expected the name of a kernel. {did_you_mean(named, NAMES)}")
    if named == "compiled" and library.library().loaded is None:
        raise ConfigError(f"{VARIABLE}=compiled: there is no compiled kernel, {library.library().missing}.")
    return named


def why_not_compiled() -> str:
    """Say why no step is taken by the compiled kernel; empty where it is there."""
    return library.library().missing


def take_step(
    updates: Mapping[str, Update], kernel: str, lists: Sequence[list[Tensor]], numbers: Mapping[str, Any]
) -> Any:
    """Take one step by a kernel, and by the loop where the kernel cannot read a tensor.

    Args:
        updates: The loop and the kernels, by name.
        kernel: Its name.
        lists: Parameters, gradients and state; all of one length.
        numbers: Keywords of all of them.

    Returns:
        What the update returns: nothing, or a tensor with an entry for each parameter.
    """
    if kernel in ("loop", "foreach"):
        return updates[kernel](*lists, **numbers)
    increment_version(lists[0])  # autograd refuses a graph from before the step; no kernel tells it by itself
    flat = [_alike(tensors) for tensors in zip(*lists, strict=True)]
    if all(flat):
        return updates[kernel](*lists, **numbers)
    parts = []
    for name, wanted in ((kernel, True), ("loop", False)):
        chosen = [i for i, is_flat in enumerate(flat) if is_flat is wanted]
        if chosen:
            some = {key: [v[i] for i in chosen] if isinstance(v, list) else v for key, v in numbers.items()}
            parts.append((chosen, updates[name](*([tensors[i] for i in chosen] for tensors in lists), **some)))
    if parts[0][1] is None:
        return None
    order = torch.tensor([i for chosen, _ in parts for i in chosen])
    return torch.cat([found for _, found in parts])[order.argsort()]


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel that goes by addresses may take a parameter, its gradient and its state.

    State may have been loaded in another dtype, or a model moved without its optimizer: the loop says so.
    """
    dtype, numel = tensors[0].dtype, tensors[0].numel()
    return dtype in (torch.float32, torch.float64) and all(
        tensor.is_contiguous() and tensor.is_cpu and tensor.dtype is dtype and tensor.numel() == numel
        for tensor in tensors
    )
