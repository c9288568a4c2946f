"""On how many ranks, and how a model is divided among them; names as in torch and torchtitan."""

import re
from dataclasses import dataclass
from enum import Enum

from optrun.config.schema.checks import expect, expect_count, expect_not_negative, expect_positive


class ShardDtype(Enum):
    """Floating types that parameters may compute in, and gradients may be reduced in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(kw_only=True)
class DistributedConfig:
    """What every choice has."""

    name: str
    timeout_seconds: float
    """How long a rank may be silent before the run ends; without ranks, how long a step may take before it is told."""

    def __post_init__(self) -> None:
        """Refuse no time at all."""
        expect_positive("distributed.timeout_seconds", self.timeout_seconds)


@dataclass(kw_only=True)
class NoDistributedConfig(DistributedConfig):
    """One process."""


@dataclass(kw_only=True)
class RanksConfig(DistributedConfig):
    """`distributed=ddp`, and what `fsdp` has too."""

    nnodes: int
    """Machines; the same command is started on each."""
    rdzv_endpoint: str | None
    """HOST:PORT where the machines meet."""
    max_restarts: int
    """How often ranks that failed are started again, from the last checkpoint."""
    backend: str
    """`auto` or a backend of torch.distributed."""

    def __post_init__(self) -> None:
        """Refuse machines that cannot meet."""
        super().__post_init__()
        expect_count("distributed.nnodes", self.nnodes)
        expect_not_negative("distributed.max_restarts", self.max_restarts)
        endpoint = self.rdzv_endpoint
        expect(
            endpoint is None or re.fullmatch(r"\[?[^\s/]+\]?:\d{1,5}", endpoint) is not None,
            "distributed.rdzv_endpoint",
            endpoint,
            "HOST:PORT",
        )
        expect(
            endpoint is not None or self.nnodes == 1,
            "distributed.rdzv_endpoint",
            endpoint,
            f"HOST:PORT, where the {self.nnodes} machines meet",
        )


@dataclass(kw_only=True)
class DdpConfig(RanksConfig):
    """Whole models."""


@dataclass(kw_only=True)
class FsdpConfig(RanksConfig):
    """Shards."""

    data_parallel_replicate_degree: int
    """Above 1: HSDP, so many groups of ranks with a whole model each."""
    data_parallel_shard_degree: int
    """Ranks that share one model; -1: all of such a group."""
    reshard_after_forward: bool
    """Free a block's parameters after its forward pass."""
    cpu_offload: bool
    """Shards rest in the CPU's memory."""
    param_dtype: ShardDtype | None
    """Of forward and backward; null: as the parameters are."""
    reduce_dtype: ShardDtype | None
    """Of the reduction of gradients; null: as `param_dtype`."""

    def __post_init__(self) -> None:
        """Refuse degrees that are none."""
        super().__post_init__()
        expect_count("distributed.data_parallel_replicate_degree", self.data_parallel_replicate_degree)
        degree = self.data_parallel_shard_degree
        expect(degree == -1 or degree > 0, "distributed.data_parallel_shard_degree", degree, "1 or more, or -1")


SCHEMAS: dict[str, type[DistributedConfig]] = {
    "none": NoDistributedConfig,
    "ddp": DdpConfig,
    "fsdp": FsdpConfig,
}
