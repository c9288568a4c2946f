"""Signals that end a sweep."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self


class Stop:
    """A request to end the sweep: the first is for saving, a second ends everything at once.

    Outside the main thread, where Python takes no signals, there are none.

    Args:
        owns_process: Whether a second request ends this process; else it raises KeyboardInterrupt.
    """

    def __init__(self, *, owns_process: bool = True) -> None:
        self.owns_process = owns_process
        self.requested = False
        self.groups: Callable[[], Sequence[int]] = list
        """Asked for the process groups of the sweep's workers."""
        self.at_work: Callable[[], Sequence[str]] = list
        """Asked for the jobs that such a process holds."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if main else ():
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.requested:
            cut = len(self.at_work())
            for group in self.groups():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            if not self.owns_process:
                raise KeyboardInterrupt
            saved = f"nothing new was saved of {cut} job{'s' * (cut > 1)}" if cut else "every job was saved before"
            sys.stderr.write(f"\nstopped at once: {saved}. The same command goes on.\n")
            sys.stderr.flush()
            os._exit(128 + number)
        self.requested = True
