"""Which kernel takes a step: the loop of the paper's file, its foreach form, the compiled or Triton's.

The loop is the truth; every other kernel equals it as far as rounding lets it. `foreach=True` and `foreach=False` name
a kernel themselves. Where `foreach` is None, accelerators take Triton's or foreach, and a CPU the fastest that computes
what the options ask for; the environment variable `OPTRUN_KERNEL` names one instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from optrun.base.errors import ConfigError, did_you_mean
from optrun.optimizer.kernels import library
from optrun.optimizer.kernels.triton.found import why_not
from optrun.optimizer.numerics import has_own_numbers

VARIABLE = "OPTRUN_KERNEL"
NAMES = ("auto", "loop", "foreach", "compiled", "triton")

Update = Callable[..., Any]
"""A paper's function: lists of tensors, then numbers by keyword, of which lists have an entry for each tensor."""


def pick(foreach: bool | None, device: str, ways: Sequence[str]) -> str:
    """Pick the kernel of a step.

    Args:
        foreach: The option of that name.
        device: Type of the device that the tensors are on.
        ways: Kernels besides foreach that compute the formula with its options, the preferred one first.

    Raises:
        ConfigError: `OPTRUN_KERNEL` is no kernel, or one that is not there.

    Example:
        >>> pick(False, "cpu", ("compiled", "loop")), pick(None, "cuda", ("compiled", "loop"))
        ('loop', 'foreach')
    """
    if foreach is not None:
        return "foreach" if foreach else "loop"
    named = _named(device)
    if named in ("loop", "foreach"):
        return named
    if device != "cpu":
        return "triton" if named in ("auto", "triton") and "triton" in ways and not why_not(device) else "foreach"
    if named != "auto":
        return named if named in ways else ways[0] if ways[0] == "foreach" else "loop"
    there = {"compiled": library.library().loaded is not None, "triton": False}  # Triton's interpreter is slow
    return next(way for way in ways if there.get(way, True))


def _named(device: str) -> str:
    named = os.environ.get(VARIABLE) or "auto"
    if named not in NAMES:
        raise ConfigError(f"{VARIABLE}={named!r}: expected the name of a kernel. {did_you_mean(named, NAMES)}")
    if named == "compiled" and library.library().loaded is None:
        raise ConfigError(f"{VARIABLE}=compiled: there is no compiled kernel, {library.library().missing}.")
    if named == "triton" and why_not(device):
        raise ConfigError(f"{VARIABLE}=triton: the Triton kernels cannot step tensors on {device}, {why_not(device)}.")
    return named


def why_not_compiled() -> str:
    """Say why no step is taken by the compiled kernel; empty where it is there."""
    return library.library().missing


def take_step(
    updates: Mapping[str, Update], kernel: str, lists: Sequence[list[Tensor]], numbers: Mapping[str, Any]
) -> Any:
    """Take one step by a kernel; where it cannot read a tensor by the loop, or on an accelerator by foreach.

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
    if _overlap([tensor for tensors in lists[:2] for tensor, is_flat in zip(tensors, flat, strict=True) if is_flat]):
        flat = [False] * len(flat)  # a kernel steps tensors side by side, and reads none where it writes another
    if all(flat):
        return updates[kernel](*lists, **numbers)
    parts = []
    for name, wanted in ((kernel, True), ("foreach" if kernel == "triton" else "loop", False)):
        chosen = [i for i, is_flat in enumerate(flat) if is_flat is wanted]
        if chosen:
            some = {key: [v[i] for i in chosen] if isinstance(v, list) else v for key, v in numbers.items()}
            parts.append((chosen, updates[name](*([tensors[i] for i in chosen] for tensors in lists), **some)))
    if parts[0][1] is None:
        return None
    order = torch.tensor([i for chosen, _ in parts for i in chosen])
    return torch.cat([found for _, found in parts])[order.argsort()]


def _alike(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a kernel that goes by addresses may take a parameter, its gradient and its state.

    State may have been loaded in another dtype, or a model moved without its optimizer: the loop says so.
    """
    dtype, device, numel = tensors[0].dtype, tensors[0].device, tensors[0].numel()
    return dtype in (torch.float32, torch.float64) and all(
        has_own_numbers(tensor)
        and tensor.is_contiguous()
        and tensor.device == device
        and tensor.dtype is dtype
        and tensor.numel() == numel
        for tensor in tensors
    )


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Tell whether two contiguous tensors share memory."""
    spans = sorted((tensor.data_ptr(), size) for tensor in tensors if (size := tensor.nbytes))
    return any(begin + size > after for (begin, size), (after, _) in pairwise(spans))
