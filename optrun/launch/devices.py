"""How many ranks and devices there are on this machine, and what is left idle."""

from __future__ import annotations

import os

from optrun.config.schema.distributed import RanksConfig
from optrun.config.schema.run import RunConfig


def nproc(config: RunConfig) -> int:
    """Count the ranks of this machine."""
    given = config.training.nproc_per_node
    return int(given) if given != "auto" else device_count(config) or 1


def device_count(config: RunConfig) -> int | None:
    """Count the GPUs that ranks can have; None where they run on the CPU."""
    import torch

    kind = config.training.device.partition(":")[0]
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return None
    return torch.cuda.device_count()


def visible_devices() -> str:
    """Name what decides which devices are seen, for messages."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA devices" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"


def idle_note(config: RunConfig) -> str | None:
    """Say that there are accelerators which a run in one process leaves idle; None where there are none."""
    if isinstance(config.distributed, RanksConfig) or config.training.device.partition(":")[0] not in ("auto", "cuda"):
        return None
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return None
    return (
        f"1 of {count} GPUs is used (distributed=none); distributed=ddp trains on all of them, "
        "training.nproc_per_node=N on some."
    )
