"""Signals as requests: the loop looks at them between two steps."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """SIGINT and SIGTERM ask to stop, SIGUSR1 asks to save; a second request to stop ends the process at once.

    Outside the main thread, where Python takes no signals, it asks for nothing.
    """

    def __init__(self) -> None:
        self.stop_signal: signal.Signals | None = None
        self.save_requested = False
        self._before: dict[signal.Signals, object] = {}

    @property
    def stop_requested(self) -> bool:
        """Whether the loop should save and end."""
        return self.stop_signal is not None

    def __enter__(self) -> Self:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._stop)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._save)
        except ValueError:  # not the main thread
            self._before.clear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _stop(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.stop_signal is not None:
            sys.stderr.write("\nstopped at once: nothing new was saved\n")
            sys.stderr.flush()
            os._exit(128 + number)
        self.stop_signal = signal.Signals(number)

    def _save(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.save_requested = True
