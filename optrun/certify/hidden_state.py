"""Find attributes of an optimizer that `step` changes and its state dict does not carry."""

import copy
from collections.abc import Callable

import torch

_STEPS = 3
_IN_STATE_DICT = ("state", "param_groups", "defaults")
"""Attributes that the state dict or the constructor restores."""
Builder = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]


def hidden_attributes(build: Builder) -> list[str]:
    """List attributes changed by `step` and not restored from the state dict.

    An optimizer takes three steps, and a second one loads its state dict. Then both take one more
    step, so that attributes which a step computes anew are equal. Only plain values are compared,
    see `_is_plain`. A class with a step counter `self.t` that its state dict lacks has one.

    Args:
        build: Makes the optimizer over named parameters.

    Returns:
        Names such as `BeliefSign.t`.
    """
    # 1. Find the attributes that steps change.
    params = _parameters()
    stepped = build(params)
    before = _plain_attributes(stepped)
    for number in range(_STEPS):
        _step(stepped, number)
    after = _plain_attributes(stepped)
    changed = [name for name, value in after.items() if not _are_equal(before.get(name), value)]
    if not changed:
        return []
    # 2. Find those among them that a state dict does not restore.
    copies = []
    for name, param in params:
        copies.append((name, torch.nn.Parameter(param.detach().clone())))
    resumed = build(copies)
    resumed.load_state_dict(copy.deepcopy(stepped.state_dict()))
    for optimizer in (stepped, resumed):
        _step(optimizer, _STEPS)
    expected = _plain_attributes(stepped)
    restored = _plain_attributes(resumed)
    lost = [name for name in changed if not _are_equal(restored.get(name), expected[name])]
    return [f"{type(stepped).__name__}.{name}" for name in lost]


def _parameters() -> list[tuple[str, torch.nn.Parameter]]:
    """Draw an 8 x 8 weight and a bias of 8 elements, the same at each call."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=generator))
    bias = torch.nn.Parameter(torch.randn(8, generator=generator))
    return [("layer.weight", weight), ("layer.bias", bias)]


def _step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """Take one step with gradients drawn from the step number.

    An optimizer whose attribute `takes_loss` is set gets a closure that returns a falling loss.
    """
    generator = torch.Generator().manual_seed(number + 1)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator)
    if getattr(optimizer, "takes_loss", False):
        optimizer.step(lambda: 1.0 / (number + 1))
    else:
        optimizer.step()


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Copy the attributes with plain values (`_is_plain`), except state, groups and defaults."""
    return {
        name: copy.deepcopy(value)
        for name, value in vars(optimizer).items()
        if name not in _IN_STATE_DICT and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    """Tell whether a value is None, a number, text or tensor, or dicts, lists, tuples of these.

    False for a parameter, and for anything that holds another object.
    """
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, torch.nn.Parameter):
        return False
    return value is None or isinstance(value, (int, float, str, torch.Tensor))


def _are_equal(one: object, other: object) -> bool:
    """Tell whether two plain values are equal in type and value; NaN is not equal to NaN.

    Tensors are equal by shape and values (`torch.equal`), lists and dicts item by item.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)
