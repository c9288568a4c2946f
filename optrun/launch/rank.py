"""One rank of a run.

Started by optrun's own agent, or one of the processes of torchrun, srun or mpirun.

`python -m optrun.launch.rank` is what the agent starts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from optrun.base.reading import read_json
from optrun.config.schema.distributed import DistributedConfig, RanksConfig
from optrun.distributed import heartbeat
from optrun.distributed.contract import agree
from optrun.distributed.heartbeat import Heartbeat, Heartbeats, Phase
from optrun.distributed.join import Launched, launched, set_torch_environment
from optrun.distributed.limits import Limits
from optrun.distributed.local_ends import (
    HEARTBEATS,
    end_file,
    find_hung,
    is_alive,
    kill,
    stack_file,
)
from optrun.distributed.meeting import Meeting, UnmetError, is_held_by_agent
from optrun.distributed.rank_signals import RankSignals
from optrun.distributed.verdict import COLLECTIVES, LostRankError, RankEnd, error_of, is_lost_rank
from optrun.distributed.watchdog import Watchdog
from optrun.launch.payload import Payload
from optrun.launch.rank_checks import refuse_shared_device
from optrun.sweeper.pool import hold_as_rank

if TYPE_CHECKING:
    from optrun.artifacts.run_dir import RunDir
    from optrun.distributed.world import World
    from optrun.runner.outcome import Outcome

PARTING_SECONDS = 10.0
"""For the others to say how they ended, where one has failed."""
_GROUPS_SECONDS = 60.0
"""More than the longest limit.

The watchdog, which knows more, is to speak before a collective gives up.
"""
_UNCONFIRMED = (
    "the machine of rank 0 is gone, and did not say whether the last save is whole; resume=auto"
    " goes on from the newest one that is."
)
_TOGETHER = (EXIT_DONE, EXIT_NONFINITE, EXIT_STOPPED_EARLY)
"""Codes that the ranks have agreed on."""
_NEARLY = 0.9
"""Of each limit: what a rank did last is written before it is ended."""
_RECORDERS = {"": "_dump_fr_trace_json", "-nccl": "_dump_nccl_trace_json"}
"""torch's flight recorders: of gloo, and in builds for CUDA of NCCL, which has its own."""
_LOOK_SECONDS = 0.2
"""Between two looks whether rank 0 still runs."""
PAYLOAD = "payload.json"
FOLDER = "OPTRUN_RANKS"
"""Environment variable by which the agent tells its ranks the folder of the attempt."""


@dataclass
class Rank:
    """This process, as one rank of a run."""

    launched: Launched
    signals: RankSignals
    folder: Path | None = None
    """That the ranks of this machine share."""
    heartbeats: Heartbeats | None = None
    """In it."""

    @property
    def is_main(self) -> bool:
        """Whether it is the one that composes, writes and speaks."""
        return self.launched.rank == 0

    @property
    def is_watched(self) -> bool:
        """Whether optrun's own agent started it.

        Which finds ranks that hang, and tells how they ended.
        """
        return FOLDER in os.environ

    def share(self, folder: Path) -> None:
        """Write heartbeats where the others of this machine, and the agent, read them."""
        local_rank = self.launched.local_rank
        self.folder, self.heartbeats = folder, Heartbeats.open(folder / HEARTBEATS)
        heartbeat.begin(self.heartbeats, local_rank, self.launched.rank)
        faulthandler.register(
            signal.SIGUSR2, stack_file(folder, local_rank).open("w"), all_threads=True
        )

    def meet(self, timeout: float, asked: Mapping[str, object]) -> Meeting:
        """Meet the other ranks.

        Args:
            timeout: Seconds to wait for them.
            asked: What they were asked to run, as far as it is known.

        Raises:
            ConfigError: Not all of them come, or some run another program, or another
                configuration.
        """
        meeting = Meeting.join(timeout, {**versions(), "code of optrun": code_digest(), **asked})
        if not self.is_watched:
            if self.launched.local_rank == 0:
                made = Path(tempfile.mkdtemp(prefix="optrun-ranks-"))
                Heartbeats.create(self.launched.local_size, made / HEARTBEATS)
                meeting.tell_machine(str(made))
            self.share(Path(meeting.hear_machine()))
        return meeting


def begin(launched: Launched) -> Rank:
    """Make this process a rank: from here on signals are noted."""
    set_torch_environment(launched)
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # DDP warns of what find_unused_parameters costs
    os.environ.setdefault(
        "TORCH_FR_BUFFER_SIZE", "200"
    )  # collectives that torch's flight recorder keeps
    rank = Rank(launched, RankSignals())
    if rank.is_watched:
        rank.share(Path(os.environ[FOLDER]))
        rank.signals.heartbeats = rank.heartbeats
    rank.signals.begin()
    return rank


def take_part(rank: Rank, payload: Payload, meeting: Meeting) -> Outcome | None:
    """Train as one of the ranks.

    Returns:
        The outcome on rank 0, None on the others.

    Raises:
        OptrunError: How the ranks ended, together, where not all ended well.
    """
    limits = Limits.of(payload.values["distributed"])
    meeting.timeout = limits.longest
    with (
        _rank_output(rank.launched.rank, payload.run),
        _recorded(rank, payload.run, Limits.of(payload.values["distributed"], share=_NEARLY)),
        _watching_others(rank, meeting, limits),
    ):
        end, outcome = RankEnd(rank.launched.rank, EXIT_DONE), None
        try:
            outcome = _train(rank, payload, meeting)
        except OptrunError as error:
            end = _end(rank, error, error.exit_code)
            if not rank.is_main:  # into its log; the terminal has it once
                sys.stderr.write(f"optrun: {printable(end.message)}\n")
        except BaseException as error:  # told together with how the others ended
            end = _end(rank, error, EXIT_FAILED)
            if not (rank.is_main and end.lost_rank) or os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
        ends = _part(rank, meeting, end)
    together = error_of(ends, payload.run.rank_log)
    if together is not None:
        raise together
    return outcome


def _end(rank: Rank, error: BaseException, code: int) -> RankEnd:
    text = str(error) or type(error).__name__
    message = (
        text
        if isinstance(error, OptrunError)
        else f"{type(error).__name__}: {' '.join(text.split())}"
    )
    return RankEnd(rank.launched.rank, code, message, lost_rank=is_lost_rank(error))


def _train(rank: Rank, payload: Payload, meeting: Meeting) -> Outcome | None:
    from optrun.launch.run_here import run_here
    from optrun.runner.train import train
    from optrun.training.display import PlainDisplay

    request, resume = agree(meeting, lambda: (payload.request(), payload.resume_point()))
    refuse_shared_device(request.config, meeting)
    world = _world(request.config.distributed, meeting)
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


def _world(config: DistributedConfig, meeting: Meeting) -> World:
    """Make the groups of the ranks."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from optrun.distributed.world import World

    assert isinstance(config, RanksConfig)
    backend = config.backend
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=Limits.of(vars(config)).longest + _GROUPS_SECONDS)
    store = PrefixStore("groups", meeting.store)
    dist.init_process_group(
        backend, store=store, rank=meeting.rank, world_size=meeting.size, timeout=timeout
    )
    return World.join(backend, timeout)


@contextmanager
def _rank_output(rank: int, run: RunDir) -> Iterator[None]:
    """Write what any rank but the first prints into its log, warnings of libraries among it."""
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
def _recorded(rank: Rank, run: RunDir, limits: Limits) -> Iterator[None]:
    """Write which collectives this rank began last.

    Where a rank of this machine is about to be silent for too long.
    """
    if rank.heartbeats is None:
        yield
        return
    paths = {
        kind: run.logs / COLLECTIVES.replace("*", f"{rank.launched.rank}{kind}")
        for kind in _RECORDERS
    }
    for path in paths.values():
        path.unlink(missing_ok=True)

    def write(silent: dict[int, Heartbeat]) -> None:  # noqa: ARG001
        from torch._C import _distributed_c10d as recorders

        for kind, path in paths.items():
            dump = getattr(recorders, _RECORDERS[kind], None)  # no public part of torch
            if dump is not None:
                with contextlib.suppress(OSError):
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(dump())

    with Watchdog(rank.heartbeats, limits, write):
        yield


@contextmanager
def _printed_log() -> Iterator[None]:
    """Print what optrun logs."""
    logger, handler = logging.getLogger("optrun"), logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _watching_others(rank: Rank, meeting: Meeting, limits: Limits) -> Iterator[None]:
    """End ranks of this machine that hang, and tell how, where no agent of optrun's does."""
    if rank.is_watched or rank.folder is None or rank.heartbeats is None:
        yield
        return
    folder = rank.folder
    told: set[int] = set()

    def end_silent(silent: dict[int, Heartbeat]) -> None:
        found = find_hung(silent, folder, limits, rank.launched.local_size)
        ends = {local_rank: end for local_rank, end in found.items() if local_rank not in told}
        told.update(ends)
        for end in ends.values():
            with contextlib.suppress(LostRankError):
                meeting.send("end", asdict(end), end.rank)
        for local_rank in ends:
            kill(silent[local_rank])

    with Watchdog(rank.heartbeats, limits, end_silent):
        yield


def _gone(rank: Rank) -> dict[int, str]:
    """Find ranks of this machine whose process is no more, and what each was at."""
    known = (
        []
        if rank.heartbeats is None
        else [rank.heartbeats[number] for number in range(len(rank.heartbeats))]
    )
    return {line.rank: str(line) for line in known if line.pid and not is_alive(line)}


def _part(rank: Rank, meeting: Meeting, end: RankEnd) -> list[RankEnd]:
    """Tell how this rank ended, and let nobody leave before rank 0 where all end alike.

    The first rank that leaves with another code than 0 makes the launcher end the others, and rank
    0 has its summary and curves to write.

    Returns:
        The ends that are known here.
    """
    rank.signals.close()
    heartbeat.beat(Phase.closing)
    if rank.is_watched:
        _tell(rank, end)
    with contextlib.suppress(LostRankError):  # the store is gone with who held it
        meeting.send("end", asdict(end))
    found: dict[int, PlainDict] = {}
    waits = end.lost_rank and not rank.is_watched
    try:
        if rank.is_main or waits:
            found = _ends_of_all(rank, meeting, PARTING_SECONDS if waits else 0.0)
        elif end.code in _TOGETHER:
            found = _end_of_main(rank, meeting)
    except LostRankError:  # a machine is gone; where rank 0 holds the store, that is how it ends
        if end.code == EXIT_DONE and not rank.is_main and is_held_by_agent():
            end = RankEnd(end.rank, EXIT_FAILED, _UNCONFIRMED, lost_rank=True)
            if rank.is_watched:
                _tell(rank, end)  # the agent starts it again, or finds the run finished
    return [end, *(RankEnd(**theirs) for number, theirs in found.items() if number != end.rank)]


def _ends_of_all(rank: Rank, meeting: Meeting, seconds: float) -> dict[int, PlainDict]:
    """Hear how the ranks ended, and tell the others of those of this machine that are gone without a word.

    Raises:
        LostRankError: The store is gone.
    """
    deadline = time.monotonic() + seconds
    while True:
        gone = (
            {} if rank.is_watched else _gone(rank)
        )  # looked for first: what one told before it went is heard
        found = meeting.heard("end", range(meeting.size), min(seconds, _LOOK_SECONDS))
        for number in gone.keys() - found.keys():
            found[number] = asdict(RankEnd(number, EXIT_FAILED, "it is gone", where=gone[number]))
            meeting.send("end", found[number], number)
        if len(found) == meeting.size or time.monotonic() >= deadline:
            return found


def _end_of_main(rank: Rank, meeting: Meeting) -> dict[int, PlainDict]:
    """Wait until rank 0 has told its end; a second signal may have ended it before.

    Raises:
        LostRankError: The store is gone, as with the agent of another machine.
    """
    deadline = time.monotonic() + meeting.timeout
    found: dict[int, PlainDict] = {}
    while not found and time.monotonic() < deadline:
        gone = 0 in _gone(rank)  # looked for first: what it told before it went is heard
        found = meeting.heard("end", [0], 0.0 if gone else _LOOK_SECONDS)
        if gone:
            break
    return found


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
    """Run what the agent wrote down.

    Returns:
        The exit code; the agent tells what it stands for.
    """
    hold_as_rank(os.environ)  # of a sweep over devices
    found = launched(os.environ)
    assert found is not None, "started by optrun's agent alone"
    rank = begin(found)
    assert rank.folder is not None
    payload = Payload(**read_json(rank.folder / PAYLOAD))
    try:
        meeting = rank.meet(payload.values["distributed"]["timeout_seconds"], payload.facts())
    except (
        UnmetError
    ) as error:  # the agents have met: a rank that does not come was lost on its way
        return leave(_tell(rank, RankEnd(found.rank, EXIT_FAILED, str(error), lost_rank=True)))
    except OptrunError as error:
        return leave(_tell(rank, _end(rank, error, error.exit_code)))
    try:
        take_part(rank, payload, meeting)
    except OptrunError as error:
        # What another start would only repeat stands in the file, and is no failure to torch's
        # agent.
        return leave(EXIT_FAILED if error.exit_code == EXIT_FAILED else EXIT_DONE)
    return leave(EXIT_DONE)


def _tell(rank: Rank, end: RankEnd) -> int:
    """Leave how this rank ended where its agent reads it.

    Returns the exit code that tells it of another start.
    """
    assert rank.folder is not None
    end_file(rank.folder, rank.launched.local_rank).write_text(
        json.dumps(asdict(end)), encoding="utf-8"
    )
    return EXIT_FAILED if end.code == EXIT_FAILED else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
