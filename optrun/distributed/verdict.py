"""Decide from the ends of all ranks with which exit code and message a run ends."""

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
    """This rank cannot continue because another rank has left or does not answer."""


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
    """Whether it ended only because another rank, the cause, did not answer."""
    where: str = ""
    """Phase and step of its last heartbeat."""
    seen: float = 0.0
    """Time of that heartbeat, on the monotonic clock."""


def is_lost_rank(error: BaseException | None) -> bool:
    """Tell whether a collective failed because another rank is gone or silent.

    So it is if the error, or one of those that led to it, is a LostRankError or an error of torch's
    communication; None is no such error.

    Example:
        >>> is_lost_rank(RuntimeError("[gloo/pair.cc] Connection closed by peer [10.0.0.2]:9"))
        True
        >>> is_lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    while error is not None:
        # By name, so that torch is not imported for it.
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
    """Build one error for the run from the ends of its ranks; None if all ended well.

    Only root causes count, see `_root_causes`. Their exit code is that of the error; it is 1 if
    they have different codes, or if a signal ended them. The message is that of the first cause; if
    it is not that of rank 0 or of all ranks, number and log of the rank are added.

    Args:
        ends: How the known ranks ended.
        log_of: Returns the path of a rank's log, for the message; None: there are no logs.

    Example:
        >>> error = error_of([RankEnd(0, 0), RankEnd(1, 2, "lr=high: expected a number.")])
        >>> type(error).__name__, str(error)
        ('ConfigError', 'rank 1 failed: lr=high: expected a number.')
    """
    causes = _root_causes([end for end in ends if end.code != EXIT_DONE])
    if not causes:
        return None
    cause = causes[0]
    # 1. The exit code; a negative one, a signal, becomes 1.
    has_one_code = len({end.code for end in causes}) == 1
    code = cause.code if has_one_code and cause.code > 0 else EXIT_FAILED
    # 2. The message. Only a rank that was ended, or that ended without a report, has a `where`.
    # Rank 0 speaks for the run, and so does a rank if all have its message.
    is_own_report = cause.code > 0 and cause.message and not cause.where
    speaks_for_all = cause.rank == 0 or {end.message for end in ends} == {cause.message}
    if is_own_report and speaks_for_all:
        message = cause.message
    else:
        log = None
        if log_of is not None and cause.rank != 0:  # rank 0 prints to the terminal
            log = log_of(cause.rank)
        message = _describe_cause(cause, log)
    error = kind_of(code)(message)
    if code not in _BY_CODE:  # keep it, although no class stands for it
        error.exit_code = code
    return error


def _root_causes(failed: Sequence[RankEnd]) -> list[RankEnd]:
    """List the root causes among failed ranks; ranks with a message first.

    The launcher sends SIGTERM to the other ranks when one has failed, and a rank that waits for a
    dead one fails, too. So the first of these that has a member wins:

    1. the rank with the oldest heartbeat among those that a signal other than SIGTERM killed;
    2. ranks that exited with an error;
    3. ranks that stopped early;
    4. ranks ended by SIGTERM;
    5. all failed ranks.

    Ranks that only lost another rank count in 5 alone, and ranks ended by a second signal only if
    there is no other.
    """
    causes = [end for end in failed if not end.lost_rank]
    causes = [end for end in causes if end.code not in _BY_SECOND_SIGNAL] or causes
    # 1. A negative code is a signal.
    killed = [end for end in causes if end.code < 0 and end.code != -signal.SIGTERM]
    if killed:
        return [min(killed, key=lambda end: end.seen)]
    # 2., 3. and 4.: whatever is left here after `exited` was ended by SIGTERM.
    exited = [end for end in causes if end.code > 0]
    with_error = [end for end in exited if end.code != EXIT_STOPPED_EARLY]
    roots = with_error or exited or causes
    # 5. All of them only lost another rank.
    if not roots:
        return list(failed)
    return sorted(roots, key=lambda end: not end.message)


def _describe_cause(end: RankEnd, log: Path | None) -> str:
    """Describe how a rank failed, and name its log if it has one.

    Example:
        >>> _describe_cause(RankEnd(2, 3, where="training, step 7"), Path("logs/rank-2.log"))
        'rank 2 failed while training, step 7 with exit code 3. Its log: logs/rank-2.log.'
    """
    where = f" while {end.where}" if end.where else ""
    log_sentence = "" if log is None else f" Its log: {log}."
    if end.code < 0:
        return (
            f"rank {end.rank} was ended by {signal_name(-end.code)}{where}; the other ranks were"
            f" ended, too.{log_sentence}"
        )
    reason = f": {end.message}" if end.message else f" with exit code {end.code}"
    if not reason.endswith((".", "!", "?")):
        reason += "."
    return f"rank {end.rank} failed{where}{reason}{log_sentence}"
