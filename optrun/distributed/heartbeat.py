"""Heartbeats: the phase and step of each rank of this machine, in shared memory.

A rank writes a line at every phase of a step, without a system call. Whoever watches the ranks sees
who is silent. The process that started them leaves its requests in the same memory, and finds there
how each of them ended. A run in one process keeps such a line for itself.
"""

from __future__ import annotations

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
"""Of the text in which a rank says how it ended."""


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


class Heartbeat(NamedTuple):
    """The last sign of life of a rank."""

    pid: int
    """0: the process has not begun yet."""
    rank: int
    """Among all, not only those of this machine."""
    phase: Phase
    step: int
    """Optimizer steps done."""
    time: float
    """Seconds, on the monotonic clock, which the processes of a machine share."""
    done: int = 0
    """Steps of this start."""
    stack: int = -1
    """Descriptor of the memory file for its stack, in that process; -1: there is none."""

    def __str__(self) -> str:
        """Name the phase and the step, for messages."""
        if self.phase > Phase.preparing:
            return f"{self.phase.name} after step {self.step}"
        return self.phase.name


@dataclass(frozen=True)
class Requests:
    """Requests to all ranks of a machine."""

    stops: int = 0
    """How often they were asked to stop; the second time means at once."""
    stop_signal: signal.Signals = signal.SIGTERM
    saves: int = 0


class Heartbeats:
    """One line and one end a rank, and the requests to all of them above.

    Args:
        memory: Shared by the processes that use it.
        file: The file behind it, if this process made it for others.
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
        """Make the memory.

        Args:
            ranks: Of this machine.
            shared: Whether other processes open it, by `path`.
        """
        size = cls._HEAD.size + ranks * cls._RANK_BYTES
        if shared:
            file = MemoryFile("optrun-ranks")
            os.ftruncate(file.descriptor, size)
            table = cls(mmap.mmap(file.descriptor, size), file)
        else:
            table = cls(mmap.mmap(-1, size))
        table.forget()
        return table

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the memory of another process.

        Raises:
            OSError: That process has ended.
        """
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    @property
    def path(self) -> Path:
        """The path at which other processes open it."""
        assert self._file is not None
        return self._file.path

    def close(self) -> None:
        """Close the file; the memory is still there."""
        if self._file is not None:
            self._file.close()

    def forget(self) -> None:
        """Forget ranks of an earlier start: those that begin now start their silence."""
        for local_rank in range(len(self)):
            self.write(local_rank, Heartbeat(0, local_rank, Phase.starting, 0, time.monotonic()))
            self.write_end(local_rank, "")

    def write(self, local_rank: int, heartbeat: Heartbeat) -> None:
        """Write the line of a rank."""
        # By one copy: `pack_into` clears the place first, and another process could read a silence
        # since 1970.
        at = self._line_at(local_rank)
        self._memory[at : at + self._LINE.size] = self._LINE.pack(*heartbeat)

    def __getitem__(self, local_rank: int) -> Heartbeat:
        """Read the line of a rank."""
        line = self._LINE.unpack_from(self._memory, self._line_at(local_rank))
        pid, rank, phase, step, seconds, done, stack = line
        return Heartbeat(pid, rank, Phase(phase), step, seconds, done, stack)

    def __len__(self) -> int:
        """Count the ranks of this machine."""
        return (len(self._memory) - self._HEAD.size) // self._RANK_BYTES

    def write_end(self, local_rank: int, text: str) -> None:
        """Write how a rank ended.

        Args:
            local_rank: Which.
            text: At most 16 KiB in UTF-8.
        """
        content = text.encode()
        length_at = self._line_at(local_rank) + self._LINE.size
        text_at = length_at + self._LENGTH.size
        self._memory[text_at : text_at + len(content)] = content
        self._memory[length_at:text_at] = self._LENGTH.pack(len(content))

    def read_end(self, local_rank: int) -> str:
        """Read how a rank ended; empty: it has not said so."""
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
    """The line of this process."""

    table: Heartbeats
    local_rank: int
    last: Heartbeat


_line: _Line | None = None


def begin(table: Heartbeats, local_rank: int = 0, rank: int = 0, stack: int = -1) -> None:
    """Write the heartbeats of this process into a line of a table from now on.

    Args:
        table: Of this machine.
        local_rank: Which line: the rank among those of this machine.
        rank: Among all.
        stack: Descriptor of the memory file for its stack; -1: there is none.
    """
    global _line
    first = Heartbeat(os.getpid(), rank, Phase.starting, 0, 0.0, stack=stack)
    _line = _Line(table, local_rank, first)
    beat()


def end() -> None:
    """Write no more heartbeats."""
    global _line
    _line = None


def beat(phase: Phase | None = None, step: int | None = None) -> Phase:
    """Write a heartbeat; cheap enough for every batch. Nothing happens before `begin`.

    Args:
        phase: The phase that begins now; None: the same goes on.
        step: Optimizer steps done; None: as before.

    Returns:
        The phase before.
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
    # The first step number is that from which this start continues.
    if last.phase > Phase.preparing and step > last.step:
        done += 1
    line.last = Heartbeat(last.pid, last.rank, phase, step, time.monotonic(), done, last.stack)
    line.table.write(line.local_rank, line.last)
    return last.phase


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """Show a phase as long as the context lasts, then the one before."""
    before = beat(phase)
    try:
        yield
    finally:
        beat(before)
