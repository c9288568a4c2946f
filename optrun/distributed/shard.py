"""Put a model on several ranks: replicated on each (DDP), or sharded block by block (FSDP2)."""

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
"""Takes whether a micro-batch is the last of its step; returns a context for that micro-batch, in
which gradients are reduced only if it is."""


def data_parallel_degrees(config: FsdpConfig, ranks: int) -> tuple[int, int]:
    """Return the number of model replicas, and the number of shards of each replica.

    Args:
        config: The degrees; a shard degree of -1 uses all ranks.
        ranks: The number of ranks.

    Raises:
        ConfigError: Replicas times shards is not the number of ranks.
    """
    replicas = config.data_parallel_replicate_degree
    shards = config.data_parallel_shard_degree
    if ranks % replicas:
        raise ConfigError(
            f"distributed.data_parallel_replicate_degree={replicas}: expected a divisor of {ranks},"
            " the number of ranks."
        )
    if shards == -1:
        shards = ranks // replicas
    if replicas * shards != ranks:
        raise ConfigError(
            f"distributed.data_parallel_shard_degree={shards}: with"
            f" data_parallel_replicate_degree={replicas} that needs {replicas * shards} ranks, but"
            f" there are {ranks}. Expected {ranks // replicas}, or -1."
        )
    return replicas, shards


def distribute(
    model: nn.Module,
    config: DistributedConfig,
    world: World,
    device: torch.device,
    blocks: Sequence[str],
) -> tuple[nn.Module, GradientSync]:
    """Wrap a model for training on several ranks by DDP or FSDP2, as configured.

    With `distributed=none` the model is returned as it is.

    Args:
        model: Equal on every rank, on the CPU or on the device; for FSDP2, ranks other than 0 may
            have it on `meta`. FSDP2 changes it in place: its parameters become DTensors on the
            device, under the same names.
        config: The kind of distribution and its options.
        world: The ranks.
        device: The device of this rank.
        blocks: Dotted names of the modules that FSDP2 gathers and frees one by one.

    Returns:
        The module to call in training, and a function that returns a context for a micro-batch, see
        `GradientSync`.

    Raises:
        ConfigError: The degrees of FSDP2 do not multiply to the number of ranks.
    """
    if isinstance(config, FsdpConfig):
        return _shard_fully(model, config, world, device, blocks)
    if isinstance(config, DdpConfig):
        ids = [device] if device.type == "cuda" else None
        # With find_unused_parameters, unused parameters keep grad=None, as in one process. Without
        # it torch rebuilds its buckets after the first step: on more than two ranks a resumed run
        # would sum gradients in another order than before.
        replicated = DistributedDataParallel(model, device_ids=ids, find_unused_parameters=True)
        return replicated, lambda last: nullcontext() if last else replicated.no_sync()
    return model, lambda last: nullcontext()  # noqa: ARG005


def _shard_fully(
    model: nn.Module, config: FsdpConfig, world: World, device: torch.device, blocks: Sequence[str]
) -> tuple[nn.Module, GradientSync]:
    """Shard each block, and then the model, by FSDP2 in place.

    The weights are those of rank 0. Arguments and result are those of `distribute`: the same model,
    and a function that takes whether a micro-batch is the last of its step and returns a context
    manager for it (`GradientSync`). A forward hook on the model frees the root's parameters after a
    forward pass without gradients.
    """
    replicas, shards = data_parallel_degrees(config, world.size)
    options: PlainDict = {
        "mesh": _mesh(replicas, shards, device),
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_dtype(config.param_dtype),
            reduce_dtype=_dtype(config.reduce_dtype),
            cast_forward_inputs=config.param_dtype is not None,
        ),
        "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
    }
    # `fully_shard` replaces the parameters by DTensors; their values are still needed below.
    full_params = {name: param.detach() for name, param in model.named_parameters()}

    # Shard. A block becomes a unit that is gathered and freed by itself, the root the unit of what
    # is left. The root's backward pass follows its forward pass directly, so resharding in between
    # would gather its parameters twice.
    for block in _innermost_first(model, blocks):
        fully_shard(block, **options)
    fully_shard(model, **{**options, "reshard_after_forward": False})
    # No backward pass follows an evaluation, so this hook frees the root's parameters.
    model.register_forward_hook(_reshard_without_gradients)
    assert isinstance(model, FSDPModule)

    # Fill the shards of ranks that have built their model on `meta`.
    shard_device = torch.device("cpu") if config.cpu_offload else device
    _copy_from_rank_0(model, full_params, world, shard_device, device)

    @contextmanager
    def gradient_sync(last: bool) -> Iterator[None]:
        """Reduce gradients only in the backward pass of the last micro-batch of a step."""
        model.set_requires_gradient_sync(last)
        yield

    return model, gradient_sync


def _reshard_without_gradients(module: nn.Module, args: object, output: object) -> None:  # noqa: ARG001
    """Free the root's gathered parameters after a forward pass without gradients; a forward hook.

    With gradients, the backward pass frees them.
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
    """Copy rank 0's weights and buffers into the shards of all ranks, tensor by tensor.

    Does nothing if no rank has its model on `meta`: all ranks then hold the same weights already.
    Every rank must call this.

    Args:
        model: Sharded; changed in place.
        full_params: Parameters before sharding, by name; emptied on rank 0 to save memory.
        world: The ranks.
        shard_device: Where shards are kept: the CPU if they are offloaded.
        device: Where the model computes.
    """
    import torch.distributed as dist

    # 1. Memory for ranks without any. If all ranks have their weights, they are equal already.
    is_on_meta = any(tensor.is_meta for tensor in full_params.values())
    if not any(world.gather_objects(is_on_meta)):
        return
    if is_on_meta:
        _allocate(model, shard_device, device)
        tie_weights = getattr(model, "tie_weights", None)
        if callable(tie_weights):
            tie_weights()  # allocating has given tied parameters memory of their own
    # 2. The values. Each call is a collective, so all ranks go through the same names in one order.
    with torch.no_grad():
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            if world.rank == 0:
                source = full_params.pop(name)
            else:
                source = torch.empty(param.shape, dtype=param.dtype)  # ignored: rank 0 sends
            shard = distribute_tensor(source, param.device_mesh, param.placements, src_data_rank=0)
            param.to_local().copy_(shard.to_local())
        for buffer in model.buffers():  # not all of them are saved with the weights
            content = buffer
            if buffer.dtype is torch.bool:  # gloo cannot send booleans
                content = buffer.view(torch.uint8)  # the same memory
            dist.broadcast(content, 0)


def _mesh(replicas: int, shards: int, device: torch.device) -> DeviceMesh:
    """Build the device mesh of FSDP2; with one replica it has one dimension."""
    if replicas > 1:
        return init_device_mesh(
            device.type, (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    return init_device_mesh(device.type, (shards,), mesh_dim_names=("dp_shard",))


def _dtype(choice: ShardDtype | None) -> torch.dtype | None:
    return None if choice is None else getattr(torch, choice.value)


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model is sharded over ranks by FSDP2."""
    return isinstance(model, FSDPModule)


def model_class(model: nn.Module) -> type[Any]:
    """Return the class of a model before `fully_shard` made a subclass of it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _innermost_first(model: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    """Return the modules at these dotted names, deepest first, as `fully_shard` needs them.

    Left out: names without a module, and lists and dicts of modules, which have no forward pass.
    So "layers.0.mlp" comes before "layers.0", and "layers", a ModuleList, does not come at all.
    """
    modules = dict(model.named_modules())
    deepest_first = sorted(paths, key=lambda path: path.count("."), reverse=True)
    selected = [modules[path] for path in deepest_first if path in modules]
    return [module for module in selected if not isinstance(module, nn.ModuleList | nn.ModuleDict)]


def gather_full_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor unsharded, under its name.

    Every rank must iterate to the end, because gathering is a collective.
    """
    for name, tensor in tensors:
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
