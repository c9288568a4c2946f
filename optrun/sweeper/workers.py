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
        self.has_devices = bool(devices)
        """Whether each process has devices of its own, and each of its launches one job."""
        self._log = log
        self._n_devices = len(devices)
        """Devices at the start of the sweep."""
        self._usable = list(devices)
        """The devices, without those of `_failed`."""
        self._failed: list[str] = []
        """Devices on which no job could start."""
        self._at_work: list[launching.LaunchProcess] = []
        """Processes with a launch that has not ended."""
        self._idle: list[launching.LaunchProcess] = []
        """Processes that wait for their next launch."""
        self._ending: list[launching.LaunchProcess] = []
        """Processes that are asked to end; until they have, their devices are not free."""

    def devices_of(self, values: Mapping[str, object]) -> int:
        """Count the devices of a job, from its resolved configuration.

        `training.nproc_per_node=auto` means all devices of the sweep. 0 without devices.
        """
        if self.has_devices:
            return job_devices(values, self._n_devices)
        return 0

    def take_or_start(self, count: int, *, busy: Collection[str]) -> launching.LaunchProcess | None:
        """Take an idle process with this number of devices, or start one on free devices.

        Args:
            count: Number of devices that the process gets; 0 without devices.
            busy: Devices on which no process may start.

        Returns:
            None if too few devices are free, or without devices if a launch is running.

        Raises:
            OptrunError: The sweep has fewer devices left than `count`, because others failed.
        """
        if count > len(self._usable):
            raise OptrunError(
                f"too few devices are left to continue: {', '.join(self._failed)} failed. See"
                f" {self._log}."
            )
        if self._at_work and not self.has_devices:
            return None  # without devices one process runs all launches
        # 1. An idle process with this number of devices.
        for process in self._idle:
            if len(process.devices) == count:
                self._idle.remove(process)
                self._at_work.append(process)
                return process
        # 2. A new process, on devices that no other process has. Without devices count is 0.
        taken = set(busy)
        for process in self._all_processes():
            taken.update(process.devices)
        free = [device for device in self._usable if device not in taken]
        if len(free) < count:
            return None
        process = launching.LaunchProcess(self._log, free[:count])
        self._at_work.append(process)
        return process

    def give_back(self, process: launching.LaunchProcess, *, retire: bool, broken: bool) -> None:
        """Keep a process whose launch has ended for the next launch, or ask it to end.

        The process of a sweep without devices is always kept.

        Args:
            process: A process from `take_or_start`.
            retire: Whether the process may not be used again; a new one may use its devices.
            broken: Whether no job could start on its devices; the sweep uses them no more.
        """
        self._at_work.remove(process)
        if broken:
            self._failed += process.devices
            self._usable = [device for device in self._usable if device not in process.devices]
        if self.has_devices and (retire or broken):
            process.finish()
            self._ending.append(process)
        else:
            self._idle.append(process)

    def end_idle(self) -> None:
        """Ask idle processes to end, to free their devices for jobs of another size.

        Devices are free once their process has ended, which a later call notices. The process of a
        sweep without devices is kept.
        """
        if self.has_devices:
            for process in self._idle:
                process.finish()
            self._ending += self._idle
            self._idle.clear()
        self._ending = [process for process in self._ending if not process.has_ended()]

    def pids(self) -> list[int]:
        """List the ids of all process groups."""
        return [process.pid for process in self._all_processes() if not process.has_ended()]

    def close(self, patience: float | None) -> None:
        """Let all processes end, and wait for them.

        Args:
            patience: Seconds until they are killed; None: never.
        """
        for process in self._all_processes():
            process.close(patience)
        self._at_work = []
        self._idle = []
        self._ending = []

    def _all_processes(self) -> list[launching.LaunchProcess]:
        return [*self._at_work, *self._idle, *self._ending]
