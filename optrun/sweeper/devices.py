"""The CUDA devices of a sweep: which are meant, and how many a job takes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from optrun.base.errors import ConfigError, OptrunError
from optrun.base.plain import PlainMapping

KEY = "hydra.sweeper.devices"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def find_devices(names: str | Sequence[int | str]) -> list[str]:
    """Find the devices of `hydra.sweeper.devices`, as `CUDA_VISIBLE_DEVICES` names them.

    Args:
        names: `auto` for all visible devices; else indices of visible ones, UUIDs or MIG names.
            Names are not checked here; a worker fails if there is no such device.

    Raises:
        ConfigError: No device is visible, or an index is too large.
    """
    visible = visible_devices()
    if names == "auto":
        if not visible:
            raise ConfigError(
                f"{KEY}=auto: torch sees no CUDA device on this machine. Leave it out, and the jobs"
                " run one after the other; hydra/launcher=joblib runs several at a time on the CPU."
            )
        return visible
    devices = []
    for name in names:
        if isinstance(name, int):
            if name >= len(visible):
                raise ConfigError(
                    f"{KEY}={names}: there is no device {name} on this machine. Visible CUDA"
                    f" devices: {', '.join(visible) or 'none'}."
                )
            name = visible[name]
        devices.append(name)
    return devices


def visible_devices() -> list[str]:
    """List the devices that this process sees, as `CUDA_VISIBLE_DEVICES` names them."""
    inherited = os.environ.get(VISIBLE)
    if inherited is not None:
        return [name.strip() for name in inherited.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def job_devices(values: PlainMapping, devices: int) -> int:
    """Count the devices of a job.

    Args:
        values: Resolved configuration of the job.
        devices: Number of devices of the sweep; `training.nproc_per_node=auto` takes all.
    """
    if values["distributed"]["name"] == "none":
        return 1
    ranks = values["training"]["nproc_per_node"]
    if ranks == "auto":
        return devices
    return int(ranks)


def refuse_misplaced(values: PlainMapping, label: str, devices: int) -> None:
    """Refuse a job with more devices than the sweep, or without CUDA.

    Args:
        values: Resolved configuration of the job.
        label: Name of the job in messages.
        devices: Number of devices of the sweep.

    Raises:
        ConfigError: The message names the key.
    """
    name = values["training"]["device"]
    if name not in ("auto", "cuda"):
        raise ConfigError(
            f"training.device={name} in the job {label}: expected auto or cuda. With {KEY} each job"
            f" sees only its own devices, the first as cuda:0. {KEY}=[0,1] chooses those of the"
            " machine."
        )
    needed = job_devices(values, devices)
    if needed > devices:
        raise ConfigError(
            f"training.nproc_per_node={needed}: a job takes {needed} devices, and the sweep has"
            f" {devices}. Expected {devices} or fewer, or more devices in {KEY}. In the job"
            f" {label}."
        )


def refuse_unseen(visible: Sequence[str]) -> None:
    """Raise an error if torch does not see the devices of this process.

    `training.device=auto` would take the CPU.

    Args:
        visible: The devices in `CUDA_VISIBLE_DEVICES` of this process.

    Raises:
        OptrunError: torch sees fewer devices, or others.
    """
    import torch

    seen = torch.cuda.device_count()
    if seen != len(visible):
        raise OptrunError(
            f"{VISIBLE}={','.join(visible)}: torch sees {seen} CUDA devices instead of"
            f" {len(visible)}. Is the device still there (nvidia-smi -L)?"
        )
