"""The processes that work for a sweep: one for all jobs, or one for each device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from optrun.base.errors import OptrunError
from optrun.sweeper import launch as launching
from optrun.sweeper.devices import Device, job_devices
from optrun.sweeper.pool import DevicePool


class Workers:
    """Processes in which launchers run.

    Without devices that is one, kept for the whole sweep: what runs side by side is its launcher's
    matter. With devices it is one for each of them, or for each group that a job takes. It is kept
    for the next job of its device,
    since importing torch takes seconds, unless a sweep without any device waits for it, or its last
    job failed: what CUDA was left in is not known then.

    Args:
        pool: Leases the devices.
        log: Takes what they print.
    """

    def __init__(self, pool: DevicePool, log: Path) -> None:
        self.pool = pool
        self.one_job_each = bool(pool.devices)
        """Whether a launch is of one job."""
        self._log = log
        self._count = len(pool.devices)
        self._at_work: list[launching.Server] = []
        self._idle: list[launching.Server] = []
        self._ending: list[tuple[launching.Server, bool]] = []
        """Processes that were told to end, and whether others come first on their devices."""
        self._broken: list[Device] = []

    def devices_of(self, values: Mapping[str, object]) -> int:
        """Count the devices of a job from its resolved configuration.

        `auto` means all devices of the sweep.
        """
        return job_devices(values, self._count) if self.one_job_each else 0

    def take(self, devices: int, *, wait: bool) -> launching.Server | None:
        """Take an idle process, or start one on free devices.

        Args:
            devices: How many it has for itself.
            wait: Whether no process of this sweep is at work.

        Raises:
            OptrunError: Too many devices have failed.
        """
        if devices > len(self.pool.devices):
            gone = ", ".join(f"{device.visible} ({device.uuid})" for device in self._broken)
            raise OptrunError(
                f"there is no device left to go on with: {gone} failed. See {self._log}."
            )
        if self._at_work and not self.one_job_each:
            return None
        server = next(
            (server for server in self._idle if len(server.lease.devices) == devices), None
        )
        if server is not None:
            self._idle.remove(server)
        else:
            lease = self.pool.take(devices, wait=wait)
            if lease is not None:
                server = launching.Server(self._log, lease)
        if server is not None:
            self._at_work.append(server)
        return server

    def give_back(self, server: launching.Server, *, fresh: bool, broken: bool) -> None:
        """Keep an idle process for the next launch, or end it.

        Args:
            server: The process.
            fresh: Whether the next job wants another one.
            broken: Whether nothing could be begun on its devices.
        """
        self._at_work.remove(server)
        if broken:
            self._broken += server.lease.devices
            self.pool.devices = [
                device for device in self.pool.devices if device not in self._broken
            ]
        awaited = self.pool.is_awaited(server.lease)
        if self.one_job_each and (fresh or broken or awaited):
            server.finish()
            self._ending.append((server, awaited))
        else:
            self._idle.append(server)

    def tidy(self) -> None:
        """End processes without a job, and give back their devices."""
        if self.one_job_each:
            for server in self._idle:
                server.finish()
            self._ending += [(server, False) for server in self._idle]
            self._idle.clear()
        for server, step_back in list(self._ending):
            if server.has_ended():
                self.pool.release(server.lease, step_back=step_back)
                self._ending.remove((server, step_back))

    def pids(self) -> list[int]:
        """List the process groups there are."""
        return [server.pid for server in self._all() if not server.has_ended()]

    def close(self, patience: float | None) -> None:
        """Let all processes end, wait for them, and give the devices back.

        Args:
            patience: Seconds until they are killed; None: as long as it takes.
        """
        self.pool.stop_waiting()
        for server in self._all():
            server.close(patience)
            self.pool.release(server.lease)
        self._at_work = []
        self._idle = []
        self._ending = []

    def _all(self) -> list[launching.Server]:
        return [*self._at_work, *self._idle, *(server for server, _ in self._ending)]
