"""Signals, and a limit of time, that end a sweep.

And the end of a process with all that it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from optrun.base.errors import show_cursor
from optrun.base.reading import read_text

GRACE_SECONDS = 300.0
"""Seconds that jobs have to save and end after the time limit; then they are killed."""


class Stop:
    """A request to end the sweep: the first is for saving, a second ends everything at once.

    Outside the main thread, where Python takes no signals, there are none.

    Args:
        owns_process: Whether a second request ends this process; else it raises KeyboardInterrupt.
        seconds: Time after which the sweep is asked to stop; None: never.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        *,
        owns_process: bool = True,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.owns_process = owns_process
        self.clock = clock
        self._end = None if seconds is None else clock() + seconds
        self._signalled = False
        self.refused = ""
        """The disk error that ended the sweep; empty if there is none."""
        self.groups: Callable[[], Sequence[int]] = list
        """Returns the process groups of the sweep's workers."""
        self.at_work: Callable[[], Sequence[str]] = list
        """Returns the running jobs with unsaved steps."""
        self._before: dict[signal.Signals, Any] = {}
        """The handlers of signals that were set before, to be set again at the end."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds left of `hydra.sweeper.timeout`; None without a timeout."""
        if self._end is None:
            return None
        return max(0.0, self._end - self.clock())

    @property
    def patience(self) -> float | None:
        """Seconds until jobs that do not stop are killed; negative after that.

        None if they are never killed.
        """
        if self._end is None:
            return None
        return self._end + GRACE_SECONDS - self.clock()

    @property
    def requested(self) -> bool:
        """Whether jobs are to save and end."""
        return self._signalled or bool(self.refused) or self.seconds_left == 0.0

    @property
    def why(self) -> str:
        """The reason for the stop, as the beginning of a line."""
        if self._signalled:
            return "stopping"
        if self.refused:
            return f"{self.refused} Stopping"
        return "hydra.sweeper.timeout is up: stopping"

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle a signal: the first requests a stop, a second kills all jobs and ends the sweep.

        The second exits this process with 128 + number, or raises KeyboardInterrupt in a process
        that the sweep does not own, such as a notebook.
        """
        if not self._signalled:
            self._signalled = True
            return
        unsaved = len(self.at_work())
        for group in self.groups():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if not self.owns_process:
            raise KeyboardInterrupt
        if unsaved:
            jobs = "job" if unsaved == 1 else "jobs"
            saved = f"nothing new was saved of {unsaved} {jobs}"
        else:
            saved = "every job was saved before"
        show_cursor()
        sys.stderr.write(f"\nstopped at once: {saved}. The same command continues it.\n")
        sys.stderr.flush()
        os._exit(128 + number)


def process_tree(pid: int) -> list[int]:
    """List the ids of a process and of all its descendants.

    Ranks in process groups of their own are among them. Without /proc, the process alone.
    """
    # 1. The children of every process: the second field behind its name is its parent.
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = read_text(stat, errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    # 2. Children of children: the list grows while the loop runs over it.
    pids = [pid]
    for parent_pid in pids:
        pids += children.get(parent_pid, [])
    return pids


def kill_process_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    for member in process_tree(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)
