"""How the ranks of a run ended, taken together: one exit code, one message."""

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
_LOST = (
    *(
        "Connection closed by peer",
        "Connection reset by peer",
        "Connection refused",
        "Broken pipe",
        "Socket closed",
    ),
    *(
        "Timed out waiting",
        "Socket Timeout",
        "timeout caused pair closure",
        "connectFullMesh failed",
        "Read error",
    ),
)
"""What torch's backends say where another rank does not answer; gloo's errors are bare
RuntimeErrors."""


def kind_of(code: int) -> type[OptrunError]:
    """Find the error that an exit code stands for."""
    return _BY_CODE.get(code, OptrunError)


class LostRankError(OptrunError):
    """Another rank has left, or does not answer; that one is the cause."""


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
    """What it was at, by its last heartbeat."""
    seen: float = 0.0
    """When that was."""


def is_lost_rank(error: BaseException | None) -> bool:
    """Tell whether a collective failed because another rank has left, or does not answer."""
    while error is not None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {"DistError", "DistBackendError", LostRankError.__name__}:
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST):
            return True
        error = error.__cause__ or error.__context__
    return False


def error_of(
    ends: Sequence[RankEnd], log_of: Callable[[int], Path] | None = None
) -> OptrunError | None:
    """Say how the ranks ended, together.

    Args:
        ends: Of the ranks that are known.
        log_of: Names the log of a rank.

    Returns:
        None where all ended well; else an error with the exit code of the contract. Where ranks
        ended differently, that of those which did not only lose another one counts; where these
        differ, it is 1.
    """
    causes = _causes([end for end in ends if end.code != EXIT_DONE])
    if not causes:
        return None
    first, codes = causes[0], {end.code for end in causes}
    code = first.code if len(codes) == 1 and first.code > 0 else EXIT_FAILED
    kind = kind_of(code)
    for_all = first.rank == 0 or {end.message for end in ends} == {first.message}
    if (
        first.code > 0 and first.message and not first.where and for_all
    ):  # said by itself, and not of it
        error = kind(first.message)
    else:
        error = kind(_blame(first, None if log_of is None else log_of(first.rank)))
    if code not in _BY_CODE:
        error.exit_code = code
    return error


def _causes(bad: Sequence[RankEnd]) -> list[RankEnd]:
    """List the ends that are not the consequence of another one; the first is the one to tell.

    A rank whose peers are gone loses them in a collective, or is ended by the launcher: by SIGTERM,
    which may also stop it early, or at last by SIGKILL.
    """
    own = [end for end in bad if not end.lost_rank]
    own = [end for end in own if end.code not in _BY_SECOND_SIGNAL] or own
    for found in (
        sorted(
            (end for end in own if end.code < 0 and end.code != -signal.SIGTERM),
            key=lambda end: end.seen,
        )[:1],
        [end for end in own if end.code > 0 and end.code != EXIT_STOPPED_EARLY],
        [end for end in own if end.code > 0],
        own,
    ):
        if found:
            return sorted(found, key=lambda end: not end.message)
    return list(bad)


def _blame(end: RankEnd, log: Path | None) -> str:
    """Name the rank that ended a run, and its log, which rank 0 has on the terminal."""
    where = f" while {end.where}" if end.where else ""
    log_shown = f" Its log: {log}." if log is not None and end.rank else ""
    if end.code < 0:
        return (
            f"rank {end.rank} was ended by {signal_name(-end.code)}{where}; the other ranks were"
            f" ended, too.{log_shown}"
        )
    said = f": {end.message}" if end.message else f" with exit code {end.code}"
    return (
        f"rank {end.rank}"
        f" failed{where}{said}{'' if said.endswith(('.', '!', '?')) else '.'}{log_shown}"
    )
