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
    below: float
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

        It is not explained if the deviation minus twice the noise is above half of `TOLERANCE`. NaN
        fails.
        """
        # Both are false for NaN, so it fails.
        is_small = self.deviation <= TOLERANCE
        is_noise = self.deviation - 2 * self.noise <= TOLERANCE / 2
        return not is_small and not is_noise

    @property
    def deviation(self) -> float:
        """How far the slope lies outside the range of expected slopes; 0 if there is none."""
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
        """The expected slope as text, such as `+0.0`, or a range of slopes."""
        highest = self.expected or 0.0
        if self.below:
            return f"{highest - self.below:+.1f} to {highest:+.1f}"
        return f"{highest:+.1f}"

    def describe_failure(self) -> str:
        """Describe in one sentence how the line fails, and the likely cause.

        Such as "h.0.fc.weight: what its update does to the output grows with the size, by a power
        of +0.51 where +0.0 is right: look at its lr_scale". The line must have an `expected` slope.
        """
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
        """Convert to numbers, strings and lists for JSON and pictures.

        Of the measured values only the mean over seeds is kept, by the size as text: "4", "0.5".
        """
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
    build: Callable[[float, int], SizedModel],
    sizes: Sequence[float],
    seeds: Sequence[int],
    along: str = "width",
    *,
    by_gradient: bool = False,
) -> CoordinateCheck:
    """Train models of several sizes for a few steps, and measure how outputs grow with size.

    A measure is one of three mean absolute values: a module's `initial` output, its `change` by the
    training, or the change by one parameter's `update` alone. A line holds one measure of one
    parameter at all sizes; its slope is that of log(measure) over log(size), see `SlopeLine`. Lines
    without a positive value for every size and seed are left out of the result.

    Args:
        build: Builds the model of a size, as a factor of the base, and a seed. (`SizedModel.sizes`
            is something else: how each parameter grew.)
        sizes: Two or more, rising.
        seeds: Seeds of the initial weights.
        along: `width` or `depth`.
        by_gradient: Whether updates are proportional to gradients, as those of SGD are. Then, along
            the width, updates of parameters that units share may have a slope 0.5 lower.

    Raises:
        ConfigError: The models cannot be compared, see `growth_of`.
    """
    # 1. Find how each parameter grows from the smallest to the largest model: `largest.sizes` if
    # the builder knows it, else by comparing shapes.
    largest = build(sizes[-1], seeds[0])
    smallest = build(sizes[0], seeds[0])
    growths = _add_tied_names(
        largest.model, largest.sizes or growth_of(largest.model, smallest.model)
    )
    shared: set[str] = set()  # updates of these may have a lower slope
    if by_gradient and along == "width":
        shared = _params_shared_by_units(largest, smallest, growths)
    # 2. Train and measure each model, both in `measure`, and add its values to the line of their
    # parameter and measure. Along the depth, blocks (layers) are averaged: one line for all.
    lines: dict[tuple[str, str], SlopeLine] = {}
    for size in sizes:
        for seed in seeds:
            values = measure(build(size, seed))
            for key, value in _average_blocks(values, along).items():
                name, measure_name = key
                if key not in lines:
                    # None: the theory expects no slope, and the line never fails.
                    expected = _expected_slope(name, measure_name, growths, along)
                    below = 0.5 if name in shared and measure_name == "update" else 0.0
                    lines[key] = SlopeLine(name, measure_name, expected, below)
                lines[key].values.setdefault(size, []).append(value)
    complete = [line for line in lines.values() if _is_complete(line, sizes, seeds)]
    return CoordinateCheck(along, complete)


def _params_shared_by_units(
    larger: SizedModel, smaller: SizedModel, growths: Mapping[str, Growth]
) -> set[str]:
    """Find the names of parameters of one size whose module has more outputs in the larger model.

    An example is a query norm: its weight has the size of one head, and acts on every head. So its
    gradient is a sum over n units, here heads. At first the summands are noise, and the sum grows
    with sqrt(n); later, when all units learn the same, with n.

    Args:
        larger: The larger model; it is run once.
        smaller: The smaller model; it is run once.
        growths: How each parameter grew from the smaller to the larger model, by name.
    """
    outputs_in_larger = _output_counts(larger)
    outputs_in_smaller = _output_counts(smaller)
    shared = set()
    for name, growth in growths.items():
        path = name.rpartition(".")[0]
        # A module that was not called has no count.
        if growth.kind != "of one size" or path not in outputs_in_larger:
            continue
        if path in outputs_in_smaller and outputs_in_larger[path] > outputs_in_smaller[path]:
            shared.add(name)
    return shared


def _output_counts(sized: SizedModel) -> dict[str, int]:
    """Run a model, and count the output elements of each module with parameters, by its path."""
    with _recorded_calls(sized.model) as calls:
        sized.forward()
    return {path: _total_numel(call.outputs) for path, call in calls.items()}


def _total_numel(tensors: Sequence[Tensor]) -> int:
    """Count the elements of all tensors."""
    return sum(tensor.numel() for tensor in tensors)


def _add_tied_names(model: nn.Module, growths: Mapping[str, Growth]) -> dict[str, Growth]:
    """Copy the growths by name, and add entries for the second names of tied tensors.

    For an embedding `wte.weight` that is tied to `lm_head.weight`, `growths` has the first name
    alone. The weight of a linear layer that is tied, such as this head, gets the growth of an
    untied head (its fan_in grows) if some parameter scales logits, else no entry: then the check
    has no expected slope for it.
    """
    first_names = {id(param): name for name, param in model.named_parameters()}
    # Whether the norm before a tied head has the factor that muP asks of the head.
    scales_logits = any(growth.logits != 1 for growth in growths.values())
    with_tied = dict(growths)
    for name, param in model.named_parameters(remove_duplicate=False):
        growth = growths[first_names[id(param)]]
        module = model.get_submodule(name.rpartition(".")[0])
        is_linear_weight = isinstance(module, nn.Linear) and param.dim() > 1
        if not is_linear_weight:  # first names are there already
            with_tied[name] = growth
        elif name not in with_tied and scales_logits:  # a second name: the tied head
            with_tied[name] = replace(growth, fan_in=growth.fan_out, fan_out=1.0, is_head=True)
    return with_tied


def _is_complete(line: SlopeLine, sizes: Sequence[float], seeds: Sequence[int]) -> bool:
    """Tell whether a line has a value above 0 for every size and seed."""
    values = list(chain.from_iterable(line.values.values()))
    return len(values) == len(sizes) * len(seeds) and all(value > 0 for value in values)


def _average_blocks(
    values: Mapping[tuple[str, str], float], along: str
) -> dict[tuple[str, str], float]:
    """Average each (parameter, measure) over the blocks; their number in the name becomes `*`.

    Only along the depth; along the width the values are returned unchanged.

    Example:
        >>> values = {("h.0.weight", "change"): 1.0, ("h.1.weight", "change"): 3.0}
        >>> _average_blocks(values, "depth")
        {('h.*.weight', 'change'): 2.0}
    """
    if along == "width":
        return dict(values)
    block_values: dict[tuple[str, str], list[float]] = {}
    for (name, measure_name), value in values.items():
        key = (_replace_block_number(name), measure_name)
        block_values.setdefault(key, []).append(value)
    return {key: math.fsum(group) / len(group) for key, group in block_values.items()}


def _replace_block_number(name: str) -> str:
    """Replace the first block number in a name by `*`."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def _expected_slope(
    name: str, measure: str, growths: Mapping[str, Growth], along: str
) -> float | None:
    """Return the expected slope of a measure; None if the theory expects none.

    The slope is that of log(measure) over log(size). Along the width, in this order:

    - a parameter without a growth, such as a tied head: None;
    - one whose weights scale the logits by `Growth.logits`: the power of the width that this factor
      is; 1/4 at four times the width is -1;
    - an output matrix: -0.5 for `initial`, which shrinks with 1/sqrt(width); None for `change`,
      which contains the initial output; 0 for `update`;
    - all others: 0, since muP keeps outputs and their changes at one size.

    Along the depth see `_expected_along_depth`.

    Args:
        name: Name of the parameter, see `SlopeLine.parameter`.
        measure: `initial`, `change` or `update`, see `SlopeLine.measure`.
        growths: By name, the sizes of each parameter of the largest model over those in a smaller
            model, see `Growth`.
        along: `width` or `depth`.
    """
    if along == "depth":
        return _expected_along_depth(name, measure, growths)
    growth = growths.get(name)
    if growth is None:  # a tied head, whose logits are scaled by a key of the architecture
        return None
    if growth.logits != 1:  # the power of the width that this factor is
        return math.log(growth.logits) / math.log(growth.fan_out)
    if growth.kind == "output matrix" and measure == "initial":
        return -0.5
    if growth.kind == "output matrix" and measure == "change":
        return None  # the initial output shrinks, and the change with it
    return 0.0


def _expected_along_depth(name: str, measure: str, growths: Mapping[str, Growth]) -> float | None:
    """Return the expected slope over the number of blocks; None if the theory expects none.

    -1 for the matrix at the end of a residual branch, whose output is scaled with 1/blocks; 0 for
    all others. No slope is expected of the `change` within a block. Arguments as in
    `_expected_slope`; parameters of several blocks with one name grow alike.
    """
    growth = next(
        (size for key, size in growths.items() if _replace_block_number(key) == name), None
    )
    if growth is None:
        return None
    if measure == "change":
        is_in_block = "*" in name  # in place of the block number
        return None if is_in_block else 0.0
    if growth.ends_branch:
        return -1.0
    return 0.0


def measure(sized: SizedModel) -> dict[tuple[str, str], float]:
    """Train a model, and measure the outputs of its modules before and after.

    Returns:
        Value by (parameter name, measure), in the order of the forward pass; for the measures see
        `SlopeLine.measure`. The key of `initial` and `change` has the first parameter of the
        module; modules with submodules have neither. An `update` is missing if it is only rounding.
        For one linear layer: ("fc.weight", "initial"), ("fc.weight", "change"), ("fc.weight",
        "update") and ("fc.bias", "update").
    """
    # 1. Run the model, train it, and run it again.
    model = sized.model
    with _recorded_calls(model) as before:
        sized.forward()
    initial = {
        name: param.detach().clone()
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    sized.train()
    with _recorded_calls(model) as after:
        sized.forward()
    # 2. Measure each module with parameters of its own.
    measured: dict[tuple[str, str], float] = {}
    for path, call in after.items():
        if path not in before:  # called only after the training
            continue
        module = model.get_submodule(path)
        prefix = f"{path}." if path else ""
        leaves = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        has_children = next(module.children(), None) is not None
        if not has_children:  # the output of a container is computed by its children
            first_param = prefix + leaves[0]
            measured[first_param, "initial"] = _mean_abs(before[path].outputs)
            measured[first_param, "change"] = _mean_abs(
                [b - a for a, b in zip(before[path].outputs, call.outputs, strict=True)]
            )
        for leaf in leaves:
            name = prefix + leaf
            effect = _effect_of_change(module, leaf, initial[name], call)
            if effect is not None and effect > _ROUNDING * _mean_abs(call.outputs):
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
    """Record the last call of each module with parameters of its own, by its path, in a block.

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
        Mean absolute change of the output; None if the call raises an error, as that of a module
        that writes into a cache may do.
    """
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            out = _float_tensors(
                torch.func.functional_call(module, {leaf: before}, call.args, call.kwargs)
            )
        return _mean_abs([b - a for a, b in zip(out, call.outputs, strict=True)])
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


def _mean_abs(tensors: Sequence[Tensor]) -> float:
    """Return the mean absolute value over all elements; 0 without elements."""
    total = float(sum(tensor.abs().sum().item() for tensor in tensors))
    return total / max(_total_numel(tensors), 1)
