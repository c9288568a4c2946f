"""Laws that every optimizer holds to, for authors to run over their own."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes
from torch.nn import Parameter
from torch.optim import Optimizer

from optrun.config.choice import choice
from optrun.config.schema.optimizer import SCHEMAS
from optrun.config.schema.parametrization import MupConfig, TransferDecay
from optrun.optimizer.build import build_optimizer
from optrun.optimizer.classes import class_of
from optrun.optimizer.coordinates import SizedModel, coordinate_check
from optrun.optimizer.footprint import state_bytes
from optrun.optimizer.restore import sharded_like
from optrun.optimizer.state import TRAINED, load_named_state, named_state
from optrun.optimizer.transfer import transferred
from optrun.param_groups import build_param_groups
from optrun.param_groups.growth import growth_of
from optrun.param_groups.parametrization import scale_initial_weights

_NEAR = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How far steps over shards may be from those of one process, over the largest number; other
dtypes: 1e-2."""
_SHAPES = {"body.weight": (8, 12), "body.bias": (8,), "gain": (5,)}


def check_optimizer(name: str, *, lr: float, ranks: int = 1, **options: object) -> None:
    """Check that a registered optimizer keeps optrun's rules; call it in your own test.

    It lowers a quadratic; a parameter without a gradient does not change; several groups equal
    several optimizers; after a checkpoint, loaded by name in any order, the next steps are equal to
    the last bit; the size of its state is known before a step. Another `lr`, or another
    `weight_decay` if it has one, leads to other weights.

    Args:
        name: The optimizer, as in `optimizer=NAME`.
        lr: A learning rate that lowers a sum of squares in 60 steps.
        ranks: From 2 on, also step shards in so many forked processes (gloo). Weights and state
            must equal those of one process, as `distributed=fsdp` needs.
        **options: Keyword arguments of the optimizer's class.

    Raises:
        ConfigError: The optimizer cannot be built, or fails on its first step.
        AssertionError: The message names the first broken rule.

    Example:
        >>> check_optimizer("lamb", lr=0.05, weight_decay=0.0)
    """

    def build(params: Mapping[str, Tensor]) -> Optimizer:
        return build_optimizer(name, _groups(params), lr=lr, **options)

    params = _params()
    _check_descends(build(params), params)
    params = _params()
    _check_skips_missing_gradients(build(params), params)
    _check_obeys(name, "lr", [{**options, "lr": rate} for rate in (lr, lr / 2)])
    if "weight_decay" in inspect.signature(class_of(name)).parameters:
        decays = [{**options, "lr": lr, "weight_decay": decay} for decay in (0.0, 0.1)]
        _check_obeys(name, "weight_decay", decays)
    together = _params()
    _take_steps(together, [build(together)], 0, 4)
    apart = _params()
    optimizers = [build_optimizer(name, [group], lr=lr, **options) for group in _groups(apart)]
    _take_steps(apart, optimizers, 0, 4)
    for key, param in together.items():
        message = f"{name}: {key} differs when each group has an optimizer of its own"
        torch.testing.assert_close(apart[key], param, rtol=1e-6, atol=1e-7, msg=message)
    _check_checkpoint(name, build)
    if ranks > 1:
        _check_shards(name, ranks, lr, options)


def _check_checkpoint(name: str, build: Callable[[Mapping[str, Tensor]], Optimizer]) -> None:
    """Check the state after a checkpoint loaded by name, with parameters reordered."""
    params = _params()
    optimizer = build(params)
    expected_bytes = state_bytes(optimizer)
    _take_steps(params, [optimizer], 0, 3)
    tensors, meta = named_state(optimizer)
    bytes_of = dict.fromkeys(params, 0)
    for path, tensor in tensors.items():
        key, _, leaf = path.rpartition("/")
        if leaf != TRAINED:
            bytes_of[key] += tensor.numel() * tensor.itemsize
    assert expected_bytes == bytes_of, (
        f"{name}: state of {expected_bytes} bytes was expected, there are {bytes_of}"
    )
    copies = {key: Parameter(param.detach().clone()) for key, param in reversed(params.items())}
    resumed = build(copies)
    saved = {path: tensor.clone() for path, tensor in tensors.items()}
    load_named_state(resumed, saved, json.loads(json.dumps(meta)))
    _take_steps(params, [optimizer], 3, 6)
    _take_steps(copies, [resumed], 3, 6)
    for key, param in params.items():
        assert torch.equal(copies[key], param), (
            f"{name}: {key} differs after its state went through a checkpoint"
        )


def _check_shards(name: str, ranks: int, lr: float, options: Mapping[str, object]) -> None:
    """Step shards in several processes, and compare with one process."""
    with tempfile.TemporaryDirectory() as folder:
        args = (folder, ranks, name, lr, options)
        try:
            start_processes(_run_rank, args=args, nprocs=ranks, start_method="fork")
        except ProcessRaisedException as error:
            last_line = str(error).strip().rsplit("\n", 1)[-1]
            raise AssertionError(f"{name}: in shards on {ranks} ranks: {last_line}") from error


def check_transfer(
    name: str, *, lr: float, steps: int = 4, seeds: Sequence[int] = (0, 1), **options: object
) -> None:
    """Check that a registered optimizer obeys the muP rule of its schema (`transfer`).

    Use it in a test of your own.

    Call it in your own test. It trains networks of three matrices, 32 to 256 wide, for a few steps
    under `parametrization=mup`. The effect of each update on the outputs must not depend on the
    width. See `optrun certify transfer` for whole models.

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
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def trial(width: float, seed: int) -> SizedModel:
        torch.manual_seed(seed)
        base, model = _network(32), _network(int(32 * width))
        sizes = growth_of(model, base)
        scale_initial_weights(model, base, sizes)
        groups = transferred(build_param_groups(model, lr=lr), sizes, config, mup, lr=lr)
        optimizer = build_optimizer(config, groups, lr=lr)

        def train() -> None:
            for _ in range(steps):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(
                    model(batch), torch.tensor([0, 0, 0, 1])
                ).backward()
                optimizer.step()

        return SizedModel(model, lambda: model(batch), train)

    failures = coordinate_check(trial, (1, 2, 4, 8), seeds).failures
    assert not failures, f"{name}: {failures[0].in_words()}"


def _network(width: int) -> nn.Sequential:
    layers = [nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 4)]
    for layer in layers:
        # As transformers has it. torch's own bias shrinks with the width, and four numbers hide it.
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double()


def _run_rank(
    rank: int, folder: str, ranks: int, name: str, lr: float, options: Mapping[str, object]
) -> None:
    """Compare sharded steps with those of one process, from its checkpoint too."""
    torch.set_num_threads(1)  # after a fork OpenMP's other threads are not there
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(folder).absolute()}/meet", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (ranks,))

    def sharded(params: Mapping[str, Tensor]) -> dict[str, Parameter]:
        return {
            key: Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None))
            for key, param in params.items()
        }

    def build(params: Mapping[str, Tensor]) -> Optimizer:
        return build_optimizer(name, _groups(params), lr=lr, **options)

    params = {key: Parameter(param.detach().double()) for key, param in _params().items()}
    shards = sharded(params)
    optimizer = build(params)
    sharded_optimizer = build(shards)
    _take_steps(params, [optimizer], 0, 11)
    _take_steps(shards, [sharded_optimizer], 0, 11)
    message = f"{name}: steps over shards are not those of one process"
    _compare_shards(message, optimizer, sharded_optimizer)
    resumed_shards = sharded(params)
    resumed = build(resumed_shards)
    tensors, meta = named_state(optimizer)
    load_named_state(resumed, tensors, json.loads(json.dumps(meta)))
    _take_steps(params, [optimizer], 11, 24)
    _take_steps(resumed_shards, [resumed], 11, 24)
    message = f"{name}: shards do not go on from the checkpoint of one process"
    _compare_shards(message, optimizer, resumed)
    dist.destroy_process_group()


def _compare_shards(message: str, optimizer: Optimizer, sharded_optimizer: Optimizer) -> None:
    """Raise for the first sharded weight or state tensor that differs from one process."""
    expected = _weights_and_state(optimizer)
    sharded = _weights_and_state(sharded_optimizer)
    assert expected.keys() == sharded.keys(), f"{message}: their states have other names"
    for key, tensor in expected.items():
        shard = sharded[key]
        full = shard.full_tensor() if isinstance(shard, DTensor) else shard
        shapes = f"{tuple(full.shape)} and not {tuple(tensor.shape)}"
        assert full.shape == tensor.shape, f"{message}: {key} has shape {shapes}"
        if tensor.numel():
            largest = max(tensor.abs().max().item(), 1e-30)
            distance = (full - tensor).abs().max().item() / largest
            assert distance <= _NEAR.get(tensor.dtype, 1e-2), (
                f"{message}: {key} is {distance:.0e} away"
            )


def _weights_and_state(optimizer: Optimizer) -> dict[str, Tensor]:
    weights = {
        key: param.detach()
        for group in optimizer.param_groups
        for key, param in zip(group["param_names"], group["params"], strict=True)
    }
    return weights | named_state(optimizer)[0]


def _params() -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        key: Parameter(torch.randn(shape, generator=generator)) for key, shape in _SHAPES.items()
    }


def _groups(params: Mapping[str, Tensor]) -> list[dict[str, object]]:
    """Separate matrices from vectors."""
    matrices = [(key, param) for key, param in params.items() if param.dim() > 1]
    vectors = [(key, param) for key, param in params.items() if param.dim() <= 1]
    return [{"params": matrices, "role": "matrix"}, {"params": vectors, "role": "bias"}]


def _take_steps(
    params: Mapping[str, Tensor], optimizers: list[Optimizer], first: int, last: int
) -> None:
    for step in range(first, last):
        for key, param in params.items():
            generator = torch.Generator().manual_seed(1000 * step + len(key))
            noise = torch.randn(param.shape, generator=generator)
            param.grad = sharded_like(noise.to(param.dtype), param)
        for optimizer in optimizers:
            optimizer.step()


def _check_descends(optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
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


def _check_obeys(name: str, key: str, settings: Sequence[Mapping[str, Any]]) -> None:
    """Check that two values of an option lead to different weights."""
    weights = []
    for options in settings:
        params = {path: Parameter(param.detach().double()) for path, param in _params().items()}
        _take_steps(params, [build_optimizer(name, _groups(params), **options)], 0, 24)
        weights.append(list(params.values()))
    same = all(torch.equal(first, second) for first, second in zip(*weights, strict=True))
    assert not same, f"{name}: its steps do not depend on {key}, which would be ignored"


def _check_skips_missing_gradients(optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
    before = {key: param.detach().clone() for key, param in params.items()}
    with_gradient = {key: param for key, param in params.items() if key != "gain"}
    _take_steps(with_gradient, [optimizer], 0, 2)
    assert torch.equal(params["gain"], before["gain"]), "a parameter without a gradient was changed"
    assert not torch.equal(params["body.weight"], before["body.weight"]), "a step changes nothing"
