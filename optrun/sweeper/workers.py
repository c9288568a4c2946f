"""The processes that work for a sweep: one for all jobs, or one for each device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from optrun.base.errors import OptrunError
from optrun.sweeper import launch as launching
from optrun.sweeper.devices import job_devices


class Workers:
    """The processes in which launchers run.

    Without devices there is one process for the whole sweep, and its launcher decides what runs in
    parallel. With devices there is one for each device, or group of devices, of a job. A process is
    kept for the next job, since importing torch takes seconds, unless its last job failed, because
    CUDA may then be in a bad state.

    Args:
        devices: Devices of the sweep, as `CUDA_VISIBLE_DEVICES` names them.
        log: File for their output.
    """

    def __init__(self, devices: Sequence[str], log: Path) -> None:
        self.one_job_each = bool(devices)
        """Whether a launch is of one job."""
        self._log = log
        self._count = len(devices)
        self._devices = list(devices)
        self._broken: list[str] = []
        self._at_work: list[launching.Server] = []
        self._idle: list[launching.Server] = []
        self._ending: list[launching.Server] = []
        """Processes that were told to end."""

    def devices_of(self, values: Mapping[str, object]) -> int:
        """Count the devices of a job from its resolved configuration.

        `auto` means all devices of the sweep.
        """
        if self.one_job_each:
            return job_devices(values, self._count)
        return 0

    def take(self, count: int, *, busy: Collection[str]) -> launching.Server | None:
        """Take an idle process, or start one on free devices.

        Args:
            count: Number of devices that the process gets.
            busy: Devices on which no process may start.

        Raises:
            OptrunError: Too many devices have failed.
        """
        if count > len(self._devices):
            raise OptrunError(
                f"there is no device left to continue with: {', '.join(self._broken)} failed. See"
                f" {self._log}."
            )
        if self._at_work and not self.one_job_each:
            return None
        server = next((server for server in self._idle if len(server.devices) == count), None)
        if server is not None:
            self._idle.remove(server)
        else:
            taken = {device for server in self._all() for device in server.devices}
            free = [device for device in self._devices if device not in {*taken, *busy}]
            if len(free) < count:
                return None
            server = launching.Server(self._log, free[:count])
        self._at_work.append(server)
        return server

    def give_back(self, server: launching.Server, *, fresh: bool, broken: bool) -> None:
        """Keep an idle process for the next launch, or end it.

        Args:
            server: The process.
            fresh: Whether the process must not be reused.
            broken: Whether no job could start on its devices.
        """
        self._at_work.remove(server)
        if broken:
            self._broken += server.devices
            self._devices = [device for device in self._devices if device not in server.devices]
        if self.one_job_each and (fresh or broken):
            server.finish()
            self._ending.append(server)
        else:
            self._idle.append(server)

    def tidy(self) -> None:
        """End processes without a job, and free the devices of those that have ended."""
        if self.one_job_each:
            for server in self._idle:
                server.finish()
            self._ending += self._idle
            self._idle.clear()
        self._ending = [server for server in self._ending if not server.has_ended()]

    def pids(self) -> list[int]:
        """List the ids of all process groups."""
        return [server.pid for server in self._all() if not server.has_ended()]

    def close(self, patience: float | None) -> None:
        """Let all processes end, and wait for them.

        Args:
            patience: Seconds until they are killed; None: never.
        """
        for server in self._all():
            server.close(patience)
        self._at_work = []
        self._idle = []
        self._ending = []

    def _all(self) -> list[launching.Server]:
        return [*self._at_work, *self._idle, *self._ending]
