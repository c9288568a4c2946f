"""Watch the heartbeats of ranks, and report those that are silent for too long."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from optrun.distributed import heartbeat
from optrun.distributed.heartbeat import Heartbeats, Phase, RankStatus
from optrun.distributed.limits import allowed_silence, describe_limit

_LOOKS = 20
"""Checks in the time that a rank may be silent."""


@contextmanager
def watched(timeout_seconds: float, note: Callable[[str], None]) -> Iterator[None]:
    """Warn if this process makes no progress inside the context; the run is not ended.

    The warning names the source line of the calling thread.

    Args:
        timeout_seconds: Seconds without a heartbeat, at least 300 until the first step is done.
        note: Shows the user a line.
    """
    main_thread = threading.get_ident()

    def warn(silent: dict[int, RankStatus]) -> None:
        status = silent[0]  # the table below has one rank
        frame = sys._current_frames().get(main_thread)
        where = ""
        if frame is not None:
            code = frame.f_code
            where = f", at {code.co_filename}:{frame.f_lineno} in {code.co_name}"
        note(
            f"warning: no progress for {describe_limit(status, timeout_seconds)}: {status}{where}."
            " The run is not ended."
        )

    table = Heartbeats.create(1)
    heartbeat.begin(table)
    try:
        with Watchdog(table, timeout_seconds, warn):
            yield
    finally:
        heartbeat.end()


class Watchdog:
    """Calls a function, in a thread, when ranks have been silent for too long.

    It is called once for the same silent heartbeats. A rank that is closing has no limit.

    Args:
        heartbeats: The table of this machine.
        timeout_seconds: Seconds that a rank may be silent, as `allowed_silence` extends them.
        on_silent: Called with the last heartbeats of all silent ranks, by rank on this machine.
    """

    def __init__(
        self,
        heartbeats: Heartbeats,
        timeout_seconds: float,
        on_silent: Callable[[dict[int, RankStatus]], None],
    ) -> None:
        self._heartbeats = heartbeats
        self._timeout_seconds = timeout_seconds
        self._on_silent = on_silent
        self._reported: dict[int, RankStatus] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="optrun-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(self._timeout_seconds / _LOOKS, 1.0)):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Check all ranks once; report all silent ones if one of them is not reported yet.

        Args:
            now: Seconds on the monotonic clock.
        """
        silent = {}
        for rank in range(len(self._heartbeats)):
            status = self._heartbeats[rank]
            is_late = now - status.time > allowed_silence(status, self._timeout_seconds)
            if is_late and status.phase is not Phase.closing:  # the end has no limit
                silent[rank] = status
        # Pairs of rank and status. A status has its time in it: a rank that is silent for a second
        # time counts as new.
        if silent.items() - self._reported.items():
            self._reported = silent
            self._on_silent(silent)
