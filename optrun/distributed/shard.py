"""A model on several ranks.

Whole on each of them (DDP), or cut over them block by block (FSDP2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from optrun.base.errors import ConfigError
from optrun.base.plain import PlainDict
from optrun.config.schema.distributed import DdpConfig, DistributedConfig, FsdpConfig, ShardDtype
from optrun.distributed.world import World

GradientSync = Callable[[bool], AbstractContextManager[object]]
"""Stands around each micro-batch, told whether it is the last of its step: gradients are reduced
there only."""


def data_parallel_degrees(config: FsdpConfig, ranks: int) -> tuple[int, int]:
    """Divide the ranks into groups with a whole model each, and such a group into shards.

    Args:
        config: The degrees that were asked for.
        ranks: How many there are.

    Returns:
        Groups, and ranks of each.

    Raises:
        ConfigError: They do not make up all ranks.

    """
    groups, shards = config.data_parallel_replicate_degree, config.data_parallel_shard_degree
    if ranks % groups:
        raise ConfigError(
            f"distributed.data_parallel_replicate_degree={groups}: expected a divisor of {ranks},"
            " the number of ranks."
        )
    if shards == -1:
        shards = ranks // groups
    if groups * shards != ranks:
        raise ConfigError(
            f"distributed.data_parallel_shard_degree={shards}: with {groups} groups of ranks"
            f" (data_parallel_replicate_degree) it makes {groups * shards} ranks, and there are"
            f" {ranks}. Expected {ranks // groups}, or -1."
        )
    return groups, shards


def distribute(
    model: nn.Module,
    config: DistributedConfig,
    world: World,
    device: torch.device,
    blocks: Sequence[str],
) -> tuple[nn.Module, GradientSync]:
    """Put a model on its ranks.

    Args:
        model: On the CPU or on the device, equal on every rank; for FSDP, other ranks than 0 may
            have it on `meta`.
            FSDP changes it in place: its parameters are DTensors afterwards, under the same names,
            on the device.
        config: How.
        world: The ranks.
        device: Of this rank.
        blocks: Dotted names of the modules that are gathered and freed one by one.

    Returns:
        What is called in training, and what stands around each micro-batch.

    Raises:
        ConfigError: Degrees that do not make up the ranks.
    """
    if isinstance(config, FsdpConfig):
        return _shard_fully(model, config, world, device, blocks)
    if isinstance(config, DdpConfig):
        ids = [device] if device.type == "cuda" else None
        # What a model does not use keeps no gradient, as in one process. And without it torch lays
        # out its buckets anew after the first step: on more than two ranks a run that goes on would
        # sum in another order than before.
        replicated = DistributedDataParallel(model, device_ids=ids, find_unused_parameters=True)
        return replicated, lambda last: nullcontext() if last else replicated.no_sync()
    return model, lambda last: nullcontext()  # noqa: ARG005


def _shard_fully(
    model: nn.Module, config: FsdpConfig, world: World, device: torch.device, blocks: Sequence[str]
) -> tuple[nn.Module, GradientSync]:
    """Shard each block and then the model by FSDP2, and fill in the weights of rank 0."""
    groups, shards = data_parallel_degrees(config, world.size)
    options: PlainDict = {
        "mesh": _mesh(groups, shards, device),
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_dtype(config.param_dtype),
            reduce_dtype=_dtype(config.reduce_dtype),
            cast_forward_inputs=config.param_dtype is not None,
        ),
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    }
    whole = {name: param.detach() for name, param in model.named_parameters()}
    for block in _innermost_first(model, blocks):
        fully_shard(block, **options)
    fully_shard(
        model, **{**options, "reshard_after_forward": False}
    )  # its backward pass begins at once
    model.register_forward_hook(_reshard_unless_trained)
    assert isinstance(model, FSDPModule)
    _copy_from_rank_0(
        model, whole, world, torch.device("cpu") if config.cpu_offload else device, device
    )

    @contextmanager
    def gradient_sync(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    return model, gradient_sync


def _reshard_unless_trained(module: nn.Module, args: object, output: object) -> None:  # noqa: ARG001
    """Free what the root has gathered where no backward pass follows, which would."""
    if not torch.is_grad_enabled() and isinstance(module, FSDPModule):
        module.reshard()


def _allocate(model: nn.Module, rest: torch.device, device: torch.device) -> None:
    """Give a model on `meta` memory, but buffers, which are never offloaded, on the device."""
    model.to_empty(device=rest)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _copy_from_rank_0(
    model: nn.Module,
    whole: dict[str, torch.Tensor],
    world: World,
    rest: torch.device,
    device: torch.device,
) -> None:
    """Give ranks whose model is on `meta` their shards of rank 0's model, tensor by tensor.

    Args:
        model: Sharded.
        whole: Its parameters from before, by name; nothing of it is left at the end.
        world: The ranks.
        rest: Where shards rest.
        device: Where the model computes.
    """
    import torch.distributed as dist

    empty = any(tensor.is_meta for tensor in whole.values())
    if not any(world.gather_objects(empty)):
        return
    if empty:
        _allocate(model, rest, device)
        tie_weights = getattr(model, "tie_weights", None)
        if callable(tie_weights):
            tie_weights()
    with torch.no_grad():
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            source = torch.empty(param.shape, dtype=param.dtype) if world.rank else whole.pop(name)
            shard = distribute_tensor(source, param.device_mesh, param.placements, src_data_rank=0)
            param.to_local().copy_(shard.to_local())
        for buffer in model.buffers():  # not all of them are saved with the weights
            dist.broadcast(buffer.view(torch.uint8) if buffer.dtype is torch.bool else buffer, 0)


def _mesh(groups: int, shards: int, device: torch.device) -> DeviceMesh:
    if groups > 1:
        return init_device_mesh(
            device.type, (groups, shards), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    return init_device_mesh(device.type, (shards,), mesh_dim_names=("dp_shard",))


def _dtype(choice: ShardDtype | None) -> torch.dtype | None:
    return None if choice is None else getattr(torch, choice.value)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether several ranks hold a part of the model each."""
    return isinstance(model, FSDPModule)


def model_class(model: nn.Module) -> type[Any]:
    """Return the class of a model before it was sharded.

    `fully_shard` puts one of its own in front.
    """
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _innermost_first(model: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    """Return the modules at these names that have a forward pass of their own, innermost first."""
    modules = dict(model.named_modules())
    found = (
        modules[path]
        for path in sorted(paths, key=lambda path: -path.count("."))
        if path in modules
    )
    return [module for module in found if not isinstance(module, nn.ModuleList | nn.ModuleDict)]


def gather_full_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather shards one after the other.

    Every rank takes part to the end, and has each tensor whole for a while.
    """
    for name, tensor in tensors:
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
