"""Heartbeats: what each rank of this machine is doing, in memory that its agent reads.

A rank writes a line at every phase of a step, without a system call; the agent sees from it who is
silent, and leaves its requests in the same memory. A run in one process keeps such a line for
itself.
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
from typing import Self


class Phase(IntEnum):
    """What a rank is at."""

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


@dataclass(frozen=True)
class Heartbeat:
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

    def __str__(self) -> str:
        """Name the phase and the step, for messages."""
        return (
            f"{self.phase.name} after step {self.step}"
            if self.phase > Phase.preparing
            else self.phase.name
        )


@dataclass(frozen=True)
class Requests:
    """What was asked of all ranks of a machine."""

    stops: int = 0
    """How often they were asked to stop; the second time means at once."""
    stop_signal: signal.Signals = signal.SIGTERM
    saves: int = 0


class Heartbeats:
    """One line a rank, and the agent's requests above them.

    Args:
        memory: Shared by the processes that use it.
    """

    _HEAD = struct.Struct("<qqq")
    _LINE = struct.Struct("<qqqqdq")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def create(cls, ranks: int, path: Path | None = None) -> Self:
        """Make the memory.

        Args:
            ranks: Of this machine.
            path: A file that other processes open; None: for this process alone.
        """
        size = cls._HEAD.size + ranks * cls._LINE.size
        if path is None:
            table = cls(mmap.mmap(-1, size))
        else:
            path.write_bytes(bytes(size))
            table = cls.open(path)
        for rank in range(ranks):
            table.write(rank, Heartbeat(0, rank, Phase.starting, 0, time.monotonic()))
        return table

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open what another process made."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    def write(self, local_rank: int, heartbeat: Heartbeat) -> None:
        """Write the line of a rank."""
        line = (
            heartbeat.pid,
            heartbeat.rank,
            heartbeat.phase,
            heartbeat.step,
            heartbeat.time,
            heartbeat.done,
        )
        # By one copy: `pack_into` clears the place first, and another process could read a silence
        # since 1970.
        at = self._HEAD.size + local_rank * self._LINE.size
        self._memory[at : at + self._LINE.size] = self._LINE.pack(*line)

    def __getitem__(self, local_rank: int) -> Heartbeat:
        """Read the line of a rank."""
        line = self._LINE.unpack_from(self._memory, self._HEAD.size + local_rank * self._LINE.size)
        pid, rank, phase, step, seconds, done = line
        return Heartbeat(pid, rank, Phase(phase), step, seconds, done)

    def __len__(self) -> int:
        """Count the ranks of this machine."""
        return (len(self._memory) - self._HEAD.size) // self._LINE.size

    @property
    def requests(self) -> Requests:
        """What was asked of the ranks so far."""
        stops, number, saves = self._HEAD.unpack_from(self._memory)
        return Requests(stops, signal.Signals(number or signal.SIGTERM), saves)

    @requests.setter
    def requests(self, requests: Requests) -> None:
        self._memory[: self._HEAD.size] = self._HEAD.pack(
            requests.stops, requests.stop_signal, requests.saves
        )


@dataclass(frozen=True)
class _Line:
    """The line of this process."""

    table: Heartbeats
    local_rank: int
    last: Heartbeat


_line: _Line | None = None


def begin(table: Heartbeats, local_rank: int = 0, rank: int = 0) -> None:
    """Write the heartbeats of this process into a line of a table from now on.

    Args:
        table: Of this machine.
        local_rank: Which line: the rank among those of this machine.
        rank: Among all.
    """
    global _line
    _line = _Line(table, local_rank, Heartbeat(os.getpid(), rank, Phase.starting, 0, 0.0))
    beat()


def end() -> None:
    """Write no more heartbeats."""
    global _line
    _line = None


def beat(phase: Phase | None = None, step: int | None = None) -> Phase:
    """Give a sign of life; cheap enough for every batch. Nothing happens where nobody listens.

    Args:
        phase: What is begun now; None: the same goes on.
        step: Optimizer steps done; None: as before.

    Returns:
        The phase before.
    """
    global _line
    line = _line
    if line is None:
        return Phase.starting
    last = line.last
    phase, step = last.phase if phase is None else phase, last.step if step is None else step
    # The first number that is told is that of the step which this start goes on from.
    done = last.done + (last.phase > Phase.preparing and step > last.step)
    now = Heartbeat(last.pid, last.rank, phase, step, time.monotonic(), done)
    line.table.write(line.local_rank, now)
    _line = _Line(line.table, line.local_rank, now)
    return last.phase


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """Say what this process is at as long as this lasts."""
    before = beat(phase)
    try:
        yield
    finally:
        beat(before)
