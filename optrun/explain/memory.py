"""Estimate the memory of each rank: pieces under FSDP, the whole under DDP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from optrun.config.schema.distributed import FsdpConfig, RanksConfig
from optrun.config.schema.run import RunConfig
from optrun.distributed.shard import data_parallel_degrees
from optrun.explain.facts import RankMemory


def rank_count(config: RunConfig) -> int:
    """Count the ranks from the configuration alone.

    `training.nproc_per_node=auto` counts the GPUs of this machine.
    """
    distributed, on_node = config.distributed, config.training.nproc_per_node
    if not isinstance(distributed, RanksConfig):
        return 1
    if on_node == "auto":
        return max(1, torch.cuda.device_count())
    return int(on_node)


def rank_memory(
    config: RunConfig,
    params: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    states: Mapping[str, int | None],
) -> RankMemory | None:
    """Estimate the memory of the fullest rank from the configuration alone.

    Args:
        config: Says how many ranks there are and how they share a model;
            `training.nproc_per_node=auto` counts the GPUs of this machine.
        params: Name -> parameter, for all of the model.
        sizes: Name -> bytes of the parameter.
        states: Name -> bytes of optimizer state, for trainable parameters; None: unknown.

    Returns:
        The memory; None for `distributed=none`. Its `state_bytes` are None if the state of any
        parameter is unknown.

    Raises:
        ConfigError: The degrees of `distributed=fsdp` do not multiply to the number of ranks.
    """
    distributed = config.distributed
    if not isinstance(distributed, RanksConfig):
        return None
    ranks = rank_count(config)
    shards = 1
    if isinstance(distributed, FsdpConfig):
        _, shards = data_parallel_degrees(distributed, ranks)

    def rank_bytes(tensors: Iterable[tuple[Tensor, int]]) -> int:
        return sum(_piece(param, size, shards) for param, size in tensors)

    known_states = {name: size for name, size in states.items() if size is not None}
    return RankMemory(
        distributed=distributed.name,
        ranks=ranks,
        shards=shards,
        weight_bytes=rank_bytes((param, sizes[name]) for name, param in params.items()),
        gradient_bytes=rank_bytes(
            (param, sizes[name]) for name, param in params.items() if param.requires_grad
        ),
        state_bytes=rank_bytes((params[name], size) for name, size in known_states.items())
        if len(known_states) == len(states)
        else None,
    )


def _piece(param: Tensor, size: int, shards: int) -> int:
    """Count the bytes of the largest shard: FSDP2 chunks dimension 0 as torch.chunk does."""
    rows = param.shape[0] if param.dim() else 1
    if not rows:
        return size
    return size * -(-rows // shards) // rows
