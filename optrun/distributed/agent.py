"""Starts the ranks of this machine through torch's elastic agent, watches them, and says how they ended.

`torch.distributed.elastic` starts the processes, lets several machines find each other, and ends
the ranks that are left when one has failed. What it does not do is done here: a signal is a request
to all ranks and not their end, a rank that hangs is found by its heartbeats, and exit codes are
kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from optrun.base.errors import ConfigError, OptrunError, StoppedEarly
from optrun.distributed.heartbeat import Heartbeat, Heartbeats, Phase
from optrun.distributed.limits import Limits
from optrun.distributed.local_ends import HEARTBEATS, end_file, end_of, find_hung, kill
from optrun.distributed.verdict import RankEnd, error_of
from optrun.distributed.watchdog import Watchdog

_LOOK_SECONDS = 0.1
"""Between two looks for the machine that all meet at."""
_MEETING_SECONDS = 60
"""To wait for other machines at a time, before it is looked whether they have finished the run."""
_DIRECT_SECONDS = 0.5
"""A launcher may signal agent and ranks at once.

The agent passes its own on a little later, so that it counts once.
"""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which ranks to start, and how."""

    nproc: int
    """On this machine."""
    nnodes: int = 1
    fewest: int = 1
    """Machines that will do where not all are there."""
    rdzv_endpoint: str | None = None
    """HOST:PORT where the machines meet."""
    limits: Limits
    """Of their meeting and their silence."""
    command: Sequence[str]
    """What each runs, after the interpreter."""
    environment: Mapping[str, str]
    """What each finds besides the variables of torch."""
    max_restarts: int = 0
    """How often they are started again."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of this machine ended."""

    ends: list[RankEnd]
    stops: int
    """How many signals asked them to stop."""


def run_ranks(
    ranks: Ranks,
    folder: Path,
    begin: Callable[[list[RankEnd] | None], None],
    is_over: Callable[[], bool],
) -> Ended:
    """Start the ranks of this machine, again where that is allowed, and wait for their end.

    Args:
        ranks: Which, and how.
        folder: Of this run alone; heartbeats and the ends of the ranks lie in it.
        begin: Called before each start, told how the ranks before ended; None: they are the first.
        is_over: Whether the other machines have come to the good end of the run; asked before they
            are met.

    Raises:
        ConfigError: The other machines do not come.
        StoppedEarly: A signal ended the wait for them.
        OptrunError: They do not come back.
    """
    from optrun.distributed.elastic import Agent, handler_of, is_late, is_lost_machine, spec_of

    heartbeats = Heartbeats.create(ranks.nproc, folder / HEARTBEATS)
    hung: dict[int, RankEnd] = {}

    def end_silent(silent: dict[int, Heartbeat]) -> None:
        if not hung:  # who is silent later has lost that one, and torch's agent ends it
            hung.update(find_hung(silent, folder, ranks.limits, ranks.nproc))
            for local_rank in hung:
                kill(silent[local_rank])

    def mark(phase: Phase) -> None:
        for local_rank in range(ranks.nproc):
            heartbeats.write(local_rank, Heartbeat(0, local_rank, phase, 0, time.monotonic()))

    def start(before: list[RankEnd] | None) -> None:
        hung.clear()
        for local_rank in range(ranks.nproc):
            end_file(folder, local_rank).unlink(missing_ok=True)
        mark(Phase.starting)
        begin(before)

    def ends(codes: Mapping[int, int]) -> list[RankEnd]:
        silent = 0 if codes else -signal.SIGTERM  # of those that say nothing
        return [
            hung.get(local_rank)
            or end_of(folder, local_rank, codes.get(local_rank, silent), heartbeats[local_rank])
            for local_rank in range(ranks.nproc)
        ]

    left, deadline = ranks.max_restarts, time.monotonic() + ranks.limits.meeting
    before: list[RankEnd] | None = None
    agent: Agent | None = None
    with (
        _environment(ranks),
        _forwarded(heartbeats, lambda: agent is None or agent.is_meeting) as stops,
        Watchdog(heartbeats, ranks.limits, end_silent),
    ):
        while True:
            agent = None
            if is_over():
                return Ended([], stops=len(stops))
            try:
                seconds = min(_MEETING_SECONDS, max(1, math.ceil(deadline - time.monotonic())))
                handler = handler_of(ranks.rdzv_endpoint, ranks.fewest, ranks.nnodes, seconds)
                agent = Agent(
                    spec_of(ranks.command, ranks.nproc, handler, left),
                    begin=start,
                    ends=ends,
                    stopped=lambda: mark(Phase.closing),
                    asked_to_stop=lambda: bool(stops),
                )
                agent.ended = before
                agent.run()
                ended = agent.ended or []
                if error_of(ended) is None:
                    # whoever comes later need not wait; after another end this agent may come again
                    handler.shutdown()
                elif all(end.lost_rank or not end.code for end in ended) and is_over():
                    ended = []  # the machine of rank 0 was gone before its good end was heard
                return Ended(ended, stops=len(stops))
            except _AskedToStop:
                raise StoppedEarly(
                    f"{stops[0].name} received while waiting for the other machines; the"
                    " checkpoints are as they were."
                ) from None
            except Exception as error:
                if not is_lost_machine(error):
                    raise
                if agent is None or not agent.has_begun:
                    if time.monotonic() < deadline or is_over():
                        time.sleep(_LOOK_SECONDS)
                        # a machine has died, and is not back yet, or came to the end of the run
                        # alone
                        continue
                    raise _unmet(ranks) if before is None else _left_alone(ranks, before) from error
                before, left = agent.ended or ends({}), agent.restarts_left - (not is_late(error))
                deadline = time.monotonic() + ranks.limits.meeting
                mark(Phase.closing)
                if stops or left < 0:
                    raise _left_alone(ranks, before) from error


def _unmet(ranks: Ranks) -> ConfigError:
    """Make the refusal of machines that never met."""
    return ConfigError(
        f"distributed.rdzv_endpoint={ranks.rdzv_endpoint}: not all of the {ranks.fewest} machines"
        f" came within {ranks.limits.meeting:g} s (distributed.timeout_seconds). Expected the same"
        " command on each of them (distributed.nnodes), and that each can reach this address,"
        " which belongs to one of them."
    )


def _left_alone(ranks: Ranks, ends: list[RankEnd]) -> OptrunError:
    """Say that the other machines are gone; a rank's own reason counts more."""
    own = error_of([end for end in ends if not end.lost_rank and end.code != -signal.SIGTERM])
    return own or OptrunError(
        f"another machine is gone, and did not come back within {ranks.limits.meeting:g} s"
        f" (distributed.timeout_seconds); distributed.max_restarts={ranks.max_restarts}. The"
        " checkpoints are as they were. Go on with the same command on each machine, and"
        " resume=auto."
    )


@contextmanager
def _environment(ranks: Ranks) -> Iterator[None]:
    """Set what the ranks inherit from this process, and leave it to optrun to tell how they ended.

    torch's agent would log every end but 0 as a failure, that of a rank that stops early, too.
    """
    logger, silent = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    propagate, before = logger.propagate, dict(os.environ)
    logger.propagate = False  # loggers below have levels of their own
    logger.addHandler(silent)
    own = {
        **ranks.environment,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
    }  # other signals are requests
    os.environ.update(own)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks.nproc)))
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(silent)
        for name in (*own, "OMP_NUM_THREADS"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


class _AskedToStop(BaseException):
    """A request to stop while there are no ranks."""


# Signals
# ----------------------------------------------------------------------------------------------------------


@contextmanager
def _forwarded(
    heartbeats: Heartbeats, is_meeting: Callable[[], bool]
) -> Iterator[list[signal.Signals]]:
    """Make of signals to this process requests to its ranks, and list them.

    There are none outside the main thread.

    Raises:
        _AskedToStop: There are no ranks, since the other machines are awaited.
    """
    stops: list[signal.Signals] = []
    timers: list[threading.Timer] = []

    def ask() -> None:
        heartbeats.requests = replace(heartbeats.requests, stops=len(stops), stop_signal=stops[0])

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        stops.append(signal.Signals(number))
        if is_meeting():
            raise _AskedToStop
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
