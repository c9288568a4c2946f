"""On how many ranks, and how a model is divided among them; names as in torch and torchtitan."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from optrun.config.schema.checks import Checked
from optrun.config.schema.ranges import Count, Positive, WholeNumber, matching, whole_number

ShardDtype = StrEnum("ShardDtype", ["float32", "bfloat16", "float16"])
"""Floating types that parameters may compute in, and gradients may be reduced in."""


@dataclass(kw_only=True)
class DistributedConfig(Checked):
    """What every choice has."""

    GROUP = "distributed."
    name: str
    timeout_seconds: Positive
    """How long ranks wait for each other to come, and may be silent where no other limit is given.

    Without ranks: how long a step may take before it is told.
    """


@dataclass(kw_only=True)
class NoDistributedConfig(DistributedConfig):
    """One process."""


@dataclass(kw_only=True)
class RanksConfig(DistributedConfig):
    """`distributed=ddp`, and what `fsdp` has too."""

    nnodes: Count
    """Machines; the same command is started on each."""
    min_nnodes: Count | None
    """Machines that the run goes on with where not all are there; null: all."""
    rdzv_endpoint: Annotated[str, matching(r"\[?[^\s/]+\]?:\d{1,5}", "HOST:PORT")] | None
    """HOST:PORT where the machines meet."""
    max_restarts: WholeNumber
    """How often ranks that failed are started again, from the last checkpoint."""
    init_timeout_seconds: Positive | None
    """How long a rank may be silent until its first step is done; null.

    `timeout_seconds`, and 300 at least.
    """
    train_timeout_seconds: Positive | None
    """How long a later step, or a batch of an evaluation, may take; null: `timeout_seconds`."""
    save_timeout_seconds: Positive | None
    """How long training may stand still for a save, or the end for the export; null.

    `timeout_seconds`.
    """
    backend: str
    """`auto` or a backend of torch.distributed."""

    def __post_init__(self) -> None:
        """Refuse machines that cannot meet."""
        super().__post_init__()
        there = self.rdzv_endpoint is not None or self.nnodes == 1
        self.expect(there, "rdzv_endpoint", f"HOST:PORT, where the {self.nnodes} machines meet")
        self.expect(
            self.fewest <= self.nnodes, "min_nnodes", f"at most distributed.nnodes={self.nnodes}"
        )

    @property
    def fewest(self) -> int:
        """Count the machines that the run needs."""
        return self.min_nnodes or self.nnodes


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
