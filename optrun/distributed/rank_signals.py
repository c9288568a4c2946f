"""Pass requests to a rank on to training: signals, and requests of the process that started it."""

import multiprocessing
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from optrun.distributed.heartbeat import Heartbeats, Requests

_LOOK_SECONDS = 0.1
_ORPHAN_SECONDS = 30.0
"""Time for a rank to save and stop after its launcher is gone; then it exits at once."""
_REPEAT_SECONDS = 2.5
"""Time after the first stop request from which another one is a second request, and not the same
again: more than `training.signals.REPEAT_SECONDS`."""
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
        self._noted_stops: list[signal.Signals] = []
        """Stop signals before and after training, in the order of their arrival."""
        self._save_noted = False
        self._stops_sent = 0
        """How many stops training was told of: 0, 1, or 2, to stop at once."""
        self._saves_seen = 0
        self._orphaned = 0.0
        """Seconds since the launcher ended."""
        self._over = threading.Event()

    def begin(self) -> None:
        """Store signals from now on, and start a thread to pass requests on.

        A stop signal that is ignored, as SIGHUP under nohup, stays ignored.
        """
        for number in _STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.signal(signal.SIGUSR1, self._note)
        threading.Thread(
            target=self._watch_requests, name="optrun-rank-signals", daemon=True
        ).start()

    def close(self) -> None:
        """Ignore requests from now on; this process still exits if its launcher is gone."""
        self._over.set()

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if number == signal.SIGUSR1:
            self._save_noted = True
        else:
            self._noted_stops.append(signal.Signals(number))

    def _watch_requests(self) -> None:
        """Pass requests on ten times a second, for ever; the body of a daemon thread.

        Once the launcher has been gone for 30 s, kill child processes and exit with code 1.
        """
        while True:
            time.sleep(_LOOK_SECONDS)
            if os.getppid() != self._parent:  # the launcher has ended
                self._orphaned += _LOOK_SECONDS
                if self._orphaned >= _ORPHAN_SECONDS:
                    for worker in multiprocessing.active_children():
                        worker.kill()
                    os._exit(1)
            if not self._over.is_set():
                self._send_to_training()

    def _send_to_training(self) -> None:
        """Send this process the signals for pending requests, if training handles signals now.

        There are two kinds of requests:

        - to stop, and a second one to stop at once: stored signals, what the process that started
          this rank asks for, and a launcher that is gone, which counts as one. SLURM may signal a
          rank and its starter at once: both count as one.
        - to save, sent as SIGUSR1.

        Each is sent once, though this method is called ten times a second:

        - a first stop, unless training is stopping already, by a signal that came from elsewhere;
        - a second stop, once training has been stopping for 2.5 s;
        - a save, for any number of requests since the last one.
        """
        handler = self._training_handler()
        if handler is None:  # before or after training
            return
        # Both numbers of requests, of stops and of saves, count from the start of the processes.
        requests = Requests() if self.heartbeats is None else self.heartbeats.requests
        # 1. How often to stop (0, 1 or more often), and by which signal.
        stops = requests.stops
        number = requests.stop_signal
        if self._noted_stops:
            number = self._noted_stops[0]
        if self._noted_stops or self._orphaned:
            stops = max(stops, 1)  # not the sum: a signal to rank and starter counts once
        # 2. Stop. `_stops_sent` counts too, since the main thread may run its handler much later.
        is_stopping = handler.stop_signal is not None
        if stops and not is_stopping and self._stops_sent == 0:
            self._stops_sent = 1
            os.kill(os.getpid(), number)
        # `_is_second`: training has been stopping for 2.5 s.
        elif stops > 1 and is_stopping and self._stops_sent < 2 and self._is_second(handler):
            self._stops_sent = 2
            os.kill(os.getpid(), number)
        # 3. Send a save.
        if requests.saves > self._saves_seen or self._save_noted:
            self._saves_seen = requests.saves
            self._save_noted = False
            os.kill(os.getpid(), signal.SIGUSR1)

    def _training_handler(self) -> Any:
        """Return the object with training's handler of SIGTERM; None before and after training.

        It is a `training.signals.SignalHandler`, recognised by its attribute `stop_signal`, since
        this package may not import training. `stop_signal` is None until it was asked to stop.
        """
        handler = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if handler is self or not hasattr(handler, "stop_signal"):
            return None
        return handler

    @staticmethod
    def _is_second(handler: object) -> bool:
        """Tell whether a request counts as a second one: training has been stopping for 2.5 s."""
        stopped_at: float = getattr(handler, "stopped_at", 0.0)
        return time.monotonic() - stopped_at > _REPEAT_SECONDS
