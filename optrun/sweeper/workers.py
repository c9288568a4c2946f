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
        """Whether each launch has one job."""
        self._log = log
        self._count = len(devices)
        self._devices = list(devices)
        self._broken: list[str] = []
        self._at_work: list[launching.LaunchProcess] = []
        self._idle: list[launching.LaunchProcess] = []
        self._ending: list[launching.LaunchProcess] = []
        """Processes that are asked to end."""

    def devices_of(self, values: Mapping[str, object]) -> int:
        """Count the devices of a job, from its resolved configuration.

        `training.nproc_per_node=auto` means all devices of the sweep. 0 without devices.
        """
        if self.one_job_each:
            return job_devices(values, self._count)
        return 0

    def take(self, count: int, *, busy: Collection[str]) -> launching.LaunchProcess | None:
        """Take an idle process with this number of devices, or start one on free devices.

        Args:
            count: Number of devices that the process gets; 0 without devices.
            busy: Devices on which no process may start.

        Returns:
            None if too few devices are free, or without devices if a launch is running.

        Raises:
            OptrunError: The sweep has fewer devices left than `count`, because others failed.
        """
        if count > len(self._devices):
            raise OptrunError(
                f"too few devices are left to continue: {', '.join(self._broken)} failed. See"
                f" {self._log}."
            )
        if self._at_work and not self.one_job_each:
            return None
        fitting = [process for process in self._idle if len(process.devices) == count]
        if fitting:
            process = fitting[0]
            self._idle.remove(process)
        else:
            taken = set(busy)
            for other in self._all():
                taken.update(other.devices)
            free = [device for device in self._devices if device not in taken]
            if len(free) < count:
                return None
            process = launching.LaunchProcess(self._log, free[:count])
        self._at_work.append(process)
        return process

    def give_back(self, process: launching.LaunchProcess, *, retire: bool, broken: bool) -> None:
        """Keep a process for the next launch, or end it.

        The process of a sweep without devices is always kept.

        Args:
            process: The process; its launch has ended.
            retire: Whether the process may not be used again.
            broken: Whether no job could start on its devices; the sweep uses them no more.
        """
        self._at_work.remove(process)
        if broken:
            self._broken += process.devices
            self._devices = [device for device in self._devices if device not in process.devices]
        if self.one_job_each and (retire or broken):
            process.finish()
            self._ending.append(process)
        else:
            self._idle.append(process)

    def end_idle(self) -> None:
        """End idle processes, to free their devices for jobs of another size.

        The process of a sweep without devices is kept.
        """
        if self.one_job_each:
            for process in self._idle:
                process.finish()
            self._ending += self._idle
            self._idle.clear()
        self._ending = [process for process in self._ending if not process.has_ended()]

    def pids(self) -> list[int]:
        """List the ids of all process groups."""
        return [process.pid for process in self._all() if not process.has_ended()]

    def close(self, patience: float | None) -> None:
        """Let all processes end, and wait for them.

        Args:
            patience: Seconds until they are killed; None: never.
        """
        for process in self._all():
            process.close(patience)
        self._at_work = []
        self._idle = []
        self._ending = []

    def _all(self) -> list[launching.LaunchProcess]:
        return [*self._at_work, *self._idle, *self._ending]
