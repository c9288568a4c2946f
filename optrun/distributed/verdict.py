"""Decide from the ends of all ranks with which exit code and message a run ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from optrun.base.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED_EARLY,
    CheckpointError,
    ConfigError,
    LockedError,
    NonFiniteError,
    OptrunError,
    StoppedEarly,
    StorageError,
    signal_name,
)

_KINDS = (ConfigError, NonFiniteError, CheckpointError, LockedError, StorageError, StoppedEarly)
_BY_CODE: dict[int, type[OptrunError]] = {kind.exit_code: kind for kind in _KINDS}
_LOST_RANK_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "Socket Timeout",
    "timeout caused pair closure",
    "connectFullMesh failed",
    "Read error",
)
"""Texts of torch's backends if another rank does not answer; gloo's errors are bare
RuntimeErrors."""


def kind_of(code: int) -> type[OptrunError]:
    """Return the error class of an exit code; OptrunError for codes without one."""
    return _BY_CODE.get(code, OptrunError)


class LostRankError(OptrunError):
    """A rank cannot go on because another one has left, or does not answer."""


_BY_SECOND_SIGNAL = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
"""Exit codes of a rank that a second signal ends at once."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    code: int
    """Exit code; negative: the signal that ended it."""
    message: str = ""
    lost_rank: bool = False
    """Whether it ended because another rank did not answer: that one is the cause."""
    where: str = ""
    """Phase and step of its last heartbeat."""
    seen: float = 0.0
    """Time of that heartbeat, on the monotonic clock."""


def is_lost_rank(error: BaseException | None) -> bool:
    """Tell whether a collective failed because another rank is gone or silent."""
    while error is not None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {"DistError", "DistBackendError", LostRankError.__name__}:
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_RANK_TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def error_of(
    ends: Sequence[RankEnd], log_of: Callable[[int], Path] | None = None
) -> OptrunError | None:
    """Build the error of a run from the ends of its ranks.

    Args:
        ends: Of the known ranks.
        log_of: Names the log of a rank.

    Returns:
        None if all ended well; else an error with the exit code of the contract. Ranks that only
        lost another one do not count. If the others ended with different codes, the code is 1.
    """
    causes = _root_causes([end for end in ends if end.code != EXIT_DONE])
    if not causes:
        return None
    first = causes[0]
    codes = {end.code for end in causes}
    code = first.code if len(codes) == 1 and first.code > 0 else EXIT_FAILED
    kind = kind_of(code)
    speaks_for_all = first.rank == 0 or {end.message for end in ends} == {first.message}
    is_own_message = first.code > 0 and first.message and not first.where
    if is_own_message and speaks_for_all:
        error = kind(first.message)
    else:
        log = None if log_of is None else log_of(first.rank)
        error = kind(_describe_cause(first, log))
    if code not in _BY_CODE:
        error.exit_code = code
    return error


def _root_causes(failed: Sequence[RankEnd]) -> list[RankEnd]:
    """List the ends that no other end caused, one with a message first.

    Ends that another rank's may have caused are left out, if any others are there: lost ranks, then
    second signals. The rank that a signal other than SIGTERM ended first is the only cause. Exit
    codes count before SIGTERM, which the launcher sends to the others, and refusals before early
    stops.
    """
    causes = [end for end in failed if not end.lost_rank]
    causes = [end for end in causes if end.code not in _BY_SECOND_SIGNAL] or causes
    killed = [end for end in causes if end.code < 0 and end.code != -signal.SIGTERM]
    if killed:
        return [min(killed, key=lambda end: end.seen)]
    exited = [end for end in causes if end.code > 0]
    refused = [end for end in exited if end.code != EXIT_STOPPED_EARLY]
    roots = refused or exited or causes
    if not roots:
        return list(failed)
    return sorted(roots, key=lambda end: not end.message)


def _describe_cause(end: RankEnd, log: Path | None) -> str:
    """Name the rank that ended a run, and its log; the log of rank 0 is the terminal."""
    where = f" while {end.where}" if end.where else ""
    log_sentence = f" Its log: {log}." if log is not None and end.rank else ""
    if end.code < 0:
        return (
            f"rank {end.rank} was ended by {signal_name(-end.code)}{where}; the other ranks were"
            f" ended, too.{log_sentence}"
        )
    reason = f": {end.message}" if end.message else f" with exit code {end.code}"
    if not reason.endswith((".", "!", "?")):
        reason += "."
    return f"rank {end.rank} failed{where}{reason}{log_sentence}"
