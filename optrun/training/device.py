"""The device of a model, and the memory it uses."""

from __future__ import annotations

import resource
import sys

import torch

from optrun.base.errors import ConfigError


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device of `training.device`.

    Args:
        name: `auto` (cuda, then mps, then cpu) or a torch device.
        local_rank: Number of this rank among those on this machine, each with a GPU of its own;
            None: there is one process.

    Raises:
        ConfigError: The device does not exist on this machine.
    """
    # 1. One of several ranks.
    if local_rank is not None:
        return _device_of_rank(name, local_rank)

    # 2. The best device.
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")

    # 3. A given device, which must be one that torch knows, and exist here; `cuda` is `cuda:0`.
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"training.device={name}: expected auto, cpu, cuda, cuda:N or mps."
        ) from error
    usable = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        usable.append("mps")
    wanted = device.type
    if wanted == "cuda":
        wanted = f"cuda:{device.index or 0}"
    if wanted not in usable:
        raise ConfigError(
            f"training.device={name}: this machine has no such device. Usable: {', '.join(usable)}."
        )
    return device


def _device_of_rank(name: str, local_rank: int) -> torch.device:
    """Return the device of one of several ranks on this machine; make a GPU torch's current one.

    Each rank gets the GPU of its number. If only one GPU is visible, every rank uses it: the
    launcher has shown each rank its own.

    Raises:
        ConfigError: A device other than auto, cpu and cuda, or fewer GPUs than ranks.
    """
    # 1. The kind of device, the same for all ranks.
    kind = name
    if name == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind not in ("cpu", "cuda"):
        raise ConfigError(
            f"training.device={name}: expected auto, cpu or cuda, since each rank has a device of"
            " its own."
        )
    if kind == "cpu":
        return torch.device("cpu")

    # 2. The GPU of this rank.
    count = torch.cuda.device_count()
    if count == 1:
        local_rank = 0
    if local_rank >= count:
        raise ConfigError(
            f"training.nproc_per_node: rank {local_rank} of this machine has no GPU of its own:"
            f" {count} are there. Expected {count} ranks or fewer."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: allocated on the GPU, else resident in this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(device: torch.device) -> str:
    """Name the kind of a device, such as `NVIDIA H100 80GB HBM3` or `cpu`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type
