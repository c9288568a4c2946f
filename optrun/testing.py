"""Checks of the rules that every optimizer keeps, for authors to run over their own optimizer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from optrun.config.choice import choice
from optrun.config.schema.optimizer import SCHEMAS
from optrun.config.schema.parametrization import MupConfig, TransferDecay
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.classes import class_of
from optrun.optimizer.coordinates import SizedModel, coordinate_check
from optrun.optimizer.footprint import state_bytes
from optrun.optimizer.state import TRAINED, load_named_state, named_state
from optrun.optimizer.transfer import transfer_groups
from optrun.param_groups import build_param_groups
from optrun.param_groups.growth import growth_of
from optrun.param_groups.parametrization import scale_initial_weights

_SHAPES = {"body.weight": (8, 12), "body.bias": (8,), "gain": (5,)}
"""The parameters that `check_optimizer` steps: a matrix and two vectors."""
_BASE_WIDTH = 32
"""Width of the smallest network of `check_transfer`."""

Params = dict[str, Parameter]
Groups = list[dict[str, object]]
Build = Callable[[Groups], Optimizer]
"""Builds the optimizer to check over parameter groups."""


def check_optimizer(name: str, *, lr: float, **options: object) -> None:
    """Check that a registered optimizer keeps optrun's rules; call it in your own test.

    It lowers a quadratic; a parameter without a gradient does not change; several groups equal
    several optimizers; after a checkpoint, loaded by name in any order, the next steps are equal to
    the last bit; the size of its state is known before a step. Another `lr`, or another
    `weight_decay` if it has one, leads to other weights. Shards are not checked.

    Args:
        name: The optimizer, as in `optimizer=NAME`.
        lr: A learning rate that lowers a sum of squares by a fifth in 60 steps.
        **options: Keyword arguments of the optimizer's class.

    Raises:
        ConfigError: The optimizer cannot be built, or fails on its first step.
        AssertionError: The message names the first broken rule.

    Example:
        >>> check_optimizer("lamb", lr=0.05, weight_decay=0.0)
    """

    def build(groups: Groups) -> Optimizer:
        return build_optimizer(name, groups, lr=lr, **options)

    _check_lowers_quadratic(build)
    _check_skips_missing_gradients(build)
    _check_depends_on(name, "lr", [{**options, "lr": lr}, {**options, "lr": lr / 2}])
    if "weight_decay" in inspect.signature(class_of(name)).parameters:
        settings = [{**options, "lr": lr, "weight_decay": decay} for decay in (0.0, 0.1)]
        _check_depends_on(name, "weight_decay", settings)
    _check_groups_are_independent(name, build)
    _check_state_bytes(name, build)
    _check_checkpoint(name, build)


def check_transfer(
    name: str, *, lr: float, steps: int = 4, seeds: Sequence[int] = (0, 1), **options: object
) -> None:
    """Check that a registered optimizer obeys the muP rule of its schema (`transfer`).

    Call it in your own test. It trains networks of three matrices, 32, 64, 128 and 256 wide, for a
    few steps under `parametrization=mup`. The effect of each update on the outputs must not depend
    on the width. See `optrun certify transfer` for complete models. Seeds torch's global generator.

    Args:
        name: The optimizer, as in `optimizer=NAME`.
        lr: Learning rate at the base width of 32.
        steps: Training steps of each network.
        seeds: Seeds of the initial weights.
        **options: Keys of the optimizer's configuration.

    Raises:
        ConfigError: The optimizer cannot be built, or its schema names no rule.
        AssertionError: The message names a parameter whose update grows or vanishes with the width.

    Example:
        >>> check_transfer("lion", lr=0.01)
    """
    config = choice("optimizer", SCHEMAS, name, options)
    mup = MupConfig(name="mup", base={}, weight_decay=TransferDecay.independent)
    # Four rows of two classes; the last two outputs of the network are never right.
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    classes = torch.tensor([0, 0, 0, 1])

    def sized_model(width_factor: float, seed: int) -> SizedModel:
        """Build a network so many times as wide as the base, and the functions to measure it."""
        # 1. Weights as muP draws them for this width: scaled in place, by how each parameter grew
        # over that of the base.
        torch.manual_seed(seed)
        base = _network(_BASE_WIDTH)
        model = _network(int(_BASE_WIDTH * width_factor))
        sizes = growth_of(model, base)
        scale_initial_weights(model, base, sizes)
        # 2. An optimizer over groups whose lr is scaled by the rule of its schema.
        groups = transfer_groups(build_param_groups(model, lr=lr), sizes, config, mup, lr=lr)
        optimizer = build_optimizer(config, groups, lr=lr)

        def train() -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), classes).backward()
                optimizer.step()

        # 3. The check runs the network, trains it, and runs it again.
        return SizedModel(model, lambda: model(inputs), train)

    # A failure: the change of the output, or a parameter's share in it, grows or vanishes over the
    # widths 32, 64, 128 and 256.
    failures = coordinate_check(sized_model, (1, 2, 4, 8), seeds).failures
    assert not failures, f"{name}: {failures[0].describe_failure()}"


def _network(width: int) -> nn.Sequential:
    """Build a network of 6 inputs, two hidden layers of a width, and 4 outputs, in float64."""
    layers = [nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 4)]
    for layer in layers:
        # As transformers has it. torch's own bias shrinks with the width, and four numbers hide it.
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double()


def _params() -> Params:
    """Draw the same normal weights at each call: one parameter for each of `_SHAPES`, float32."""
    generator = torch.Generator().manual_seed(0)
    return {
        key: Parameter(torch.randn(shape, generator=generator)) for key, shape in _SHAPES.items()
    }


def _groups(params: Mapping[str, Tensor]) -> Groups:
    """Divide parameters into a group of matrices and a group of vectors, with their roles."""
    matrices = [(key, param) for key, param in params.items() if param.dim() > 1]
    vectors = [(key, param) for key, param in params.items() if param.dim() <= 1]
    return [{"params": matrices, "role": "matrix"}, {"params": vectors, "role": "bias"}]


def _take_steps(
    params: Mapping[str, Tensor], optimizers: list[Optimizer], first: int, last: int
) -> None:
    """Take the steps from `first` to before `last`, with the same gradients at each call.

    Normal gradients, drawn anew for each step and parameter. The seed is made of the step and the
    length of the name, which differs for all names of `_SHAPES`.

    Args:
        params: Name -> parameter to which a gradient is given.
        optimizers: Each takes every step.
        first: Number of the first step.
        last: Number of the step after the last.
    """
    for step in range(first, last):
        for key, param in params.items():
            generator = torch.Generator().manual_seed(1000 * step + len(key))
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        for optimizer in optimizers:
            optimizer.step()


def _check_lowers_quadratic(build: Build) -> None:
    """Check that 60 steps take at least a fifth off the sum of squares of all weights."""
    params = _params()
    optimizer = build(_groups(params))

    def loss() -> Tensor:
        return torch.stack([(param**2).sum() for param in params.values()]).sum()

    before = loss().item()
    for _ in range(60):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    after = loss().item()
    assert after < 0.8 * before, (
        f"a sum of squares goes from {before:.3g} to {after:.3g} in 60 steps"
    )


def _check_skips_missing_gradients(build: Build) -> None:
    """Check that two steps move `body.weight`, and leave `gain`, which has no gradient."""
    params = _params()
    before = _params()
    optimizer = build(_groups(params))
    with_gradient = {key: param for key, param in params.items() if key != "gain"}
    _take_steps(with_gradient, [optimizer], 0, 2)
    assert torch.equal(params["gain"], before["gain"]), "a parameter without a gradient was changed"
    assert not torch.equal(params["body.weight"], before["body.weight"]), "a step changes nothing"


def _check_depends_on(name: str, key: str, settings: Sequence[Mapping[str, Any]]) -> None:
    """Check that two settings, which differ in one option, lead to other weights in 24 steps.

    Args:
        name: The optimizer.
        key: The option.
        settings: Two mappings of keywords, `lr` among them.
    """
    weights = []
    for options in settings:
        params = {path: Parameter(param.detach().double()) for path, param in _params().items()}
        optimizer = build_optimizer(name, _groups(params), **options)
        _take_steps(params, [optimizer], 0, 24)
        weights.append(list(params.values()))
    are_equal = all(map(torch.equal, *weights))
    assert not are_equal, f"{name}: its steps do not depend on {key}, which would be ignored"


def _check_groups_are_independent(name: str, build: Build) -> None:
    """Check that one optimizer over two groups steps as two optimizers over one group each."""
    together = _params()
    _take_steps(together, [build(_groups(together))], 0, 4)
    apart = _params()
    optimizers = [build([group]) for group in _groups(apart)]
    _take_steps(apart, optimizers, 0, 4)
    for key, param in together.items():
        message = f"{name}: {key} differs when each group has an optimizer of its own"
        torch.testing.assert_close(apart[key], param, rtol=1e-6, atol=1e-7, msg=message)


def _check_state_bytes(name: str, build: Build) -> None:
    """Check that the size of the state, computed before a step, is its size after three.

    The size of a parameter's state is the bytes of its tensors, not counting training weights that
    are saved beside evaluation weights.
    """
    params = _params()
    optimizer = build(_groups(params))
    expected_bytes = state_bytes(optimizer)
    _take_steps(params, [optimizer], 0, 3)
    tensors, _ = named_state(optimizer)
    bytes_of = dict.fromkeys(params, 0)
    for path, tensor in tensors.items():
        key, _, leaf = path.rpartition("/")
        if leaf != TRAINED:
            bytes_of[key] += tensor.numel() * tensor.itemsize
    assert expected_bytes == bytes_of, (
        f"{name}: state of {expected_bytes} bytes was expected, there are {bytes_of}"
    )


def _check_checkpoint(name: str, build: Build) -> None:
    """Check that steps after a checkpoint are equal bit by bit, with parameters reordered.

    One optimizer takes steps 0 to 5. Another gets copies of the parameters, in reversed order, and
    the state after step 2; it takes steps 3 to 5. Metadata goes through JSON, as in a checkpoint.
    """
    params = _params()
    optimizer = build(_groups(params))
    _take_steps(params, [optimizer], 0, 3)
    tensors, meta = named_state(optimizer)
    copies = {key: Parameter(param.detach().clone()) for key, param in reversed(params.items())}
    resumed = build(_groups(copies))
    saved = {path: tensor.clone() for path, tensor in tensors.items()}
    load_named_state(resumed, saved, json.loads(json.dumps(meta)))
    _take_steps(params, [optimizer], 3, 6)
    _take_steps(copies, [resumed], 3, 6)
    for key, param in params.items():
        assert torch.equal(copies[key], param), (
            f"{name}: {key} differs after its state went through a checkpoint"
        )
