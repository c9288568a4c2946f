"""Pass requests to a rank on to training: signals, requests of the starter, and its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from types import FrameType

from optrun.distributed.heartbeat import Heartbeats, Requests

_LOOK_SECONDS = 0.1
_ORPHAN_SECONDS = 30.0
"""For a rank whose launcher is gone: time to stop by itself, everything saved."""
_REPEAT_SECONDS = 2.5
"""After which a second request is one: more than `training.signals.REPEAT_SECONDS`."""
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RankSignals:
    """Stores requests to a rank until training handles signals itself.

    `torch.distributed.elastic` sends SIGTERM to all ranks as soon as one has ended with another
    code than 0, also where all end alike, with 75, and rank 0 is still at its summary. So before
    and after training a signal is only noted.

    Attributes:
        heartbeats: Where optrun leaves its requests; None: a launcher started this rank.
    """

    def __init__(self) -> None:
        self.heartbeats: Heartbeats | None = None
        self._parent = os.getppid()
        self._noted: list[signal.Signals] = []
        self._save_noted = False
        self._sent = 0
        self._saves_seen = 0
        self._orphaned = 0.0
        self._over = threading.Event()

    def begin(self) -> None:
        """Store signals from now on, and start the thread that passes requests on."""
        for number in _STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.signal(signal.SIGUSR1, self._note)
        threading.Thread(target=self._follow, name="optrun-rank-signals", daemon=True).start()

    def close(self) -> None:
        """Ignore requests from now on; the launcher's end still ends this process."""
        self._over.set()

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if number == signal.SIGUSR1:
            self._save_noted = True
        else:
            self._noted.append(signal.Signals(number))

    def _follow(self) -> None:
        """Pass requests on, and end this process when its launcher has been gone for 30 s."""
        waited = threading.Event()
        while not waited.wait(_LOOK_SECONDS):
            if os.getppid() != self._parent:
                self._orphaned += _LOOK_SECONDS
                if self._orphaned >= _ORPHAN_SECONDS:
                    for worker in multiprocessing.active_children():
                        worker.kill()
                    os._exit(1)
            if not self._over.is_set():
                self._pass_on()

    def _pass_on(self) -> None:
        """Signal this process with the requests that training has not taken yet.

        A scheduler's signal may reach rank and starter at once, as SLURM's does: it counts as one
        request.
        """
        # `training.signals.SignalHandler`, while it handles the signals; this package lies below.
        handler: object = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if handler is self or not hasattr(handler, "stop_signal"):
            return
        requests = Requests() if self.heartbeats is None else self.heartbeats.requests
        stops = requests.stops
        number = requests.stop_signal
        if self._noted:
            number = self._noted[0]
        if self._noted or self._orphaned:
            stops = max(stops, 1)
        is_stopping = handler.stop_signal is not None
        # Only once: the main thread takes a signal when it comes to it.
        if stops and not is_stopping and not self._sent:
            self._sent = 1
            os.kill(os.getpid(), number)
        elif stops > 1 and is_stopping and self._sent < 2 and self._is_second(handler):
            self._sent = 2
            os.kill(os.getpid(), number)
        if requests.saves > self._saves_seen or self._save_noted:
            self._saves_seen = requests.saves
            self._save_noted = False
            os.kill(os.getpid(), signal.SIGUSR1)

    @staticmethod
    def _is_second(handler: object) -> bool:
        """Tell whether enough time has passed for a request to be another one."""
        stopped_at: float = getattr(handler, "stopped_at", 0.0)
        return time.monotonic() - stopped_at > _REPEAT_SECONDS
