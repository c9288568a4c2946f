"""Find the rank of this machine that the others wait for, and end it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from optrun.base.errors import EXIT_FAILED
from optrun.distributed.heartbeat import Phase, RankStatus
from optrun.distributed.limits import KEY, describe_limit
from optrun.distributed.memory_file import read_text
from optrun.distributed.verdict import RankEnd

_STACK_SECONDS = 1.0
"""For a rank to write where it is."""
_WAITING = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/", "optrun/distributed/")
"""Parts of the path of the innermost frame if a rank waits for another one."""


def find_hung(
    silent: dict[int, RankStatus], timeout_seconds: float, local_size: int
) -> dict[int, RankEnd]:
    """Find the silent ranks that the others wait for, with their innermost frame.

    If all silent ranks only wait themselves, they are the cause only if no rank of this machine was
    heard later.

    Args:
        silent: Their last status, by rank on this machine.
        timeout_seconds: Of the configuration.
        local_size: Ranks of this machine.
    """
    frames = {local_rank: _innermost_frame(status) for local_rank, status in silent.items()}
    stopped = []
    busy = []
    for local_rank, status in silent.items():
        if process_state(status.pid) in ("T", "t"):
            stopped.append(local_rank)
        is_in_collective = any(text in frames[local_rank] for text in _WAITING)
        if status.phase is not Phase.waiting and not is_in_collective:
            busy.append(local_rank)
    hung = stopped or busy
    if not hung and len(silent) == local_size:
        hung = list(silent)
    ends = {}
    for local_rank in hung:
        state = ", stopped by a signal" if local_rank in stopped else ""
        frame = f" at {frames[local_rank]}" if frames[local_rank] else ""
        ends[local_rank] = RankEnd(
            silent[local_rank].rank,
            EXIT_FAILED,
            f"no sign of life for {describe_limit(silent[local_rank], timeout_seconds)}"
            f"{state}{frame}; all ranks were ended. If it only needs longer, raise {KEY}. The"
            " checkpoints are as they were",
            where=str(silent[local_rank]),
        )
    return ends


def kill(status: RankStatus) -> None:
    """End a hanging rank by SIGKILL, with its workers if it leads a process group.

    Does nothing if the rank has no pid yet, is gone, or belongs to another user.
    """
    if not status.pid:  # 0 would mean the group of this process
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(status.pid) == status.pid:
            os.killpg(status.pid, signal.SIGKILL)
        else:
            os.kill(status.pid, signal.SIGKILL)


def is_alive(status: RankStatus) -> bool:
    """Tell whether a rank of this machine still runs; False for one that has no pid yet."""
    return process_state(status.pid) not in ("", "Z", "X")


def process_state(pid: int) -> str:
    """Read the state of a process, a letter as `ps` shows it; empty: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def _innermost_frame(status: RankStatus) -> str:
    """Ask a rank for its innermost Python frame, by `faulthandler`; empty: it does not answer."""
    if not status.pid or status.stack < 0:
        return ""
    path = Path(f"/proc/{status.pid}/fd/{status.stack}")
    deadline = time.monotonic() + _STACK_SECONDS
    with contextlib.suppress(OSError):  # it has ended
        os.kill(status.pid, signal.SIGUSR2)
        while time.monotonic() < deadline:
            time.sleep(0.1)
            frames = re.findall(
                r"^(?:Current thread|Thread) .*\n  File \"(.+)\", line (\d+) in (.+)",
                read_text(path),
                re.M,
            )
            if frames:
                file, line, name = frames[-1]  # the main thread is the last
                return f"{file}:{line} in {name}"
    return ""
