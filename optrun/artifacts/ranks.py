"""Collectives of the ranks that write or read a checkpoint together; errors reach every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

from optrun.base.errors import DiskFullError, OptrunError, first_line, is_refused_by_disk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class RankLostError(OptrunError):
    """A rank no longer answers: it died, or hangs for longer than the group waits."""


def rank_of(group: ProcessGroup | None) -> int:
    """Return the rank of this process in a group; 0 without a group."""
    if group is None:
        return 0
    import torch.distributed as dist

    return dist.get_rank(group)


def size_of(group: ProcessGroup | None) -> int:
    """Count the ranks of a group; 1 without a group."""
    if group is None:
        return 1
    import torch.distributed as dist

    return dist.get_world_size(group)


def gather_results(group: ProcessGroup | None, act: Callable[[], T]) -> list[T]:
    """Run an action on every rank of a group, and gather the results on every rank.

    If it fails on a rank, every rank raises the error of the first rank that failed. So no rank
    goes on alone to a collective where it would wait for ever.

    Args:
        group: A CPU group (gloo) that no other thread uses. None: this process alone, whose errors
            are raised unchanged.
        act: The action; its result is sent to all ranks.

    Returns:
        Results by rank.

    Raises:
        OptrunError: The error of the first failing rank, with its number, on every rank.
        OSError: Likewise, if the disk of that rank refused.
        RankLostError: A rank no longer answers.
    """
    if group is None:
        return [act()]
    import torch.distributed as dist

    # Every rank sends (result, None) or (None, error).
    rank_result: tuple[T | None, Exception | None]
    try:
        rank_result = (act(), None)
    except Exception as error:  # sent to all ranks, which raise it
        rank_result = (None, _picklable(error))
    # torch replaces the entries of this list by what the ranks send.
    gathered: list[tuple[T, Exception | None]] = [None] * dist.get_world_size(group)  # type: ignore[list-item]
    with lost_rank_errors():
        dist.all_gather_object(gathered, rank_result, group=group)
    for rank, (_, error_on_rank) in enumerate(gathered):
        if error_on_rank is not None:
            raise error_of_rank(rank, error_on_rank)
    return [result for result, _ in gathered]


def call_on_first(group: ProcessGroup | None, act: Callable[[], T]) -> T:
    """Run an action on the first rank only; every rank gets its result, or raises its error."""
    # The others do nothing, and take the first of all results.
    first: T | None = gather_results(group, act if rank_of(group) == 0 else lambda: None)[0]
    return cast(T, first)


@contextmanager
def lost_rank_errors() -> Iterator[None]:
    """Turn an error of a collective, because another rank does not answer, into RankLostError.

    Raises:
        RankLostError: A rank does not answer; gloo has no class of its own for that.
    """
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error) or type(error).__name__
        raise RankLostError(f"another rank no longer answers: {reason}") from error


def _picklable(error: BaseException, prefix: str = "") -> Exception:
    """Convert an error to one that can be pickled for other ranks, without its cause.

    An OSError stays one, with number and file name. An error of optrun keeps its class, except that
    one because of the disk becomes a DiskFullError. Anything else becomes an OptrunError.

    Args:
        error: The error.
        prefix: Put before the message.
    """
    if isinstance(error, OSError):
        return OSError(error.errno, f"{prefix}{error.strerror or error}", error.filename)
    if is_refused_by_disk(error):  # only its cause tells that, and is lost
        return DiskFullError(f"{prefix}{error}")
    if isinstance(error, OptrunError):
        return type(error)(f"{prefix}{error}")
    return OptrunError(f"{prefix}{type(error).__name__}: {error}")


def error_of_rank(rank: int, error: BaseException) -> Exception:
    """Build the error that all ranks raise for the error of one rank."""
    return _picklable(error, f"rank {rank}: ")
