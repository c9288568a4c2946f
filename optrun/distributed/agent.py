"""Starts the ranks of this machine through torch's elastic agent, watches them, and says how they ended.

`torch.distributed.elastic` starts the processes, lets several machines find each other, and ends the ranks that are
left when one has failed. What it does not do is done here: a signal is a request to all ranks and not their end, a rank
that hangs is found by its heartbeats, and exit codes are kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from optrun.base.errors import ConfigError
from optrun.distributed.heartbeat import Heartbeat, Heartbeats
from optrun.distributed.local_ends import HEARTBEATS, end_of, find_hung, kill
from optrun.distributed.verdict import RankEnd
from optrun.distributed.watchdog import Watchdog

_DIRECT_SECONDS = 0.5
"""A launcher may signal agent and ranks at once: the agent passes its own on a little later, so that it counts once."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Which ranks to start, and how."""

    nproc: int
    """On this machine."""
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    """HOST:PORT where the machines meet."""
    timeout: float
    """Seconds that a rank may be silent."""
    command: Sequence[str]
    """What each runs, after the interpreter."""
    environment: Mapping[str, str]
    """What each finds besides the variables of torch."""
    run_id: str
    """The same on every machine, for this run; another for each attempt."""


@dataclass(frozen=True)
class Ended:
    """How the ranks of this machine ended."""

    ends: list[RankEnd]
    stops: int
    """How many signals asked them to stop."""


def run_ranks(ranks: Ranks, folder: Path) -> Ended:
    """Start the ranks of this machine, and wait for their end.

    Args:
        ranks: Which, and how.
        folder: Of this attempt alone; heartbeats and the ends of the ranks lie in it.

    Raises:
        ConfigError: The other machines do not come.
    """
    heartbeats = Heartbeats.create(ranks.nproc, folder / HEARTBEATS)
    hung: dict[int, RankEnd] = {}

    def end_silent(silent: dict[int, Heartbeat]) -> None:
        for local_rank, end in find_hung(silent, folder, ranks.timeout).items():
            if local_rank not in hung:  # it stays silent, and how it was is known from the first look
                hung[local_rank] = end
                kill(silent[local_rank])

    with _forwarded(heartbeats) as stops, Watchdog(heartbeats, ranks.timeout, end_silent):
        codes = _launch(ranks)
    ends = [
        hung.get(local_rank) or end_of(folder, local_rank, codes.get(local_rank, 0), heartbeats[local_rank])
        for local_rank in range(ranks.nproc)
    ]
    return Ended(ends, stops=len(stops))


def _launch(ranks: Ranks) -> dict[int, int]:
    """Run torch's agent in this thread.

    Returns:
        The exit codes that are not 0, by local rank; negative: the signal.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    seconds = max(1, math.ceil(ranks.timeout))
    alone = ranks.nnodes == 1
    config = LaunchConfig(
        min_nodes=ranks.nnodes,
        max_nodes=ranks.nnodes,
        nproc_per_node=ranks.nproc,
        run_id=ranks.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=ranks.rdzv_endpoint or "127.0.0.1:0",
        rdzv_configs={"timeout": seconds, "join_timeout": seconds, "read_timeout": min(seconds, 60)},
        max_restarts=0,  # optrun starts them again, and not after every exit code
        local_addr="127.0.0.1" if alone else None,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGQUIT",  # the others are requests
    )
    with _environment(ranks):
        try:
            elastic_launch(config, sys.executable)(*ranks.command)
        except ChildFailedError as error:
            return {failure.local_rank: failure.exitcode for failure in error.failures.values()}
        except (RendezvousTimeoutError, RendezvousConnectionError) as error:
            raise ConfigError(
                f"distributed.rdzv_endpoint={ranks.rdzv_endpoint}: not all of the {ranks.nnodes} machines came within "
                f"{ranks.timeout:g} s (distributed.timeout_seconds). Expected the same command on each of them "
                "(distributed.nnodes), and that each can reach this address, which belongs to one of them."
            ) from error
    return {}


@contextmanager
def _environment(ranks: Ranks) -> Iterator[None]:
    """Set what the ranks inherit from this process, and leave it to optrun to tell how they ended.

    torch's agent would log every end but 0 as a failure, that of a rank that stops early, too.
    """
    logger = logging.getLogger("torch.distributed.elastic")
    level, before = logger.level, dict(os.environ)
    logger.setLevel(logging.CRITICAL + 1)
    os.environ.update(ranks.environment)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks.nproc)))
    try:
        yield
    finally:
        logger.setLevel(level)
        for name in (*ranks.environment, "OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


# Signals ----------------------------------------------------------------------------------------------------------


@contextmanager
def _forwarded(heartbeats: Heartbeats) -> Iterator[list[signal.Signals]]:
    """Make of signals to this process requests to its ranks, and list them; there are none outside the main thread."""
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
