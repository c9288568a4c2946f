"""Where the model runs, and what that costs."""

from __future__ import annotations

import resource
import sys

import torch

from optrun.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """The device of `training.device`.

    Args:
        name: `auto` (cuda, then mps, then cpu) or a torch device.

    Raises:
        ConfigError: No such device here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"training.device={name}: expected auto, cpu, cuda, cuda:N or mps.") from error
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there.get(device.type, False):
        usable = ", ".join(kind for kind, present in there.items() if present)
        raise ConfigError(f"training.device={name}: there is no such device here. Usable: {usable}.")
    return device


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: of the GPU, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
