"""Find the rank of this machine that hangs while the others wait for it, and kill it."""

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
"""Parts of source paths: a rank whose innermost frame is in such a file waits for another rank."""


def find_hung(
    silent: dict[int, RankStatus], timeout_seconds: float, local_size: int
) -> dict[int, RankEnd]:
    """Find the hanging ranks among the silent ranks of this machine, and describe their ends.

    A silent rank may only wait for a rank that hangs. So the first of these that has a member wins:

    1. ranks stopped by a signal such as SIGSTOP;
    2. ranks that do not wait in a collective;
    3. all ranks, if every rank of this machine is silent: the rank that hangs is elsewhere, or they
       all wait in a deadlock.

    Empty if none applies.

    Args:
        silent: The last heartbeats, by rank on this machine.
        timeout_seconds: The option `distributed.timeout_seconds`.
        local_size: Number of ranks on this machine.

    Returns:
        Rank on this machine -> its end, whose message names its innermost Python frame.
    """
    # 1. Sort the silent ranks. A frame is "FILE:LINE in FUNCTION", or empty.
    frames = {local_rank: _innermost_frame(status) for local_rank, status in silent.items()}
    stopped = []
    not_waiting = []
    for local_rank, status in silent.items():
        if process_state(status.pid) in ("T", "t"):  # by a signal, or by a debugger
            stopped.append(local_rank)
        is_in_collective = any(path in frames[local_rank] for path in _WAITING)
        if status.phase is not Phase.waiting and not is_in_collective:
            not_waiting.append(local_rank)
    # 2. Choose the hanging ones.
    hung = stopped or not_waiting
    if not hung and len(silent) == local_size:
        hung = list(silent)
    # 3. Describe each.
    ends = {}
    for local_rank in hung:
        details = ""
        if local_rank in stopped:
            details = ", stopped by a signal"
        if frames[local_rank]:
            details += f" at {frames[local_rank]}"
        ends[local_rank] = RankEnd(
            silent[local_rank].rank,
            EXIT_FAILED,
            f"no heartbeat for {describe_limit(silent[local_rank], timeout_seconds)}"
            f"{details}; all ranks were ended. If it only needs longer, raise {KEY}. The"
            " checkpoints are unchanged",
            where=str(silent[local_rank]),
        )
    return ends


def kill(status: RankStatus) -> None:
    """Send SIGKILL to a rank; to its process group with its workers if it leads one.

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
    """Tell whether a rank of this machine still runs; False before it has a pid."""
    return process_state(status.pid) not in ("", "Z", "X")


def process_state(pid: int) -> str:
    """Read the state of a process, a letter as `ps` shows it; empty if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def _innermost_frame(status: RankStatus) -> str:
    """Ask a rank for the innermost Python frame of its main thread: `FILE:LINE in FUNCTION`.

    SIGUSR2 makes its `faulthandler` write all stacks into a memory file, which is read for at most
    one second. Empty if the rank does not answer, has ended, or has no such file.

    Args:
        status: Its last heartbeat, with its pid and the file descriptor of its memory file.
    """
    if not status.pid or status.stack < 0:
        return ""
    stack_file = Path(f"/proc/{status.pid}/fd/{status.stack}")
    deadline = time.monotonic() + _STACK_SECONDS
    with contextlib.suppress(OSError):  # the rank has ended
        os.kill(status.pid, signal.SIGUSR2)
        while time.monotonic() < deadline:
            time.sleep(0.1)
            # The head of each stack, and the line of its innermost frame below it.
            frames = re.findall(
                r"^(?:Current thread|Thread) .*\n  File \"(.+)\", line (\d+) in (.+)",
                read_text(stack_file),
                re.M,
            )
            if frames:
                file, line, name = frames[-1]  # faulthandler writes the main thread last
                return f"{file}:{line} in {name}"
    return ""
