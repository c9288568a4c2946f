"""One rank of a run: started by optrun, or one of the processes of torchrun, srun or mpirun.

`python -m optrun.launch.rank HEARTBEATS PAYLOAD` is what optrun starts; both are memory files.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from optrun.artifacts.provenance import code_digest, versions
from optrun.base.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NONFINITE,
    EXIT_STOPPED_EARLY,
    OptrunError,
    printable,
)
from optrun.base.plain import PlainDict
from optrun.config.schema.distributed import DistributedConfig, RanksConfig
from optrun.distributed import heartbeat
from optrun.distributed.contract import call_on_all
from optrun.distributed.heartbeat import Heartbeats, Phase, RankStatus
from optrun.distributed.join import Launched, launched, set_torch_environment
from optrun.distributed.limits import longest_silence
from optrun.distributed.memory_file import MemoryFile, read_text
from optrun.distributed.rank_signals import RankSignals
from optrun.distributed.rendezvous import Rendezvous, RendezvousError
from optrun.distributed.silence import find_hung, is_alive, kill
from optrun.distributed.verdict import LostRankError, RankEnd, error_of, is_lost_rank
from optrun.distributed.watchdog import Watchdog
from optrun.launch.payload import Payload
from optrun.launch.rank_checks import refuse_shared_device

if TYPE_CHECKING:
    from optrun.artifacts.run_dir import RunDir
    from optrun.distributed.world import World
    from optrun.runner.outcome import Outcome

PARTING_SECONDS = 10.0
"""For the others to say how they ended, where one has failed."""
_CONFIRM_SECONDS = 30.0
"""For the others to hear how rank 0 ended."""
_GROUPS_SECONDS = 60.0
"""More than the longest silence.

The watchdog, which knows more, is to speak before a collective gives up.
"""
_UNCONFIRMED = (
    "rank 0 is gone, and did not say whether the last save is whole; resume=auto continues from the"
    " newest one that is."
)
_AGREED_CODES = (EXIT_DONE, EXIT_NONFINITE, EXIT_STOPPED_EARLY)
"""Codes that the ranks have agreed on."""
_LOOK_SECONDS = 0.2
"""Between two looks whether rank 0 still runs."""
_MESSAGE_LENGTH = 3000
"""Characters of a message that a rank leaves to the process that started it."""


@dataclass
class Rank:
    """This process, as one rank of a run."""

    launched: Launched
    signals: RankSignals
    is_watched: bool = False
    """Whether optrun started it: that process finds ranks that hang, and tells how they ended."""
    heartbeats: Heartbeats | None = None
    """Of the ranks of this machine."""

    @property
    def is_main(self) -> bool:
        """Tell whether this rank composes the run, writes its files and prints."""
        return self.launched.rank == 0

    def share(self, heartbeats: Heartbeats) -> None:
        """Write heartbeats into the file of the other ranks of this machine."""
        self.heartbeats = heartbeats
        stack = MemoryFile("optrun-stack").descriptor  # open as long as this process lives
        heartbeat.begin(heartbeats, self.launched.local_rank, self.launched.rank, stack)
        faulthandler.register(signal.SIGUSR2, stack, all_threads=True)

    def join_rendezvous(self, timeout: float, request_facts: Mapping[str, object]) -> Rendezvous:
        """Meet the other ranks.

        Args:
            timeout: Seconds to wait for them.
            request_facts: What they were asked to run, as far as it is known.

        Raises:
            ConfigError: Not all of them come, or some run another program, or another
                configuration.
        """
        rendezvous = Rendezvous.join(
            timeout, {**versions(), "code of optrun": code_digest(), **request_facts}
        )
        if not self.is_watched:
            if self.launched.local_rank == 0:
                heartbeats = Heartbeats.create(self.launched.local_size, shared=True)
                rendezvous.send_to_machine(str(heartbeats.path))
            else:
                heartbeats = Heartbeats.open(Path(rendezvous.receive_on_machine()))
            self.share(heartbeats)
        return rendezvous


def begin(launched: Launched, heartbeats: Path | None = None) -> Rank:
    """Make this process a rank: from here on signals are noted.

    Args:
        launched: Which rank it is.
        heartbeats: Memory file of the process of optrun that started it; None: a launcher did.
    """
    set_torch_environment(launched)
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # DDP warns of what find_unused_parameters costs
    rank = Rank(launched, RankSignals(), is_watched=heartbeats is not None)
    if heartbeats is not None:
        rank.share(Heartbeats.open(heartbeats))
        rank.signals.heartbeats = rank.heartbeats
    rank.signals.begin()
    return rank


def take_part(rank: Rank, payload: Payload, rendezvous: Rendezvous) -> Outcome | None:
    """Train as one of the ranks.

    Returns:
        The outcome on rank 0, None on the others.

    Raises:
        OptrunError: How the ranks ended, together, where not all ended well.
    """
    timeout_seconds = float(payload.values["distributed"]["timeout_seconds"])
    rendezvous.timeout = longest_silence(timeout_seconds)
    with (
        _rank_output(rank.launched.rank, payload.run),
        _watching_others(rank, rendezvous, timeout_seconds),
    ):
        end = RankEnd(rank.launched.rank, EXIT_DONE)
        outcome = None
        try:
            outcome = _train(rank, payload, rendezvous)
        except OptrunError as error:
            end = _describe_end(rank, error, error.exit_code)
            if not rank.is_main:  # into its log; the terminal has it once
                sys.stderr.write(f"optrun: {printable(end.message)}\n")
        except BaseException as error:  # told together with how the others ended
            end = _describe_end(rank, error, EXIT_FAILED)
            if not (rank.is_main and end.lost_rank) or os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
        ends = _report_end(rank, rendezvous, end)
    together = error_of(ends, payload.run.rank_log)
    if together is not None:
        raise together
    return outcome


def _describe_end(rank: Rank, error: BaseException, code: int) -> RankEnd:
    """Describe how this rank ended, from its error."""
    text = str(error) or type(error).__name__
    if isinstance(error, OptrunError):
        message = text
    else:
        message = f"{type(error).__name__}: {' '.join(text.split())}"
    return RankEnd(rank.launched.rank, code, message, lost_rank=is_lost_rank(error))


def _train(rank: Rank, payload: Payload, rendezvous: Rendezvous) -> Outcome | None:
    """Build the process groups and train; every rank must call this.

    Returns:
        The outcome on rank 0, None on the others.

    Raises:
        ConfigError: The ranks disagree on the request, or several have one device.
        OptrunError: Training failed.
    """
    from optrun.launch.run_here import run_here
    from optrun.runner.train import train
    from optrun.training.display import PlainDisplay

    request, resume = call_on_all(rendezvous, lambda: (payload.request(), payload.resume_point()))
    refuse_shared_device(request.config, rendezvous)
    world = _join_groups(request.config.distributed, rendezvous)
    if rank.is_main:
        console = Console(quiet=payload.quiet)
        return run_here(request, payload.run, console, resume, world=world, stop_at=payload.stop_at)
    with _printed_log():
        train(
            request,
            payload.run,
            PlainDisplay(Console(quiet=True)),
            stop_at=payload.stop_at,
            world=world,
        )
    return None


def _join_groups(config: DistributedConfig, rendezvous: Rendezvous) -> World:
    """Make the process groups of torch.distributed; every rank must call this.

    `backend=auto` means NCCL for tensors on a GPU if there is one, and gloo for the CPU. A
    collective waits 60 seconds longer than the longest silence that the watchdog allows.
    """
    import torch
    import torch.distributed as dist

    from optrun.distributed.world import World

    assert isinstance(config, RanksConfig)
    backend = config.backend
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=longest_silence(config.timeout_seconds) + _GROUPS_SECONDS)
    store = dist.PrefixStore("groups", rendezvous.store)
    dist.init_process_group(
        backend, store=store, rank=rendezvous.rank, world_size=rendezvous.size, timeout=timeout
    )
    return World.join(backend, timeout)


@contextmanager
def _rank_output(rank: int, run: RunDir) -> Iterator[None]:
    """Write the output of every rank but the first into its log.

    Output of libraries counts: the file descriptors themselves are redirected.
    """
    if rank == 0:
        yield
        return
    log = run.rank_log(rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    yield


@contextmanager
def _printed_log() -> Iterator[None]:
    """Print the log records of optrun."""
    logger = logging.getLogger("optrun")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _watching_others(rank: Rank, rendezvous: Rendezvous, timeout_seconds: float) -> Iterator[None]:
    """End hanging ranks of this machine and report how they ended, while the block lasts.

    Does nothing if optrun itself started the ranks: that process watches them.
    """
    if rank.is_watched or rank.heartbeats is None:
        yield
        return
    ended: set[int] = set()

    def end_silent(silent: dict[int, RankStatus]) -> None:
        hung = find_hung(silent, timeout_seconds, rank.launched.local_size)
        new = {local_rank: end for local_rank, end in hung.items() if local_rank not in ended}
        ended.update(new)
        for end in new.values():
            with contextlib.suppress(LostRankError):
                rendezvous.send("end", asdict(end), end.rank)
        for local_rank in new:
            kill(silent[local_rank])

    with Watchdog(rank.heartbeats, timeout_seconds, end_silent):
        yield


def _dead_ranks(rank: Rank) -> dict[int, str]:
    """Describe the last heartbeat of each rank of this machine whose process is dead."""
    if rank.heartbeats is None:
        return {}
    heartbeats = [rank.heartbeats[number] for number in range(len(rank.heartbeats))]
    return {line.rank: str(line) for line in heartbeats if line.pid and not is_alive(line)}


def _report_end(rank: Rank, rendezvous: Rendezvous, end: RankEnd) -> list[RankEnd]:
    """Report how this rank ended, and wait for rank 0 if all ranks end alike.

    The first rank that leaves with another code than 0 makes the launcher end the others, and rank
    0 has its summary and curves to write.

    Returns:
        The ends that are known here.
    """
    rank.signals.close()
    heartbeat.beat(Phase.closing)
    if rank.is_watched:
        _write_end(rank, end)
    with contextlib.suppress(LostRankError):  # the store is gone with who held it
        rendezvous.send("end", asdict(end))
    ends: dict[int, PlainDict] = {}
    waits = end.lost_rank and not rank.is_watched
    try:
        if rank.is_main or waits:
            ends = _collect_ends(rank, rendezvous, PARTING_SECONDS if waits else 0.0)
        elif end.code in _AGREED_CODES:
            ends = _await_end_of_main(rank, rendezvous)
        if rank.is_main and end.code in _AGREED_CODES:
            _await_confirmations(rank, rendezvous)
    except LostRankError:
        if end.code == EXIT_DONE and not rank.is_main:
            end = RankEnd(end.rank, EXIT_FAILED, _UNCONFIRMED, lost_rank=True)
            if rank.is_watched:
                _write_end(rank, end)
    return [end, *(RankEnd(**theirs) for number, theirs in ends.items() if number != end.rank)]


def _collect_ends(rank: Rank, rendezvous: Rendezvous, seconds: float) -> dict[int, PlainDict]:
    """Collect the ends of all ranks that report one in time.

    Also reports the end of each rank of this machine whose process is dead.

    Args:
        rank: This rank.
        rendezvous: Where ends are reported, under the key `end`.
        seconds: How long to wait; 0: those that are there now.

    Raises:
        LostRankError: The store is gone.
    """
    deadline = time.monotonic() + seconds
    while True:
        # Looked for before collecting: what a rank reported before it was lost still arrives.
        gone = {} if rank.is_watched else _dead_ranks(rank)
        ends = rendezvous.collect("end", range(rendezvous.size), min(seconds, _LOOK_SECONDS))
        for number in gone.keys() - ends.keys():
            ends[number] = asdict(RankEnd(number, EXIT_FAILED, "it is gone", where=gone[number]))
            rendezvous.send("end", ends[number], number)
        if len(ends) == rendezvous.size or time.monotonic() >= deadline:
            return ends


def _await_end_of_main(rank: Rank, rendezvous: Rendezvous) -> dict[int, PlainDict]:
    """Wait until rank 0 has told its end; a second signal may have ended it before.

    Raises:
        LostRankError: The store is gone, as with the machine that held it.
    """
    deadline = time.monotonic() + rendezvous.timeout
    ends: dict[int, PlainDict] = {}
    while not ends and time.monotonic() < deadline:
        gone = 0 in _dead_ranks(rank)  # looked for first: what it told before it went is heard
        ends = rendezvous.collect("end", [0], 0.0 if gone else _LOOK_SECONDS)
        if gone:
            break
    if ends:
        with contextlib.suppress(LostRankError):  # rank 0 has told, and need not wait
            rendezvous.send("confirmed", None)
    return ends


def _await_confirmations(rank: Rank, rendezvous: Rendezvous) -> None:
    """Wait until all live ranks confirm that they read rank 0's end, at most 30 s.

    Rank 0 may hold the store, so its own exit would cut off those that have not read yet.

    Raises:
        LostRankError: The store is gone.
    """
    deadline = time.monotonic() + _CONFIRM_SECONDS
    waiting_for = set(range(1, rendezvous.size))
    while waiting_for and time.monotonic() < deadline:
        waiting_for -= _dead_ranks(rank).keys()
        waiting_for -= rendezvous.collect("confirmed", sorted(waiting_for), _LOOK_SECONDS).keys()


def leave(code: int) -> int:
    """End this process without taking Python down.

    Threads of gloo outlive their group, and would abort it.

    Returns:
        The exit code, where there was no group.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return code
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main() -> int:
    """Run the payload of the optrun process that started this one.

    Returns:
        The exit code; the starting process says what it stands for.
    """
    heartbeats, payload_file = map(Path, sys.argv[1:])
    own_launch = launched(os.environ)
    assert own_launch is not None, "started by optrun alone"
    rank = begin(own_launch, heartbeats)
    payload = Payload(**json.loads(read_text(payload_file)))
    try:
        rendezvous = rank.join_rendezvous(
            payload.values["distributed"]["timeout_seconds"], payload.facts()
        )
    except RendezvousError as error:  # a rank that does not come was lost on its way
        _write_end(rank, RankEnd(own_launch.rank, EXIT_FAILED, str(error), lost_rank=True))
        return leave(EXIT_FAILED)
    except OptrunError as error:
        _write_end(rank, _describe_end(rank, error, error.exit_code))
        return leave(_code_for_torch(error.exit_code))
    try:
        take_part(rank, payload, rendezvous)
    except OptrunError as error:
        return leave(_code_for_torch(error.exit_code))
    return leave(EXIT_DONE)


def _code_for_torch(exit_code: int) -> int:
    """Return the exit code of a rank, as torchrun should see it.

    torchrun ends the other ranks as soon as one exits with another code than 0. If the ranks have
    agreed on an end, each comes to it by itself; `_write_end` has left its code.
    """
    if exit_code == EXIT_FAILED:
        return EXIT_FAILED
    return EXIT_DONE


def _write_end(rank: Rank, end: RankEnd) -> None:
    """Write how this rank ended for the process that started it."""
    assert rank.heartbeats is not None
    message = end.message[:_MESSAGE_LENGTH]
    text = json.dumps(asdict(replace(end, message=message)), ensure_ascii=False)
    rank.heartbeats.write_end(rank.launched.local_rank, text)


if __name__ == "__main__":
    sys.exit(main())
