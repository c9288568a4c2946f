"""Heartbeats: the phase and step of each rank of this machine, in shared memory.

A rank writes a line at every phase of a step, without a system call. Whoever watches the ranks sees
who is silent. The process that started them leaves its requests in the same memory, and finds there
how each of them ended. A run in one process keeps such a line for itself.
"""

import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Self

from optrun.distributed.memory_file import MemoryFile

_END_BYTES = 16_384
"""Most bytes of a rank's report on its end."""


class Phase(IntEnum):
    """The phase of a rank."""

    starting = 0
    preparing = 1
    """Data, tokenizer and model."""
    loading = 2
    """The next batches."""
    training = 3
    waiting = 4
    """For the other ranks."""
    evaluating = 5
    saving = 6
    publishing = 7
    closing = 8


class RankStatus(NamedTuple):
    """The last heartbeat of a rank: its process, phase and step."""

    pid: int
    """0: the process has not started yet."""
    rank: int
    """Rank among all, not only those of this machine."""
    phase: Phase
    step: int
    """Optimizer steps done."""
    time: float
    """Seconds on the monotonic clock, which the processes of a machine share."""
    done: int = 0
    """Optimizer steps of this start."""
    stack: int = -1
    """File descriptor, in that process, of the memory file for its stack; -1: there is none."""

    def __str__(self) -> str:
        """Name the phase and the step, for messages."""
        if self.phase > Phase.preparing:
            return f"{self.phase.name} after step {self.step}"
        return self.phase.name


@dataclass(frozen=True)
class Requests:
    """Requests to all ranks of a machine."""

    stops: int = 0
    """Number of requests to stop; the second one means at once."""
    stop_signal: signal.Signals = signal.SIGTERM
    saves: int = 0
    """Number of requests to save."""


class Heartbeats:
    """A table in shared memory: the last status and the end of each rank, and requests to all.

    Args:
        memory: Shared by the processes that use it.
        file: The file behind it, if this process created it for others; else None.
    """

    _HEAD = struct.Struct("<qqq")
    _LINE = struct.Struct("<qqqqdqq")
    _LENGTH = struct.Struct("<q")
    _RANK_BYTES = _LINE.size + _LENGTH.size + _END_BYTES

    def __init__(self, memory: mmap.mmap, file: MemoryFile | None = None) -> None:
        self._memory = memory
        self._file = file

    @classmethod
    def create(cls, ranks: int, *, shared: bool = False) -> Self:
        """Create a table with all ranks in the phase `starting`.

        Args:
            ranks: Number of ranks on this machine.
            shared: Whether other processes open it by `path`, so that it needs a file. Without one
                only this process and those forked from it see the table.
        """
        size = cls._HEAD.size + ranks * cls._RANK_BYTES
        if shared:
            file = MemoryFile("optrun-ranks")
            os.ftruncate(file.descriptor, size)
            table = cls(mmap.mmap(file.descriptor, size), file)
        else:
            table = cls(mmap.mmap(-1, size))  # -1: no file
        table.forget()  # the first status of each rank
        return table

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the table of another process.

        Raises:
            OSError: That process has ended.
        """
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    @property
    def path(self) -> Path:
        """The path at which other processes open a shared table."""
        assert self._file is not None
        return self._file.path

    def close(self) -> None:
        """Close the file of a shared table; the memory stays mapped in this process."""
        if self._file is not None:
            self._file.close()

    def forget(self) -> None:
        """Clear heartbeats and ends before a start; the silence of all ranks begins now."""
        for local_rank in range(len(self)):
            self.write(local_rank, RankStatus(0, local_rank, Phase.starting, 0, time.monotonic()))
            self.write_end(local_rank, "")

    def write(self, local_rank: int, status: RankStatus) -> None:
        """Write the status of a rank."""
        # With one copy: `pack_into` writes zeros first, and another process could read the time 0.
        at = self._line_at(local_rank)
        self._memory[at : at + self._LINE.size] = self._LINE.pack(*status)

    def __getitem__(self, local_rank: int) -> RankStatus:
        """Read the last status of a rank of this machine."""
        line = self._LINE.unpack_from(self._memory, self._line_at(local_rank))
        pid, rank, phase, step, seconds, done, stack = line
        return RankStatus(pid, rank, Phase(phase), step, seconds, done, stack)

    def __len__(self) -> int:
        """Count the ranks of this machine."""
        return (len(self._memory) - self._HEAD.size) // self._RANK_BYTES

    def write_end(self, local_rank: int, text: str) -> None:
        """Write a rank's report on its end: the text first, then its length.

        A reader between the two sees the old length, so no torn text.

        Args:
            local_rank: Rank among those of this machine.
            text: At most 16 KiB in UTF-8, which is not checked.
        """
        content = text.encode()
        length_at = self._line_at(local_rank) + self._LINE.size
        text_at = length_at + self._LENGTH.size
        self._memory[text_at : text_at + len(content)] = content
        self._memory[length_at:text_at] = self._LENGTH.pack(len(content))

    def read_end(self, local_rank: int) -> str:
        """Read a rank's report on its end; empty if it has not written one."""
        length_at = self._line_at(local_rank) + self._LINE.size
        text_at = length_at + self._LENGTH.size
        (length,) = self._LENGTH.unpack_from(self._memory, length_at)
        return self._memory[text_at : text_at + length].decode()

    def _line_at(self, local_rank: int) -> int:
        return self._HEAD.size + local_rank * self._RANK_BYTES

    @property
    def requests(self) -> Requests:
        """The requests so far."""
        stops, number, saves = self._HEAD.unpack_from(self._memory)
        return Requests(stops, signal.Signals(number or signal.SIGTERM), saves)

    @requests.setter
    def requests(self, requests: Requests) -> None:
        self._memory[: self._HEAD.size] = self._HEAD.pack(
            requests.stops, requests.stop_signal, requests.saves
        )


@dataclass
class _Line:
    """Where this process writes its heartbeats, and the last one."""

    table: Heartbeats
    local_rank: int
    last: RankStatus


_line: _Line | None = None


def begin(table: Heartbeats, local_rank: int = 0, rank: int = 0, stack: int = -1) -> None:
    """Write the heartbeats of this process into a table from now on, the first one at once.

    Args:
        table: The table of this machine.
        local_rank: Rank among those of this machine.
        rank: Rank among all.
        stack: File descriptor of the memory file (memfd) that `faulthandler` writes the stacks of
            this process into on SIGUSR2; -1: there is none.
    """
    global _line
    first = RankStatus(os.getpid(), rank, Phase.starting, 0, 0.0, stack=stack)
    _line = _Line(table, local_rank, first)
    beat()


def end() -> None:
    """Write no more heartbeats from this process."""
    global _line
    _line = None


def beat(phase: Phase | None = None, step: int | None = None) -> Phase:
    """Write a heartbeat: phase, step and time. Does nothing before `begin`.

    It needs no system call. A rising `step` also adds one to `done`, the steps of this start; not
    while the run is prepared, when `step` jumps to that of the checkpoint.

    Args:
        phase: The phase that begins now; None: the same as before.
        step: Optimizer steps done; None: as before.

    Returns:
        The phase before this call.
    """
    line = _line
    if line is None:
        return Phase.starting
    last = line.last
    if phase is None:
        phase = last.phase
    if step is None:
        step = last.step
    done = last.done
    is_prepared = last.phase > Phase.preparing
    if is_prepared and step > last.step:
        done += 1
    # The rest, such as process and rank, stays as `begin` set it.
    line.last = RankStatus(last.pid, last.rank, phase, step, time.monotonic(), done, last.stack)
    line.table.write(line.local_rank, line.last)
    return last.phase


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """Set the phase of this process inside the context, and restore the phase before afterwards."""
    phase_before = beat(phase)
    try:
        yield
    finally:
        beat(phase_before)
