"""Estimate the memory of a rank: a shard of each tensor under FSDP, all of it under DDP."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from optrun.config.schema.distributed import FsdpConfig, RanksConfig
from optrun.config.schema.run import RunConfig
from optrun.distributed.shard import data_parallel_degrees
from optrun.explain.facts import RankMemory


def rank_count(config: RunConfig) -> int:
    """Count the ranks of a configuration; 1 for `distributed=none`.

    `training.nproc_per_node=auto` is the number of GPUs of this machine, at least 1.
    """
    if not isinstance(config.distributed, RanksConfig):
        return 1
    if config.training.nproc_per_node == "auto":
        return max(1, torch.cuda.device_count())
    return int(config.training.nproc_per_node)


def rank_memory(
    config: RunConfig,
    params: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    states: Mapping[str, int | None],
) -> RankMemory | None:
    """Estimate the memory of the rank with the largest shards, without activations.

    Args:
        config: Has the number of ranks and how they share a model.
        params: All parameters of the model, by name.
        sizes: Bytes of each parameter; its gradient is taken to be as large.
        states: Bytes of the optimizer state of each trainable parameter; None: unknown.

    Returns:
        None for `distributed=none`. Its `state_bytes` are None if one state is unknown.

    Raises:
        ConfigError: The degrees of `distributed=fsdp` do not multiply to the number of ranks.
    """
    distributed = config.distributed
    if not isinstance(distributed, RanksConfig):
        return None
    ranks = rank_count(config)
    shards = 1  # of each tensor; with ddp every rank has the whole model
    if isinstance(distributed, FsdpConfig):
        _, shards = data_parallel_degrees(distributed, ranks)

    def rank_bytes(bytes_by_name: Mapping[str, int]) -> int:
        """Add up the largest shard of each tensor."""
        return sum(
            _largest_shard(params[name], size, shards) for name, size in bytes_by_name.items()
        )

    trainable = {name: size for name, size in sizes.items() if params[name].requires_grad}
    known_states = {name: size for name, size in states.items() if size is not None}
    return RankMemory(
        distributed=distributed.name,
        ranks=ranks,
        shards=shards,
        weight_bytes=rank_bytes(sizes),
        gradient_bytes=rank_bytes(trainable),
        state_bytes=rank_bytes(known_states) if len(known_states) == len(states) else None,
    )


def _largest_shard(param: Tensor, size: int, shards: int) -> int:
    """Count the bytes of the largest shard of a tensor of `size` bytes.

    FSDP2 chunks dimension 0 as torch.chunk does: the first shard has ceil(rows / shards) rows. A
    tensor without dimensions is one row; one without elements has `size` bytes on each rank.

    Example:
        >>> _largest_shard(torch.zeros(5, 2), 40, shards=2)
        24
    """
    rows = param.shape[0] if param.dim() else 1
    if not rows:
        return size
    return size * math.ceil(rows / shards) // rows
