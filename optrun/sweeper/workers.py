"""The processes that work for a sweep: one for all jobs, or one for each device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from optrun.base.errors import OptrunError
from optrun.sweeper import launch as launching
from optrun.sweeper.devices import Device, job_devices
from optrun.sweeper.pool import DevicePool, Lease


class Workers(Protocol):
    """Processes in which launchers run."""

    one_job_each: bool
    """Whether a launch is of one job."""

    def devices_of(self, values: Mapping[str, Any]) -> int:
        """Count the devices that a job takes, from its resolved configuration."""

    def take(self, devices: int, *, wait: bool) -> launching.Server | None:
        """Find a process that has nothing to do.

        Args:
            devices: How many it has for itself.
            wait: Whether no process of this sweep is at work.
        """

    def give_back(self, server: launching.Server, *, fresh: bool, broken: bool) -> None:
        """Take back a process whose launch is over.

        Args:
            server: The process.
            fresh: Whether the next job wants another one.
            broken: Whether nothing could be begun on its devices.
        """

    def tidy(self) -> None:
        """Let processes end that nothing is to be done for."""

    def stop_waiting(self) -> None:
        """Let others have what was kept and told while waiting: there is no job for it now."""

    @property
    def holders(self) -> str:
        """Who has the devices that could not be taken."""

    def pids(self) -> list[int]:
        """The process groups there are."""

    def close(self, patience: float | None) -> None:
        """Let all processes end, and wait for them.

        Args:
            patience: Seconds until they are killed; None: as long as it takes.
        """


class OneWorker:
    """One process, kept for the whole sweep: what runs side by side is its launcher's matter.

    Args:
        log: Takes what it prints.
    """

    one_job_each = False
    holders = ""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._server: launching.Server | None = None
        self._at_work = False

    def devices_of(self, values: Mapping[str, Any]) -> int:  # noqa: ARG002
        """Count none: jobs find their devices themselves."""
        return 0

    def take(self, devices: int, *, wait: bool) -> launching.Server | None:  # noqa: ARG002
        """The process, if it has nothing to do."""
        if self._at_work:
            return None
        if self._server is None:
            self._server = launching.Server(self._log)
        self._at_work = True
        return self._server

    def give_back(self, server: launching.Server, *, fresh: bool, broken: bool) -> None:  # noqa: ARG002
        """Keep it for the next launch."""
        self._at_work = False

    def tidy(self) -> None:
        """Does nothing: it waits for the next launch."""

    def stop_waiting(self) -> None:
        """Does nothing: it needs no device."""

    def pids(self) -> list[int]:
        """The process, while it is at work."""
        return [self._server.pid] if self._server is not None and self._at_work else []

    def close(self, patience: float | None) -> None:
        """Let it end."""
        if self._server is not None:
            self._server.close(patience)


class DeviceWorkers:
    """A process for each device, or for each group of devices that a job takes.

    It is kept for the next job of its device, since importing torch takes seconds, unless a sweep without any device
    waits for it, or its last job failed: what CUDA was left in is not known then.

    Args:
        pool: Leases the devices.
        log: Takes what they print.
    """

    one_job_each = True

    def __init__(self, pool: DevicePool, log: Path) -> None:
        self._pool = pool
        self._log = log
        self._at_work: list[launching.Server] = []
        self._idle: list[launching.Server] = []
        self._ending: list[tuple[launching.Server, bool]] = []
        """Processes that were told to end, and whether others come first on their devices."""
        self._broken: set[Device] = set()
        self._count = len(pool.devices)

    def devices_of(self, values: Mapping[str, Any]) -> int:
        """Count the devices that a job takes; `auto` is all of the sweep's."""
        return job_devices(values, self._count)

    def take(self, devices: int, *, wait: bool) -> launching.Server | None:
        """Find a process with so many devices, or start one on devices that nobody uses.

        Raises:
            OptrunError: Too many devices have failed.
        """
        if devices > len(self._pool.devices):
            gone = ", ".join(f"{device.visible} ({device.uuid})" for device in self._broken)
            raise OptrunError(f"there is no device left to go on with: {gone} failed. See {self._log}.")
        for server in self._idle:
            if len(_lease(server).devices) == devices:
                self._idle.remove(server)
                break
        else:
            lease = self._pool.take(devices, wait=wait)
            if lease is None:
                return None
            server = launching.Server(self._log, lease)
        self._at_work.append(server)
        return server

    def give_back(self, server: launching.Server, *, fresh: bool, broken: bool) -> None:
        """Keep it for the next job, or let it end where its devices are wanted, or where it is not to be trusted."""
        self._at_work.remove(server)
        lease = _lease(server)
        if broken:
            self._broken.update(lease.devices)
            self._pool.devices = [device for device in self._pool.devices if device not in self._broken]
        awaited = self._pool.is_awaited(lease)
        if fresh or broken or awaited:
            self._end(server, step_back=awaited)
        else:
            self._idle.append(server)

    def tidy(self) -> None:
        """Let processes without a job end, and give back the devices of those that have."""
        for server in self._idle:
            self._end(server, step_back=False)
        self._idle.clear()
        for server, step_back in list(self._ending):
            if server.has_ended():
                self._pool.release(_lease(server), step_back=step_back)
                self._ending.remove((server, step_back))

    def stop_waiting(self) -> None:
        """Give up devices that were kept for a job of several, and tell nobody of waiting."""
        self._pool.stop_waiting()

    @property
    def holders(self) -> str:
        """Who has the devices that could not be taken."""
        return self._pool.holders()

    def pids(self) -> list[int]:
        """All that have not ended."""
        known = [*self._at_work, *self._idle, *(server for server, _ in self._ending)]
        return [server.pid for server in known if not server.has_ended()]

    def close(self, patience: float | None) -> None:
        """Let all end, and give the devices back."""
        self._pool.stop_waiting()
        for server in [*self._at_work, *self._idle, *(server for server, _ in self._ending)]:
            server.close(patience)
            self._pool.release(_lease(server))
        self._at_work, self._idle, self._ending = [], [], []

    def _end(self, server: launching.Server, *, step_back: bool) -> None:
        server.finish()
        self._ending.append((server, step_back))


def _lease(server: launching.Server) -> Lease:
    assert server.lease is not None
    return server.lease
