"""Optimizers that are judged by other weights than they train.

Those of their `eval()`, as the schedule-free ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def averages(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer has weights of its own for evaluation, put in place by `eval()`.

    Example:
        >>> averages(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
        False
    """
    return bool(_averaging(optimizer))


def averaged_params(optimizer: Optimizer) -> set[Tensor]:
    """Collect the parameters for which `eval()` has other weights.

    Of a `Composite`, those of such members.
    """
    return {
        param
        for one in _averaging(optimizer)
        for group in one.param_groups
        for param in group["params"]
    }


def _averaging(optimizer: Optimizer) -> list[Any]:
    """List the optimizer, or the members of a `Composite`, with `eval()` and `train()`."""
    each = getattr(optimizer, "members", {"": optimizer}).values()
    return [
        one
        for one in each
        if callable(getattr(one, "eval", None)) and callable(getattr(one, "train", None))
    ]


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Put the weights to evaluate, save and publish into the model for the time of the block.

    Those of training come back bit for bit, and the state with them: `train()` computes them by the
    inverse of what
    `eval()` did, which rounds, so that training would depend on how often it was evaluated.
    """
    averaging = _averaging(optimizer)
    if not averaging:
        yield
        return
    weights = [(param, param.detach().clone()) for param in averaged_params(optimizer)]
    state = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in optimizer.state.items()
    }
    for one in averaging:
        _switch(one, one.eval)
    try:
        yield
    finally:
        for one in averaging:
            _switch(one, one.train)
        with torch.no_grad():
            for param, before in weights:
                param.copy_(before)
        optimizer.state.clear()
        optimizer.state.update(state)


def _switch(optimizer: Optimizer, change: Any) -> None:
    """Call `eval()` or `train()` for the parameters that have a state.

    SPlus fails over one without.
    """
    whole = [group["params"] for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = [param for param in params if optimizer.state.get(param)]
        change()
    finally:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = params
