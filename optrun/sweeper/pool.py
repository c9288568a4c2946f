"""Who uses which device of this machine.

A kernel lock for each, so that sweeps in several terminals share them.

The locks belong to the user and the machine, not to a sweep: two sweeps must not meet on a device
either. A lock is held by the sweep's process and by the worker on the device, through one open
file; it is gone when both are, however they died, so that a worker which still saves after its
sweep was killed keeps its device until it is done. Ranks that a
worker starts inherit no files of it: each holds a lock of its own beside the device's, shared with
the other ranks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optrun.base.errors import StorageError
from optrun.base.reading import read_json
from optrun.sweeper.devices import VISIBLE, Device

RANK_LOCKS = "OPTRUN_DEVICE_LOCKS"
"""Environment variable that names the lock files which ranks hold."""
_GATHERING = "gathering"
"""Names the lock of the one process that keeps devices for a job of several."""
_STEP_BACK_SECONDS = 1.0
"""Far longer than the others take to look again."""


def lock_dir() -> Path:
    """Name the folder of the locks.

    `optrun/devices` in `$XDG_STATE_HOME`, else in `~/.local/state`.

    The cache would be cleared by its owner, /tmp by the system, and TMPDIR is another in each job
    of a cluster. Where
    several machines share it nothing is lost: a lock is named by the UUID of its device.
    """
    return (
        Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        / "optrun"
        / "devices"
    )


@dataclass(frozen=True)
class Lease:
    """Devices that one worker has for itself."""

    devices: tuple[Device, ...]
    descriptors: tuple[int, ...]
    """Open files that hold the locks; the worker inherits them."""
    rank_locks: tuple[Path, ...] = ()
    """Lock files for ranks that the worker starts."""

    @property
    def visible(self) -> list[str]:
        """What `CUDA_VISIBLE_DEVICES` of the worker names."""
        return [device.visible for device in self.devices]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the worker; none where no devices are leased."""
        locks = os.pathsep.join(map(str, self.rank_locks))
        return {VISIBLE: ",".join(self.visible), RANK_LOCKS: locks} if self.devices else {}

    def release(self) -> None:
        """Give the devices back; the worker has ended."""
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass(eq=False)
class DevicePool:
    """Leases devices, as long as no other process has them.

    A sweep that has none says that it waits, and those that have some step back for it at the end
    of a job. A job of several devices keeps what it has found while it waits for the rest; only one
    process of the machine does so at a time, or two could wait for each other.
    """

    devices: Sequence[Device]
    """Of the sweep; with none, each lease is of none, and no lock is made."""
    folder: Path = field(default_factory=lock_dir)
    """Of the locks; made where missing."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, monotonic."""
    _found: dict[Device, int] = field(default_factory=dict, init=False)
    """Devices that are kept for a job of several, and the open files that lock them."""
    _leased: set[Device] = field(default_factory=set, init=False)
    _waiting: dict[str, int] = field(default_factory=dict, init=False)
    """Open files that tell others of this process's waiting, by name."""
    _not_before: dict[Device, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Make the folder, if there is anything to lock.

        Raises:
            StorageError: It cannot be made.
        """
        try:
            if self.devices:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(self.folder, error) from error

    def take(self, count: int, *, wait: bool = False) -> Lease | None:
        """Take unused devices, or None if there are too few.

        Args:
            count: How many.
            wait: Whether this process has none, and tells the others that it waits.

        Raises:
            StorageError: A lock cannot be taken, whoever holds it.
        """
        for device in self.devices:
            if (
                len(self._found) < count
                and device not in self._leased
                and device not in self._found
            ):
                self._find(device)
        if len(self._found) < count:
            if wait:
                self._wait(count)
            if _GATHERING not in self._waiting:
                self._drop_found()
            return None
        chosen = tuple(device for device in self.devices if device in self._found)[:count]
        descriptors = tuple(self._found.pop(device) for device in chosen)
        lease = Lease(chosen, descriptors, tuple(self._path(device, "ranks") for device in chosen))
        self._leased.update(chosen)
        self.stop_waiting()
        return lease

    def release(self, lease: Lease, *, step_back: bool = False) -> None:
        """Give devices back.

        Args:
            lease: The worker on them has ended.
            step_back: Whether others come first now.
        """
        lease.release()
        self._leased.difference_update(lease.devices)
        if step_back:
            self._not_before.update(dict.fromkeys(lease.devices, self.clock() + _STEP_BACK_SECONDS))

    def is_awaited(self, lease: Lease) -> bool:
        """Tell whether a process without devices waits for one of these."""
        for device in lease.devices:
            descriptor = _lock(self._path(device, "waiting"))
            if descriptor is None:
                return True
            os.close(descriptor)  # nobody; this was only a look
        return False

    def holders(self) -> str:
        """Describe the processes on the devices in use elsewhere."""
        return ", ".join(
            f"{device.visible} ({device.uuid}){_holder(self._path(device, 'lock'))}"
            for device in self.devices
            if device not in self._leased and device not in self._found
        )

    def stop_waiting(self) -> None:
        """Release the devices and the marks kept while waiting."""
        self._drop_found()
        while self._waiting:
            os.close(self._waiting.popitem()[1])

    def _find(self, device: Device) -> None:
        if self.clock() < self._not_before.get(device, 0.0):
            return
        descriptor = _lock(self._path(device, "lock"))
        if descriptor is None:
            return
        ranks = _lock(self._path(device, "ranks"))
        if ranks is None:  # of a worker that was killed; they save, and go
            os.close(descriptor)
            return
        os.close(ranks)
        self._found[device] = descriptor
        _sign(descriptor)

    def _wait(self, count: int) -> None:
        marks = {str(self._path(device, "waiting")): fcntl.LOCK_SH for device in self.devices}
        for name, kind in {**marks, **({_GATHERING: fcntl.LOCK_EX} if count > 1 else {})}.items():
            if name not in self._waiting:
                mark = _lock(self.folder / name, kind)
                # None: another process looks just now, and sees the mark the next time.
                if mark is not None:
                    self._waiting[name] = mark

    def _drop_found(self) -> None:
        while self._found:
            os.close(self._found.popitem()[1])

    def _path(self, device: Device, kind: str) -> Path:
        return self.folder / f"{re.sub(r'[^A-Za-z0-9.-]', '_', device.uuid)}.{kind}"


def adopt(descriptors: Sequence[int]) -> None:
    """Keep inherited locks for this process alone.

    Processes that it forks, such as loader workers, drop theirs.

    Args:
        descriptors: Of a lease, under the numbers they had in the process that took it.
    """
    open_descriptors = list(descriptors)
    for descriptor in open_descriptors:
        os.set_inheritable(descriptor, False)

    def drop() -> None:
        while open_descriptors:  # emptied, since the numbers are free for other files from then on
            os.close(open_descriptors.pop())

    os.register_at_fork(after_in_child=drop)


def hold_as_rank(environment: Mapping[str, str]) -> None:
    """Keep the devices of this process, a rank, for as long as it lives; there need not be any.

    Args:
        environment: Names the lock files in `RANK_LOCKS`.

    Raises:
        StorageError: A lock cannot be taken.
    """
    paths = [Path(path) for path in environment.get(RANK_LOCKS, "").split(os.pathsep) if path]
    descriptors = [_lock(path, fcntl.LOCK_SH) for path in paths]
    adopt([descriptor for descriptor in descriptors if descriptor is not None])


def _lock(path: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Lock a file; return its descriptor, None if another process holds it.

    A missing file is created.

    Raises:
        StorageError: The file cannot be written, is a link, or lies on a file system without locks.
    """
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise _refused(path, error) from error
    return descriptor


def _refused(path: Path, error: OSError) -> StorageError:
    why = "it is a link" if error.errno == errno.ELOOP else error.strerror
    return StorageError(
        f"{path}: the lock of a device cannot be taken: {why}. Choose another folder with"
        " XDG_STATE_HOME, one for all sweeps that share the devices."
    )


def _sign(descriptor: int) -> None:
    """Write the holder of a lock into its file, for people only."""
    with contextlib.suppress(OSError):
        holder = {
            "pid": os.getpid(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "folder": str(Path.cwd()),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(path: Path) -> str:
    try:
        holder = read_json(path)
        return f": process {holder['pid']} since {holder['since']}, started in {holder['folder']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
