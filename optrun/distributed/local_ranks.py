"""Run the ranks of this machine through torch's launcher, and report how they ended.

`torch.distributed.launcher.api.elastic_launch` starts the processes, and ends those that are left
when one has failed. The rest is done here: a signal is a request to all ranks and not their end, a
rank that hangs is found by its heartbeats, exit codes are kept, and only ends that another start
could change are followed by one.
"""

from __future__ import annotations

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
    """The ranks to start, and how."""

    nproc: int
    timeout_seconds: float
    """How long a rank may be silent."""
    max_restarts: int = 0
    """How often they are started again."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of this machine ended."""

    ends: list[RankEnd]
    stops: int
    """How many signals asked them to stop."""


def run_ranks(
    ranks: LocalRanks,
    heartbeats: Heartbeats,
    begin: Callable[[list[RankEnd] | None], Sequence[str]],
) -> Ended:
    """Start the ranks, again if that is allowed, and wait for their end.

    A refusal, a non-finite number, a full disk or a stop would only come again, so only the exit
    code of a failure is followed by another start.

    Args:
        ranks: Which, and how.
        heartbeats: Shared with them.
        begin: Called before each start with the ends of the ranks before, None at the first;
            returns what each rank runs, after the interpreter.
    """
    ends: list[RankEnd] | None = None
    with _environment(ranks.nproc), _signals_forwarded(heartbeats) as stops:
        for _ in range(ranks.max_restarts + 1):
            ends = _run_once(ranks, heartbeats, begin(ends))
            error = error_of(ends)
            if error is None or error.exit_code != EXIT_FAILED or stops:
                break
    assert ends is not None
    return Ended(ends, stops=len(stops))


def _run_once(ranks: LocalRanks, heartbeats: Heartbeats, command: Sequence[str]) -> list[RankEnd]:
    """Run the ranks to their end, and end one that hangs."""
    hung: dict[int, RankEnd] = {}

    def end_silent(silent: dict[int, RankStatus]) -> None:
        if hung:  # ranks that are silent later have lost that one, and torch ends them
            return
        hung.update(find_hung(silent, ranks.timeout_seconds, ranks.nproc))
        for local_rank in hung:
            kill(silent[local_rank])

    heartbeats.forget()
    with Watchdog(heartbeats, ranks.timeout_seconds, end_silent):
        exit_codes = _launch(command, ranks.nproc)
    # A rank without an exit code was ended by torch because another one failed.
    default_code = 0 if exit_codes else -signal.SIGTERM
    ends = []
    for local_rank in range(ranks.nproc):
        code = exit_codes.get(local_rank, default_code)
        ends.append(hung.get(local_rank) or _end_of(heartbeats, local_rank, code))
    return ends


def _launch(command: Sequence[str], nproc: int) -> dict[int, int]:
    """Start an interpreter for each rank, and wait for all.

    Returns:
        Exit codes by rank, of those that failed first.
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
        max_restarts=0,  # `run_ranks` knows which ends are worth another start
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",  # other signals are requests to the ranks
    )
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as failed:
        return {failure.local_rank: failure.exitcode for failure in failed.failures.values()}
    return {}


def _end_of(heartbeats: Heartbeats, local_rank: int, exit_code: int) -> RankEnd:
    """Read how a rank ended: as it says itself, else by its exit code and its last heartbeat."""
    text = heartbeats.read_end(local_rank)
    if text:
        return RankEnd(**json.loads(text))  # also if it was ended on its way out
    last = heartbeats[local_rank]
    return RankEnd(last.rank, exit_code, where=str(last), seen=last.time)


@contextmanager
def _environment(nproc: int) -> Iterator[None]:
    """Let optrun say how ranks ended, and share the cores among them.

    torch's agent would log every end but 0 as a failure, that of a rank that stops early, too.
    """
    logger = logging.getLogger("torch.distributed.elastic")
    silent = logging.NullHandler()
    propagate = logger.propagate
    before = dict(os.environ)
    logger.propagate = False  # loggers below have levels of their own
    logger.addHandler(silent)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silent)
        for name in ("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):  # torch sets the latter
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


@contextmanager
def _signals_forwarded(heartbeats: Heartbeats) -> Iterator[list[signal.Signals]]:
    """Turn signals to this process into requests to its ranks, and list them.

    There are none outside the main thread.
    """
    stops: list[signal.Signals] = []
    timers: list[threading.Timer] = []

    def ask() -> None:
        heartbeats.requests = replace(heartbeats.requests, stops=len(stops), stop_signal=stops[0])

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stops.append(signal.Signals(number))
        timers.append(threading.Timer(_DIRECT_SECONDS, ask))
        timers[-1].daemon = True
        timers[-1].start()

    def save(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        heartbeats.requests = replace(heartbeats.requests, saves=heartbeats.requests.saves + 1)

    before: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, stop)
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, save)
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for timer in timers:
            timer.cancel()
