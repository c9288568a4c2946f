"""Find jobs that make no progress, by the files that they write, and end them."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from optrun.artifacts.lock import holder_of
from optrun.sweeper.folder import SweepDir
from optrun.sweeper.stop import end_family, family

_LOOK_SECONDS = 60.0
"""The most that one look counts: a sweep that was suspended itself has seen nothing meanwhile."""
_PAUSES = 20
"""How many of the longest pauses so far are too long."""
_AT_LEAST = 3_600.0
_BEFORE_A_STEP = 86_400.0
"""Until a job has logged a step: data may be fetched and tokenized, which changes no file of a run.
"""


@dataclass
class _Seen:
    marks: list[tuple[str, int, int]]
    """Name, size and time of change of each file."""
    looked: float
    silent: float = 0.0
    limit: float = math.inf


@dataclass(eq=False)
class StallWatch:
    """Measures how long jobs leave the files of their run directories as they are."""

    sweep: SweepDir
    seconds: float | None
    """`hydra.sweeper.stall_seconds`; None: 20 times the longest pause of any job so far, an hour at
    least."""
    clock: Callable[[], float]
    """Seconds, monotonic."""
    _seen: dict[str, _Seen] = field(default_factory=dict, init=False)
    _longest: float = field(default=0.0, init=False)

    def __call__(self, name: str) -> float | None:
        """Look at a job that is at work.

        Args:
            name: Of the job.

        Returns:
            Seconds without any change if these are too many; None: it goes on.
        """
        now, marks, run = self.clock(), list[tuple[str, int, int]](), self.sweep.run(name)
        for path in (*run.path.glob("*"), *run.checkpoints.glob("*")):
            with contextlib.suppress(OSError):
                state = path.stat()
                marks.append((path.name, state.st_size, state.st_mtime_ns))
        seen = self._seen.setdefault(name, _Seen(marks, now))
        seen.silent += min(now - seen.looked, _LOOK_SECONDS)
        seen.looked = now
        if marks != seen.marks:
            self._longest = max(self._longest, seen.silent)
            self._seen[name] = _Seen(marks, now)
            return None
        if (
            seen.limit == math.inf and seen.silent >= _AT_LEAST
        ):  # once: its metrics stay as they are
            stepped = self.sweep.steps_done(name) > 0
            seen.limit = max(_AT_LEAST, _PAUSES * self._longest) if stepped else _BEFORE_A_STEP
        return seen.silent if seen.silent >= (self.seconds or seen.limit) else None

    def forget(self, name: str) -> None:
        """Begin anew with a job that is not at work."""
        self._seen.pop(name, None)


def end_holder(lock: Path, server: int) -> str:
    """Kill the process that holds a job, if a process of this sweep has started it.

    Args:
        lock: Of the job.
        server: Id of the process that the launcher runs in.

    Returns:
        Where it runs if it is out of reach, as the jobs of a cluster are; else nothing.
    """
    pid, host = holder_of(lock) or (0, "an unknown host")
    if host != socket.gethostname() or pid not in family(server):
        return f"it runs on {host} as process {pid}"
    end_family(pid)
    return ""
