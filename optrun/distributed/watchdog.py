"""Watches heartbeats, and tells who is silent for too long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from optrun.distributed import heartbeat
from optrun.distributed.heartbeat import Heartbeat, Heartbeats, Phase
from optrun.distributed.limits import Limits

_LOOKS = 20
"""In the shortest time that a rank may be silent."""


@contextmanager
def watched(limits: Limits, note: Callable[[str], None]) -> Iterator[None]:
    """Tell it when the run in this process makes no progress; it goes on.

    Args:
        limits: Of its silence.
        note: Tells the user one line.
    """
    main = threading.get_ident()

    def tell(silent: dict[int, Heartbeat]) -> None:
        frame = sys._current_frames().get(main)
        where = (
            ""
            if frame is None
            else f", at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        )
        note(
            f"warning: no progress for {limits.at(silent[0])}: {silent[0]}{where}. The run is not"
            " ended."
        )

    table = Heartbeats.create(1)
    heartbeat.begin(table)
    try:
        with Watchdog(table, limits, tell):
            yield
    finally:
        heartbeat.end()


class Watchdog:
    """Calls a function once when ranks have been silent for too long, and again only after they have been heard.

    Args:
        heartbeats: Of this machine.
        limits: Of their silence.
        on_silent: Gets the ranks that are, all of them, by their rank on this machine.
    """

    def __init__(
        self,
        heartbeats: Heartbeats,
        limits: Limits,
        on_silent: Callable[[dict[int, Heartbeat]], None],
    ) -> None:
        self._heartbeats = heartbeats
        self._limits = limits
        self._on_silent = on_silent
        self._told: dict[int, Heartbeat] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="optrun-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(self._limits.shortest / _LOOKS, 1.0)):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Look once.

        Args:
            now: Seconds, on the monotonic clock.
        """
        silent = {}
        for rank in range(len(self._heartbeats)):
            heartbeat = self._heartbeats[rank]
            is_late = now - heartbeat.time > self._limits.at(heartbeat).seconds
            if is_late and heartbeat.phase is not Phase.closing:  # the end has no limit
                silent[rank] = heartbeat
        if silent and any(self._told.get(rank) != heartbeat for rank, heartbeat in silent.items()):
            self._told = silent
            self._on_silent(silent)
