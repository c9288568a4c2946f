"""How single ranks of this machine end.

What they say themselves, and where those are found that say nothing more.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from optrun.base.errors import EXIT_FAILED
from optrun.base.reading import read_json
from optrun.distributed.heartbeat import Heartbeat, Phase
from optrun.distributed.limits import Limits
from optrun.distributed.verdict import RankEnd

HEARTBEATS = "heartbeats"
"""Name of the table in the folder that the ranks of a machine share."""
_STACK_SECONDS = 1.0
"""For a rank to write where it is."""
_WAITING = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/", "optrun/distributed/")
"""Files of the innermost frame of a rank that waits for another one."""


def end_file(folder: Path, local_rank: int) -> Path:
    """Name the file in which a rank of this machine says how it ended."""
    return folder / f"end-{local_rank}.json"


def stack_file(folder: Path, local_rank: int) -> Path:
    """Name the file into which `faulthandler` writes where a rank is, when it is asked by SIGUSR2."""
    return folder / f"stack-{local_rank}"


def find_hung(
    silent: dict[int, Heartbeat], folder: Path, limits: Limits, local_size: int
) -> dict[int, RankEnd]:
    """Find which of the silent ranks the others wait for, and say where it is.

    While one of this machine is not silent yet, those that wait are not the cause: it may have been
    heard later.
    """
    frames = {
        local_rank: _frame_of(folder, local_rank, heartbeat.pid)
        for local_rank, heartbeat in silent.items()
    }
    stopped = [
        local_rank
        for local_rank, heartbeat in silent.items()
        if _state(heartbeat.pid) in ("T", "t")
    ]
    busy = [
        local_rank
        for local_rank, heartbeat in silent.items()
        if heartbeat.phase is not Phase.waiting
        and not any(text in frames[local_rank] for text in _WAITING)
    ]
    hung = stopped or busy or (list(silent) if len(silent) == local_size else [])
    ends = {}
    for local_rank in hung:
        state = ", stopped by a signal" if local_rank in stopped else ""
        frame = f" at {frames[local_rank]}" if frames[local_rank] else ""
        limit = limits.at(silent[local_rank])
        ends[local_rank] = RankEnd(
            silent[local_rank].rank,
            EXIT_FAILED,
            f"no sign of life for {limit}{state}{frame}; all ranks were ended. If it only needs"
            f" longer, raise {limit.key}. The checkpoints are as they were",
            where=str(silent[local_rank]),
        )
    return ends


def kill(heartbeat: Heartbeat) -> None:
    """End a rank that hears nothing else, with its workers where it leads them, as under torch's agent."""
    if not heartbeat.pid:  # not begun; and 0 would mean this process's own group
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(heartbeat.pid) == heartbeat.pid:
            os.killpg(heartbeat.pid, signal.SIGKILL)
        else:
            os.kill(heartbeat.pid, signal.SIGKILL)


def is_alive(heartbeat: Heartbeat) -> bool:
    """Tell whether a rank of this machine still runs."""
    return _state(heartbeat.pid) not in ("", "Z", "X")


def _state(pid: int) -> str:
    """Read the state of a process, a letter as `ps` shows it.

    Empty if there is none or the system does not say.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def _frame_of(folder: Path, local_rank: int, pid: int) -> str:
    """Ask a rank for its innermost Python frame, by `faulthandler`.

    Empty where it does not answer.
    """
    path = stack_file(folder, local_rank)
    if not pid or not path.is_file():
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        found = re.findall(
            r"^(?:Current thread|Thread) .*\n  File \"(.+)\", line (\d+) in (.+)",
            path.read_text(),
            re.M,
        )
        if found:
            file, line, name = found[-1]  # the main thread is the last
            return f"{file}:{line} in {name}"
    return ""


def end_of(folder: Path, local_rank: int, code: int, heartbeat: Heartbeat) -> RankEnd:
    """Read how a rank ended: as it says itself, else by its exit code and its last heartbeat."""
    try:
        told = RankEnd(**read_json(end_file(folder, local_rank)))
    except (OSError, ValueError, TypeError):
        return RankEnd(heartbeat.rank, code, where=str(heartbeat), seen=heartbeat.time)
    return told  # also where it was ended on its way out
