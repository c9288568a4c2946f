"""Run the ranks of this machine through torch's launcher, and report how they ended.

`torch.distributed.launcher.api.elastic_launch` starts the processes, and ends those that are left
when one has failed. The rest is done here: a signal is a request to all ranks and not their end, a
rank that hangs is found by its heartbeats, exit codes are kept, and only ends that another start
could change are followed by one.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from optrun.base.errors import EXIT_FAILED
from optrun.distributed.heartbeat import Heartbeats, RankStatus
from optrun.distributed.silence import find_hung, kill
from optrun.distributed.verdict import RankEnd, error_of
from optrun.distributed.watchdog import Watchdog

_DIRECT_SECONDS = 0.5
"""A launcher may signal this process and its ranks at once.

Requests are passed on a little later, so that such a signal counts once.
"""


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """How to start the ranks of this machine."""

    nproc: int
    """Number of ranks."""
    timeout_seconds: float
    """Seconds that a rank may be silent."""
    max_restarts: int
    """How often all ranks are started again after a failure."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of this machine ended."""

    ends: list[RankEnd]
    stops: int
    """Number of signals that asked them to stop."""


def run_ranks(
    ranks: LocalRanks,
    heartbeats: Heartbeats,
    begin: Callable[[list[RankEnd] | None], Sequence[str]],
) -> Ended:
    """Start the ranks, wait for their end, and start them again up to `max_restarts` times.

    Only a failure with exit code 1 leads to another start: a refusal, a non-finite number, a full
    disk or a stop would only occur again. Signals to this process are passed on to the ranks.

    Args:
        ranks: How to start them.
        heartbeats: The table that the ranks write their heartbeats to.
        begin: Called before each start with the ends of the start before, None at the first;
            returns the arguments of the Python interpreter, the same for each rank.

    Returns:
        How the ranks of the last start ended, and how many stop signals arrived.
    """
    ends: list[RankEnd] | None = None
    with _launcher_environment(ranks.nproc), _forward_signals(heartbeats) as stops:
        for _ in range(ranks.max_restarts + 1):
            ends = _run_once(ranks, heartbeats, begin(ends))
            error = error_of(ends)  # None: all ranks ended well
            if error is None or error.exit_code != EXIT_FAILED or stops:
                break
    assert ends is not None
    return Ended(ends, stops=len(stops))


def _run_once(ranks: LocalRanks, heartbeats: Heartbeats, command: Sequence[str]) -> list[RankEnd]:
    """Start the ranks once, kill hanging ones, and return how each ended.

    Args:
        ranks: How to start them.
        heartbeats: Their table; cleared first.
        command: Arguments of the Python interpreter.

    Returns:
        One end per rank, by its rank on this machine.
    """
    hung: dict[int, RankEnd] = {}

    def kill_hung(silent: dict[int, RankStatus]) -> None:
        """Record and kill the hanging ranks among the silent ones; called by the watchdog."""
        if hung:  # ranks that fall silent later have lost a hung one, and torch ends them
            return
        # Their ends are described while they live: that asks them where they are.
        hung.update(find_hung(silent, ranks.timeout_seconds, ranks.nproc))
        for local_rank in hung:
            kill(silent[local_rank])

    heartbeats.forget()
    with Watchdog(heartbeats, ranks.timeout_seconds, kill_hung):
        exit_codes = _launch(command, ranks.nproc)
    ends = []
    for local_rank in range(ranks.nproc):
        if local_rank in hung:
            ends.append(hung[local_rank])
        else:
            ends.append(_read_end(heartbeats, local_rank, exit_codes[local_rank]))
    return ends


def _launch(command: Sequence[str], nproc: int) -> list[int]:
    """Start an interpreter for each rank, wait for all, and return an exit code for each rank.

    torch reports the exit codes of failed ranks only. So if ranks failed, the others get 0: torch
    has ended them, and they are no cause. If none failed, all get -SIGTERM: a rank that ended well
    has left a report, which counts more (see `_read_end`), and one without was ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="optrun",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a free port
        local_addr="127.0.0.1",
        max_restarts=0,  # `run_ranks` restarts, because only it knows which failures may pass
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",  # other signals are requests to the ranks
    )
    # Returns when all ranks have ended well; raises when one has failed and the others are ended.
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as failed:
        exit_codes = [0] * nproc
        for failure in failed.failures.values():
            exit_codes[failure.local_rank] = failure.exitcode
        return exit_codes
    return [-signal.SIGTERM] * nproc


def _read_end(heartbeats: Heartbeats, local_rank: int, exit_code: int) -> RankEnd:
    """Read a rank's own report on its end; without one, use its exit code and last heartbeat."""
    report = heartbeats.read_end(local_rank)
    if report:
        return RankEnd(**json.loads(report))  # also if it was killed after it wrote the report
    last = heartbeats[local_rank]
    return RankEnd(last.rank, exit_code, where=str(last), seen=last.time)


@contextmanager
def _launcher_environment(nproc: int) -> Iterator[None]:
    """Silence the log of torch's launcher, and divide the cores among ranks by OMP_NUM_THREADS.

    The launcher would log every exit code but 0 as a failure, even that of a rank that stops early;
    optrun reports how ranks ended itself. OMP_NUM_THREADS is kept if it is set. All is restored.
    """
    logger = logging.getLogger("torch.distributed.elastic")
    no_output = logging.NullHandler()
    propagate = logger.propagate
    environment_before = dict(os.environ)
    logger.propagate = False  # a level would not do: child loggers have levels of their own
    logger.addHandler(no_output)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(no_output)
        for name in ("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):  # torch sets the latter
            os.environ.pop(name, None)
            if name in environment_before:
                os.environ[name] = environment_before[name]


@contextmanager
def _forward_signals(heartbeats: Heartbeats) -> Iterator[list[signal.Signals]]:
    """Turn signals to this process into requests to its ranks while the block runs.

    SIGINT, SIGTERM and SIGHUP ask to stop, 0.5 s later, see `_DIRECT_SECONDS`. SIGUSR1 asks to save
    at once. An ignored SIGHUP (nohup) stays ignored. Outside the main thread, where Python allows
    no handlers, nothing is forwarded. The handlers before are restored at the end.

    Yields:
        The stop signals so far; it grows as they arrive.
    """
    stops: list[signal.Signals] = []
    timers: list[threading.Timer] = []

    def request_stop() -> None:
        heartbeats.requests = replace(heartbeats.requests, stops=len(stops), stop_signal=stops[0])

    def on_stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stops.append(signal.Signals(number))
        timer = threading.Timer(_DIRECT_SECONDS, request_stop)
        timer.daemon = True
        timer.start()
        timers.append(timer)

    def on_save(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        heartbeats.requests = replace(heartbeats.requests, saves=heartbeats.requests.saves + 1)

    handlers_before: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                handlers_before[number] = signal.signal(number, on_stop)
        handlers_before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, on_save)
    try:
        yield stops
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()
