"""Optimizers whose `eval()` puts other weights into the model than they train.

Schedule-free ones do: they evaluate and publish an average of the weights so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def has_evaluation_weights(optimizer: Optimizer) -> bool:
    """Tell whether an optimizer, or a member of a `Composite`, has `eval()` and `train()`.

    Example:
        >>> has_evaluation_weights(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
        False
    """
    return bool(_members_with_eval(optimizer))


def averaged_params(optimizer: Optimizer) -> set[Tensor]:
    """Collect the parameters whose weights `eval()` changes; none for most optimizers."""
    params: set[Tensor] = set()
    for member in _members_with_eval(optimizer):
        for group in member.param_groups:
            params.update(group["params"])
    return params


def _members_with_eval(optimizer: Optimizer) -> list[Any]:
    """List the members of a `Composite`, else the optimizer, with methods `eval` and `train`."""
    # An optimizer that is no composite counts as its only member.
    members = getattr(optimizer, "members", {"": optimizer}).values()
    return [
        member
        for member in members
        if callable(getattr(member, "eval", None)) and callable(getattr(member, "train", None))
    ]


@contextmanager
def evaluation_weights(optimizer: Optimizer) -> Iterator[None]:
    """Put the evaluation weights of an optimizer into the model during a block.

    After the block the training weights and the state are restored from a copy, bit for bit.
    `train()` alone would compute them back with rounding errors, so that training would depend on
    how often the model is evaluated. Does nothing for an optimizer without evaluation weights.
    """
    members = _members_with_eval(optimizer)
    if not members:
        yield
        return
    # Pairs of a parameter and a copy of its weights to train.
    weights = [(param, param.detach().clone()) for param in averaged_params(optimizer)]
    state = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in optimizer.state.items()
    }
    for member in members:
        _call_with_stepped_params(member, member.eval)
    try:
        yield
    finally:
        for member in members:  # so that each knows that it trains again
            _call_with_stepped_params(member, member.train)
        with torch.no_grad():
            for param, before in weights:
                param.copy_(before)
        optimizer.state.clear()
        optimizer.state.update(state)


def _call_with_stepped_params(optimizer: Optimizer, method: Any) -> None:
    """Call `eval` or `train` while the groups hold only parameters with state.

    SPlus of pytorch_optimizer fails at a parameter without state. The groups are restored.
    """
    params_of_groups = [group["params"] for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, params_of_groups, strict=True):
            group["params"] = [param for param in params if optimizer.state.get(param)]
        method()
    finally:
        for group, params in zip(optimizer.param_groups, params_of_groups, strict=True):
            group["params"] = params
