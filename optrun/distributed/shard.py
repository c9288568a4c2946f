"""Put a model on several ranks: replicated on each (DDP), or sharded block by block (FSDP2)."""

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
    """Return the numbers of model replicas and of shards of each replica.

    Args:
        config: The degrees; a shard degree of -1 uses all ranks.
        ranks: The number of ranks.

    Raises:
        ConfigError: The degrees do not multiply to the number of ranks.
    """
    groups = config.data_parallel_replicate_degree
    shards = config.data_parallel_shard_degree
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
    """Wrap a model for training on several ranks: by DDP, by FSDP2, or not at all.

    Args:
        model: Equal on every rank, on the CPU or on the device; for FSDP2, ranks other than 0 may
            have it on `meta`. FSDP2 changes it in place: its parameters become DTensors on the
            device, under the same names.
        config: The kind of distribution and its options.
        world: The ranks.
        device: The device of this rank.
        blocks: Dotted names of the modules that FSDP2 gathers and frees one by one.

    Returns:
        The module to call in training, and the context manager for each micro-batch.

    Raises:
        ConfigError: Degrees that do not multiply to the number of ranks.
    """
    if isinstance(config, FsdpConfig):
        return _shard_fully(model, config, world, device, blocks)
    if isinstance(config, DdpConfig):
        ids = [device] if device.type == "cuda" else None
        # What a model does not use keeps no gradient, as in one process. And without it torch lays
        # out its buckets anew after the first step: on more than two ranks a resumed run would
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
    full_params = {name: param.detach() for name, param in model.named_parameters()}
    for block in _innermost_first(model, blocks):
        fully_shard(block, **options)
    # The backward pass of the root begins at once, so resharding it would gather it twice.
    fully_shard(model, **{**options, "reshard_after_forward": False})
    model.register_forward_hook(_reshard_unless_trained)
    assert isinstance(model, FSDPModule)
    shard_device = torch.device("cpu") if config.cpu_offload else device
    _copy_from_rank_0(model, full_params, world, shard_device, device)

    @contextmanager
    def gradient_sync(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    return model, gradient_sync


def _reshard_unless_trained(module: nn.Module, args: object, output: object) -> None:  # noqa: ARG001
    """Free the root's gathered parameters after a forward pass without gradients.

    Otherwise the backward pass frees them.
    """
    if not torch.is_grad_enabled() and isinstance(module, FSDPModule):
        module.reshard()


def _allocate(model: nn.Module, shard_device: torch.device, device: torch.device) -> None:
    """Allocate a `meta` model's parameters on one device, and its buffers on another."""
    model.to_empty(device=shard_device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _copy_from_rank_0(
    model: nn.Module,
    full_params: dict[str, torch.Tensor],
    world: World,
    shard_device: torch.device,
    device: torch.device,
) -> None:
    """Copy rank 0's weights into the shards of all ranks, tensor by tensor.

    Nothing happens if no rank has its model on `meta`.

    Args:
        model: Sharded; changed in place.
        full_params: Parameters before sharding, by name; emptied on rank 0 to save memory.
        world: The ranks.
        shard_device: Where shards are kept: the CPU if they are offloaded.
        device: Where the model computes.
    """
    import torch.distributed as dist

    is_on_meta = any(tensor.is_meta for tensor in full_params.values())
    if not any(world.gather_objects(is_on_meta)):
        return
    if is_on_meta:
        _allocate(model, shard_device, device)
        tie_weights = getattr(model, "tie_weights", None)
        if callable(tie_weights):
            tie_weights()
    with torch.no_grad():
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            if world.rank == 0:
                source = full_params.pop(name)
            else:
                source = torch.empty(param.shape, dtype=param.dtype)
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
    """Tell whether a model is sharded over ranks by FSDP2."""
    return isinstance(model, FSDPModule)


def model_class(model: nn.Module) -> type[Any]:
    """Return the class of a model before it was sharded.

    `fully_shard` puts one of its own in front.
    """
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _innermost_first(model: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    """Return the modules at these names, innermost first, without lists and dicts of modules."""
    modules = dict(model.named_modules())
    sorted_modules = []
    for path in sorted(paths, key=lambda path: -path.count(".")):
        module = modules.get(path)
        if module is not None and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            sorted_modules.append(module)
    return sorted_modules


def gather_full_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor unsharded, under its name.

    Every rank must iterate to the end, because gathering is a collective.
    """
    for name, tensor in tensors:
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
