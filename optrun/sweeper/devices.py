"""The CUDA devices of a sweep: which there are, which are meant, and how many a job takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from optrun.base.errors import ConfigError, OptrunError
from optrun.base.plain import PlainMapping

KEY = "hydra.sweeper.devices"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROBE_SECONDS = 300


@dataclass(frozen=True)
class Device:
    """A CUDA device of this machine."""

    visible: str
    """Its name in `CUDA_VISIBLE_DEVICES`: an index of CUDA's, or what stood there when the sweep
    was started."""
    uuid: str
    """What it is called everywhere, however the visible devices are counted."""


def find_devices(names: str | Sequence[int | str]) -> list[Device]:
    """Find the devices of `hydra.sweeper.devices`.

    Args:
        names: `auto`: all that are visible; else indices of the visible ones, UUIDs or MIG names.

    Raises:
        ConfigError: There is no such device, or one is meant twice.
    """
    inherited = _inherited()
    if (
        inherited is None
        and not isinstance(names, str)
        and any(str(name).startswith("MIG-") for name in names)
    ):
        # A process without such a name in its environment sees one of them.
        inherited = [str(name) for name in names]
        if not all(name.startswith("MIG-") for name in inherited):
            raise ConfigError(
                f"{KEY}={names}: expected MIG names alone, or none; CUDA does not see both at once."
            )
    visible = visible_devices(inherited)
    setting = "" if inherited is None else f" with {VISIBLE}={','.join(inherited)}"
    if names == "auto":
        if not visible:
            raise ConfigError(
                f"{KEY}=auto: torch sees no CUDA device on this machine{setting}. Leave it out, and"
                " the jobs run one after the other; hydra/launcher=joblib runs several at a time"
                " on the CPU."
            )
        return visible
    devices = [_pick(name, visible, f"{KEY}={names}", setting) for name in names]
    for device in devices:
        if devices.count(device) > 1:
            raise ConfigError(
                f"{KEY}={names}: {device.visible} and {device.uuid} are one device; expected each"
                " once."
            )
    return devices


def visible_devices(inherited: Sequence[str] | None) -> list[Device]:
    """List the devices visible to a process.

    Args:
        inherited: What `CUDA_VISIBLE_DEVICES` names; None: it is not set.

    Raises:
        OptrunError: torch could not be asked.
    """
    if inherited is None:
        return [Device(str(index), f"GPU-{uuid}") for index, uuid in enumerate(_ask_torch(None))]
    if any(
        name.startswith("MIG-") for name in inherited
    ):  # CUDA shows a process one of them, so each is asked for
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            seen = list(threads.map(_ask_torch, inherited))
        pairs = [(name, uuids[0]) for name, uuids in zip(inherited, seen, strict=True) if uuids]
        return [
            Device(name, name if name.startswith("MIG-") else f"GPU-{uuid}") for name, uuid in pairs
        ]
    # CUDA ends the list at the first name that it does not know.
    uuids = _ask_torch(",".join(inherited))
    return [Device(name, f"GPU-{uuid}") for name, uuid in zip(inherited, uuids, strict=False)]


def job_devices(values: PlainMapping, devices: int) -> int:
    """Count the devices of a job.

    Args:
        values: Its resolved configuration.
        devices: Those of the sweep, which `training.nproc_per_node=auto` takes.
    """
    if values["distributed"]["name"] == "none":
        return 1
    ranks = values["training"]["nproc_per_node"]
    return devices if ranks == "auto" else int(ranks)


def refuse_misplaced(values: PlainMapping, label: str, devices: int) -> None:
    """Refuse a job with more devices than the sweep, or without CUDA.

    Args:
        values: Its resolved configuration.
        label: What tells it from the others.
        devices: How many the sweep has.

    Raises:
        ConfigError: With the key.
    """
    name = values["training"]["device"]
    if name not in ("auto", "cuda"):
        raise ConfigError(
            f"training.device={name}: expected auto or cuda. With {KEY} each job sees its own"
            f" devices alone, the first as cuda:0; which of the machine's they are, {KEY}=[0,1]"
            f" says. In the job {label}."
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
        visible: What `CUDA_VISIBLE_DEVICES` of this process names.

    Raises:
        OptrunError: torch sees fewer, or others.
    """
    import torch

    seen = torch.cuda.device_count()
    if seen != len(visible):
        raise OptrunError(
            f"{VISIBLE}={','.join(visible)}: torch sees {seen} CUDA devices instead of"
            f" {len(visible)}. Is the device still there (nvidia-smi -L)?"
        )


def _inherited() -> list[str] | None:
    value = os.environ.get(VISIBLE)
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


def _pick(name: int | str, devices: Sequence[Device], setting_text: str, setting: str) -> Device:
    """Find the visible device of an index or a name; a UUID may be cut short, as CUDA takes it."""
    if isinstance(name, int):
        matches = [devices[name]] if name < len(devices) else []
    else:
        matches = [
            device for device in devices if name == device.visible or device.uuid.startswith(name)
        ]
    if len(matches) == 1:
        return matches[0]
    choices = (
        ", ".join(f"{index} ({device.uuid})" for index, device in enumerate(devices)) or "none"
    )
    problem = f"{name} means {len(matches)} devices" if matches else f"there is no device {name}"
    raise ConfigError(
        f"{setting_text}: {problem} on this machine{setting}. Visible CUDA devices: {choices}."
    )


def _ask_torch(visible: str | None) -> list[str]:
    """Ask torch for the UUIDs of the visible devices, by index."""
    environment = dict(os.environ) if visible is None else {**os.environ, VISIBLE: visible}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "optrun.sweeper.probe"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            return [str(uuid) for uuid in json.loads(done.stdout.splitlines()[-1])]
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        why = f"no answer within {_PROBE_SECONDS} s"
    except (OSError, ValueError, IndexError) as error:
        why = str(error)
    raise OptrunError(f"{KEY}: torch could not be asked for the devices of this machine: {why}")
