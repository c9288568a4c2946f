"""One rank of a run: started by optrun, or one of the processes of torchrun, srun or mpirun.

`python -m optrun.launch.rank HEARTBEATS PAYLOAD` is what optrun starts; both are memory files, see
`MemoryFile`: files without a name on any disk.
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
from collections.abc import Iterator, Mapping, Sequence
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
"""Time for the other ranks to report their ends after one has failed."""
_CONFIRM_SECONDS = 30.0
"""Time for the other ranks to read how rank 0 ended."""
_GROUPS_SECONDS = 60.0
"""Seconds that a collective waits longer than the longest allowed silence, so that the watchdog,
which can name the rank that hangs, acts first."""
_UNCONFIRMED = (
    "rank 0 is gone, and did not say whether the last save is whole; resume=auto continues from the"
    " newest one that is."
)
_AGREED_CODES = (EXIT_DONE, EXIT_NONFINITE, EXIT_STOPPED_EARLY)
"""Exit codes with which all ranks end together, since they decided it in a collective."""
_LOOK_SECONDS = 0.2
"""Seconds between two checks whether rank 0 still runs."""
_MESSAGE_LENGTH = 3000
"""Most characters of a message in a rank's report on its end."""


@dataclass
class Rank:
    """This process, as one rank of a run."""

    launched: Launched
    signals: RankSignals
    is_watched: bool = False
    """Whether optrun started it: then that process watches the ranks and reports their ends."""
    heartbeats: Heartbeats | None = None
    """Table of the ranks of this machine."""

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
        """Wait for the other ranks, compare code and request, and share a table of heartbeats.

        If a launcher started the ranks, the first rank of each machine creates that table.

        Args:
            timeout: Seconds to wait for them.
            request_facts: Facts of the request that must be equal on all ranks, by dotted name.

        Raises:
            ConfigError: Not all ranks come, or they have other versions, code or requests.
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
    """Make this process a rank: set torch's environment, send heartbeats, store signals.

    Args:
        launched: The rank that it is.
        heartbeats: Memory file of the optrun process that started it; None: a launcher did.
    """
    set_torch_environment(launched)
    # Without this, DDP warns of the cost of find_unused_parameters.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rank = Rank(launched, RankSignals(), is_watched=heartbeats is not None)
    if heartbeats is not None:
        rank.share(Heartbeats.open(heartbeats))
        rank.signals.heartbeats = rank.heartbeats
    rank.signals.begin()
    return rank


def take_part(rank: Rank, payload: Payload, rendezvous: Rendezvous) -> Outcome | None:
    """Train as one of the ranks, and report the end of this rank to the others.

    Other ranks than 0 write their output to a log file from here on.

    Returns:
        The outcome on rank 0, None on the others.

    Raises:
        OptrunError: A rank failed; one error for the ends of all known ranks, see `error_of`.
    """
    timeout_seconds = float(payload.values["distributed"]["timeout_seconds"])
    rendezvous.timeout = longest_silence(timeout_seconds)
    with (
        _rank_output(rank.launched.rank, payload.run),
        _watching_others(rank, rendezvous, timeout_seconds),
    ):
        end = RankEnd(rank.launched.rank, EXIT_DONE)  # unless an error replaces it
        outcome = None
        # 1. Train. No error is raised here, so that every rank reports its end.
        try:
            outcome = _train(rank, payload, rendezvous)
        except OptrunError as error:
            end = _describe_end(rank, error, error.exit_code)
            # Rank 0 prints nothing: the error of the run is raised below, and printed.
            if not rank.is_main:
                sys.stderr.write(f"optrun: {printable(end.message)}\n")  # goes to its log
        except BaseException as error:
            end = _describe_end(rank, error, EXIT_FAILED)
            # The log of another rank always gets the traceback. The terminal, which is rank 0's,
            # does not get it if rank 0 failed only because another rank did not answer.
            is_only_consequence = rank.is_main and end.lost_rank
            if not is_only_consequence or os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
        # 2. Report this end, and learn how other ranks ended.
        ends = _report_end(rank, rendezvous, end)
    # 3. One error for all of them; None if all known ranks ended well.
    run_error = error_of(ends, payload.run.rank_log)
    if run_error is not None:
        raise run_error
    return outcome


def _describe_end(rank: Rank, error: BaseException, code: int) -> RankEnd:
    """Build the report on the end of this rank from the error that ended it, and an exit code.

    The message of an error that is not optrun's begins with its type, and is one line.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, OptrunError):
        message = text
    else:
        message = f"{type(error).__name__}: {' '.join(text.split())}"
    return RankEnd(rank.launched.rank, code, message, lost_rank=is_lost_rank(error))


def _train(rank: Rank, payload: Payload, rendezvous: Rendezvous) -> Outcome | None:
    """Build the process groups and train; every rank must call this.

    Ranks with different versions, code or requests were refused before, by `join_rendezvous`.

    Returns:
        The outcome on rank 0, None on the others.

    Raises:
        ConfigError: The request cannot be built on a rank, several ranks have one device, or the
            ranks have different configurations, data or models.
        OptrunError: Training failed.
    """
    from optrun.launch.run_here import run_here
    from optrun.runner.train import train
    from optrun.training.display import PlainDisplay

    # If a rank cannot build the request, as without a plugin, every rank raises an error.
    request, resume = call_on_all(rendezvous, lambda: (payload.request(), payload.resume_point()))
    refuse_shared_device(request.config, rendezvous)
    world = _join_groups(request.config.distributed, rendezvous)  # compares nothing
    # `train`, which `run_here` calls on rank 0, refuses ranks that differ in configuration, data or
    # model, once these are assembled.
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
    """Create the process groups of torch.distributed; every rank must call this.

    `backend=auto` means gloo for tensors on the CPU, and NCCL for those on a GPU if there is one. A
    collective waits 60 seconds longer than the watchdog allows, see `_GROUPS_SECONDS`.
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
    """Redirect stdout and stderr of every rank but 0 to its log file, for the rest of the process.

    The file descriptors are redirected, so that the output of libraries goes there, too.
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
    """Print the log records of optrun to stdout inside the context."""
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
    """Kill hanging ranks of this machine inside the context, and report their ends for them.

    All ends are reported before the first kill, since this rank may be one of them. Does nothing if
    optrun itself started the ranks: that process watches them.
    """
    if rank.is_watched or rank.heartbeats is None:
        yield
        return
    killed: set[int] = set()

    def kill_hung(silent: dict[int, RankStatus]) -> None:
        """Kill the ranks that hang, and report their ends; the watchdog calls it again and again.

        Args:
            silent: Number of a rank on this machine -> its last heartbeat.
        """
        # Of the silent ranks those that hang: the others only wait for them in a collective.
        end_by_rank = find_hung(silent, timeout_seconds, rank.launched.local_size)
        newly_hung = end_by_rank.keys() - killed
        killed.update(newly_hung)
        for local_rank in newly_hung:
            end = end_by_rank[local_rank]
            with contextlib.suppress(LostRankError):
                rendezvous.send("end", asdict(end), end.rank)  # as if that rank had sent it
        for local_rank in newly_hung:
            kill(silent[local_rank])

    with Watchdog(rank.heartbeats, timeout_seconds, kill_hung):
        yield


def _dead_ranks(rank: Rank) -> dict[int, str]:
    """Map each dead rank of this machine to a description of its last heartbeat."""
    if rank.heartbeats is None:
        return {}
    statuses = [rank.heartbeats[number] for number in range(len(rank.heartbeats))]
    return {status.rank: str(status) for status in statuses if status.pid and not is_alive(status)}


def _report_end(rank: Rank, rendezvous: Rendezvous, end: RankEnd) -> list[RankEnd]:
    """Report how this rank ended, and collect the ends of other ranks.

    The report goes to the rendezvous, and to the optrun process that started this rank. Then the
    rank waits for others:

    1. A rank of a launcher that only lost another rank: 10 s for the ends of all, since one of them
       is the cause.
    2. Rank 0, if all ranks end together (`_AGREED_CODES`): until the others have read its end. If
       they do not, it waits for nothing, and takes the ends that are reported already.
    3. Any other rank, if all end together: for the end of rank 0, which has its summary and curves
       to write. A launcher kills all ranks as soon as one exits with another code than 0.
    4. Any other rank, if they do not: for nothing.

    If rank 0 is gone before it reported, a rank that ended well has failed, too.

    Returns:
        The end of this rank, and the others that are known.
    """
    rank.signals.close()
    heartbeat.beat(Phase.closing)
    if rank.is_watched:
        _write_end(rank, end)
    with contextlib.suppress(LostRankError):  # the rank or launcher with the store is gone
        rendezvous.send("end", asdict(end))
    others: dict[int, RankEnd] = {}
    seeks_cause = end.lost_rank and not rank.is_watched
    ends_together = end.code in _AGREED_CODES
    try:
        if rank.is_main or seeks_cause:
            others = _collect_ends(rank, rendezvous, PARTING_SECONDS if seeks_cause else 0.0)
            if rank.is_main and ends_together:
                _await_confirmations(rank, rendezvous)
        elif ends_together:
            others = _await_end_of_main(rank, rendezvous)
    except LostRankError:  # the store is gone, and perhaps rank 0 before it saved
        if end.code == EXIT_DONE and not rank.is_main:
            end = RankEnd(end.rank, EXIT_FAILED, _UNCONFIRMED, lost_rank=True)
            if rank.is_watched:
                _write_end(rank, end)
    others.pop(end.rank, None)
    return [end, *others.values()]


def _collect_ends(rank: Rank, rendezvous: Rendezvous, seconds: float) -> dict[int, RankEnd]:
    """Collect the ends of all ranks, waiting for them for some seconds.

    For a rank of this machine that died without a report, this rank reports its end.

    Args:
        rank: This rank.
        rendezvous: Holds the reports, under the key `end`.
        seconds: How long to wait; 0: return the ends that are reported already.

    Returns:
        Rank -> its end; ranks without a report are left out.

    Raises:
        LostRankError: The store is gone.
    """
    deadline = time.monotonic() + seconds
    while True:
        # 1. The dead first: a rank may report its end and die in between. The optrun process that
        # watches ranks reports the dead itself.
        dead = {} if rank.is_watched else _dead_ranks(rank)
        # 2. All reports so far; 0 s: without waiting for more.
        ends = _read_ends(rendezvous, range(rendezvous.size), min(seconds, _LOOK_SECONDS))
        # 3. The dead without a report.
        for number in dead.keys() - ends.keys():
            ends[number] = RankEnd(number, EXIT_FAILED, "it is gone", where=dead[number])
            rendezvous.send("end", asdict(ends[number]), number)
        if len(ends) == rendezvous.size or time.monotonic() >= deadline:
            return ends


def _await_end_of_main(rank: Rank, rendezvous: Rendezvous) -> dict[int, RankEnd]:
    """Wait for the end of rank 0, and confirm it; empty if rank 0 dies without a report.

    Also empty if the timeout of the rendezvous passes first.

    Returns:
        `{0: END}`, or empty.

    Raises:
        LostRankError: The store is gone, perhaps with the machine that held it.
    """
    deadline = time.monotonic() + rendezvous.timeout
    ends: dict[int, RankEnd] = {}
    while not ends and time.monotonic() < deadline:
        is_dead = 0 in _dead_ranks(rank)  # first: rank 0 may report its end and die in between
        ends = _read_ends(rendezvous, [0], 0.0 if is_dead else _LOOK_SECONDS)
        if is_dead:
            break
    if ends:
        with contextlib.suppress(LostRankError):  # rank 0 may have left already
            rendezvous.send("confirmed", None)
    return ends


def _read_ends(rendezvous: Rendezvous, ranks: Sequence[int], seconds: float) -> dict[int, RankEnd]:
    """Read the ends that these ranks have reported, by rank; wait for them for some seconds."""
    reports = rendezvous.collect("end", ranks, seconds)
    return {rank: RankEnd(**fields) for rank, fields in reports.items()}


def _await_confirmations(rank: Rank, rendezvous: Rendezvous) -> None:
    """Wait at most 30 s until all live ranks have read the end of rank 0.

    Rank 0 may hold the store: if it exits, ranks that have not read yet never can.

    Raises:
        LostRankError: The store is gone.
    """
    deadline = time.monotonic() + _CONFIRM_SECONDS
    waiting_for = set(range(1, rendezvous.size))
    while waiting_for and time.monotonic() < deadline:
        waiting_for -= _dead_ranks(rank).keys()
        waiting_for -= rendezvous.collect("confirmed", sorted(waiting_for), _LOOK_SECONDS).keys()


def leave(code: int) -> int:
    """Exit this process at once, with flushed output, if it has process groups.

    An ordinary exit of Python may abort, because threads of gloo outlive their group.

    Returns:
        The exit code, if there are no process groups.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return code
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main() -> int:
    """Run the payload of the optrun process that started this rank.

    Returns:
        The exit code for torch's launcher, see `_code_for_torch`; the exit code of optrun is in
        the report on the end of the rank.
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
    except RendezvousError as error:  # the rank that did not come is the cause
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
    """Return the exit code of a rank for torch's launcher: 1 for a failure, 0 for any other end.

    The launcher kills the other ranks as soon as one exits with another code than 0. In any other
    end all ranks end together, each with its report by `_write_end`.
    """
    if exit_code == EXIT_FAILED:
        return EXIT_FAILED
    return EXIT_DONE


def _write_end(rank: Rank, end: RankEnd) -> None:
    """Write the report on this rank's end for the starting process; cut its message."""
    assert rank.heartbeats is not None
    message = end.message[:_MESSAGE_LENGTH]
    text = json.dumps(asdict(replace(end, message=message)), ensure_ascii=False)
    rank.heartbeats.write_end(rank.launched.local_rank, text)


if __name__ == "__main__":
    sys.exit(main())
