"""Find attributes of an optimizer that `step` changes and its state dict does not carry."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

_STEPS = 3
_CARRIED = ("state", "param_groups", "defaults")
Builder = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


def hidden_attributes(build: Builder) -> list[str]:
    """List attributes that `step` changes and a new optimizer does not get from the state dict.

    Only numbers, texts, tensors, and lists and dicts of them are looked at, after one more step of
    both, which fills what is merely computed once.

    Args:
        build: Makes the optimizer over named parameters.

    Returns:
        Names such as `BeliefSign.t`.
    """
    params = _parameters()
    stepped = build(params)
    before = _plain_attributes(stepped)
    for number in range(_STEPS):
        _step(stepped, number)
    after = _plain_attributes(stepped)
    changed = [name for name, value in after.items() if not _same(before.get(name), value)]
    if not changed:
        return []
    resumed = build([(name, torch.nn.Parameter(p.detach().clone())) for name, p in params])
    resumed.load_state_dict(copy.deepcopy(stepped.state_dict()))
    for optimizer in (stepped, resumed):
        _step(optimizer, _STEPS)
    after = _plain_attributes(stepped)
    loaded = _plain_attributes(resumed)
    kind = type(stepped).__name__
    return [f"{kind}.{name}" for name in changed if not _same(loaded.get(name), after[name])]


def _parameters() -> list[tuple[str, torch.nn.Parameter]]:
    """Draw an 8 x 8 weight and a bias of 8 elements, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=generator))
    bias = torch.nn.Parameter(torch.randn(8, generator=generator))
    return [("layer.weight", weight), ("layer.bias", bias)]


def _step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take one step with gradients drawn from the step number."""
    generator = torch.Generator().manual_seed(number + 1)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator)
    if getattr(optimizer, "takes_loss", False):
        optimizer.step(lambda: 1.0 / (number + 1))
    else:
        optimizer.step()


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Copy the plain attributes (`_is_plain`), without state, groups and defaults."""
    return {
        name: copy.deepcopy(value)
        for name, value in vars(optimizer).items()
        if name not in _CARRIED and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    """Tell whether a value is a number, text, tensor, or a nesting of them; parameters are not."""
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, torch.nn.Parameter):
        return False
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))


def _same(one: object, other: object) -> bool:
    """Tell whether two plain values are equal in type and value, tensors by their bits."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
