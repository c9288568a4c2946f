"""Laws that every optimizer holds to, for authors to run over their own."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
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
from optrun.optimizer.coordinates import Trial, coordinate_check
from optrun.optimizer.footprint import state_bytes
from optrun.optimizer.restore import sharded_like
from optrun.optimizer.state import TRAINED, load_named_state, named_state
from optrun.optimizer.table import class_of
from optrun.optimizer.transfer import transferred
from optrun.param_groups import build_param_groups
from optrun.param_groups.growth import growth_of
from optrun.param_groups.parametrization import scale_initial_weights

_NEAR = {torch.float64: 1e-9, torch.float32: 1e-5}
"""How far steps over shards may be from those of one process, over the largest number; other
dtypes: 1e-2."""
_SHAPES = {"body.weight": (8, 12), "body.bias": (8,), "gain": (5,)}


def check_optimizer(name: str, *, lr: float, ranks: int = 1, **options: object) -> None:
    """Hold a registered optimizer to the laws: use it in a test of your own.

    It goes down on a quadratic; a parameter without a gradient stays; groups are as good as several
    optimizers; its state goes through a checkpoint by name, in any order, and the next steps are
    the same to the last bit; the memory its state takes is known before a step. Another `lr`, or
    another `weight_decay` if it has one, leads to other weights.

    Args:
        name: As in `optimizer=NAME`.
        lr: At which it goes down on a sum of squares in 60 steps.
        ranks: From 2 on, so many processes (forked, gloo) step it in shards, too: weights and state
            have to be those of one process, as `distributed=fsdp` needs them.
        **options: Keywords of its class.

    Raises:
        ConfigError: It cannot be built, or fails when it is tried.
        AssertionError: The first law that it breaks.

    Example:
        >>> check_optimizer("lamb", lr=0.05, weight_decay=0.0)
    """

    def build(params: Mapping[str, Tensor]) -> Optimizer:
        return build_optimizer(name, _groups(params), lr=lr, **options)

    _goes_down(build(params := _params()), params)
    _leaves_what_has_no_gradient(build(params := _params()), params)
    _obeys(name, "lr", [{**options, "lr": rate} for rate in (lr, lr / 2)])
    if "weight_decay" in inspect.signature(class_of(name)).parameters:
        decays = [{**options, "lr": lr, "weight_decay": decay} for decay in (0.0, 0.1)]
        _obeys(name, "weight_decay", decays)
    together, apart = _params(), _params()
    several = [build_optimizer(name, [group], lr=lr, **options) for group in _groups(apart)]
    _steps(together, [build(together)], 0, 4)
    _steps(apart, several, 0, 4)
    for key, param in together.items():
        message = f"{name}: {key} differs when each group has an optimizer of its own"
        torch.testing.assert_close(apart[key], param, rtol=1e-6, atol=1e-7, msg=message)

    first = build(params := _params())
    sizes = state_bytes(first)
    _steps(params, [first], 0, 3)
    tensors, meta = named_state(first)
    held = {
        at: t.numel() * t.itemsize for at, t in tensors.items() if not at.endswith(f"/{TRAINED}")
    }
    kept = {
        key: sum(size for at, size in held.items() if at.startswith(f"{key}/")) for key in params
    }
    assert sizes == kept, f"{name}: state of {sizes} bytes was expected, there are {kept}"
    again = {key: Parameter(param.detach().clone()) for key, param in reversed(params.items())}
    second = build(again)
    load_named_state(
        second, {key: t.clone() for key, t in tensors.items()}, json.loads(json.dumps(meta))
    )
    _steps(params, [first], 3, 6)
    _steps(again, [second], 3, 6)
    for key, param in params.items():
        assert torch.equal(again[key], param), (
            f"{name}: {key} differs after its state went through a checkpoint"
        )
    if ranks > 1:
        with tempfile.TemporaryDirectory() as folder:
            given = (folder, ranks, name, lr, options)
            try:
                start_processes(_steps_shards, args=given, nprocs=ranks, start_method="fork")
            except ProcessRaisedException as error:
                last = str(error).strip().rsplit("\n", 1)[-1]
                raise AssertionError(f"{name}: in shards on {ranks} ranks: {last}") from error


def check_transfer(
    name: str, *, lr: float, steps: int = 4, seeds: Sequence[int] = (0, 1), **options: object
) -> None:
    """Hold a registered optimizer to the rule that its schema names (`transfer`).

    Use it in a test of your own.

    A network of three matrices, 32 to 256 wide, is trained for a few steps under
    `parametrization=mup`. What each update does to the outputs must not go with the width. See
    `optrun certify transfer` for whole models.

    Args:
        name: As in `optimizer=NAME`.
        lr: At the base, 32 wide.
        steps: Of each network.
        seeds: Of the initial weights.
        **options: Keys of its configuration.

    Raises:
        ConfigError: It cannot be built, or its schema names no rule.
        AssertionError: The parameter whose update grows or dies.

    Example:
        >>> check_transfer("lion", lr=0.01)
    """
    config = choice("optimizer", SCHEMAS, name, options)
    mup = MupConfig(name="mup", base={}, weight_decay=TransferDecay.independent)
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def trial(width: float, seed: int) -> Trial:
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

        return Trial(model, lambda: model(batch), train)

    failures = coordinate_check(trial, (1, 2, 4, 8), seeds).failures
    assert not failures, f"{name}: {failures[0].in_words()}"


def _network(width: int) -> nn.Sequential:
    layers = [nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 4)]
    for layer in layers:
        nn.init.zeros_(
            layer.bias
        )  # as transformers has it; torch's own goes with the width, which four numbers hide
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double()


def _steps_shards(
    rank: int, folder: str, ranks: int, name: str, lr: float, options: Mapping[str, object]
) -> None:
    """Hold sharded steps on each of several ranks to those of one process, from its state too."""
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

    whole = {key: Parameter(param.detach().double()) for key, param in _params().items()}
    shards = sharded(whole)
    one, several = build(whole), build(shards)
    _steps(whole, [one], 0, 11)
    _steps(shards, [several], 0, 11)
    _compare_shards(f"{name}: steps over shards are not those of one process", one, several)
    resumed = sharded(whole)
    again = build(resumed)
    tensors, meta = named_state(one)
    load_named_state(again, tensors, json.loads(json.dumps(meta)))
    _steps(whole, [one], 11, 24)
    _steps(resumed, [again], 11, 24)
    _compare_shards(f"{name}: shards do not go on from the checkpoint of one process", one, again)
    dist.destroy_process_group()


def _compare_shards(message: str, one: Optimizer, several: Optimizer) -> None:
    """Raise for the first weight or state tensor that is not that of one process."""
    expected, sharded = _weights_and_state(one), _weights_and_state(several)
    assert expected.keys() == sharded.keys(), f"{message}: their states have other names"
    for key, tensor in expected.items():
        shard = sharded[key]
        full = shard.full_tensor() if isinstance(shard, DTensor) else shard
        shapes = f"{tuple(full.shape)} and not {tuple(tensor.shape)}"
        assert full.shape == tensor.shape, f"{message}: {key} has shape {shapes}"
        if tensor.numel():
            largest = max(tensor.abs().max().item(), 1e-30)
            far = (full - tensor).abs().max().item() / largest
            assert far <= _NEAR.get(tensor.dtype, 1e-2), f"{message}: {key} is {far:.0e} away"


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


def _steps(
    params: Mapping[str, Tensor], optimizers: list[Optimizer], first: int, last: int
) -> None:
    for step in range(first, last):
        for key, param in params.items():
            generator = torch.Generator().manual_seed(1000 * step + len(key))
            noise = torch.randn(param.shape, generator=generator)
            param.grad = sharded_like(noise.to(param.dtype), param)
        for optimizer in optimizers:
            optimizer.step()


def _goes_down(optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
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


def _obeys(name: str, key: str, settings: Sequence[Mapping[str, Any]]) -> None:
    """Demand that two values of an option lead to different weights."""
    weights = []
    for options in settings:
        params = {key: Parameter(param.detach().double()) for key, param in _params().items()}
        _steps(params, [build_optimizer(name, _groups(params), **options)], 0, 24)
        weights.append(list(params.values()))
    same = all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    assert not same, f"{name}: its steps do not depend on {key}, which would be ignored"


def _leaves_what_has_no_gradient(optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
    before = {key: param.detach().clone() for key, param in params.items()}
    _steps({key: param for key, param in params.items() if key != "gain"}, [optimizer], 0, 2)
    assert torch.equal(params["gain"], before["gain"]), "a parameter without a gradient was changed"
    assert not torch.equal(params["body.weight"], before["body.weight"]), "a step changes nothing"
