"""One rank of a run: started by optrun's own agent, or one of the processes of torchrun, srun or mpirun.

`python -m optrun.commands.rank` is what the agent starts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from rich.console import Console

from optrun.commands.payload import Payload
from optrun.config.schema.distributed import DistributedConfig, RanksConfig
from optrun.distributed import heartbeat
from optrun.distributed.agent import HEARTBEATS, end_file, stack_file
from optrun.distributed.heartbeat import Heartbeats, Phase
from optrun.distributed.join import Launched, launched, set_torch_environment
from optrun.distributed.meeting import Meeting
from optrun.distributed.rank_signals import RankSignals
from optrun.distributed.verdict import RankEnd, error_of, is_lost_rank
from optrun.errors import EXIT_DONE, EXIT_FAILED, EXIT_NONFINITE, EXIT_STOPPED_EARLY, OptrunError, printable

if TYPE_CHECKING:
    from optrun.artifacts.run_dir import RunDir
    from optrun.config.request import Request
    from optrun.distributed.world import World
    from optrun.runner.resume.checkpoint import ResumePoint
    from optrun.runner.train import Outcome

_PARTING_SECONDS = 10.0
"""For the others to say how they ended, where one has failed."""
_GROUPS_SECONDS = 5.0
"""More than a rank may be silent: the watchdog, which knows more, is to speak before a collective gives up."""
_TOGETHER = (EXIT_DONE, EXIT_NONFINITE, EXIT_STOPPED_EARLY)
"""Codes that the ranks have agreed on."""
_COMPOSING_SECONDS = 60.0
"""For rank 0, until there is something to run."""
_PAYLOAD, _LEFT = "payload", "left"
"""Keys of the meeting."""
PAYLOAD = "payload.json"
FOLDER = "OPTRUN_RANKS"
"""Environment variable by which the agent tells its ranks the folder of the attempt."""


@dataclass
class Rank:
    """This process, as one rank of a run."""

    launched: Launched
    signals: RankSignals
    folder: Path | None = None
    """Of the attempt, where optrun's own agent started it; None: another launcher did."""

    @property
    def is_main(self) -> bool:
        """Whether it is the one that composes, writes and speaks."""
        return self.launched.rank == 0


def begin(launched: Launched) -> Rank:
    """Make this process a rank: from here on signals are noted, and heartbeats written where an agent reads them."""
    table, folder = None, Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    if folder is not None:
        table = Heartbeats.open(folder / HEARTBEATS)
        heartbeat.begin(table, launched.local_rank, launched.rank)
        faulthandler.register(signal.SIGUSR2, stack_file(folder, launched.local_rank).open("w"), all_threads=True)
    signals = RankSignals(table)
    signals.begin()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of what find_unused_parameters costs
    set_torch_environment(launched)
    return Rank(launched, signals, folder)


def take_part(rank: Rank, payload: Payload, meeting: Meeting) -> Outcome | None:
    """Train as one of the ranks.

    Returns:
        The outcome on rank 0, None on the others.

    Raises:
        OptrunError: How the ranks ended, together, where not all ended well.
    """
    meeting.timeout = float(payload.values["distributed"]["timeout_seconds"])
    with _output(rank, payload.run):
        end, outcome = RankEnd(rank.launched.rank, EXIT_DONE), None
        try:
            outcome = _train(rank, payload, meeting)
        except OptrunError as error:
            end = _end(rank, error, error.exit_code)
            if not rank.is_main:  # into its log; the terminal has it once
                sys.stderr.write(f"optrun: {printable(end.message)}\n")
        except BaseException as error:  # told together with how the others ended
            traceback.print_exc()
            end = _end(rank, error, EXIT_FAILED)
        ends = _part(rank, meeting, end)
    together = error_of(ends, payload.run.rank_log)
    if together is not None:
        raise together
    return outcome


def _end(rank: Rank, error: BaseException, code: int) -> RankEnd:
    text = str(error) or type(error).__name__
    message = text if isinstance(error, OptrunError) else f"{type(error).__name__}: {' '.join(text.split())}"
    return RankEnd(rank.launched.rank, code, message, lost_rank=is_lost_rank(error))


def _train(rank: Rank, payload: Payload, meeting: Meeting) -> Outcome | None:
    from optrun.commands.run_here import run_here
    from optrun.runner.follow import follow
    from optrun.training.display import PlainDisplay

    request, resume = _agree(rank, payload, meeting)
    world = _world(request.config.distributed, meeting)
    if rank.is_main:
        return run_here(request, payload.run, Console(quiet=payload.quiet), resume, world=world)
    with _own_log():
        follow(request, payload.run, PlainDisplay(Console(quiet=True)), world)
    return None


def _agree(rank: Rank, payload: Payload, meeting: Meeting) -> tuple[Request, ResumePoint | None]:
    """Type what is to be run; what one rank refuses, all do.

    Raises:
        ConfigError: Such as for a plugin that is another one here.
    """
    request, resume, refused = None, None, None
    try:
        request, resume = payload.request(), payload.resume_point()
    except OptrunError as error:
        refused = RankEnd(rank.launched.rank, error.exit_code, f"{error} ({socket.gethostname()})")
    ends = meeting.gather("agree", None if refused is None else refused.to_dict())
    together = error_of([RankEnd(**end) for end in ends if end is not None])
    if together is not None:
        raise together
    assert request is not None
    return request, resume


def _world(config: DistributedConfig, meeting: Meeting) -> World:
    """Make the groups of the ranks."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from optrun.distributed.watched_world import WatchedWorld

    assert isinstance(config, RanksConfig)
    backend = config.backend
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=config.timeout_seconds + _GROUPS_SECONDS)
    store = PrefixStore("groups", meeting.store)
    dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=meeting.size, timeout=timeout)
    return WatchedWorld.join(backend, timeout)


def _part(rank: Rank, meeting: Meeting, end: RankEnd) -> list[RankEnd]:
    """Tell how this rank ended, and let nobody leave before rank 0 where all end alike.

    The first rank that leaves with another code than 0 makes the launcher end the others, and rank 0 has its summary
    and curves to write.

    Returns:
        The ends that are known here.
    """
    rank.signals.close()
    heartbeat.beat(Phase.closing)
    if rank.folder is not None:
        end_file(rank.folder, rank.launched.local_rank).write_text(json.dumps(end.to_dict()), encoding="utf-8")
    with contextlib.suppress(RuntimeError):  # the store is gone with who held it
        meeting.send("end", end.to_dict())
    if rank.is_main:
        found = meeting.heard("end", range(meeting.size), _PARTING_SECONDS if end.code == EXIT_FAILED else 0.0)
    elif end.code in _TOGETHER:
        found = meeting.heard("end", [0], meeting.timeout)
    else:
        found = {}
    return [end, *(RankEnd(**theirs) for number, theirs in found.items() if number != end.rank)]


# Started by another launcher ----------------------------------------------------------------------------------------


class Leader:
    """Rank 0 of a launcher's: it composes, and sends the others what is to be run.

    Args:
        rank: This process.
        meeting: With the others.
    """

    def __init__(self, rank: Rank, meeting: Meeting) -> None:
        self.launched = rank.launched
        self._rank = rank
        self._meeting = meeting
        self._sent = False

    def lead(self, request: Request, run: RunDir, console: Console, resume: ResumePoint | None) -> Outcome:
        """Train, with the others.

        Raises:
            OptrunError: How the ranks ended, together, where not all ended well.
        """
        payload = Payload.of(request, run, resume, quiet=console.quiet)
        self._sent = True
        self._meeting.send(_PAYLOAD, payload.to_dict())
        outcome = take_part(self._rank, payload, self._meeting)
        assert outcome is not None
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the others go, where there is nothing to run."""
        if not self._sent:
            with contextlib.suppress(RuntimeError):
                self._meeting.send(_PAYLOAD, {"exit_code": getattr(error, "exit_code", EXIT_FAILED) if error else 0})
                self._meeting.heard(_LEFT, range(1, self._meeting.size), _PARTING_SECONDS)


def follow_leader(rank: Rank, meeting: Meeting) -> int:
    """Do as any other rank of a launcher what rank 0 sends.

    Returns:
        The exit code; what rank 0 refuses it tells itself.

    Raises:
        OptrunError: How the ranks ended, together, where not all ended well.
    """
    told = meeting.receive(_PAYLOAD, 0, meeting.timeout + _COMPOSING_SECONDS)
    if "exit_code" in told:
        meeting.send(_LEFT, None)
        return int(told["exit_code"])
    payload = Payload.from_dict(told)
    if rank.folder is not None and rank.launched.local_rank == 0:
        (rank.folder / PAYLOAD).write_text(json.dumps(told), encoding="utf-8")  # for ranks that are started once more
    take_part(rank, payload, meeting)
    return EXIT_DONE


# Output -------------------------------------------------------------------------------------------------------------


@contextmanager
def _output(rank: Rank, run: RunDir) -> Iterator[None]:
    """Write what any rank but the first prints into its log, warnings of libraries among it."""
    if rank.is_main:
        yield
        return
    log = run.rank_log(rank.launched.rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    yield


@contextmanager
def _own_log() -> Iterator[None]:
    """Print what optrun logs."""
    logger, handler = logging.getLogger("optrun"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def leave(code: int) -> NoReturn:
    """End this process without taking Python down: threads of gloo outlive their group, and would abort it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main() -> NoReturn:
    """Run what the agent wrote down."""
    found = launched(os.environ)
    assert found is not None, "started by optrun's agent alone"
    rank = begin(found)
    assert rank.folder is not None
    payload = Payload.from_dict(json.loads((rank.folder / PAYLOAD).read_text(encoding="utf-8")))
    try:
        take_part(rank, payload, Meeting.join(payload.values["distributed"]["timeout_seconds"]))
    except OptrunError as error:  # the agent tells it
        leave(error.exit_code)
    leave(EXIT_DONE)


if __name__ == "__main__":
    main()
