"""Signals as requests: the loop looks at them between two steps.

SIGINT, SIGTERM and SIGHUP (the terminal was closed; not where `nohup` ignores it) ask to stop,
SIGUSR1 asks to save. A second request to stop ends the process at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from optrun.base.errors import show_cursor

REPEAT_SECONDS = 2.0
"""Most seconds between a signal to a rank and the same signal passed on by its launcher."""


class Stopped(BaseException):
    """A request to stop, raised in the middle of work that is not worth finishing.

    A BaseException, so that no `except Exception` takes it for an error.

    Args:
        signal: Number of the signal that some rank received; 0: this process received it.
    """

    def __init__(self, signal: int = 0) -> None:
        super().__init__()
        self.signal = signal


class SignalHandler:
    """Handles signals inside its `with` block, and restores the earlier handlers after it.

    Outside the main thread, where Python cannot handle signals, there are no requests.

    Args:
        owns_process: Whether a second request to stop ends this process at once; else it raises
            KeyboardInterrupt.
        is_rank: Whether a launcher may pass on a signal that this process has already received: a
            second one within `REPEAT_SECONDS` is ignored.
    """

    def __init__(self, *, owns_process: bool = True, is_rank: bool = False) -> None:
        self._owns_process = owns_process
        self._repeat_seconds = REPEAT_SECONDS if is_rank else 0.0
        self.stopped_at = 0.0
        """Time of the request to stop on the monotonic clock; 0 without one."""
        self.stop_signal: signal.Signals | None = None
        self.save_requested = False
        self._before: dict[signal.Signals, object] = {}
        self._process = os.getpid()
        self._immediate = False

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked to stop."""
        return self.stop_signal is not None

    def take_save_request(self) -> bool:
        """Return whether there was a request to save since the last call, and clear it."""
        requested = self.save_requested
        self.save_requested = False
        return requested

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Raise `Stopped` inside the block as soon as a signal to stop arrives.

        For long work that is not worth finishing, such as reading data.

        Raises:
            Stopped: A signal to stop arrived before or inside the block.
        """
        self._immediate = True
        try:
            if self.stop_requested:
                raise Stopped
            yield
        finally:
            self._immediate = False

    def __enter__(self) -> Self:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._stop)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save)
        except ValueError:  # not the main thread
            self._before.clear()
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Record a first signal to stop; at a second one end the process, with nothing saved.

        Inside `immediate` the first one raises Stopped.
        """
        if os.getpid() != self._process:
            return  # a forked loader worker: the main process reacts, and still needs its batches
        if self.stop_signal is None:
            self.stop_signal = signal.Signals(number)
            self.stopped_at = time.monotonic()
            if self._immediate:
                raise Stopped
        elif time.monotonic() - self.stopped_at >= self._repeat_seconds:
            self._end_process(number)

    def _end_process(self, number: int) -> None:
        """End the process at once by a signal's exit code; KeyboardInterrupt if others own it."""
        if not self._owns_process:
            raise KeyboardInterrupt
        kill_workers()
        show_cursor()
        os.write(2, b"\nstopped at once: nothing new was saved\n")
        os._exit(128 + number)

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        """Request to stop because the terminal was closed; from now on nothing is written to it."""
        if os.getpid() == self._process and self.stop_signal is None:
            _leave_terminal()
        self._stop(number, frame)

    def _save(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.save_requested = True


def kill_workers() -> None:
    """Kill all child processes of this process, started through multiprocessing."""
    for worker in multiprocessing.active_children():
        worker.kill()


def _leave_terminal() -> None:
    """Redirect standard output and error from a closed terminal to the null device.

    Writing to it would fail. The log file of the run has the same lines.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
