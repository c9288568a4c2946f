"""Starts the ranks of this machine through torch's elastic agent, watches them, and says how they ended.

`torch.distributed.elastic` starts the processes, lets several machines find each other, and ends the ranks that are
left when one has failed. What it does not do is done here: a signal is a request to all ranks and not their end, a rank
that hangs is found by its heartbeats, and exit codes are kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from optrun.distributed.heartbeat import Heartbeat, Heartbeats, Phase
from optrun.distributed.verdict import RankEnd
from optrun.distributed.watchdog import Watchdog
from optrun.errors import EXIT_FAILED, ConfigError

HEARTBEATS = "heartbeats"
_DIRECT_SECONDS = 0.5
"""A launcher may signal agent and ranks at once: the agent passes its own on a little later, so that it counts once."""
_STACK_SECONDS = 1.0
"""For a rank to write where it is."""
_WAITING = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/", "optrun/distributed/")
"""Files of the innermost frame of a rank that waits for another one."""


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


def end_file(folder: Path, local_rank: int) -> Path:
    """Name the file in which a rank of this machine says how it ended."""
    return folder / f"end-{local_rank}.json"


def stack_file(folder: Path, local_rank: int) -> Path:
    """Name the file into which `faulthandler` writes where a rank is, when it is asked by SIGUSR2."""
    return folder / f"stack-{local_rank}"


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
        for local_rank, end in _find_hung(silent, folder, ranks.timeout).items():
            hung[local_rank] = end
            with contextlib.suppress(ProcessLookupError):
                os.killpg(silent[local_rank].pid, signal.SIGKILL)  # each rank leads a session of its own

    with _forwarded(heartbeats) as stops, Watchdog(heartbeats, ranks.timeout, end_silent):
        codes = _launch(ranks)
    ends = [
        hung.get(local_rank) or _end_of(folder, local_rank, codes.get(local_rank, 0), heartbeats[local_rank])
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
    """What the ranks inherit from this process; and leave it to optrun to tell how they ended.

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


# Ends -------------------------------------------------------------------------------------------------------------


def _find_hung(silent: dict[int, Heartbeat], folder: Path, timeout: float) -> dict[int, RankEnd]:
    """Find which of the silent ranks the others wait for, and say where it is."""
    frames = {local_rank: _frame_of(folder, local_rank, heartbeat.pid) for local_rank, heartbeat in silent.items()}
    hung = [
        local_rank
        for local_rank, heartbeat in silent.items()
        if _is_stopped(heartbeat.pid)
        or (heartbeat.phase is not Phase.waiting and not any(text in frames[local_rank] for text in _WAITING))
    ] or list(silent)
    ends = {}
    for local_rank in hung:
        state = ", stopped by a signal" if _is_stopped(silent[local_rank].pid) else ""
        frame = f" at {frames[local_rank]}" if frames[local_rank] else ""
        ends[local_rank] = RankEnd(
            silent[local_rank].rank,
            EXIT_FAILED,
            f"no sign of life for {timeout:g} s (distributed.timeout_seconds){state}{frame}; all ranks were ended. The "
            "checkpoints are as they were",
            where=str(silent[local_rank]),
        )
    return ends


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; False where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except OSError:
        return False


def _frame_of(folder: Path, local_rank: int, pid: int) -> str:
    """Ask a rank for its innermost Python frame, by `faulthandler`; empty where it does not answer."""
    path = stack_file(folder, local_rank)
    if not pid or not path.is_file():
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < deadline:
        found = re.findall(
            r"^(?:Current thread|Thread) .*\n  File \"(.+)\", line (\d+) in (.+)", path.read_text(), re.M
        )
        if found:
            file, line, name = found[-1]  # the main thread is the last
            return f"{file}:{line} in {name}"
        time.sleep(0.02)
    return ""


def _end_of(folder: Path, local_rank: int, code: int, heartbeat: Heartbeat) -> RankEnd:
    """Read how a rank ended: as it says itself, else by its exit code and its last heartbeat."""
    try:
        told = RankEnd(**json.loads(end_file(folder, local_rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return RankEnd(heartbeat.rank, code, where=str(heartbeat), seen=heartbeat.time)
    return told  # also where it was ended on its way out
