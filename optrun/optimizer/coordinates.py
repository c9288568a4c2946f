"""The coordinate check: does the effect of each parameter keep its size while the model grows?

Source: Yang et al. 2022, arXiv:2203.03466, appendix D.1. Beside the change of each module's output,
the change is measured that the update of one parameter makes, so that the parameter with the wrong
factor is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optrun.param_groups.growth import Growth, growth_of

TOLERANCE = 0.25
"""Largest deviation of a slope that passes: half of `WRONG_FACTOR`.

Widths of a few dozen give a tenth by themselves.
"""
WRONG_FACTOR = 0.5
"""Smallest error of a slope by a wrong factor, which is a power of 1/2 or 1 of the size."""
MEASURES = ("initial", "change", "update")
"""Values of `SlopeLine.measure`."""
_ROUNDING = 1e-12
"""Below this share of an output an update is rounding: a bias that the softmax cancels has no
gradient."""


@dataclass(frozen=True)
class SizedModel:
    """A model of one size before training, with functions to run and to train it.

    Attributes:
        model: In float64, so that rounding is not taken for an update.
        forward: Runs the model on the fixed batch.
        train: Trains the model for a few steps.
        sizes: How each parameter grew, see `growth_of`; empty: it is computed from the largest and
            the smallest model.
    """

    model: nn.Module
    forward: Callable[[], object]
    train: Callable[[], object]
    sizes: Mapping[str, Growth] = field(default_factory=dict)


@dataclass
class SlopeLine:
    """One measure of one parameter at several sizes, and the slope expected of it.

    Attributes:
        parameter: Its name; `*` for the block number where depth varies.
        measure: `initial`: mean absolute output of its module before training; `change`: mean
            absolute change of that output; `update`: mean absolute change that the update of this
            parameter alone makes.
        expected: Expected slope of log(measure) over log(size); None: the line never fails.
        below: How far below `expected` a slope may be as well, see `_params_shared_by_units`.
        values: Measured values by size, one for each seed.
    """

    parameter: str
    measure: str
    expected: float | None
    below: float = 0.0
    values: dict[float, list[float]] = field(default_factory=dict)

    @property
    def slopes(self) -> list[float]:
        """Slope of log(measure) over log(size) for each seed."""
        sizes = np.log(np.array(list(self.values)))
        logs = np.log(np.array(list(self.values.values())))
        return [float(np.polyfit(sizes, column, 1)[0]) for column in logs.T]

    @property
    def slope(self) -> float:
        """Mean slope over seeds."""
        return float(np.mean(self.slopes))

    @property
    def noise(self) -> float:
        """Standard error of the slope over seeds; 0 for one seed."""
        slopes = self.slopes
        if len(slopes) > 1:
            return float(np.std(slopes, ddof=1) / math.sqrt(len(slopes)))
        return 0.0

    @property
    def fails(self) -> bool:
        """Whether the deviation is above `TOLERANCE`, and its noise does not explain that.

        The deviation less twice the noise must be above half of `TOLERANCE`, too. NaN fails.
        """
        off = self.deviation
        return not off <= TOLERANCE and not off - 2 * self.noise <= TOLERANCE / 2

    @property
    def deviation(self) -> float:
        """How far the slope lies outside the range of right slopes; 0 if it is not judged."""
        if self.expected is None:
            return 0.0
        return max(self.slope - self.expected, self.expected - self.below - self.slope)

    @property
    def spread(self) -> str:
        """Two standard errors, such as ` ±0.04`; empty for one seed or without noise."""
        if self.noise:
            return f" ±{2 * self.noise:.2f}"
        return ""

    @property
    def right(self) -> str:
        """The right slope as text, such as `+0.0`, or a range of slopes."""
        highest = self.expected or 0.0
        if self.below:
            return f"{highest - self.below:+.1f} to {highest:+.1f}"
        return f"{highest:+.1f}"

    def in_words(self) -> str:
        """Describe the failure of a line, and its likely cause; it must have an `expected`."""
        measured, cause = {
            "initial": ("the initial output of its module", "initial standard deviation"),
            "change": ("the change of its module's output", "inputs"),
            "update": ("what its update does to the output", "lr_scale"),
        }[self.measure]
        assert self.expected is not None
        trend = "grows" if self.slope > self.expected else "dies"
        return (
            f"{self.parameter}: {measured} {trend} with the size, by a power of"
            f" {self.slope:+.2f}{self.spread} where {self.right} is right: look at its {cause}"
        )


@dataclass
class CoordinateCheck:
    """The result of a coordinate check.

    Attributes:
        along: What varied: `width` or `depth`.
        lines: All measures, in the order of the forward pass.
    """

    along: str
    lines: list[SlopeLine]

    @property
    def sizes(self) -> list[float]:
        """Sizes as factors of the base; empty without lines."""
        if self.lines:
            return list(self.lines[0].values)
        return []

    def to_dict(self) -> dict[str, Any]:
        """Convert to numbers, strings and lists for JSON and pictures."""
        return {
            "along": self.along,
            "lines": [
                {
                    "parameter": line.parameter,
                    "measure": line.measure,
                    "slope": line.slope,
                    "noise": line.noise,
                    "expected": line.expected,
                    "below": line.below,
                    "fails": line.fails,
                    "means": {
                        f"{size:g}": float(np.mean(values)) for size, values in line.values.items()
                    },
                }
                for line in self.lines
            ],
        }

    @property
    def failures(self) -> list[SlopeLine]:
        """Lines that fail: `initial` first, then `update`, then `change`, a consequence."""
        order = {"initial": 0, "update": 1, "change": 2}
        return sorted(
            (line for line in self.lines if line.fails), key=lambda line: order[line.measure]
        )


def coordinate_check(
    trial: Callable[[float, int], SizedModel],
    sizes: Sequence[float],
    seeds: Sequence[int],
    along: str = "width",
    *,
    by_gradient: bool = False,
) -> CoordinateCheck:
    """Train models of several sizes for a few steps, and measure how outputs grow with size.

    Args:
        trial: Builds the model of a size, as a factor of the base, and a seed.
        sizes: Two or more, rising.
        seeds: Seeds of the initial weights.
        along: `width` or `depth`.
        by_gradient: Whether updates are proportional to gradients, as those of SGD are.

    Raises:
        ConfigError: The models cannot be compared, see `growth_of`.
    """
    largest, smallest = (trial(size, seeds[0]) for size in (sizes[-1], sizes[0]))
    grown = _add_tied_names(
        largest.model, largest.sizes or growth_of(largest.model, smallest.model)
    )
    if by_gradient and along == "width":
        shared = _params_shared_by_units(largest, smallest, grown)
    else:
        shared = set()
    lines: dict[tuple[str, str], SlopeLine] = {}
    for size in sizes:
        for seed in seeds:
            for key, value in _average_blocks(measure(trial(size, seed)), along).items():
                below = 0.5 if key[0] in shared and key[1] == "update" else 0.0
                line = lines.setdefault(
                    key, SlopeLine(*key, expected=_expected(*key, grown, along), below=below)
                )
                line.values.setdefault(size, []).append(value)
    complete = [line for line in lines.values() if _is_complete(line, sizes, seeds)]
    return CoordinateCheck(along, complete)


def _params_shared_by_units(
    larger: SizedModel, smaller: SizedModel, grown: Mapping[str, Growth]
) -> set[str]:
    """Find the names of parameters of constant size, shared by a growing number of units.

    An example is a query norm, which acts on every head. The gradient of such a parameter is a sum
    over n units. At first the summands are noise, and the sum grows with sqrt(n); once the units
    learn alike, it grows with n.
    """
    counts = []
    for trial in (larger, smaller):
        with _recorded_calls(trial.model) as calls:
            trial.forward()
        counts.append({path: _total_numel(call.outputs) for path, call in calls.items()})
    grow = {path for path, count in counts[0].items() if count > counts[1].get(path, count)}
    return {
        name
        for name, size in grown.items()
        if size.kind == "of one size" and name.rpartition(".")[0] in grow
    }


def _total_numel(tensors: Sequence[Tensor]) -> int:
    """Count the elements of all tensors."""
    return sum(tensor.numel() for tensor in tensors)


def _add_tied_names(model: nn.Module, grown: Mapping[str, Growth]) -> dict[str, Growth]:
    """Copy the growth by name, with entries for the further names of tied tensors.

    The name of a tied head gets the growth of an untied head if some parameter has a `logits`
    factor, else no entry.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    out = dict(grown)
    for name, param in model.named_parameters(remove_duplicate=False):
        size = grown[names[id(param)]]
        is_head = (
            isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear) and param.dim() > 1
        )
        if not is_head:
            out[name] = size
        elif any(growth.logits != 1 for growth in grown.values()):
            out.setdefault(name, replace(size, fan_in=size.fan_out, fan_out=1.0, is_head=True))
    return out


def _is_complete(line: SlopeLine, sizes: Sequence[float], seeds: Sequence[int]) -> bool:
    """Tell whether a line has a value above 0 for every size and seed."""
    values = list(chain.from_iterable(line.values.values()))
    return len(values) == len(sizes) * len(seeds) and all(value > 0 for value in values)


def _average_blocks(
    values: Mapping[tuple[str, str], float], along: str
) -> dict[tuple[str, str], float]:
    """Average each (parameter, measure) over the blocks if depth varies; names get `*` for a block.

    Along the width the values stay as they are.
    """
    if along == "width":
        return dict(values)
    block_values: dict[tuple[str, str], list[float]] = {}
    for (name, quantity), value in values.items():
        block_values.setdefault((_any_block(name), quantity), []).append(value)
    return {key: math.fsum(group) / len(group) for key, group in block_values.items()}


def _any_block(name: str) -> str:
    """Replace the first block number in a name by `*`."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def _expected(name: str, measure: str, grown: Mapping[str, Growth], along: str) -> float | None:
    """Return the expected slope of a measure; None if the theory expects none.

    Args:
        name: Name of the parameter, see `SlopeLine.parameter`.
        measure: See `SlopeLine.measure`.
        grown: How each parameter grew.
        along: `width` or `depth`.
    """
    by_name: dict[str, Growth] = {}
    for param_name, growth in grown.items():
        by_name.setdefault(param_name if along == "width" else _any_block(param_name), growth)
    size = by_name.get(name)
    if size is None:  # a tied head, whose logits are scaled by a key of the architecture
        return None
    if along == "depth":
        return _expected_along_depth(name, measure, size)
    if size.logits != 1:
        return math.log(size.logits) / math.log(size.fan_out)
    if size.kind == "output matrix" and measure == "initial":
        return -0.5
    if size.kind == "output matrix" and measure == "change":
        return None  # its initial part falls, and the change with it
    return 0.0


def _expected_along_depth(name: str, measure: str, size: Growth) -> float | None:
    """Return the expected slope over the number of blocks; None if the theory expects none."""
    if measure == "change":
        is_in_block = "*" in name
        if is_in_block:
            return None
        return 0.0
    if size.ends_branch:
        return -1.0
    return 0.0


def measure(trial: SizedModel) -> dict[tuple[str, str], float]:
    """Train a model, and measure the outputs of its modules before and after.

    Returns:
        Mean absolute value by (parameter, measure), in the order of the forward pass. `initial` and
        `change` stand under the first parameter of a module without submodules. An `update` that is
        rounding is missing.
    """
    model = trial.model
    with _recorded_calls(model) as before:
        trial.forward()
    initial = {
        name: param.detach().clone()
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    trial.train()
    with _recorded_calls(model) as after:
        trial.forward()
    measured: dict[tuple[str, str], float] = {}
    for path, call in after.items():
        if path not in before:
            continue
        module = model.get_submodule(path)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        has_children = next(module.children(), None) is not None
        if not has_children:  # the output of a container is computed by its children
            first = f"{path}.{names[0]}" if path else names[0]
            measured[first, "initial"] = _mean(before[path].outputs)
            measured[first, "change"] = _mean(
                [b - a for a, b in zip(before[path].outputs, call.outputs, strict=True)]
            )
        for leaf in names:
            name = f"{path}.{leaf}" if path else leaf
            effect = _effect_of_change(module, leaf, initial[name], call)
            if effect is not None and effect > _ROUNDING * _mean(call.outputs):
                measured[name, "update"] = effect
    return measured


@dataclass
class _Call:
    """Arguments and floating-point outputs of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]


@contextmanager
def _recorded_calls(model: nn.Module) -> Iterator[dict[str, _Call]]:
    """Record the last call of each module with direct parameters, by its path.

    The block runs in evaluation mode and without gradients.
    """
    calls: dict[str, _Call] = {}

    def recorder(path: str) -> Callable[..., None]:
        def hook(
            _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], out: object
        ) -> None:
            calls[path] = _Call(args, kwargs, _float_tensors(out))

        return hook

    hooks = []
    for path, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks.append(module.register_forward_hook(recorder(path), with_kwargs=True))
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield calls
    finally:
        model.train(training)
        for handle in hooks:
            handle.remove()


def _effect_of_change(module: nn.Module, leaf: str, before: Tensor, call: _Call) -> float | None:
    """Measure how much the change of one parameter changes the output of its module.

    The module is called again on its recorded input, with the parameter's value before training.

    Args:
        module: Holds the parameter.
        leaf: Name of the parameter in the module.
        before: Its value before training.
        call: The recorded call after training.

    Returns:
        Mean absolute change of the output; None if the module cannot be called again, such as one
        that writes into a cache.
    """
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            out = _float_tensors(
                torch.func.functional_call(module, {leaf: before}, call.args, call.kwargs)
            )
        return _mean([b - a for a, b in zip(out, call.outputs, strict=True)])
    except (RuntimeError, ValueError, TypeError):
        return None
    finally:
        module.train(training)


def _float_tensors(out: object) -> list[Tensor]:
    """Collect the floating-point tensors in nested outputs, detached."""
    return [
        leaf.detach()
        for leaf in tree_leaves(out)
        if torch.is_tensor(leaf) and leaf.is_floating_point()
    ]


def _mean(tensors: Sequence[Tensor]) -> float:
    """Return the mean absolute value over all elements; 0 without elements."""
    total = float(sum(tensor.abs().sum().item() for tensor in tensors))
    return total / max(_total_numel(tensors), 1)
