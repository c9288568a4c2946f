"""On how many ranks, and how a model is divided among them; names as in torch and torchtitan."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from optrun.config.schema.checks import Checked
from optrun.config.schema.ranges import Count, Positive, WholeNumber, whole_number

ShardDtype = StrEnum("ShardDtype", ["float32", "bfloat16", "float16"])
"""Floating types that parameters may compute in, and gradients may be reduced in."""


@dataclass(kw_only=True)
class DistributedConfig(Checked):
    """Base class of the choices of this group."""

    GROUP = "distributed."
    name: str
    timeout_seconds: Positive
    """How long ranks wait for each other, and how long a rank may be silent.

    Until the first step is done, at least 300 s. In one process: how long a step may take before
    optrun warns.
    """


@dataclass(kw_only=True)
class NoDistributedConfig(DistributedConfig):
    """One process."""


@dataclass(kw_only=True)
class RanksConfig(DistributedConfig):
    """`distributed=ddp`, and what `fsdp` has too."""

    max_restarts: WholeNumber
    """How often ranks that failed are started again, from the last checkpoint."""
    backend: str
    """`auto` or a backend of torch.distributed."""


@dataclass(kw_only=True)
class DdpConfig(RanksConfig):
    """Whole models."""


@dataclass(kw_only=True)
class FsdpConfig(RanksConfig):
    """Shards."""

    data_parallel_replicate_degree: Count
    """Above 1: HSDP, so many groups of ranks with a whole model each."""
    data_parallel_shard_degree: Annotated[
        int, whole_number("1 or more, or -1", lambda x: x == -1 or x > 0)
    ]
    """Ranks that share one model; -1: all of such a group."""
    reshard_after_forward: bool
    """Free a block's parameters after its forward pass."""
    cpu_offload: bool
    """Shards rest in the CPU's memory."""
    param_dtype: ShardDtype | None
    """Of forward and backward; null: as the parameters are."""
    reduce_dtype: ShardDtype | None
    """Of the reduction of gradients; null: as `param_dtype`."""


SCHEMAS: dict[str, type[DistributedConfig]] = {
    "none": NoDistributedConfig,
    "ddp": DdpConfig,
    "fsdp": FsdpConfig,
}
